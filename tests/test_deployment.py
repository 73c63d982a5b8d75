"""Images, compose, Kubernetes and systemd: valid by their schemas, and true to the settings that the worker has.

Not shown here, for want of a Docker daemon and a cluster: that the images build, that compose comes up, and that KEDA
takes the ScaledObject (its schema below is a part of its own, written by hand).
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from qworker.config import CONFIG_VARIABLE, ENV_PREFIX, Settings, load_settings
from tests.support.rabbitmq import start_node
from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "ops"
BASE = OPS / "kubernetes/base"
BIN = Path(sys.executable).parent
COMPOSE: dict[str, Any] = yaml.safe_load((OPS / "compose.yml").read_text(encoding="utf-8"))


def manifests(*folders: str) -> list[dict[str, Any]]:
    """Every document of the Kubernetes manifests, kustomizations left out."""
    found: list[dict[str, Any]] = []
    for folder in folders:
        for path in sorted((OPS / "kubernetes" / folder).glob("*.yaml")):
            if path.name != "kustomization.yaml":
                found += yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return found


def manifest(kind: str, name: str = "qworker", folder: str = "base") -> dict[str, Any]:
    return next(each for each in manifests(folder) if (each["kind"], each["metadata"]["name"]) == (kind, name))


def container(name: str, folder: str = "base") -> dict[str, Any]:
    containers = manifest("Deployment", folder=folder)["spec"]["template"]["spec"]["containers"]
    return next(each for each in containers if each["name"] == name)


# --- images and compose ---------------------------------------------------------------------------------


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    """With the exceptions that .hadolint.yaml gives reasons for."""
    hadolint = BIN / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is there for Linux on x86-64 only")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_is_valid_by_its_schema() -> None:
    """The compose specification's own, which check-jsonschema brings along."""
    text = resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    schema = json.loads(text)
    jsonschema.validate(COMPOSE, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**COMPOSE, "services": {"worker": {"imagee": "qworker:cpu"}}}, schema)


def test_what_compose_mounts_is_there() -> None:
    """Files of ours; secrets are made by ops/rabbitmq/secrets."""
    services = COMPOSE["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (OPS / source).exists(), source
        assert set(service.get("secrets", ())) <= COMPOSE["secrets"].keys()
        if "build" in service:
            assert f"AS {service['build']['target']}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("service", ["worker", "worker-gpu"])
def test_a_worker_in_compose_has_valid_settings_and_time_to_drain(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are settings, their values are taken, and SIGKILL comes after the grace time."""
    told = COMPOSE["services"][service]
    settings = settings_from(
        {k: re.sub(r"\$\{\w+:-(.*)\}", r"\1", v) for k, v in told["environment"].items()}, monkeypatch
    )
    assert float(told["stop_grace_period"].removesuffix("s")) > settings.grace
    assert told["init"] is False


def settings_from(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in environment.items():
        assert name.removeprefix(ENV_PREFIX).lower() in Settings.model_fields, name
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    return load_settings()


@pytest.mark.broker
def test_the_users_of_the_broker_can_be_made_and_let_in(tmp_path: Path) -> None:
    """A real broker loads the definitions; the worker's user gets in with its password, and not with another."""
    import pika
    from pika.exceptions import AMQPConnectionError

    folder = tmp_path / "secrets"
    script = OPS / "rabbitmq/secrets"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    password = (folder / "worker_password").read_text()
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    assert (folder / "worker_password").read_text() == password, "what is there stays"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for secret in COMPOSE["secrets"].values():
        assert (folder / Path(secret["file"]).name).exists()

    definitions = json.loads((folder / "definitions.json").read_text())
    assert {user["name"] for user in definitions["users"]} == {"admin", "worker", "operator", "publisher"}
    guest = {"name": "guest", "password": "guest", "tags": ["administrator"]}  # whom the test's node asks for
    definitions["users"].append(guest)
    definitions["permissions"].append({"user": "guest", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"})
    node = start_node(tmp_path / "node", definitions=definitions)
    try:
        pika.BlockingConnection(pika.URLParameters(node.url_of("/", ("worker", password)))).close()
        with pytest.raises(AMQPConnectionError):
            pika.BlockingConnection(pika.URLParameters(node.url_of("/", ("worker", password + "x"))))
    finally:
        node.stop(timeout=10.0)


# --- Kubernetes -------------------------------------------------------------------------------------------

SCALED_OBJECT = {
    "type": "object",
    "required": ["scaleTargetRef", "triggers"],
    "additionalProperties": False,
    "properties": {
        "scaleTargetRef": {"type": "object", "required": ["name"]},
        "minReplicaCount": {"type": "integer"},
        "maxReplicaCount": {"type": "integer"},
        "pollingInterval": {"type": "integer"},
        "cooldownPeriod": {"type": "integer"},
        "fallback": {
            "type": "object",
            "required": ["failureThreshold", "replicas"],
            "properties": {"failureThreshold": {"type": "integer"}, "replicas": {"type": "integer"}},
        },
        "advanced": {"type": "object"},
        "triggers": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["type", "metadata"],
                "properties": {
                    "type": {"const": "prometheus"},
                    "metadata": {
                        "type": "object",
                        "required": ["serverAddress", "query", "threshold"],
                        "additionalProperties": {"type": "string"},
                    },
                },
            },
        },
    },
}
"""As much of KEDA's ``ScaledObject`` as we use."""


@pytest.mark.parametrize("version", ["1.30", "1.33", kubernetes_validate.latest_version()])
def test_manifests_are_valid_by_kubernetes_own_schemas(version: str) -> None:
    """Strictly: a property that does not exist is an error. KEDA's is not Kubernetes' own."""
    for each in manifests("base"):
        if each["kind"] != "ScaledObject":
            kubernetes_validate.validate(each, version, strict=True)
    broken = manifest("Deployment") | {"spec": {**manifest("Deployment")["spec"], "replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


def test_the_scaled_object_has_what_keda_asks_for() -> None:
    """It scales our Deployment, by a query that the rules record."""
    scaled = manifest("ScaledObject")["spec"]
    jsonschema.validate(scaled, SCALED_OBJECT)
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "x"},
        "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "x"}, "maxReplicas": 2, "behavior": behavior},
    }
    kubernetes_validate.validate(hpa, kubernetes_validate.latest_version(), strict=True)  # what KEDA makes of it
    assert scaled["scaleTargetRef"]["name"] == manifest("Deployment")["metadata"]["name"]
    rules = yaml.safe_load((OPS / "prometheus/rules.yml").read_text(encoding="utf-8"))
    recorded = {rule.get("record") for group in rules["groups"] for rule in group["rules"]}
    [trigger] = scaled["triggers"]
    assert set(re.findall(r"qworker:[\w:]+", trigger["metadata"]["query"])) <= recorded


def test_kustomizations_name_what_is_there() -> None:
    """Files and folders; the GPU's patch has the names of what it patches."""
    for path in (OPS / "kubernetes").rglob("kustomization.yaml"):
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        for resource in told["resources"]:
            assert (path.parent / resource).exists(), resource
        for generated in told.get("configMapGenerator", ()):
            assert all((path.parent / name).exists() for name in generated["files"])
        for patch in told.get("patches", ()):
            assert (path.parent / patch["path"]).exists()
    assert container("worker", "gpu")["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_pods_have_valid_settings_and_time_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet's SIGKILL comes after the grace time, and the watchdog before the liveness probe."""
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    environment = dict(manifest("ConfigMap")["data"])
    for folder in ("base", "gpu"):
        environment |= {each["name"]: each.get("value", "x") for each in container("worker", folder)["env"]}
    settings = settings_from(environment, monkeypatch)
    assert pod["terminationGracePeriodSeconds"] > settings.grace
    worker = container("worker")
    probe = worker["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > settings.watchdog
    assert probe["httpGet"]["path"] == "/healthz"
    assert worker["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert "kill -TERM 1" in worker["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert {mount["name"] for mount in worker["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}


# --- the sidecar ------------------------------------------------------------------------------------------


def load_sidecar() -> Any:
    spec = importlib.util.spec_from_file_location("deletion_cost", BASE / "deletion_cost.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(state: str = "hot", in_hand: int = 0, mib: int = 10) -> dict[str, Any]:
    return {"state": state, "in_hand": in_hand, "nbytes": mib << 20}


def test_idle_workers_are_the_first_to_go() -> None:
    """Jobs in hand weigh more than any load, a load more than any hot model; who drains costs nothing."""
    cost = load_sidecar().cost
    states = [
        {"draining": True, "models": [row(in_hand=9)]},
        {"draining": False, "models": [row(mib=1)]},
        {"draining": False, "models": [row(mib=500_000)]},
        {"draining": False, "models": [row("loading")]},
        {"draining": False, "models": [row(in_hand=1)]},
        {"draining": False, "models": [row(in_hand=5000)]},
    ]
    costs = [cost(state) for state in states]
    assert costs[0] == 0
    assert costs == sorted(set(costs))
    assert costs[-1] < 1 << 31


class Pages:
    """The worker's state and the cluster's API in one server."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"draining": False, "models": []}
        self.patches: list[tuple[str, str, Any]] = []
        pages = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(json.dumps(pages.state).encode())

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pages.patches.append((self.path, self.headers["Authorization"], body))
                self._answer(b"{}")

            def log_message(self, *_: object) -> None: ...

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages()
    thread = threading.Thread(target=pages.server.serve_forever)
    thread.start()
    yield pages
    pages.server.shutdown()
    thread.join()
    pages.server.server_close()


def test_the_sidecar_annotates_its_pod(pages: Pages, tmp_path: Path) -> None:
    """With its token, when the cost has changed, and not otherwise."""
    (tmp_path / "token").write_text("secret\n")
    environment = {
        "KUBERNETES_SERVICE_HOST": "-",
        "KUBERNETES_SERVICE_PORT": "-",
        "KUBERNETES_API": pages.url,
        "KUBERNETES_ACCOUNT": str(tmp_path),
        "POD_NAMESPACE": "inference",
        "POD_NAME": "qworker-1",
        "QWORKER_STATE_URL": pages.url,
        "PERIOD": "0.02",
    }
    process = subprocess.Popen([sys.executable, BASE / "deletion_cost.py"], env=environment)
    try:
        wait_until_sync(lambda: len(pages.patches) == 1, what="a first cost")
        pages.state["models"] = [row(in_hand=2, mib=3)]
        wait_until_sync(lambda: len(pages.patches) == 2, what="another one")
    finally:
        process.kill()
        process.wait(10)
    costs = [patch[2]["metadata"]["annotations"].popitem() for patch in pages.patches]
    assert costs == [("controller.kubernetes.io/pod-deletion-cost", cost) for cost in ("0", "2000003")]
    assert {patch[:2] for patch in pages.patches} == {("/api/v1/namespaces/inference/pods/qworker-1", "Bearer secret")}


# --- systemd ----------------------------------------------------------------------------------------------

UNIT = OPS / "systemd/qworker.service"


def test_the_unit_has_valid_settings_and_time_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its TOML file is taken, its flags exist, and SIGKILL comes after the grace time."""
    settings = load_settings(config_file=OPS / "systemd/qworker.toml")
    text = UNIT.read_text(encoding="utf-8")
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) > settings.grace
    for name in re.findall(rf"{ENV_PREFIX}(\w+)=", text):
        assert name.lower() in Settings.model_fields
    helped = subprocess.run([BIN / "qworker", "worker", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--config" in helped


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """By its own check, with a program that exists here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    text = UNIT.read_text(encoding="utf-8").replace("/opt/qworker/bin/qworker", sys.executable)
    unit = tmp_path / "qworker.service"
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "qworker.service" in line] == []
    unit.write_text(text.replace("KillMode=mixed", "KilMode=mixed"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert "KilMode" in done.stderr
