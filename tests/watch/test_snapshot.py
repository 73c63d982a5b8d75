"""A snapshot is what its schema says, and small."""

from __future__ import annotations

import json
from pathlib import Path

from jsonschema import Draft202012Validator

from qworker.telemetry.measures import Measures
from qworker.wire.control import decode_snapshot, encode_snapshot
from tests.watch.snapshots import row, told

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "schemas/snapshot.json").read_text())


def test_it_fits_its_schema() -> None:
    """Every field is described, after a trip over the wire, with a model that was never used and a load under way."""
    measures = Measures()
    measures.of("m").job(0.1, 0.0, 0.2, cold=True)
    measures.of("m").batch(0.5)
    measures.chronicle.enter("n", "fetch", 0.5)
    measures.chronicle.enter("n", "load", 0.5)
    measures.chronicle.note("loaded", "n", seconds=0.25)
    measures.chronicle.note("evicted", "m", "makes room for n")
    snapshot = decode_snapshot(encode_snapshot(told("w", 1.0, measures, row("m"), row("n", key=float("-inf")))))
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(snapshot)
    assert set(snapshot) == set(SCHEMA["properties"])
    assert {name for note in snapshot["notes"] for name in note} == set(SCHEMA["$defs"]["note"]["properties"])
    assert {name for each in snapshot["models"] for name in each} == set(SCHEMA["$defs"]["model"]["properties"])
    assert set(snapshot["notes"][0]["stages"]) == {"fetch", "load"}


def test_three_hundred_models_are_a_small_message() -> None:
    """It goes out each second while somebody watches."""
    measures = Measures()
    for n in range(300):
        measures.of(f"model-{n:03}").job(0.1, 0.0, 0.2, cold=False)
        measures.chronicle.note("evicted", f"model-{n:03}", "x" * 300)
    assert len(encode_snapshot(told("w", 1.0, measures, *(row(f"model-{n:03}") for n in range(300))))) < 100_000
