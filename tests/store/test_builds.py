"""The store as a device sees it: which build is loaded, what is booked for it, and how its bytes come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qworker.errors import CorruptModel, LoadFailed, ModelNotFound
from qworker.policy.plan_choice import DeviceFacts
from qworker.store.builds import Arena, BuildsStore
from qworker.store.local import LocalStore
from qworker.store.plans import remove_plan
from tests.e2e.models import put, replace
from tests.support.fakegpu.store import put_plan
from tests.support.models import identity

MIB = 1 << 20
H100 = DeviceFacts("H100", "9.0", "11.4.0.106", "13.0", "580.1")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    put(root, "m", identity())
    return root


def builds(root: Path, *, onnx: bool = True, reserved: int = 0, device: DeviceFacts = H100) -> BuildsStore:
    return BuildsStore(LocalStore(root), device, Arena(2, reserved), onnx=onnx)


def test_the_plan_that_the_device_takes_comes_before_onnx(root: Path) -> None:
    """The fastest of those that it takes, by their cards alone."""
    put_plan(root, "m", precision="fp32")
    put_plan(root, "m", precision="fp16")
    put_plan(root, "m", precision="int8", compute_capability="8.6")
    card = builds(root).card("m")
    assert card.plan is not None
    assert (card.backend, card.plan.precision) == ("tensorrt", "fp16")
    found = builds(root).fetch(card)
    assert found.content is None
    assert found.mapped is not None
    assert bytes(found.mapped) == found.path.read_bytes()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"library_version": "11.3.0.9"}, "built with TensorRT 11.3.0.9"),
        ({"compute_capability": "8.6"}, "compute capability 8.6"),
        ({"target": "rtx"}, "TensorRT-RTX"),
        ({"lean_runtime": True}, "runtime of its own"),
    ],
)
def test_a_plan_that_the_device_does_not_take(root: Path, facts: dict[str, Any], reason: str) -> None:
    """ONNX instead, or a refusal that says why; nothing of the plan is read."""
    card = put_plan(root, "m", **facts)
    (root / "models" / "m" / "1" / card.files[0].name).unlink()
    store = builds(root)
    assert store.card("m").backend == "onnx"
    assert store.fetch(store.card("m")).content is not None
    strict = builds(root, onnx=False)
    with pytest.raises(LoadFailed, match=reason):
        strict.fetch(strict.card("m"))


def test_no_plan_at_all(root: Path) -> None:
    """Said in as many words."""
    strict = builds(root, onnx=False)
    with pytest.raises(LoadFailed, match=r"m has no plan that H100 takes \(it has no plan: build one"):
        strict.fetch(strict.card("m"))


def test_a_plan_that_is_not_what_its_card_says(root: Path) -> None:
    """One changed byte, a cut one, none."""
    store, card = builds(root), put_plan(root, "m")
    path = root / "models" / "m" / "1" / card.files[0].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    for damaged in (bytes(content), bytes(content[:-1]), b""):
        replace(path, damaged)
        with pytest.raises(CorruptModel, match="build the plan again"):
            store.fetch(store.card("m"))


def test_a_plan_that_is_removed_meanwhile(root: Path) -> None:
    """Its card was read before; then there is ONNX again."""
    store, card = builds(root), put_plan(root, "m")
    remove_plan(LocalStore(root), card)
    with pytest.raises(ModelNotFound, match="read its card again"):
        store.fetch(card)
    assert store.card("m").backend == "onnx"


def test_what_is_read_stays_when_a_rebuild_replaces_the_file(root: Path) -> None:
    """The map is of the file that was hashed."""
    store, card = builds(root), put_plan(root, "m")
    found = store.fetch(card)
    assert found.mapped is not None
    before = bytes(found.mapped)
    put_plan(root, "m", build={"ms": 5.0})
    assert bytes(found.mapped) == before


def test_what_is_booked_depends_on_the_arena(root: Path) -> None:
    """Shared scratch memory is nobody's own; without an arena, or beyond it, there is some for each lane."""
    put_plan(root, "m", weights=10 * MIB, scratch=4 * MIB)
    io = 64 << 10
    assert builds(root, reserved=20 * MIB).card("m").resident_bytes == 10 * MIB
    assert builds(root, reserved=6 * MIB).card("m").resident_bytes == 10 * MIB + 2 * (4 * MIB + io)
    assert builds(root).card("m").resident_bytes == 10 * MIB + 2 * (4 * MIB + io)
    assert builds(root).largest_need() == 4 * MIB + io
    assert builds(root, device=DeviceFacts("old", "7.0", "11.4.0.106", None, None)).largest_need() == 0
