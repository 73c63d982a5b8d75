"""The eviction policies by name, as settings and the command line know them."""

from __future__ import annotations

from collections.abc import Callable

from qworker.policy.eviction import Eviction, Gdsf, Lru
from qworker.policy.rate import Rate
from qworker.policy.s3fifo import S3Fifo

DEFAULT_POLICY = "gdsf"

POLICIES: dict[str, Callable[[], Eviction]] = {"gdsf": Gdsf, "rate": Rate, "lru": Lru, "s3fifo": S3Fifo}


def make_eviction(name: str) -> Eviction:
    """A fresh policy. Raises ValueError for a name that is not in ``POLICIES``."""
    if (make := POLICIES.get(name)) is None:
        raise ValueError(f"expected one of {', '.join(POLICIES)}, found {name!r}")
    return make()
