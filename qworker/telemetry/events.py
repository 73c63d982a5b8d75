"""All events that are logged, by name: ``noun.verb``, at which level, and what one tells.

A test holds the code to this list, and docs/reference/events.md is written from it: a new event is added here first.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Level = Literal["debug", "info", "warning", "error", "critical", "exception"]


class Event(NamedTuple):
    level: Level
    text: str


_WORKER: Final = {
    "worker.started": Event("info", "The worker runs; it is ready when /readyz says so."),
    "worker.draining": Event("info", "Told to stop: no new jobs, those in hand have the grace time."),
    "intake.abandoned": Event("warning", "Answers to unroutable or expired jobs did not end within the grace time."),
    "worker.drained": Event("info", "Everything has left; held are the bytes still booked, which should be 0."),
    "worker.drained_by_order": Event("info", "An operator drains it: it takes nothing until it is resumed."),
    "worker.resumed": Event("info", "An operator lets it take jobs again."),
    "worker.stopped": Event("info", "The last line of a worker that ended well."),
    "worker.ended": Event("error", "A worker process of the supervisor ended badly; it is started again."),
    "supervisor.started": Event("info", "One worker process is started for each device."),
    "http.listening": Event("info", "The port of health and metrics is open."),
    "process.ends_with_stuck_threads": Event("warning", "Threads that cannot be stopped are left behind."),
    "chore.ended": Event("debug", "A task of a session ended with it."),
    "loop.stands": Event("warning", "The event loop has not turned for two seconds; where it stands."),
    "loop.moves": Event("warning", "It turns again."),
    "loop.given_up": Event("critical", "It stood for longer than the setting watchdog: the process ends."),
    "history.restored": Event("info", "What models were asked for, and what loads cost, is known from before."),
    "history.corrupt": Event("warning", "The history file is damaged: the worker starts without one."),
    "history.unreadable": Event("warning", "The history file cannot be read: the worker starts without one."),
    "history.unwritable": Event("warning", "The history cannot be kept; told once."),
    "history.replayed": Event("info", "What the fleet was asked for is known from its stream."),
    "history.replay_cut_short": Event(
        "warning", "The fleet's history is long, or the broker cannot send it now: a part was read."
    ),
    "history.no_stream": Event("info", "The broker has no streams: each worker knows what it has seen itself."),
    "history.not_sent": Event("info", "Some minutes could not be told to the fleet."),
    "warm_start.done": Event("info", "Free bytes were filled with what the history says is dearest."),
    "plan.made": Event("info", "A plan of preloads for the day was written; the reason says whether it acts, and why."),
    "plan.failed": Event("warning", "No plan could be made; it is tried again in an hour."),
    "plan.unreadable": Event("warning", "The plan of preloads was edited wrongly: nothing is preloaded by it."),
    "zone.thrashing": Event("warning", "Models push each other out: claims that evict are held; the reason says who."),
    "zone.calm": Event("info", "They do not any more: claims evict at once again."),
    "memory.limited": Event("warning", "The budget asked for is more than the device has; it got less."),
}

_BROKER: Final = {
    "broker.connected": Event("info", "A session with the broker is open."),
    "broker.lost": Event("warning", "The session ended; a new one is opened."),
    "broker.unavailable": Event("warning", "No connection; it is tried again after a pause."),
    "broker.blocked": Event("warning", "The broker refuses publishes (memory or disk alarm)."),
    "broker.unblocked": Event("info", "It takes them again."),
    "broker.consumer_timeout": Event("warning", "The broker takes jobs away sooner than the worker was told."),
    "pulse.failed": Event("warning", "A test publish was not taken: somebody deleted an exchange."),
    "consumer.lost": Event("warning", "The broker has dropped a consumer."),
    "consumer.made_anew": Event("info", "It is there again."),
    "queue.missing": Event("error", "A model's queue was deleted while its model was hot."),
    "progress.lost": Event("debug", "What a job waits for could not be told to its caller."),
    "news.lost": Event("debug", "The news of a claim did not reach the sweeper; it finds out by itself."),
    "sweeper.elected": Event("info", "This worker looks at all queues from now on."),
    "sweeper.wake": Event("info", "A queue with jobs and no consumer: somebody is woken."),
    "wake.unsent": Event("info", "The broker did not take a hint; the next sweep finds the jobs."),
}

_MODELS: Final = {
    "model.declared": Event("info", "A job came for a model without a queue; it has one now."),
    "model.loaded": Event("info", "Cold to hot: loaded, warm, its bytes booked."),
    "model.backlog": Event("info", "More waits for it than is done in time: another worker is asked to serve it too."),
    "model.replica_leaves": Event("info", "The other replicas can carry its share."),
    "model.preloaded": Event("info", "Loaded before any job asks for it, into free bytes; the reason says why."),
    "model.unloaded": Event("info", "Hot to cold; its bytes are back."),
    "model.evicted": Event("info", "Told to leave; the reason names for whom, and why this one."),
    "model.no_room": Event("warning", "Its bytes were not free in time; the sweep tries again."),
    "model.load_failed": Event("error", "A load failed; it is tried again, ever more rarely."),
    "load.unguarded": Event("info", "The note of a load in progress, for the case that it ends us, could not be made."),
    "model.load_hangs": Event("error", "A load takes longer than load_timeout; its bytes stay booked until it ends."),
    "model.put_off": Event("warning", "Workers ended while they loaded it: its jobs wait until it is tried again."),
    "model.refused": Event("error", "It cannot be served: its jobs are answered with this failure."),
    "model.larger_than_card": Event("warning", "It takes more memory than its card says; the next load books more."),
    "model.ordered": Event("info", "An operator's order about a model was carried out."),
    "model.session_lost": Event("info", "The session that held its lease ended; the claim starts again."),
    "model.abandoned": Event("warning", "It did not leave within the grace time."),
    "model.on_onnx": Event("info", "No plan of it suits this device: it runs on ONNX."),
    "model.outlasts_consumer_timeout": Event("error", "A run takes longer than the broker lets a job be in hand."),
    "card.skipped": Event("debug", "A build's card cannot be read; the others count."),
    "stray.unsent": Event("warning", "A job could not be sent on to the queue made for it; it stays in hand."),
    "store.unreadable": Event("warning", "The store cannot be read now; the last list of models holds."),
    "blobs.expired": Event("info", "Old blobs were deleted from the blob store."),
    "blobs.not_sent": Event("warning", "A result could not be put into the blob store."),
    "blobs.not_tended": Event("warning", "The blob store could not be tidied up."),
    "warm_up.sample_unsuitable": Event("info", "A plan does not take its warm-up sample; it warms up on others."),
    "backend.onnx": Event("info", "There is no device: models run on ONNX."),
    "engine.not_freed": Event("exception", "An engine raised while it was freed."),
}

_JOBS: Final = {
    "job.failed": Event("info", "A job was answered with a failure."),
    "job.returned": Event("info", "The session ended first: the broker has the job again."),
    "job.dead_lettered": Event("warning", "A job went to the dead-letter exchange, with the cause in its headers."),
    "job.repeated": Event("info", "A job came again that had been answered; it was not run again."),
    "job.tried_alone": Event("info", "A job that may have ended a worker runs by itself."),
    "reply_queue.unknown": Event("debug", "Whether an answer is still wanted could not be found out; the job runs."),
    "reply.failed": Event("warning", "The broker did not take an answer."),
    "order.refused": Event("warning", "An operator's order was not carried out."),
    "order.half_done": Event("info", "A part of an order could not be carried out; the rest was."),
    "snapshot.lost": Event("debug", "A snapshot for those who watch was not taken; the next comes in a second."),
    "order.unanswered": Event("warning", "The answer to an order had nowhere to go."),
    "strikes.kept": Event("info", "Why a job or a model is held to be dangerous."),
    "strikes.not_noted": Event("info", "A note of a dangerous job could not be written."),
    "strikes.not_read": Event("info", "Notes of dangerous jobs could not be read in full."),
    "strikes.unusable": Event("warning", "The notes of dangerous jobs cannot be used."),
}

_DEVICE: Final = {
    "device.opened": Event("info", "The GPU is there, with its budget."),
    "device.lost": Event("critical", "An error broke the CUDA context: the process ends, the job is remembered."),
    "device.close_hangs": Event("warning", "The device did not let go of its memory in time; the process ends anyway."),
    "device.drift": Event("warning", "The device holds more memory than the worker knows of."),
}

EVENTS: Final[dict[str, Event]] = {**_WORKER, **_BROKER, **_MODELS, **_JOBS, **_DEVICE}
GROUPS: Final = {
    "Worker": _WORKER,
    "Broker": _BROKER,
    "Models": _MODELS,
    "Jobs and orders": _JOBS,
    "Device": _DEVICE,
}

FORBIDDEN_FIELDS: Final = frozenset(
    {"body", "payload", "inputs", "outputs", "headers", "properties", "password", "secret", "token", "url"}
)
"""Names that would carry what does not belong in a log."""
