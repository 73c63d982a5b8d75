"""Names of direct replies that the broker survives.

RabbitMQ decodes the name of a direct reply without checking it: one that is cut or made up, and on 3.10
one that another broker gave out, ends the whole connection with 541 INTERNAL_ERROR. The job would then be
delivered again, answered again, and end the next connection.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Iterable

from qworker.wire.topology import DIRECT_REPLY_TO

_PREFIX = f"{DIRECT_REPLY_TO}."
_MOST_SUSPECTS = 1_000
_DEATHS_TO_CONVICT = 2

_ERLANG_TERM, _NEW_PID = 131, 88
_ATOM_LENGTHS = {118: 2, 119: 1, 100: 2, 115: 1}  # tag of an atom → bytes of its length
_PID_NUMBERS = 12


def is_direct_reply(exchange: str, routing_key: str) -> bool:
    return not exchange and routing_key.startswith(_PREFIX)


def is_well_formed(routing_key: str) -> bool:
    """True unless the broker would try to decode the name and fail.

    It decodes names of exactly two parts, a process id of Erlang and a key, and drops all others.
    """
    parts = [part for part in routing_key.removeprefix(_PREFIX).split(".") if part]
    if len(parts) != 2:
        return True
    try:
        term = base64.b64decode(parts[0], validate=True)
    except (binascii.Error, ValueError):
        return False
    if len(term) < 5 or term[0] != _ERLANG_TERM or term[1] != _NEW_PID or term[2] not in _ATOM_LENGTHS:
        return False
    width = _ATOM_LENGTHS[term[2]]
    node = term[3 + width : 3 + width + int.from_bytes(term[3 : 3 + width], "big")]
    return node.startswith(b"reply@") and node.isascii() and len(term) == 3 + width + len(node) + _PID_NUMBERS


class Suspects:
    """Names that were on their way when a connection died of an internal error of the broker.

    Shared by the sessions of one connector, because it is the next session that has to know. Written on the
    event loop only. Two deaths convict: an innocent reply that was there both times is lost, as direct
    replies may be.
    """

    def __init__(self) -> None:
        self._deaths: OrderedDict[str, int] = OrderedDict()

    def died_with(self, names: Iterable[str]) -> None:
        for name in set(names):
            self._deaths[name] = self._deaths.pop(name, 0) + 1
        while len(self._deaths) > _MOST_SUSPECTS:
            self._deaths.popitem(last=False)

    def is_convicted(self, name: str) -> bool:
        return self._deaths.get(name, 0) >= _DEATHS_TO_CONVICT
