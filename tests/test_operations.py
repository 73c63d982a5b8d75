"""Rules, dashboard and runbook: they parse, and name nothing that does not exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from qworker.telemetry.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "ops"
DASHBOARD: dict[str, Any] = json.loads((OPS / "grafana/qworker.json").read_text(encoding="utf-8"))
GROUPS: list[dict[str, Any]] = yaml.safe_load((OPS / "prometheus/rules.yml").read_text(encoding="utf-8"))["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]


def series() -> set[str]:
    """Names that a query may use: the code's, with what a histogram is made of, and those of the recording rules."""
    names = {rule["record"] for rule in RULES if "record" in rule}
    for metric in METRICS:
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {metric.name + part for part in parts}
    return names


def dashboard_queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"])
            assert found, variable
            yield variable["name"], f"count by ({found[2]}) ({found[1]})"


def queries() -> list[tuple[str, str]]:
    rules = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in RULES]
    return [*rules, *dashboard_queries()]


def plain(query: str) -> str:
    """With values in place of Grafana's variables."""
    return query.replace("$__rate_interval", "1m").replace("$worker", ".*").replace("$model", ".*")


@pytest.mark.parametrize(("where", "query"), queries())
def test_a_query_parses_and_names_what_exists(where: str, query: str) -> None:
    """By Prometheus' own grammar; every metric of ours is in the code, or recorded by a rule."""
    promql_parser.parse(plain(query))
    assert set(re.findall(r"\bqworker[_:][a-z0-9_:]+", query)) <= series()


def test_the_query_check_can_fail() -> None:
    """Neither nonsense nor a metric that is gone gets through."""
    with pytest.raises(ValueError, match=r"invalid|unexpected|unclosed"):
        promql_parser.parse("sum(rate(qworker_jobs_total[5m])")
    assert "qworker_jobs_done_total" not in series()
    assert "qworker_job_run_seconds" not in series(), "a histogram has no series of its own name"


def test_labels_in_queries_are_labels_of_the_metric() -> None:
    """A matcher on a label that a metric does not have finds nothing, and says nothing."""
    labels = {metric.name: {*metric.labels, "instance", "job", "le"} for metric in METRICS}
    for where, query in queries():
        for name, matchers in re.findall(r"\b(qworker_[a-z0-9_]+)\{([^}]*)\}", query):
            base = name if name in labels else re.sub(r"_(bucket|sum|count)$", "", name)
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= labels[base], (where, name)


def test_each_alert_has_its_section_in_the_runbook() -> None:
    """Named by its link, and each section is some alert's."""
    text = (OPS / "runbook.md").read_text(encoding="utf-8")
    anchors = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.MULTILINE)}
    links = {alert["alert"]: alert["annotations"]["runbook_url"] for alert in ALERTS}
    assert {link.partition("#")[0] for link in links.values()} == {"ops/runbook.md"}
    assert {link.partition("#")[2] for link in links.values()} == anchors
    for name in links:
        assert f"`{name}`" in text, f"the runbook does not name {name}"


def test_each_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    """Summary, description and severity."""
    for alert in ALERTS:
        assert {"summary", "description", "runbook_url"} <= alert["annotations"].keys(), alert["alert"]
        assert alert["labels"]["severity"] in ("warning", "critical"), alert["alert"]


def test_the_dashboard_is_well_formed() -> None:
    """Ids are unique, panels do not lie on each other, each has a data source that can be chosen."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def promtool() -> str:
    """On PATH, or where ops/test has laid it out."""
    found = shutil.which("promtool") or shutil.which(str(ROOT / ".cache/promtool"))
    if found is None and "CI" not in os.environ:
        pytest.skip("no promtool: ops/lib/promtool lays it out")
    assert found, "no promtool: ops/lib/promtool lays it out"
    return found


def test_promtool_takes_rules_and_configuration() -> None:
    """And the alerts come where the series of rules_test.yml say so, and nowhere else."""
    for arguments in (
        ["check", "rules", "ops/prometheus/rules.yml"],
        ["check", "config", "--syntax-only", "ops/prometheus/prometheus.yml"],
        ["test", "rules", "ops/prometheus/rules_test.yml"],
    ):
        done = subprocess.run([promtool(), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried_in_the_rules_test() -> None:
    """Each fires in some test of rules_test.yml."""
    text = (OPS / "prometheus/rules_test.yml").read_text(encoding="utf-8")
    assert {alert["alert"] for alert in ALERTS} <= set(re.findall(r"Qworker\w+", text))
