"""Bookkeeping of acks and confirms, and the pulse: pure."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qworker.broker.fast.consumer import AckLedger
from qworker.broker.fast.publisher import ConfirmLedger, Outgoing
from qworker.broker.fast.pulse import Pulse

steps = st.lists(
    st.tuples(st.sampled_from(["deliver", "ack", "ack", "refuse", "flush"]), st.integers(0, 30)), max_size=80
)


@settings(max_examples=300)
@given(steps)
def test_acks_never_cover_what_is_not_settled(script: list[tuple[str, int]]) -> None:
    """After each flush the broker's outstanding tags are exactly those that we have not settled.

    The broker refuses an ack for a tag that is not outstanding by closing the channel: asserted as well.
    """
    ledger = AckLedger()
    outstanding: set[int] = set()
    held: list[int] = []
    delivered = 0
    for step, choice in [*script, ("flush", 0)]:
        if step == "deliver":
            delivered += 1
            outstanding.add(delivered)
            held.append(delivered)
        elif step == "ack" and held:
            ledger.acked(held.pop(choice % len(held)))
        elif step == "refuse" and held:
            tag = held.pop(choice % len(held))
            ledger.settled(tag)
            outstanding.remove(tag)
        elif step == "flush":
            prefix, singles = ledger.unsaid()
            for tag in singles:
                outstanding.remove(tag)
            if prefix is not None:
                assert prefix in outstanding
                outstanding = {tag for tag in outstanding if tag > prefix}
            assert outstanding == set(held)
            assert not ledger.has_unsaid


def test_acks_in_order_make_one_frame() -> None:
    """A thousand acks in any order that leaves no gap are one multiple ack."""
    ledger = AckLedger()
    for tag in [*range(1000, 500, -1), *range(1, 501)]:
        ledger.acked(tag)
    assert ledger.unsaid() == (1000, [])
    assert ledger.floor == 1000


def outgoing(sent_at: float) -> Outgoing:
    return Outgoing(lambda _: None, sent_at, "e", "k", 1)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60), st.integers(0, 40))
def test_confirms_settle_each_message_once(confirms: list[tuple[int, bool]], count: int) -> None:
    """Any sequence of single and multiple confirms takes out what AMQP means, each message once."""
    ledger = ConfirmLedger()
    messages = {tag: outgoing(float(tag)) for tag in range(1, count + 1)}
    for message in messages.values():
        ledger.add(message)
    pending = dict(messages)
    for tag, multiple in confirms:
        covered = [each for each in pending if (each <= tag or tag == 0 if multiple else each == tag)]
        assert ledger.settle(tag, multiple=multiple) == [pending.pop(each) for each in covered]
        assert len(ledger) == len(pending)
        assert ledger.oldest() is (pending[min(pending)] if pending else None)
    assert ledger.drain() == list(pending.values())
    assert ledger.oldest() is None


def test_silence_of_two_heartbeats_is_death() -> None:
    """The broker is given up after more than two heartbeats of silence, and any byte resets the count."""
    pulse = Pulse(10, 1.0)
    assert [pulse.tick(heard=False, wrote=True) for _ in range(20)] == ["fine"] * 20
    assert pulse.tick(heard=True, wrote=True) == "fine"
    assert [pulse.tick(heard=False, wrote=True) for _ in range(21)] == ["fine"] * 20 + ["dead"]


@pytest.mark.parametrize(("heartbeat", "tick"), [(1, 0.25), (10, 1.0), (15, 1.0), (60, 1.0)])
def test_heartbeats_leave_twice_an_interval(heartbeat: int, tick: float) -> None:
    """A quiet connection sends a heartbeat at least every half interval, and not more than twice as often."""
    pulse = Pulse(heartbeat, tick)
    wrote, sent = True, []
    for number in range(400):
        beat = pulse.tick(heard=True, wrote=wrote)
        wrote = beat == "send"
        if wrote:
            sent.append(number * tick)
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert max(gaps) <= heartbeat / 2
    assert min(gaps) >= heartbeat / 4


def test_heartbeats_can_be_off() -> None:
    """Without a heartbeat nothing is sent and silence means nothing."""
    pulse = Pulse(0, 1.0)
    assert {pulse.tick(heard=False, wrote=False) for _ in range(100)} == {"fine"}
