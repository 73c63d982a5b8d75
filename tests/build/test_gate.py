"""The accuracy gate: what it measures, what it lets pass, and whom it names."""

from __future__ import annotations

import numpy as np
import pytest

from qworker.build.calibrate_rows import fixed_rows
from qworker.build.convert_fp16 import to_fp16
from qworker.build.gate import GateResult, check, compare, compare_row, gate_words, judge
from qworker.errors import ModelRefused
from qworker.store.card import GateEntry
from tests.build.test_convert import copy, graph, node


def result(*pairs: tuple[list[list[float]], list[list[float]]], held_out: bool = True) -> GateResult:
    """Rows of (expected, found)."""
    differences = [
        compare_row(i, {"y": np.array(right, np.float32)}, {"y": np.array(left, np.float32)})
        for i, (right, left) in enumerate(pairs)
    ]
    return GateResult(judge(differences), held_out=held_out)


def test_agreement_and_errors_are_counted() -> None:
    """Two of three answers stay; the error is told against the largest output of all rows."""
    measured = result(([[0, 1], [1, 0]], [[0, 1], [0.4, 0.5]]), ([[0, 2]], [[0, 1.9]]))
    assert measured.top1 == pytest.approx(2 / 3)
    assert measured.max_error == pytest.approx(0.6)
    assert measured.relative_error == pytest.approx(0.3)
    assert [row.row for row in measured.worst] == [0, 1]


def test_rows_of_nearly_nothing_do_not_make_it_large() -> None:
    """An error of 1e-6 over answers of 1e-8, where other rows have answers of 1."""
    measured = result(([[1, 0.5]], [[1, 0.5]]), ([[1e-8, 0]], [[1e-6, 0]]))
    assert measured.relative_error < 1e-5


def test_outputs_without_classes_have_no_top1() -> None:
    """A probability alone: only its error counts."""
    measured = result(([[0.2]], [[0.3]]))
    assert measured.top1 is None
    check(measured.entry(), (), 0.0)
    assert "no classes" in gate_words(measured.entry())


def test_too_many_changed_answers_fail_with_the_worst_rows() -> None:
    """The message names rows, what is allowed and what to do."""
    measured = result(([[1, 0]], [[1, 0]]), ([[1, 0]], [[0, 1]]))
    with pytest.raises(ModelRefused, match=r"may lose 1.00%.*loses 50.00%.*row 1: 0 of 1") as refused:
        check(measured.entry(), tuple(map(str, measured.worst)), 0.01)
    assert "--max-top1-drop" in str(refused.value)
    check(measured.entry(), (), 0.5)
    check(measured.entry(), (), None)


def test_values_that_are_not_finite_always_fail() -> None:
    """Also where any loss is allowed; but not where the original has them itself."""
    measured = result(([[1, 0]], [[np.nan, 0]]))
    with pytest.raises(ModelRefused, match="not finite"):
        check(measured.entry(), tuple(map(str, measured.worst)), None)
    same = result(([[np.inf, 0]], [[np.inf, 0]]))
    check(same.entry(), (), 0.0)
    assert same.max_error == 0


def test_another_shape_is_refused() -> None:
    """Shapes that follow from values changed with the values."""
    with pytest.raises(ModelRefused, match="shape"):
        result(([[1, 0]], [[1, 0, 0]]))


def test_overflow_in_half_precision_is_seen_on_a_cpu() -> None:
    """onnxruntime computes FP16 in FP32: without roundings of our own, 1e6 would pass through."""
    nodes = [node("Mul", "x big", "h"), node("Div", "h big", "d"), node("Relu", "d", "y")]
    built = graph(nodes, big=np.array([1e3], np.float32))
    rows = fixed_rows([{"x": np.full((1, 4), 1e3, np.float32)}], made_up=False)
    measured = compare(built, to_fp16(copy(built)).model, rows)
    assert not measured.held_out
    with pytest.raises(ModelRefused, match="not finite"):
        check(measured.entry(), (), None)
    fine = compare(built, to_fp16(copy(built), frozenset({"h"})).model, rows)
    assert fine.relative_error < 1e-3


def test_a_card_keeps_it() -> None:
    """As JSON and back."""
    entry = result(([[1, 0]], [[1, 0.1]])).entry(0.01)
    assert GateEntry.model_validate_json(entry.model_dump_json()) == entry
