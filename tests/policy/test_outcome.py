"""What becomes of a delivery, for every way in which a job can end."""

from __future__ import annotations

import pytest

from qworker import errors
from qworker.policy.outcome import (
    Budgets,
    FailureClass,
    Outcome,
    ReplyTo,
    Send,
    Settle,
    Strikes,
    To,
    decide,
    deliveries,
    used_up,
)

FAILURES = list(errors.JOB_ERRORS.values())


def outcome(error: errors.QworkerError | type[errors.QworkerError] | None, reply: ReplyTo, tried: int = 1) -> Outcome:
    return decide(error, attempts=tried, max_attempts=3, reply=reply)


def test_a_result_goes_to_who_asked_else_to_the_results_exchange() -> None:
    """A named reply queue that is gone is noticed; a direct reply must not ask for that."""
    assert outcome(None, ReplyTo.QUEUE) == Outcome(Send.RESULT, To.REPLY, mandatory=True)
    assert outcome(None, ReplyTo.DIRECT) == Outcome(Send.RESULT, To.REPLY, mandatory=False)
    assert outcome(None, ReplyTo.NONE) == Outcome(Send.RESULT, To.RESULTS)


@pytest.mark.parametrize("error", FAILURES)
def test_a_failure_is_answered_or_dead_lettered_and_never_only_dropped(error: type[errors.JobError]) -> None:
    """With a reply address it is answered; without one the dead letter has the cause."""
    answered = outcome(error, ReplyTo.QUEUE)
    assert (answered.send, answered.to, answered.settle) == (Send.FAILURE, To.REPLY, Settle.ACK)
    assert outcome(error, ReplyTo.NONE) == Outcome(dead_letter=error.code)


def test_unknown_models_and_poison_jobs_are_dead_lettered_as_well() -> None:
    """A person must see them even where the requester was told; other failures are the requester's."""
    both = {error for error in FAILURES if outcome(error, ReplyTo.DIRECT).dead_letter is not None}
    assert both == {errors.UnknownModel, errors.PoisonJob}
    assert outcome(errors.PoisonJob, ReplyTo.DIRECT).dead_letter == "poison_job"


def test_an_instance_decides_like_its_class_but_for_its_own_code() -> None:
    """JobFailed carries a code of its own."""
    assert outcome(errors.InvalidInput("no"), ReplyTo.NONE) == outcome(errors.InvalidInput, ReplyTo.NONE)
    assert outcome(errors.JobFailed("custom", "x"), ReplyTo.NONE).dead_letter == "custom"


def test_an_answer_that_nobody_can_get_is_kept_with_its_cause() -> None:
    """The reply queue is gone: the job is not run again."""
    assert outcome(errors.Unroutable("gone"), ReplyTo.QUEUE) == Outcome(dead_letter="reply_gone")


@pytest.mark.parametrize("error", [errors.PublishFailed, errors.BrokerUnavailable])
def test_an_answer_that_did_not_leave_is_tried_again_but_not_for_ever(error: type[errors.BrokerError]) -> None:
    """The job goes back as long as attempts are left."""
    assert outcome(error, ReplyTo.QUEUE, tried=2) == Outcome(settle=Settle.GIVE_BACK)
    assert outcome(error, ReplyTo.QUEUE, tried=3) == Outcome(dead_letter=error.code)


def test_a_job_that_ended_its_workers_alone_does_not_run_again() -> None:
    """One crash beside others, and as many alone as make up the budget."""
    verdicts = [used_up(Strikes(begun=n), Budgets(crash=3)) for n in range(4)]
    assert verdicts == [None, None, FailureClass.CRASH, FailureClass.CRASH]


@pytest.mark.parametrize("budgets", [Budgets(), Budgets(crash=2, device_fault=2, unsent=2)])
def test_whoever_was_merely_in_hand_has_all_its_attempts(budgets: Budgets) -> None:
    """No strike, no verdict, however small the budgets are."""
    assert used_up(Strikes(), budgets) is None


def test_each_class_has_a_budget_of_its_own() -> None:
    """A device that fails and an answer that does not leave are no crashes, and are allowed more often."""
    budgets = Budgets(crash=3, device_fault=5, unsent=4)
    assert used_up(Strikes(begun=3, device_faults=3), budgets) is None
    assert used_up(Strikes(begun=4, device_faults=4), budgets) is FailureClass.DEVICE_FAULT
    assert used_up(Strikes(begun=2, unsent=2), budgets) is None
    assert used_up(Strikes(begun=3, unsent=3), budgets) is FailureClass.UNSENT
    assert used_up(Strikes(begun=5, device_faults=3), budgets) is FailureClass.CRASH


@pytest.mark.parametrize(
    ("headers", "redelivered", "expected"),
    [
        ({}, False, 1),
        ({}, True, 2),
        ({"x-delivery-count": 0}, True, 1),  # given back in good order
        ({"x-delivery-count": 4}, True, 5),
        ({"x-acquired-count": 2}, True, 3),
        ({"x-acquired-count": 9, "x-delivery-count": 1}, True, 2),
        ({"x-delivery-count": "7"}, True, 2),  # not the broker's: a publisher wrote it
        ({"x-delivery-count": True}, False, 1),
        ({"x-delivery-count": -5}, True, 1),
        ({"x-delivery-count": 50}, False, 1),  # of the life before: a dead letter that was published again
        ({"x-acquired-count": 50}, False, 1),
    ],
)
def test_deliveries_are_read_from_what_the_broker_says(
    headers: dict[str, object], redelivered: bool, expected: int
) -> None:
    """Quorum queues count, classic ones only flag; nonsense in a header does no harm."""
    assert deliveries(headers, redelivered) == expected


@pytest.mark.parametrize(
    ("reply_to", "kind"),
    [
        (None, ReplyTo.NONE),
        ("", ReplyTo.NONE),
        ("answers", ReplyTo.QUEUE),
        ("amq.rabbitmq.reply-to", ReplyTo.DIRECT),
        ("amq.rabbitmq.reply-to.g1h2AA5", ReplyTo.DIRECT),  # as the broker rewrites it
    ],
)
def test_the_kind_of_a_reply_address(reply_to: str | None, kind: ReplyTo) -> None:
    """Direct reply-to is known by its prefix: the broker appends the requester."""
    assert ReplyTo.of(reply_to) is kind
