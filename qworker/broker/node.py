"""A private RabbitMQ node: a child process in a folder of its own, on loopback only.

For development (``qworker broker``), the demo and the tests. It needs the distribution's RabbitMQ and no
rights; with ``root`` it runs another RabbitMQ out of a folder with a whole Debian in it (needs root).
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from qworker.broker.child import spawn, stop_child
from qworker.errors import BrokerUnavailable, ConfigError

_NODE_NAME = "qworker@localhost"  # the data belong to the name; an epmd for each node keeps them apart
_START_ATTEMPTS = 3
_INSIDE_ROOT = Path("/mnt")
"""Where the node's folder is mounted inside ``root``."""

# Mounts live in a private namespace, so that nothing stays mounted when the node is gone. Without /proc
# a 4.x node dies while it boots.
_ENTER_ROOT = (
    'mount --bind /proc "$0/proc" && mount --rbind /dev "$0/dev" && mount --bind "$1" "$0/mnt" '
    '&& root="$0" && shift && exec chroot "$root" "$@"'
)


@dataclass(frozen=True, slots=True)
class NodeTls:
    """PEM bytes for a TLS listener: the authority's certificate, the node's, and the node's key."""

    ca: bytes
    certificate: bytes
    key: bytes
    require_client_certificate: bool = False


class PrivateNode:
    """One RabbitMQ node that ends with us, whatever ends us.

    ``folder`` holds all that it writes and survives ``stop``: starting again finds the same queues. ``port``
    and the others are chosen free at the first start and then kept. ``conf`` are more lines of rabbitmq.conf;
    ``definitions`` (virtual hosts, users, permissions as RabbitMQ exports them) are imported at each start.

    All calls block (seconds); from asyncio use ``asyncio.to_thread``. One caller at a time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        root: Path | None = None,
        conf: Sequence[str] = (),
        tls: NodeTls | None = None,
        definitions: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self.root = root
        self.conf = tuple(conf)
        self.tls = tls
        self.definitions = definitions
        self._wanted_port = port
        self._ports: _Ports | None = None
        self._epmd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    # --- address ---

    @property
    def port(self) -> int:
        return self._chosen.amqp

    @property
    def tls_port(self) -> int:
        return self._chosen.tls

    @property
    def pid(self) -> int:
        """The process id of the Erlang machine itself."""
        if self._server is None:
            raise BrokerUnavailable("the private RabbitMQ node is not running: call start() first")
        return self._server.pid

    @property
    def is_running(self) -> bool:
        return self._server is not None and self._server.poll() is None

    @property
    def url(self) -> str:
        return self.url_of("/")

    def url_of(self, vhost: str, credentials: tuple[str, str] = ("guest", "guest")) -> str:
        user, password = (quote(part, safe="") for part in credentials)
        return f"amqp://{user}:{password}@127.0.0.1:{self.port}/{quote(vhost, safe='')}"

    @property
    def log(self) -> Path:
        return self.folder / "log" / "node.log"

    # --- life ---

    def __enter__(self) -> PrivateNode:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, timeout: float = 90.0) -> None:
        """Start, and return once the node speaks AMQP. Starting a running node does nothing.

        Raises ConfigError when RabbitMQ is not installed, BrokerUnavailable when it does not come up.
        """
        if self.is_running:
            return
        chosen_before = self._ports is not None
        for attempt in range(_START_ATTEMPTS):
            if self._ports is None:
                self._ports = _Ports.choose(self._wanted_port)
            try:
                self._start_once(timeout)
                return
            except BrokerUnavailable:
                # Between our choosing a port and the node's taking it, another process may have taken it.
                if chosen_before or attempt + 1 == _START_ATTEMPTS:
                    raise
                self._ports = None

    def stop(self, timeout: float = 30.0) -> None:
        """Stop in order; kill what does not end by itself in time. Stopping twice does nothing."""
        if self._server is not None:
            self.resume()
            stop_child(self._server, timeout)
        self._stop_epmd()

    def kill(self) -> None:
        """SIGKILL, as when the machine loses power."""
        if self._server is not None:
            stop_child(self._server, 0)
        self._stop_epmd()

    def restart(self) -> None:
        """Stop in order and start again with the same data and the same ports."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT. Resuming a node that is not paused does nothing."""
        if self.is_running:
            os.kill(self.pid, signal.SIGCONT)

    def ctl(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run rabbitmqctl against this node and return what it prints. Slow: 1.5 to 2.5 s a call."""
        done = subprocess.run(
            self._enter([self._program("rabbitmqctl"), *arguments]),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise BrokerUnavailable(
                f"rabbitmqctl {arguments[0]} ended with {done.returncode} instead of 0; it said: "
                f"{(done.stdout + done.stderr).strip()[-1500:]}"
            )
        return done.stdout

    # --- steps of a start ---

    def _start_once(self, timeout: float) -> None:
        server = self._program("rabbitmq-server")
        self._chosen.check_free()
        self._lay_out()
        # Our own epmd: the one that the node or rabbitmqctl would start goes on when the node is gone.
        self._epmd = spawn(
            self._enter(["epmd", "-address", "127.0.0.1", "-port", str(self._chosen.epmd)]),
            environment=self._environment(),
        )
        with (self.folder / "stdout.txt").open("wb") as output:
            self._server = spawn(self._enter([server]), environment=self._environment(), output=output)
        try:
            self._wait_until_up(timeout)
        except BaseException:
            self.kill()
            raise

    def _wait_until_up(self, timeout: float) -> None:
        assert self._server is not None
        deadline = time.monotonic() + timeout
        while not _speaks_amqp(self.port):
            if self._server.poll() is not None:
                raise BrokerUnavailable(
                    f"the private RabbitMQ node ended with {self._server.returncode} while it started; see "
                    f"{self.log}. It said: {self._last_words()}"
                )
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"the private RabbitMQ node did not open port {self.port} within {timeout:g} s; see "
                    f"{self.log}. It said: {self._last_words()}"
                )
            time.sleep(0.02)

    def _last_words(self) -> str:
        return (self.folder / "stdout.txt").read_text(errors="replace").strip()[-1500:]

    def _stop_epmd(self) -> None:
        if self._epmd is not None:
            stop_child(self._epmd, 2.0)

    # --- what the node finds ---

    @property
    def _chosen(self) -> _Ports:
        if self._ports is None:
            raise BrokerUnavailable("the private RabbitMQ node has no ports yet: call start() first")
        return self._ports

    @property
    def _inside(self) -> Path:
        """The node's folder as the node sees it."""
        return self.folder if self.root is None else _INSIDE_ROOT

    def _lay_out(self) -> None:
        for name in ("data", "log", "tls"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        cookie = self.folder / ".erlang.cookie"
        if not cookie.exists():
            cookie.touch(mode=0o600)
            cookie.write_text(secrets.token_hex(16))
            cookie.chmod(0o400)
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text("\n".join(self._conf_lines()) + "\n")
        if self.definitions is not None:
            (self.folder / "definitions.json").write_text(json.dumps(dict(self.definitions)))
        if self.tls is not None:
            for name, pem in (("ca", self.tls.ca), ("certificate", self.tls.certificate), ("key", self.tls.key)):
                path = self.folder / "tls" / f"{name}.pem"
                path.touch(mode=0o600)
                path.write_bytes(pem)

    def _conf_lines(self) -> list[str]:
        lines = [
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            "loopback_users.guest = true",
            "log.console = false",
            "log.file.level = info",
        ]
        if self.tls is not None:
            inside = self._inside / "tls"
            lines += [
                f"listeners.ssl.1 = 127.0.0.1:{self.tls_port}",
                f"ssl_options.cacertfile = {inside}/ca.pem",
                f"ssl_options.certfile = {inside}/certificate.pem",
                f"ssl_options.keyfile = {inside}/key.pem",
                f"ssl_options.verify = {'verify_peer' if self.tls.require_client_certificate else 'verify_none'}",
                f"ssl_options.fail_if_no_peer_cert = {str(self.tls.require_client_certificate).lower()}",
            ]
        if self.definitions is not None:
            lines.append(f"load_definitions = {self._inside}/definitions.json")
        return [*lines, *self.conf]

    def _environment(self) -> dict[str, str]:
        home, ports = self._inside, self._chosen
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "ERL_CRASH_DUMP": f"{home}/erl_crash.dump",  # not in our working directory
            "ERL_EPMD_PORT": str(ports.epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": _NODE_NAME,
            "RABBITMQ_NODE_PORT": str(ports.amqp),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(ports.dist),
            "RABBITMQ_CTL_DIST_PORT_MIN": str(ports.ctl),
            "RABBITMQ_CTL_DIST_PORT_MAX": str(ports.ctl + 10),
            "RABBITMQ_MNESIA_BASE": f"{home}/data",
            "RABBITMQ_LOG_BASE": f"{home}/log",
            "RABBITMQ_LOGS": f"{home}/log/node.log",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{home}/advanced.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{home}/data/config",
            "RABBITMQ_PID_FILE": f"{home}/node.pid",
            # Makes the start script exec the Erlang machine, so that the pid of our child is the node's.
            "RABBITMQ_ALLOW_INPUT": "1",
            # No busy waiting of idle schedulers: the node shares its cores with what it serves.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput -kernel inet_dist_use_interface {127,0,0,1} "
            "+sbwt none +sbwtdcpu none +sbwtdio none",
        }

    # --- programs ---

    def _program(self, name: str) -> str:
        """The path of one of RabbitMQ's own scripts, as seen inside ``root``.

        Not /usr/sbin/rabbitmq-server: that one changes the user and drops the environment.
        """
        base = self.root or Path("/")
        found = sorted(base.glob(f"usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/{name}"))
        if not found and self.root is not None:
            raise ConfigError(f"expected a system with RabbitMQ in {self.root}, found none: lay one out there first")
        if not found:
            raise ConfigError(
                "a private RabbitMQ node needs the distribution's RabbitMQ, and none is installed: run "
                "`apt-get install --no-install-recommends rabbitmq-server`"
            )
        return "/" + str(found[-1].relative_to(base))

    def _enter(self, command: Sequence[str]) -> list[str]:
        """``command``, run inside ``root`` when there is one."""
        if self.root is None:
            if shutil.which(command[0]) is None:
                raise ConfigError(f"expected {command[0]} of Erlang, found none: run `apt-get install erlang-base`")
            return list(command)
        if os.geteuid() != 0:
            raise ConfigError(f"running RabbitMQ out of {self.root} needs root: run as root, or leave the root out")
        return ["unshare", "-m", "sh", "-c", _ENTER_ROOT, str(self.root), str(self.folder), *command]


@dataclass(frozen=True, slots=True)
class _Ports:
    amqp: int
    tls: int
    epmd: int
    dist: int
    ctl: int

    @classmethod
    def choose(cls, amqp: int | None) -> _Ports:
        """Five ports that are free now, on loopback."""
        free = _free_ports(5)
        return cls(amqp or free[0], *free[1:])

    def check_free(self) -> None:
        """Raises BrokerUnavailable naming a port that another process has: it would answer in our node's place."""
        for port in (self.amqp, self.tls, self.epmd, self.dist):
            try:
                socket.create_server(("127.0.0.1", port)).close()
            except OSError as error:
                raise BrokerUnavailable(
                    f"expected port {port} to be free, found it in use ({error.strerror}): choose another, or end the "
                    "process that has it"
                ) from error


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, below the range that the kernel gives to outgoing connections.

    From that range, a connection of anybody's could take the node's port while the node is down.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 32_000)  # noqa: S311  # not a secret
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found


def _speaks_amqp(port: int) -> bool:
    """True when the listener answers a protocol header with Connection.Start (a method frame)."""
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5) as probe:
            probe.settimeout(2.0)
            probe.sendall(b"AMQP\0\0\x09\x01")
            return probe.recv(1) == b"\x01"
    except OSError:
        return False
