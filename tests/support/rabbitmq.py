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

_FIRST_VHOSTS = 60
_MORE_VHOSTS = 100


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

    They are made many at a time: rabbitmqctl takes 2 s to start and 10 ms to make one.
    """

    def __init__(self, folder: Path) -> None:
        names = [f"t{number}" for number in range(_FIRST_VHOSTS)]
        self._fresh = iter(names)
        self._made = _FIRST_VHOSTS
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
        self.node.ctl(
            "eval",
            f"""[begin V = list_to_binary("t" ++ integer_to_list(N)), rabbit_vhost:add(V, <<"tests">>),
            rabbit_auth_backend_internal:set_permissions(<<"guest">>, V, <<".*">>, <<".*">>, <<".*">>, <<"tests">>),
            rabbit_auth_backend_internal:set_permissions(<<"{STRANGER[0]}">>, V, <<>>, <<>>, <<>>, <<"tests">>)
            end || N <- lists:seq({first}, {self._made - 1})].""",
        )
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
