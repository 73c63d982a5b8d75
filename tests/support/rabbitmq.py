"""A private RabbitMQ for the suite, with a virtual host for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qworker.broker.node import PrivateNode
from qworker.errors import ConfigError

ROOT_VARIABLE = "QWORKER_TEST_RABBITMQ_ROOT"
"""Path of a laid out system (``ops/lib/rabbitmq4``) whose RabbitMQ is tested instead of the host's."""

STRANGER = ("stranger", "stranger")
"""A user and password that may connect to every test's virtual host, and may do nothing there."""

_FIRST_VHOSTS = 40
_MORE_VHOSTS = 30


def rabbitmq_root() -> Path | None:
    chosen = os.environ.get(ROOT_VARIABLE)
    return Path(chosen) if chosen else None


def start_node(folder: Path, **settings: Any) -> PrivateNode:
    """Start a private node for a test; where none can run, skip the test, or fail it in CI."""
    node = PrivateNode(folder, root=rabbitmq_root(), **settings)
    try:
        node.start()
    except ConfigError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return node


class SuiteNode:
    """One node for the suite; hands out virtual hosts that no test has used before.

    They are made some at a time, since rabbitmqctl takes 2 s to start, and the used ones are deleted by the
    same call: making one takes the broker 70 ms, and 200 ms where some hundred are left standing.
    """

    def __init__(self, folder: Path) -> None:
        names = [f"t{number}" for number in range(_FIRST_VHOSTS)]
        self._fresh = iter(names)
        self._made = _FIRST_VHOSTS
        self._standing = 0  # those before it have been deleted
        self.node = start_node(folder, definitions=_definitions(names))

    def fresh_vhost(self) -> str:
        name = next(self._fresh, None)
        if name is None:
            self._fresh = self._make_more()
            name = next(self._fresh)
        return name

    def fresh_url(self) -> str:
        return self.node.url_of(self.fresh_vhost())

    def _make_more(self) -> Iterator[str]:
        first, self._made = self._made, self._made + _MORE_VHOSTS
        stranger = f'<<"{STRANGER[0]}">>'
        self.node.ctl(
            "eval",
            f"""Name = fun(N) -> list_to_binary("t" ++ integer_to_list(N)) end,
            Allow = fun(User, Vhost, What) ->
                rabbit_auth_backend_internal:set_permissions(User, Vhost, What, What, What, <<"tests">>) end,
            [rabbit_vhost:delete(Name(N), <<"tests">>) || N <- lists:seq({self._standing}, {first - 1})],
            [begin rabbit_vhost:add(Name(N), <<"tests">>),
            Allow(<<"guest">>, Name(N), <<".*">>), Allow({stranger}, Name(N), <<>>)
            end || N <- lists:seq({first}, {self._made - 1})].""",
        )
        self._standing = first
        return iter([f"t{number}" for number in range(first, self._made)])


def _definitions(vhosts: list[str]) -> dict[str, Any]:
    def permission(user: str, vhost: str, pattern: str) -> dict[str, str]:
        return {"user": user, "vhost": vhost, "configure": pattern, "write": pattern, "read": pattern}

    return {
        "vhosts": [{"name": vhost} for vhost in ["/", *vhosts]],
        "users": [
            {"name": "guest", "password": "guest", "tags": ["administrator"]},
            {"name": STRANGER[0], "password": STRANGER[1], "tags": []},
        ],
        "permissions": [
            *(permission("guest", vhost, ".*") for vhost in ["/", *vhosts]),
            *(permission(STRANGER[0], vhost, "") for vhost in vhosts),
        ],
    }
