"""Reading traces: what is taken, what is drawn, and what is refused with a line number."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from qworker.simulate.trace import BadTrace, Cost, draw_cost, make_trace, read_costs, read_trace


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_columns_by_name_in_any_order(tmp_path: Path) -> None:
    """Other columns are left alone, rows are put in order, costs are those of the model's last row."""
    rows = "ok,b,2,9.5,20\nok,a,1.5,3,10\n\nok,a,,4,\nok,a,2.5,5,1e3\n"
    trace = read_trace(written(tmp_path, "status,model_id,load_seconds,timestamp_s,size_bytes\n" + rows))
    assert list(trace.times) == [3.0, 4.0, 5.0, 9.5]
    assert [trace.models[i] for i in trace.which] == ["a", "a", "a", "b"]
    assert trace.costs == {"a": Cost(1_000, 2.5), "b": Cost(20, 2.0)}
    assert trace.run_seconds is None
    assert not trace.drawn


def test_run_seconds_follow_their_rows(tmp_path: Path) -> None:
    """Sorting keeps each request's run time with it."""
    trace = read_trace(written(tmp_path, "timestamp_s,model_id,run_seconds\n2,a,0.2\n1,a,0.1\n3,a,\n"))
    assert trace.run_seconds is not None
    assert list(trace.run_seconds) == [0.1, 0.2, 0.0]


def test_compressed_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    """A .gz is read, and so is what a spreadsheet saved."""
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress("\ufefftimestamp_s,model_id\n1,a\n".encode()))
    assert read_trace(path).models == ("a",)


def test_sizes_from_a_table_win(tmp_path: Path) -> None:
    """--sizes overrules the trace; what neither has is drawn and named."""
    sizes = written(tmp_path, "model_id,size_bytes,load_seconds\na,7,0.5\n", "sizes.csv")
    trace = read_trace(written(tmp_path, "timestamp_s,model_id,size_bytes\n1,a,100\n2,b,50\n3,c,\n"), sizes=sizes)
    assert trace.costs["a"] == Cost(7, 0.5)
    assert trace.costs["b"].nbytes == 50
    assert trace.drawn == ("b", "c")


def test_draws_depend_on_name_and_seed_alone() -> None:
    """Another model in the trace changes no draw; another seed does."""
    one = make_trace([(0.0, "a")], seed=3)
    two = make_trace([(0.0, "z"), (1.0, "a")], seed=3)
    assert one.costs["a"] == two.costs["a"] == draw_cost("a", 3)
    assert draw_cost("a", 4) != draw_cost("a", 3)


def test_drawn_loads_are_spread_like_real_ones() -> None:
    """A tenth takes less than 2.6 s, a tenth more than 42 s."""
    seconds = sorted(draw_cost(f"m{i}", 0).load_seconds for i in range(4_000))
    assert seconds[400] == pytest.approx(2.6, rel=0.15)
    assert seconds[3_600] == pytest.approx(42.0, rel=0.15)


def test_rows_without_a_model_are_counted(tmp_path: Path) -> None:
    """Real records have such rows: they are left out, not taken for a model."""
    trace = read_trace(written(tmp_path, "timestamp_s,model_id\n1,a\n2,\n"))
    assert len(trace.times) == trace.skipped == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "missing: timestamp_s, model_id"),
        ("time,model\n1,a\n", "missing: timestamp_s, model_id"),
        ("timestamp_s,model_id\n", "at least one request"),
        ("timestamp_s,model_id\n1,a\nsoon,a\n", "line 3"),
        ("timestamp_s,model_id\n1,a\n2\n", "line 3"),
        ("timestamp_s,model_id\nnan,a\n", "not finite"),
        ("timestamp_s,model_id,size_bytes\n1,a,-5\n", "a size > 0"),
        ("timestamp_s,model_id,size_bytes\n1,a,inf\n", "line 2"),
        ("timestamp_s,model_id,load_seconds\n1,a,-1\n", "load seconds >= 0"),
        ("timestamp_s,model_id,run_seconds\n1,a,-1\n", "run_seconds >= 0"),
    ],
)
def test_bad_traces_say_where(tmp_path: Path, text: str, says: str) -> None:
    """Each kind of damage is told, with its place."""
    with pytest.raises(BadTrace, match=says):
        read_trace(written(tmp_path, text))


def test_what_cannot_be_opened_or_read_to_its_end(tmp_path: Path) -> None:
    """A missing file, a table without its columns and a cut archive are all BadTrace."""
    with pytest.raises(BadTrace, match="cannot be opened"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(BadTrace, match="missing: size_bytes"):
        read_costs(written(tmp_path, "model_id,load_seconds\na,1\n"))
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(b"timestamp_s,model_id\n" + b"1,a\n" * 100_000)[:-40])
    with pytest.raises(BadTrace, match="cannot be read to its end"):
        read_trace(cut)
