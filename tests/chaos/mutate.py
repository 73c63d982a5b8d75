"""Messages that no publisher should send: the golden files and good jobs, broken in seeded ways. Pure.

Three ways: bytes are flipped, cut, doubled or put in; a field of the decoded message gets a value of another
kind, vanishes or is added; the envelope says what is not so. Some of what comes out is a good job all the same:
what matters is that each is answered for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from tests.e2e.caller import JSON, MSGPACK

GOLDEN = Path(__file__).parents[2] / "schemas" / "golden"
CONTENT_TYPES = (MSGPACK, JSON, "", "text/plain", "application/x-unheard-of", "a" * 200, "\u00e4\u00f6")
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    1e308,
    "",
    "x" * 5000,
    "../../etc",
    b"\xff\x00",
    [],
    {},
    [[]],
    [None] * 50,
    {"a": {"b": {"c": []}}},
    [2**40, 2**40],
    [-3],
    "FP32",
    "BYTES",
)
ODD_HEADERS: tuple[dict[str, Any], ...] = (
    {"x-deadline": "tomorrow"},
    {"x-deadline": -1},
    {"x-deadline": 2**62},
    {"x-published": [1, 2]},
    {"x-delivery-count": "many"},
    {"x-delivery-count": 10_000},
    {"x-qworker-cause": "none"},
    {"traceparent": "x" * 300},
    {"nested": {"a": [1, {"b": None}]}},
)


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message to publish."""

    body: bytes
    content_type: str | None
    headers: dict[str, Any] = field(default_factory=dict[str, Any])


def seeds(good: Sequence[bytes] = ()) -> list[tuple[bytes, str]]:
    """What is broken: the golden jobs, and ``good`` ones in MessagePack."""
    golden = sorted(GOLDEN.glob("*.*"))
    assert golden, f"no golden files in {GOLDEN}"
    found = [(path.read_bytes(), JSON if path.suffix == ".json" else MSGPACK) for path in golden]
    return [*found, *((body, MSGPACK) for body in good)]


def malformed(chance: random.Random, sources: Sequence[tuple[bytes, str]]) -> Malformed:
    """One broken message."""
    body, content_type = chance.choice(sources)
    way = chance.random()
    if way < 0.45:
        body = _damage(chance, body)
    elif way < 0.9:
        body = _restructure(chance, body, content_type)
    kind: str | None = content_type
    if way >= 0.9 or chance.random() < 0.1:
        kind = chance.choice((*CONTENT_TYPES, None))
    headers = dict(chance.choice(ODD_HEADERS)) if chance.random() < 0.15 else {}
    return Malformed(body, kind, headers)


def _damage(chance: random.Random, body: bytes) -> bytes:
    damaged = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(damaged) + 1)
        match chance.randrange(5):
            case 0 if damaged:
                damaged[at % len(damaged)] ^= 1 << chance.randrange(8)
            case 1:
                del damaged[at:]
            case 2:
                damaged[at:at] = chance.randbytes(chance.randint(1, 9))
            case 3:
                damaged[at:at] = damaged[at : at + chance.randint(1, 40)]
            case _:
                del damaged[at : at + chance.randint(1, 8)]
    return bytes(damaged)


def _restructure(chance: random.Random, body: bytes, content_type: str) -> bytes:
    tree = json.loads(body) if content_type == JSON else msgpack.unpackb(body)
    places = list(_places(tree))
    holder, key = chance.choice(places)
    value = chance.choice(ODD_VALUES)
    if isinstance(holder, dict) and chance.random() < 0.25:
        holder.pop(key)
    elif isinstance(holder, dict) and chance.random() < 0.15:
        holder[chance.choice(("ref", "unknown", "parameters", "outputs", "model_version"))] = value
    else:
        holder[key] = value
    if content_type == JSON:
        return json.dumps(tree, default=str).encode("utf-8", "surrogatepass")
    packed = msgpack.packb(tree)
    assert isinstance(packed, bytes)
    return packed


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    _walk(tree, lambda holder, key: found.append((holder, key)))
    return found


def _walk(node: Any, visit: Callable[[Any, Any], None]) -> None:
    keys: Sequence[Any] = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        visit(node, key)
        _walk(node[key], visit)
