"""Which plans a device takes, from their cards alone, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.plan_choice import DeviceFacts, choose, rank, refusal


@dataclass(frozen=True)
class Facts:
    """A plan that the device below takes."""

    target: str = "trt"
    precision: str = "fp16"
    library_version: str = "11.4.0.106"
    cuda_version: str | None = "13.0"
    compute_capability: str | None = "9.0"
    version_compatible: bool = False
    lean_runtime: bool = False
    hardware_compatibility: str = "NONE"


H200 = DeviceFacts("NVIDIA H200", "9.0", "11.4.0.106", "13.0", "580.95.05")


def test_a_plan_made_here_is_taken() -> None:
    """Same version, same capability, a new enough driver."""
    assert refusal(Facts(), H200) is None


@pytest.mark.parametrize(
    ("plan", "device", "words"),
    [
        ({"target": "rtx"}, {}, "TensorRT-RTX"),
        ({"library_version": "11.3.0.99"}, {}, "built with TensorRT 11.3.0.99, and 11.4.0.106 is here"),
        ({"library_version": "11.4.1.2"}, {}, "the very version"),
        ({"version_compatible": True, "library_version": "11.5.0.1"}, {}, "newer versions only"),
        ({"compute_capability": "8.0"}, {}, "compute capability 8.0, and NVIDIA H200 has 9.0"),
        ({"compute_capability": None}, {}, "without a device"),
        ({"hardware_compatibility": "AMPERE_PLUS"}, {"compute_capability": "7.5"}, "from 8.0 on"),
        ({"lean_runtime": True}, {}, "code for this host"),
        ({"cuda_version": "14.0"}, {}, "built with CUDA 14.0"),
        ({}, {"driver": "570.12"}, "driver 570.12 is too old"),
        ({}, {"tensorrt": None}, "not installed"),
        ({}, {"wants_signatures": True}, "no signature"),
    ],
)
def test_the_reason_says_what_is_wrong(plan: dict[str, Any], device: dict[str, Any], words: str) -> None:
    """What was expected, what was found, and (behind the colon) what to do."""
    reason = refusal(replace(Facts(), **plan), replace(H200, **device))
    assert reason is not None
    assert words in reason
    assert ": " in reason


@pytest.mark.parametrize(
    ("plan", "device"),
    [
        ({"version_compatible": True, "library_version": "10.16.0.1"}, {}),
        ({"hardware_compatibility": "AMPERE_PLUS", "compute_capability": "8.0"}, {}),
        ({"lean_runtime": True}, {"trusts_lean_runtimes": True}),
        ({"cuda_version": "13.2"}, {}),
        ({"cuda_version": None}, {"cuda": None, "driver": None}),
    ],
)
def test_what_is_compatible_is_taken(plan: dict[str, Any], device: dict[str, Any]) -> None:
    """Newer TensorRT, newer GPUs, another minor version of CUDA."""
    assert refusal(replace(Facts(), **plan), replace(H200, **device)) is None


def test_what_has_no_card_is_not_loaded() -> None:
    """A plan is code."""
    assert "no card" in str(refusal(None, H200))


def test_a_signed_plan_is_taken_where_signatures_are_wanted() -> None:
    """Whether it is signed, and by whom, was checked before."""
    assert refusal(Facts(), replace(H200, wants_signatures=True), signed=True) is None


def test_the_best_plan_is_made_for_this_device_and_fast() -> None:
    """The very device before a compatible one, then the fastest precision; of equals, the last."""
    ampere = Facts(precision="int8", hardware_compatibility="AMPERE_PLUS", compute_capability="8.0")
    plans = [Facts(precision="fp32"), ampere, Facts(), replace(Facts(), cuda_version="13.1")]
    assert choose(plans, H200) is plans[3]
    assert choose([plans[0], ampere], H200) is plans[0]
    assert choose([ampere], H200) is ampere
    assert choose([Facts(target="rtx")], H200) is None


@given(
    st.lists(
        st.builds(
            Facts,
            target=st.sampled_from(["trt", "rtx"]),
            precision=st.sampled_from(["fp32", "fp16", "int8", "fp8"]),
            library_version=st.sampled_from(["11.4.0.106", "11.3.0.1", "12.0.0.1", ""]),
            compute_capability=st.sampled_from([None, "8.0", "9.0", "12.0"]),
            version_compatible=st.booleans(),
            lean_runtime=st.booleans(),
            hardware_compatibility=st.sampled_from(["NONE", "AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"]),
        )
    )
)
def test_what_is_chosen_is_never_refused(plans: list[Facts]) -> None:
    """And nothing that would be taken ranks better."""
    chosen = choose(plans, H200)
    takes = [plan for plan in plans if refusal(plan, H200) is None]
    assert (chosen is None) == (not takes)
    if chosen is not None:
        assert refusal(chosen, H200) is None
        assert rank(chosen, H200) == min(rank(plan, H200) for plan in takes)
