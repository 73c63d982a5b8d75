"""What every engine backend promises (``qworker/engine/base.py``), on models made on the spot."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from qworker.engine.base import Backend, Engine, ModelSource
from qworker.errors import InferenceFailed, InvalidInput, LoadFailed
from qworker.wire.datatypes import bytes_array, dtype_of, tensor
from tests.contract.engines import KINDS as BACKENDS
from tests.contract.engines import Kind
from tests.support import models

Load = Callable[..., Engine]

KINDS = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
}


@pytest.fixture(params=list(BACKENDS))
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """Each backend in turn."""
    with BACKENDS[request.param]() as kind:
        yield kind


@pytest.fixture
def backend(kind: Kind) -> Backend:
    return kind.backend


@pytest.fixture
def load(kind: Kind) -> Iterator[Load]:
    """Loads models and closes them at the end."""
    engines: list[Engine] = []

    def make(content: bytes, path: Path = Path("model.onnx")) -> Engine:
        engines.append(kind.backend.load(ModelSource("m", "1", path, kind.content(content))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def run(engine: Engine, outputs: tuple[str, ...] = (), **inputs: Any) -> dict[str, Any]:
    """Outputs by name, in the order in which they came."""
    return {t.name: t.array for t in engine.run([tensor(name, array) for name, array in inputs.items()], outputs)}


# --- signatures ---------------------------------------------------------------------------------


def test_signature_keeps_the_models_order_and_names(load: Load) -> None:
    """Names with colons, slashes and digits come in the model's order."""
    signature = load(models.arithmetic()).signature
    assert [spec.name for spec in signature.inputs] == ["in/a:0", "b"]
    assert [spec.name for spec in signature.outputs] == ["sum:0", "difference", "7"]
    assert signature.inputs[0].shape in {("batch", 2), (None, 2)}  # a plan keeps no names of dims


def test_unnamed_dims_are_unknown(load: Load) -> None:
    """A dim without a name and a size is None."""
    assert load(models.joined()).signature.inputs[0].shape == (None, 2)


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", KINDS)
@pytest.mark.parametrize("shape", [(2, 3), (1, 0), ()])
def test_every_datatype_goes_in_and_out(kind: Kind, load: Load, datatype: str, shape: tuple[int, ...]) -> None:
    """Values, dtype and shape survive, also of empty and zero-dim tensors, and from read-only memory."""
    kind.needs(datatype)
    declared = [f"d{axis}" for axis in range(len(shape))] if "inputs of any rank" in kind.lacks else None
    array = np.asarray(np.arange(np.prod(shape)).reshape(shape) % 2 == 0).astype(dtype_of(datatype))
    array.flags.writeable = False
    engine = load(models.identity(KINDS[datatype], declared))
    [result] = engine.run([tensor("x", array)])
    assert (result.name, result.datatype) == ("y", datatype)
    assert result.array.dtype == array.dtype
    assert result.array.shape == shape
    assert result.array.flags.c_contiguous
    np.testing.assert_array_equal(result.array, array)


def test_all_outputs_come_in_the_models_order(load: Load) -> None:
    """Without a wish every output comes, each with its own values."""
    engine = load(models.arithmetic())
    a, b = np.array([[5.0, 7.0]], np.float32), np.array([[2.0, 3.0]], np.float32)
    result = run(engine, **{"in/a:0": a, "b": b})
    assert list(result) == ["sum:0", "difference", "7"]
    assert [array.tolist() for array in result.values()] == [[[7, 10]], [[3, 4]], [[10, 21]]]


def test_wanted_outputs_come_in_the_models_order(load: Load) -> None:
    """A wish leaves out the others and changes no order."""
    ones = np.ones((1, 2), np.float32)
    assert list(run(load(models.arithmetic()), ("7", "sum:0"), **{"in/a:0": ones, "b": ones})) == ["sum:0", "7"]


def test_an_output_that_is_not_there_is_invalid_input(load: Load) -> None:
    """The message names what was asked for and what there is."""
    ones = np.ones((1, 2), np.float32)
    with pytest.raises(InvalidInput, match=r"difference.*nonsense"):
        run(load(models.arithmetic()), ("nonsense",), **{"in/a:0": ones, "b": ones})


def test_scalars_go_in_and_out(load: Load) -> None:
    """Tensors of shape [] on either side."""
    scaled = run(load(models.scaled()), x=np.array([1, 2], np.float32), factor=np.array(3, np.float32))
    assert scaled["y"].tolist() == [3, 6]
    total = run(load(models.no_batch_axis()), x=np.ones((2, 3), np.float32))["total"]
    assert total.shape == ()
    assert total == 6


def test_text_is_utf8_bytes(kind: Kind, load: Load) -> None:
    """BYTES go in and out as UTF-8, zero bytes included."""
    kind.needs("text")
    result = run(load(models.labels()), words=bytes_array([b"hund", "Flöße\0".encode(), b""], (3,)))
    assert result["translated"].tolist() == ["Hündin".encode(), b"?", b"?"]
    assert result["same"].tolist() == [b"hund", "Flöße\0".encode(), b""]


def test_no_text_at_all(kind: Kind, load: Load) -> None:
    """An empty BYTES tensor stays one."""
    kind.needs("text")
    assert run(load(models.labels()), words=bytes_array([], (0,)))["same"].shape == (0,)


def test_bytes_that_are_no_text_are_invalid_input(kind: Kind, load: Load) -> None:
    """A model of text cannot take other bytes, and the message says so."""
    kind.needs("text")
    with pytest.raises(InvalidInput, match="UTF-8"):
        run(load(models.labels()), words=bytes_array([b"\xff\xfe"], (1,)))


def test_declared_output_shapes_are_not_trusted(kind: Kind, load: Load) -> None:
    """A model that declares a matrix may make any rank."""
    kind.needs("shapes that values choose")
    engine = load(models.wrong_output_rank())
    x = np.arange(8, dtype=np.float32)
    for shape in ([8], [2, 2, 2], [1, 2, 2, 2, 1]):
        assert run(engine, x=x, shape=np.array(shape))["y"].shape == tuple(shape)


def test_dynamic_dims_follow_the_inputs(load: Load) -> None:
    """Sizes change from run to run."""
    engine = load(models.joined())
    for left, right in ((1, 2), (5, 0), (0, 0)):
        assert run(engine, a=np.zeros((left, 2), int), b=np.zeros((right, 2), int))["y"].shape == (left + right, 2)


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (3, 2, 1), ()])
def test_shapes_that_the_model_refuses_are_invalid_input(load: Load, shape: tuple[int, ...]) -> None:
    """A wrong batch, size or rank is the requester's fault, told in one line."""
    engine = load(models.fixed_batch())
    with pytest.raises(InvalidInput) as caught:
        run(engine, x=np.zeros(shape, np.float32))
    assert "\n" not in str(caught.value)
    assert run(engine, x=np.ones((3, 2), np.float32))["y"].sum() == 6  # and nothing is harmed


def test_a_missing_or_mistyped_input_is_invalid_input(load: Load) -> None:
    """Should a check before have let it through."""
    engine = load(models.fixed_batch())
    for inputs in ({}, {"x": np.zeros((3, 2))}, {"z": np.zeros((3, 2), np.float32)}):
        with pytest.raises(InvalidInput):
            run(engine, **inputs)


def test_values_that_break_the_model_are_a_failed_inference(
    kind: Kind, load: Load, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message is one line, names no file of the library's build, and the log is not written past us."""
    kind.needs("shapes that values choose")
    engine = load(models.wrong_output_rank())
    with pytest.raises(InferenceFailed) as caught:
        run(engine, x=np.zeros(3, np.float32), shape=np.array([2, 2]))
    assert "\n" not in str(caught.value)
    assert "_src/" not in str(caught.value)
    assert run(engine, x=np.zeros(4, np.float32), shape=np.array([2, 2]))["y"].shape == (2, 2)
    assert capfd.readouterr() == ("", "")


def test_absurd_sizes_do_not_end_the_process(kind: Kind, load: Load) -> None:
    """A memory request that no machine can meet is a failed inference."""
    kind.needs("shapes that values choose")
    engine = load(models.wrong_output_rank())
    with pytest.raises((InferenceFailed, InvalidInput)):
        run(engine, x=np.zeros(4, np.float32), shape=np.array([1 << 40, 1 << 22]))


# --- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no graph"),
        (b"<!DOCTYPE html><html></html>", "protobuf"),
        (models.identity()[:-9], "protobuf"),
        (models.missing_op(), "Levitate"),
        (models.sequence_output(), "seq.*parts|parts.*seq"),
        (models.identity(TensorProto.BFLOAT16), "bfloat16"),
        (models.identity(TensorProto.FLOAT8E4M3FN), "float8"),
    ],
    ids=["empty", "html", "truncated", "missing op", "sequence", "bfloat16", "float8"],
)
def test_what_does_not_load_says_why(kind: Kind, load: Load, content: bytes, reason: str) -> None:
    """LoadFailed with the library's words, on one line."""
    if kind.name != "onnx":
        pytest.skip("these are ONNX files; plans that do not load are in tests/engine")
    with pytest.raises(LoadFailed, match=f"(?i){reason}") as caught:
        load(content)
    assert "\n" not in str(caught.value)


def test_external_weights_are_loaded_from_the_path(kind: Kind, backend: Backend, tmp_path: Path) -> None:
    """Without content the model is read from its path, and its weights beside it."""
    kind.needs("external weights")
    path = models.with_external_weights(tmp_path)
    engine = backend.load(ModelSource("m", "1", path, None))
    assert run(engine, x=np.ones((1, 64), np.float32))["y"].sum() == 128
    engine.close()
    with pytest.raises(LoadFailed):
        backend.load(ModelSource("m", "1", tmp_path / "gone.onnx", None))


# --- warming up ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "needs"),
    [
        (models.identity(), ""),
        (models.identity(shape=None), "inputs of any rank"),
        (models.arithmetic(), ""),
        (models.scaled(), ""),
        (models.labels(), "text"),
        (models.fixed_batch(), ""),
        (models.no_batch_axis(), ""),
        (models.wrong_output_rank(), "shapes that values choose"),
        (models.joined(), ""),
        (models.picky(), "sizes that it finds out"),
    ],
    ids=["open", "no rank", "two", "scalar", "text", "fixed", "sum", "reshape", "concat", "width 48"],
)
def test_made_up_inputs_suit_many_models(kind: Kind, backend: Backend, load: Load, content: bytes, needs: str) -> None:
    """Without a sample a guess is found."""
    kind.needs(needs)
    assert backend.warm_up(load(content), None)


def test_no_guess_suits_an_unusual_model(kind: Kind, backend: Backend, load: Load) -> None:
    """Then it is said, the search ends soon, and the engine still runs."""
    kind.needs("sizes that it finds out")
    engine = load(models.picky(57))
    started = time.monotonic()
    assert not backend.warm_up(engine, None)
    assert time.monotonic() - started < 10
    assert run(engine, x=np.ones((1, 57), np.float32))["y"].tolist() == [[57]]


def test_a_sample_must_suit(kind: Kind, backend: Backend, load: Load) -> None:
    """One of a width that the model does not take warms nothing up."""
    kind.needs("sizes that it finds out")
    picky = load(models.picky(57))
    assert backend.warm_up(picky, {"x": np.ones((1, 57), np.float32)})
    assert not backend.warm_up(picky, {"x": np.ones((1, 56), np.float32)})


def test_a_sample_warms_up_by_either_name(backend: Backend, load: Load) -> None:
    """A sample suits by the tensors' names, and with "_" where an .npz cannot hold a "/"."""
    two, ones = load(models.arithmetic()), np.ones((1, 2), np.float32)
    assert backend.warm_up(two, {"in_a:0": ones, "b": ones})
    assert backend.warm_up(two, {"in/a:0": ones, "b": ones})


# --- life and memory ----------------------------------------------------------------------------


def test_close_is_idempotent_and_ends_runs(load: Load) -> None:
    """After it a run is a failed inference, not a crash."""
    engine = load(models.identity())
    engine.close()
    engine.close()
    with pytest.raises(InferenceFailed, match="unloaded"):
        run(engine, x=np.zeros((1, 3), np.float32))


def test_threads_may_run_one_engine_at_once(load: Load) -> None:
    """Each gets its own answer."""
    engine = load(models.arithmetic())

    def ask(number: int) -> float:
        a = np.full((1, 2), number, np.float32)
        return float(run(engine, ("sum:0",), **{"in/a:0": a, "b": a})["sum:0"][0, 0])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(200))) == [2.0 * number for number in range(200)]


def test_close_while_others_run_is_safe(backend: Backend, load: Load) -> None:
    """A run in progress ends as it would have; one that comes too late fails cleanly."""
    content = models.heavy(4)
    for _ in range(5):
        engine = load(content)
        width = engine.signature.inputs[0].shape[1]  # type: ignore[index]
        x = np.ones((64, width), np.float32)  # type: ignore[arg-type]
        expected = run(engine, x=x)["y"]
        outcomes: list[bool] = []
        running = threading.Event()

        with ThreadPoolExecutor(3) as threads:
            works = [threads.submit(_run_until_closed, engine, x, expected, outcomes, running) for _ in range(3)]
            assert running.wait(20)
            engine.close()
            for each in works:
                each.result(20)
        assert outcomes.count(False) == 3
        assert True in outcomes


def _run_until_closed(engine: Engine, x: Any, expected: Any, outcomes: list[bool], running: threading.Event) -> None:
    try:
        while True:
            np.testing.assert_array_equal(run(engine, x=x)["y"], expected)
            outcomes.append(True)
            running.set()
    except InferenceFailed:
        outcomes.append(False)


def test_memory_comes_back_after_every_unload(kind: Kind, backend: Backend) -> None:
    """30 loads and unloads of 30 MiB, without the garbage collector: what was taken is given back."""
    content = kind.content(models.heavy(30))

    def cycle() -> int:
        engine = backend.load(ModelSource("m", "1", Path("model.onnx"), content))
        backend.warm_up(engine, None)
        loaded = backend.used_bytes()
        engine.close()
        backend.trim()
        return loaded

    gc.collect()
    gc.disable()
    try:
        cycle()
        before = backend.used_bytes()
        loaded = [cycle() for _ in range(30)]
        after = backend.used_bytes()
    finally:
        gc.enable()
    assert min(loaded) - before > 25 << 20, "the measurement sees a loaded model"
    assert after - before < 8 << 20
