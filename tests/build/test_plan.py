"""``build``: what stops it, what it leaves behind, and what it does not do twice. With TensorRT-RTX on the CPU."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from qworker.build.plan import PlanRequest, build
from qworker.build.plan_convert import Recipe
from qworker.build.profiles import parse_profiles
from qworker.build.tensorrt import toolkit
from qworker.build.tensorrt_build import BuilderOptions, build_plan, plan_version
from qworker.errors import CorruptModel, InvalidInput, ModelNotFound, ModelRefused
from qworker.policy.plan_choice import DeviceFacts, choose
from qworker.store.local import LocalStore
from qworker.store.plans import orphans, plan_cards, publish_plan, remove_plan
from tests.build.test_convert import convolutions, graph, node
from tests.support import models
from tests.support.models import model, value
from tests.support.telling import Told

pytestmark = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="tensorrt-rtx-cu13-bindings is for Linux on x86-64 only"
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """A model with rows: y = relu(x w)."""
    path = tmp_path / "layer.onnx"
    built = graph([node("MatMul", "x w", "h"), node("Relu", "h", "y")], w=np.eye(4, dtype=np.float32))
    path.write_bytes(built.SerializeToString())
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Twenty rows whose largest value stands out."""
    np.savez(tmp_path / "rows.npz", x=standing_out(20))
    return tmp_path / "rows.npz"


def standing_out(count: int) -> np.ndarray:
    return (np.eye(4)[np.arange(count) % 4] + np.linspace(0, 0.3, count * 4).reshape(count, 4)).astype(np.float32)


def rtx(path: Path, precision: str = "fp16", **options: object) -> PlanRequest:
    return PlanRequest(path=path, model="org/layer", target="rtx", recipe=Recipe(precision), **options)  # type: ignore[arg-type]


def incoming(store: LocalStore) -> list[str]:
    return [path.name for path in store.incoming.iterdir()] if store.incoming.exists() else []


# --- what comes out -----------------------------------------------------------------------------


def test_a_plan_lies_beside_its_version(store: LocalStore, onnx_file: Path, rows: Path) -> None:
    """The version stays what it was; the plan has a card of its own, and takes no more rows than its profile."""
    outcome = build(store, rtx(onnx_file, "int8", calibration=rows), Told())
    assert outcome.card is not None
    assert outcome.card.plan is not None
    assert store.card("org/layer").backend == "onnx"
    assert plan_cards(store, "org/layer") == [outcome.card]
    assert outcome.card.files[0].name == "org~layer-1.rtx1.7.any.int8.engine"
    assert outcome.card.plan.profiles[0]["x"].max == (8, 4)
    assert outcome.card.batching is not None
    assert outcome.card.batching.max_rows == 8
    assert outcome.card.plan.gate is not None
    assert outcome.card.plan.gate.rows == 4
    assert incoming(store) == []


def test_the_same_build_is_not_made_twice(store: LocalStore, onnx_file: Path, rows: Path) -> None:
    """Unless asked for; another precision, profile or option is another build, and a conversion is kept."""
    first = build(store, rtx(onnx_file, calibration=rows), Told())
    again = build(store, rtx(onnx_file, calibration=rows), Told())
    assert again.reused
    assert again.card == first.card
    for other in (
        rtx(onnx_file, calibration=rows, again=True),
        rtx(onnx_file, calibration=rows, profiles=("x=1x4,2x4,2x4",)),
        rtx(onnx_file, calibration=rows, builder=BuilderOptions(tf32=False)),
    ):
        told = Told()
        built = build(store, other, told)
        assert not built.reused
        assert any("converted earlier" in line for line in told.lines)
    assert len(plan_cards(store, "org/layer")) == 1
    build(store, rtx(onnx_file, "fp32"), Told())
    assert len(plan_cards(store, "org/layer")) == 2


def test_rows_that_change_are_converted_anew(store: LocalStore, onnx_file: Path, rows: Path) -> None:
    """Scales come from the rows."""
    build(store, rtx(onnx_file, "int8", calibration=rows), Told())
    np.savez(rows, x=standing_out(20) * 3)
    told = Told()
    outcome = build(store, rtx(onnx_file, "int8", calibration=rows), told)
    assert not outcome.reused
    assert ("calibration", 32, 32) in told.stages


def test_without_rows_the_made_up_sample_is_the_gate(store: LocalStore, onnx_file: Path) -> None:
    """It is said that nothing was held out."""
    told = Told()
    outcome = build(store, rtx(onnx_file), told)
    assert outcome.gate is not None
    assert not outcome.gate.held_out
    assert any("none of them held out" in line for line in told.lines)


def test_the_builders_phases_are_told(store: LocalStore, onnx_file: Path) -> None:
    """Each inside of its parent, and all of them finished."""
    told = Told()
    build(store, rtx(onnx_file, "fp32"), told)
    assert "Building engine" in told.phases
    assert told.open == []


# --- what stops it ------------------------------------------------------------------------------


def test_int8_needs_rows(store: LocalStore, onnx_file: Path) -> None:
    """A made-up sample says nothing of real ranges."""
    with pytest.raises(InvalidInput, match="--calibration"):
        build(store, rtx(onnx_file, "int8"), Told())


def test_a_failed_gate_builds_nothing(store: LocalStore, onnx_file: Path, tmp_path: Path) -> None:
    """Two values less apart than a step of the range: 8 bits take them for one, and the answer changes."""
    np.savez(tmp_path / "rows.npz", x=np.array([[1.0, 1.01, 0, -100]] * 20, np.float32))
    request = rtx(onnx_file, "int8", calibration=tmp_path / "rows.npz")
    with pytest.raises(ModelRefused, match=r"accuracy gate.*row \d+"):
        build(store, request, Told())
    assert plan_cards(store, "org/layer") == []
    assert build(store, replace(request, max_top1_drop=1.0), Told()).card is not None


def test_ctrl_c_ends_the_builder_and_leaves_nothing(store: LocalStore, onnx_file: Path) -> None:
    """At the builder's next step; no thread of it is left, and the next build is made."""
    pressed: list[int] = []

    def press() -> None:
        if not pressed:
            pressed.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    told = Told(on_step=press)
    with pytest.raises(KeyboardInterrupt):
        build(store, rtx(onnx_file, "fp32"), told)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorrt-build")]
    assert plan_cards(store, "org/layer") == []
    assert incoming(store) == []
    assert build(store, rtx(onnx_file, "fp32"), Told()).card is not None


def test_the_parsers_words_come_with_the_nodes_name(tmp_path: Path) -> None:
    """Asymmetric 8 bits, which TensorRT does not take."""
    zero = helper.make_tensor("zero", TensorProto.UINT8, [], [128])
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [0.1])
    nodes = [node("QuantizeLinear", "x scale zero", "q"), node("DequantizeLinear", "q scale zero", "y")]
    path = tmp_path / "m.onnx"
    dims = (1, 4)
    path.write_bytes(model(nodes, [value("x", 1, dims)], [value("y", 1, dims)], [zero, scale]))
    with pytest.raises(ModelRefused, match=r"TensorRT-RTX 1\.7.* cannot take this model: node 'q'"):
        build_plan(toolkit("rtx"), path, (), tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_profiles_that_the_builder_refuses_are_told(tmp_path: Path) -> None:
    """An input without one, and one of the wrong rank: the library itself returns and says nothing."""
    path = tmp_path / "m.onnx"
    path.write_bytes(models.identity())
    with pytest.raises(InvalidInput, match="give one in profile 1"):
        build_plan(toolkit("rtx"), path, (), tmp_path / "plan")
    with pytest.raises(ModelRefused, match="2 dimensions but profile 0 has 3"):
        build_plan(toolkit("rtx"), path, parse_profiles(["x=1x3x1"]), tmp_path / "plan")


def test_an_input_that_is_a_shape_takes_values(tmp_path: Path) -> None:
    """A plan is built for a range of its values, and the message shows how to give them."""
    path = tmp_path / "m.onnx"
    nodes = [node("Expand", "x shape", "y")]
    inputs = [value("x", TensorProto.FLOAT, (1, 4)), value("shape", TensorProto.INT64, (2,))]
    path.write_bytes(model(nodes, inputs, [value("y", TensorProto.FLOAT, ("n", 4))]))
    with pytest.raises(InvalidInput, match="shape:="):
        build_plan(toolkit("rtx"), path, (), tmp_path / "plan")
    built = build_plan(toolkit("rtx"), path, parse_profiles(["shape:=1x4,2x4,8x4"]), tmp_path / "plan")
    assert plan_version(built.path, "rtx") == built.version
    with pytest.raises(ModelRefused, match="does not start like a plan"):
        plan_version(built.path, "trt")


def test_rtx_leaves_a_timing_cache_alone(tmp_path: Path) -> None:
    """It times nothing; its own calls for it are deprecated and do nothing."""
    path = tmp_path / "m.onnx"
    path.write_bytes(convolutions().SerializeToString())
    options = BuilderOptions(timing_cache=tmp_path / "timing.cache", workspace=1 << 28)
    assert build_plan(toolkit("rtx"), path, (), tmp_path / "plan", options).nbytes > 0
    assert not (tmp_path / "timing.cache").exists()


def test_rtx_builds_no_version_compatible_plans(store: LocalStore, onnx_file: Path) -> None:
    """The runtime that such a plan brings is not in its package."""
    with pytest.raises(InvalidInput, match="--version-compatible"):
        build(store, rtx(onnx_file, builder=BuilderOptions(version_compatible=True)), Told())


def test_without_a_gpu_a_build_for_tensorrt_stops_before_the_builder(
    store: LocalStore, onnx_file: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted and checked; the message says what is left, and where. The next build takes the conversion."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    outcome = build(store, replace(rtx(onnx_file, calibration=rows), target="trt"), Told())
    assert outcome.card is None
    assert outcome.gate is not None
    assert outcome.left is not None
    assert "on a machine with an NVIDIA GPU" in outcome.left
    assert str(outcome.converted) in outcome.left
    assert outcome.converted.is_file()
    told = Told()
    build(store, rtx(onnx_file, calibration=rows), told)
    assert any("converted earlier" in line for line in told.lines)


# --- plans in the store -------------------------------------------------------------------------


def test_damaged_and_orphaned_plans_are_told(store: LocalStore, onnx_file: Path) -> None:
    """A file without a card does not exist; a card that cannot be read is an error."""
    outcome = build(store, rtx(onnx_file, "fp32"), Told())
    assert outcome.card is not None
    folder = store.version_folder("org/layer", "1")
    path = folder / outcome.card.files[0].name
    (folder / "other.engine").write_bytes(b"x")
    assert orphans(store, "org/layer", "1") == ["other.engine"]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    with pytest.raises((CorruptModel, ModelNotFound)):
        store.fetch(outcome.card)
    card = folder / f"{path.name}.json"
    card.write_text(card.read_text().replace('"rtx"', '"abc"'))
    with pytest.raises(CorruptModel, match=r"plan\.target"):
        plan_cards(store, "org/layer")
    remove_plan(store, outcome.card)
    assert plan_cards(store, "org/layer") == []
    assert not path.exists()


def test_plans_go_with_their_version(store: LocalStore, onnx_file: Path) -> None:
    """And a version that went away while a plan was built gets none."""
    outcome = build(store, rtx(onnx_file, "fp32"), Told())
    assert outcome.card is not None
    store.remove("org/layer")
    with store.stage() as staging:
        (staging.folder / outcome.card.files[0].name).write_bytes(b"plan")
        with pytest.raises(ModelNotFound, match="removed while its plan was built"):
            publish_plan(store, staging, outcome.card)
    assert store.models() == []


def test_cards_choose_themselves(store: LocalStore, onnx_file: Path) -> None:
    """A card's plan is what the choice takes: nothing here is for a real device."""
    build(store, rtx(onnx_file, "fp32"), Told())
    plans = [card.plan for card in plan_cards(store, "org/layer") if card.plan is not None]
    assert choose(plans, DeviceFacts("GPU", "9.0", "11.4.0.106", "13.0", "580.1")) is None
    real = [
        plan.model_copy(update={"target": "trt", "library_version": "11.4.0.106", "compute_capability": "9.0"})
        for plan in plans
    ]
    assert choose(real, DeviceFacts("GPU", "9.0", "11.4.0.106", "13.0", "580.1")) is real[0]
