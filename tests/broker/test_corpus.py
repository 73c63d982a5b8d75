"""Streams that a fuzzer found worth keeping are read as it read them."""

from __future__ import annotations

import random

import pytest

from tests.broker.fuzz_frames import check, kept
from tests.broker.wire_samples import seeds


@pytest.mark.parametrize("stream", [*seeds(), *kept()], ids=lambda stream: stream[:12].hex())
def test_a_damaged_stream_breaks_the_reader_and_nothing_else(stream: bytes) -> None:
    """However it is cut: the same events, the same FrameError or none, and no other exception."""
    check(stream, random.Random(len(stream)))
