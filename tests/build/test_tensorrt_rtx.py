"""The whole way from real ONNX models to plans, with TensorRT-RTX's own parser and builder on the CPU.

TensorRT-RTX has TensorRT's builder API and parser, and builds without a GPU; its plans are not TensorRT's,
and nothing here runs one. What is shown: conversions, profiles, parser, builder, card and store fit together.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from ops.models import LaidOut, LayOutError, lay_out
from qworker.build.plan import PlanOutcome, PlanRequest, build
from qworker.build.plan_convert import PRECISIONS, Precision, Recipe
from qworker.build.tensorrt_build import plan_version
from qworker.errors import ModelRefused
from qworker.policy.plan_choice import DeviceFacts, refusal
from qworker.store.local import LocalStore
from qworker.store.plans import orphans, plan_cards
from tests.build.real_models import PROFILES, REFUSED, write_rows
from tests.support.telling import Told

pytestmark = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="tensorrt-rtx-cu13-bindings is for Linux on x86-64 only"
)

H200 = DeviceFacts("NVIDIA H200", "9.0", "11.4.0.106", "13.0", "580.95.05")
ROWS = 6


@pytest.fixture(scope="module")
def laid_out() -> dict[str, LaidOut]:
    try:
        return {entry.model.id: entry for entry in lay_out(only=[*PROFILES, *REFUSED])}
    except LayOutError as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def request(entry: LaidOut, folder: Path, precision: Precision) -> PlanRequest:
    """A build that lets INT8 lose what it will: six rows are no calibration."""
    name = entry.model.id
    rows = folder / "rows" / name
    return PlanRequest(
        path=entry.path,
        model=name,
        target="rtx",
        recipe=Recipe(precision),
        profiles=PROFILES[name],
        calibration=rows if rows.exists() else write_rows(name, rows, ROWS),
        max_top1_drop=1.0,
    )


def test_there_are_enough_of_them() -> None:
    """Ten real models, three precisions each."""
    assert len(PROFILES) >= 10
    assert PRECISIONS == ("fp32", "fp16", "int8")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROFILES)
def test_a_real_model_becomes_a_plan_in_every_precision(laid_out: dict[str, LaidOut], folder: Path, name: str) -> None:
    """Registered, converted, checked, parsed, built and published, by TensorRT-RTX on the CPU."""
    store = LocalStore(folder / "store")
    told = Told()
    for precision in PRECISIONS:
        outcome = build(store, request(laid_out[name], folder, precision), told)
        assert outcome.card is not None
        check_card(store, outcome, precision)
    cards = plan_cards(store, name)
    assert {card.plan.precision for card in cards if card.plan} == set(PRECISIONS)
    assert orphans(store, name, "1") == []
    assert "Building engine" in told.phases
    for card in cards:
        assert "TensorRT-RTX" in str(refusal(card.plan, H200))


def check_card(store: LocalStore, outcome: PlanOutcome, precision: Precision) -> None:
    """The card says what was built, and the file is the one that it describes."""
    card = outcome.card
    assert card is not None
    plan = card.plan
    assert plan is not None
    path = store.version_folder(card.model, card.version) / card.files[0].name
    content = path.read_bytes()
    assert card.digest == hashlib.sha256(content).hexdigest()
    assert path.name == f"{card.model}-1.rtx1.7.any.{precision}.engine"
    assert plan_version(path, "rtx") == plan.library_version
    assert (plan.target, plan.precision, plan.measured, plan.compute_capability) == ("rtx", precision, False, None)
    assert 0 < plan.weights_bytes <= len(content)
    assert store.fetch(card).content == content
    if precision == "fp32":
        assert plan.gate is None
    else:
        assert plan.gate is not None
        assert plan.gate.rows == 1
    if precision == "fp16" and plan.gate is not None:
        assert plan.gate.relative_error < 0.1


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_has_no_place_in_tensorrt_is_refused_by_the_node(
    laid_out: dict[str, LaidOut], tmp_path: Path, name: str
) -> None:
    """Strings, sequences, float64 trees and contrib operators; the model itself stays in the store."""
    store = LocalStore(tmp_path / "store")
    with pytest.raises(ModelRefused, match="TensorRT cannot take this model") as refused:
        build(store, PlanRequest(path=laid_out[name].path, model=name, target="rtx"), Told())
    assert REFUSED[name] in str(refused.value)
    assert store.models() == [name]
    assert plan_cards(store, name) == []
