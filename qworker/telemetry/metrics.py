"""All metrics of a worker, by name: what they are called, what they count, and their labels.

``exposition`` fills them, ``docs/reference/metrics.md`` is written from this table, and tests hold the rules, the
dashboard and the code to it. Label values are bounded: models are the busiest ones and ``other``; the rest come from
enumerations of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

OTHER: Final = "other"
"""The model label of all models that have none of their own."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"qworker_{name}_total", "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"qworker_{name}", "gauge", text, labels)


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"qworker_{name}", "histogram", text, labels)


JOBS: Final = (
    _counter("jobs", "Jobs by what became of them: answered, failed, dead_lettered or given_back.", "outcome"),
    _counter("job_failures", "Jobs answered with a failure, by its wire code.", "code"),
    _counter("dead_letters", "Jobs sent to the dead-letter exchange, by cause.", "cause"),
    _counter("redeliveries", "Jobs that came after an earlier delivery of them had no outcome."),
    _counter("model_jobs", "Jobs that ran, by model.", "model"),
    _gauge("jobs_in_hand", "Deliveries that are not settled yet, by model.", "model"),
    _gauge(
        "backlog_seconds",
        "Seconds of work that wait for hot models, as far as this worker sees: jobs in hand (on the sweeper, ready "
        "ones too) times the mean run here. The rules add up the fleet's.",
        "model",
    ),
    _histogram("job_queue_wait_seconds", "From the publish of a job to its delivery here, by model.", "model"),
    _histogram("job_batch_wait_seconds", "From the decoded job to the start of its run: for others, or for a lane."),
    _histogram("job_run_seconds", "Runs of the engine that a job was part of, by model.", "model"),
    _histogram("job_publish_seconds", "From the send of an answer to the broker's confirm."),
    _histogram("job_cold_wait_seconds", "Queue wait of the jobs that were there before their model was hot here."),
    _counter(
        "guards",
        "What kept a job or a load from doing harm: tried_alone, convicted, unwanted, repeated, load_quarantined.",
        "guard",
    ),
    _counter("progress_messages", "Messages to callers who ask what their jobs wait for, by state.", "state"),
    _gauge("replies_unconfirmed", "Answers that were sent and are not confirmed by the broker yet."),
)

BATCHING: Final = (
    _counter("runs", "Runs of engines; less than the jobs where several shared one."),
    _counter("jobs_together", "Jobs, or pieces of large ones, that shared a run."),
    _counter("batches_split", "Runs that failed as a whole and were done again in halves."),
    _histogram("batch_rows", "Rows of a run, of models that are batched."),
    _histogram("batch_fill_ratio", "Rows of a run over the most that the model takes, of models that are batched."),
)

HOT_ZONE: Final = (
    _gauge("models", "Models by state: waiting (for bytes), loading, hot or draining.", "state"),
    _gauge(
        "models_bytes",
        "Booked bytes of the models in a state: hot is resident, loading is reserved, draining is on its way back.",
        "state",
    ),
    _gauge("model_hot", "1 for a model that is hot on this worker.", "model"),
    _gauge("models_refusing", "Models whose jobs are answered with a failure, since they cannot be loaded."),
    _gauge("memory_budget_bytes", "Budget of all hot models together, by kind of memory.", "memory"),
    _gauge("memory_held_bytes", "Booked bytes, by kind of memory. Never more than the budget.", "memory"),
    _gauge("memory_peak_bytes", "The most bytes ever booked, by kind of memory.", "memory"),
    _gauge(
        "memory_measured_bytes",
        "What the process (or the device) has grown by since the start, by kind of memory.",
        "memory",
    ),
    _gauge(
        "memory_drift_bytes",
        "Measured less booked bytes: what the ledger does not know of, by kind of memory.",
        "memory",
    ),
    _counter("model_loads", "Loads that went well: cold to hot."),
    _counter("model_unloads", "Unloads: hot to cold. Together with the loads, the switch rate."),
    _counter("evictions", "Models told to leave for another one."),
    _counter("evicted_bytes", "Bytes of the models told to leave, by their cards."),
    _counter("revivals", "Models told to leave that found more jobs, and stayed."),
    _counter("reloads", "Loads of models that had left within ten times their own load seconds."),
    _counter("reload_seconds", "Seconds of those loads. Its rate over the load slots is the thrash score."),
    _counter(
        "preloads", "Models loaded before any job asked for them, by fate: used, or unused when they left.", "fate"
    ),
    _gauge("preloads_waiting", "Those that are hot and that no job has asked for yet."),
    _gauge(
        "least_valuable_age_seconds", "How long the hot model that is the first to go has been hot; 0 when none is hot."
    ),
    _gauge("room_wait_seconds", "How long the longest waiting claim has waited for bytes; 0 when none waits."),
)

LOADS: Final = (
    _histogram("load_seconds", "Deserialize and warm-up of the loads that went well."),
    _histogram(
        "load_stage_seconds",
        "Stages of loads: card, fetch (with verification), room (bytes), slot, deserialize, warm_up.",
        "stage",
    ),
    _counter(
        "load_failures", "Loads that failed, by the kind of error; no_room: the bytes were not free in time.", "cause"
    ),
    _histogram(
        "eta_error_seconds",
        "How far estimates were off: of each load from its start (load), and of jobs whose callers asked, from the "
        "first ETA that they were told (job).",
        "of",
    ),
    _gauge("loads_in_progress", "Loads that hold a load slot now."),
    _gauge("load_slots", "Load slots: how many loads may run at once."),
)

CLAIMS: Final = (
    _gauge("claims", "Claims on models, by the step that they are at.", "step"),
    _counter("leases", "Attempts to take a model's lease: got, or taken by another worker.", "outcome"),
    _counter("hints", "Hints of cold models with jobs, by fate: claimed, or stale.", "fate"),
    _counter("wakes", "Hints that this worker published: as the sweeper, or for jobs that it left behind."),
    _gauge("sweeper_elected", "1 on the worker that sweeps."),
    _counter("sweeps", "Sweeps over the queues of all models."),
    _counter("sweep_seconds", "Seconds that those sweeps took."),
    _gauge(
        "queue_ready_jobs",
        "Ready jobs in both lanes, as the sweeper saw them last; the longest queues by model. On the sweeper only.",
        "model",
    ),
    _gauge(
        "queue_consumers",
        "Consumers of both lanes of the same models, as the sweeper saw them last. On the sweeper only.",
        "model",
    ),
    _gauge("unserved_models", "Models with ready jobs and no consumer, as the sweeper saw last. On the sweeper only."),
    _gauge("unserved_jobs", "Their ready jobs. On the sweeper only."),
)

WORKER: Final = (
    _gauge("worker_info", "1, with the worker's name and version.", "worker", "version"),
    _gauge("ready", "1 when /readyz would say so."),
    _gauge("draining", "1 when the worker was told to stop, and finishes what is in hand."),
    _gauge("broker_connected", "1 while there is a session with the broker."),
    _gauge("broker_blocked", "1 while the broker refuses publishes (memory or disk alarm)."),
    _gauge("broker_blocked_seconds", "For how long it has done so; 0 while it takes them."),
    _counter("broker_blocks", "Times that the broker began to refuse publishes."),
    _gauge("outbox_messages", "Publishes that the broker has not confirmed, of all kinds."),
    _gauge("outbox_bytes", "Their bytes."),
    _gauge("consumers_expected", "Consumers of job queues that this worker believes to have."),
    _gauge("consumers_missing", "Models for which the broker counts fewer consumers than this worker alone expects."),
    _counter("consumers_lost", "Consumers that the broker had dropped, and that were made anew."),
    _counter("broker_reconnects", "Sessions with the broker that ended."),
    _histogram("event_loop_lag_seconds", "How late a timer on the event loop is, measured four times a second."),
    _counter("event_loop_stalls", "Standstills of the event loop of more than two seconds."),
)

METRICS: Final = (*JOBS, *BATCHING, *HOT_ZONE, *LOADS, *CLAIMS, *WORKER)
GROUPS: Final = {
    "Jobs": JOBS,
    "Batching": BATCHING,
    "Hot zone": HOT_ZONE,
    "Loads": LOADS,
    "Claims, hints and sweeps": CLAIMS,
    "Worker": WORKER,
}
