"""Writes docs/reference/ from the code:  python -m tests.reference

Settings, metrics, events, errors, the command line and the schemas. ``test_reference.py`` fails when the pages are not
what this would write.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ByteSize, SecretStr
from pydantic_core import PydanticUndefined
from typer.main import get_command

from qworker import config, errors
from qworker.cli.main import app
from qworker.telemetry import events, metrics

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
NOTE = "<!-- Written by `python -m tests.reference` from the code: change it there. -->\n"

SETTINGS = """
Flags over `QWORKER_*` variables over a TOML file (`--config`, or `QWORKER_CONFIG`) over defaults. The setting
`max_body` is the variable `QWORKER_MAX_BODY` and the key `max_body` of the file; those with a flag have it in the
table. Times are seconds; sizes are bytes, or like `512MiB`. `qworker doctor` prints what is in force, and where each
value came from.
"""
METRICS = """
What `/metrics` on the worker's health port (`http_port`) tells, in Prometheus' text format or OpenMetrics. Counters
and histograms count from the start of the process. Label values are bounded: `model` is one of the busiest models
(`metrics_models` of them), or `other` for all the rest together. A model keeps its label until it has had no jobs for
an hour and another one wants it. `memory` is the name of the backend whose memory it is, or `host` where all share one
budget.

Rules and alerts over them are in [ops/prometheus](../../ops/prometheus/rules.yml), the dashboard is
[ops/grafana/qworker.json](../../ops/grafana/qworker.json).
"""
EVENTS = """
One a line, as JSON (`log_format`), on standard error: `event`, `level`, `timestamp`, `worker`, and the fields below.
Lines about a job have its `job_id`, and `trace_id` where its message has a `traceparent`. Nothing of a payload is ever
logged. Of more than 50 lines of one event about one model within 10 seconds the rest is left out, and counted in
`left_out` of a later line; errors are never left out.
"""
ERRORS = """
Every error says what was expected, what was found and what to do next. A worker answers a job with `code`, `message`
and `retryable` ([failure.json](../../schemas/failure.json)); the client raises the class. Retryable: the same job may
succeed later.
"""
SCHEMAS = """
The bodies of messages and the cards of the store, as JSON Schema in [schemas/](../../schemas/README.md), which is
normative; golden messages lie beside them. This page lists the fields.
"""


def pages() -> dict[str, str]:
    """File name → content."""
    made = {
        "settings.md": settings_page(),
        "metrics.md": metrics_page(),
        "events.md": events_page(),
        "errors.md": errors_page(),
        "cli.md": cli_page(),
        "schemas.md": schemas_page(),
    }
    return {name: NOTE + text.rstrip("\n") + "\n" for name, text in made.items()}


# --- settings -----------------------------------------------------------------------------------------


def settings_page() -> str:
    flags = worker_flags()
    lines = ["# Settings of the worker", "", one_paragraph(SETTINGS)]
    for section, names in settings_by_section():
        lines += [
            "",
            f"## {section[0].upper()}{section[1:]}",
            "",
            "| setting | default | flag | |",
            "|---|---|---|---|",
        ]
        for name, text in names:
            flag = f"`--{name.replace('_', '-')}`" if name in flags else ""
            lines.append(f"| `{name}` | {cell(default_of(name))} | {flag} | {cell(text or flags.get(name, ''))} |")
    return "\n".join(lines)


def settings_by_section() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The sections of ``Settings`` as its source has them, with each setting and what is said of it."""
    source = inspect.getsource(config.Settings).splitlines()
    [body] = ast.parse("\n".join(source)).body
    assert isinstance(body, ast.ClassDef)
    section, found = "", list[tuple[str, str]]()
    heads = {n: head[1] for n, line in enumerate(source, 1) if (head := re.fullmatch(r"    # --- (.+) ---", line))}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id not in config.Settings.model_fields:
            continue
        above = max((n for n in heads if n < node.lineno), default=None)
        title = heads[above] if above is not None else "general"
        if title != section and found:
            yield section, found
            found = []
        section = title
        found.append((node.target.id, docstring(after)))
    yield section, found


def docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return one_line(node.value.value)
    return ""


def default_of(name: str) -> str:
    field = config.Settings.model_fields[name]
    if field.default_factory is not None:
        return "computed"
    value = field.default
    if value is PydanticUndefined:
        return "none: required"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, ByteSize):
        return f"`{value.human_readable()}`" if value else "0"
    if value is None or value in ((), ""):
        return "not set"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def worker_flags() -> dict[str, str]:
    """The settings that ``qworker worker`` has flags for, with their help."""
    return {param.name: param.help or "" for param in commands()["worker"].params if param.name != "config"}


# --- metrics, events, errors ---------------------------------------------------------------------------


def metrics_page() -> str:
    lines = ["# Metrics", "", one_paragraph(METRICS)]
    for title, group in metrics.GROUPS.items():
        lines += ["", f"## {title}", "", "| metric | kind | labels | |", "|---|---|---|---|"]
        for each in group:
            labels = ", ".join(f"`{label}`" for label in each.labels)
            lines.append(f"| `{each.name}` | {each.kind} | {labels} | {cell(each.help)} |")
    return "\n".join(lines)


def events_page() -> str:
    fields = logged_fields()
    lines = ["# Events in the log", "", one_paragraph(EVENTS)]
    for title, group in events.GROUPS.items():
        lines += ["", f"## {title}", "", "| event | level | fields | |", "|---|---|---|---|"]
        for name, event in group.items():
            level = "error" if event.level == "exception" else event.level
            told = ", ".join(f"`{field}`" for field in fields.get(name, ()))
            lines.append(f"| `{name}` | {level} | {told} | {cell(event.text)} |")
    return "\n".join(lines)


def logged_fields() -> dict[str, list[str]]:
    """Event → the names of the fields that it is logged with."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "qworker").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = node.args[0].value
                if name in events.EVENTS and isinstance(node.func, ast.Attribute):
                    told = found.setdefault(name, [])
                    told += [keyword.arg for keyword in node.keywords if keyword.arg and keyword.arg not in told]
    return found


def errors_page() -> str:
    classes = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.QworkerError)
    ]
    jobs = [each for each in classes if issubclass(each, errors.JobError) and each is not errors.JobError]
    others = [each for each in classes if each not in (*jobs, errors.JobError, errors.QworkerError)]
    lines = ["# Errors", "", one_paragraph(ERRORS)]
    for title, group in (("What is answered to a job", jobs), ("What else is raised", others)):
        lines += ["", f"## {title}", "", "| class | code | retryable | |", "|---|---|---|---|"]
        for each in group:
            retryable = "yes" if each.retryable else ""
            text = one_line((each.__doc__ or "").strip().partition("\n\n")[0])
            lines.append(f"| `{each.__name__}` | `{each.code}` | {retryable} | {cell(text)} |")
    return "\n".join(lines)


# --- the command line ----------------------------------------------------------------------------------


def cli_page() -> str:
    lines = ["# Command line", "", "`qworker COMMAND --help` prints the same."]
    for path, command in commands().items():
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        options = [param for param in command.params if param.param_type_name == "option"]
        words = "".join(f" {shown_argument(param)}" for param in arguments)
        lines += ["", f"## qworker {path}", "", one_paragraph(command.help or ""), "", "```", f"qworker {path}{words}"]
        lines[-1] += " [OPTIONS]" if options else ""
        lines += ["```"]
        told = [(shown_argument(param), param) for param in arguments if getattr(param, "help", None)]
        told += [(", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts)), param) for param in options]
        if told:
            lines += ["", "| | |", "|---|---|"]
        for name, param in told:
            more = " May be given again." if param.multiple and "again" not in (param.help or "") else ""
            lines.append(f"| {cell(name)} | {cell((param.help or '') + more)} |")
    return "\n".join(lines)


def commands() -> dict[str, Any]:
    """Each command by its words, in the order of the help."""
    found: dict[str, Any] = {}

    def walk(words: tuple[str, ...], command: Any) -> None:
        if subcommands := getattr(command, "commands", None):
            for name, each in subcommands.items():
                walk((*words, name), each)
        else:
            found[" ".join(words)] = command

    walk((), get_command(app))
    return found


def shown_argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    several = "..." if param.nargs == -1 or param.multiple else ""
    return f"{name}{several}" if param.required else f"[{name}]{several}"


# --- schemas ---------------------------------------------------------------------------------------------


def schemas_page() -> str:
    lines = ["# Schemas", "", one_paragraph(SCHEMAS)]
    for path in sorted((ROOT / "schemas").glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        lines += ["", f"## [{path.name}](../../schemas/{path.name})", "", one_paragraph(schema.get("description", ""))]
        lines += fields_of(schema)
        for name, part in schema.get("$defs", {}).items():
            if "properties" in part:
                lines += ["", f"### {name}", "", one_paragraph(part.get("description", "")), *fields_of(part)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def fields_of(schema: Mapping[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    lines = ["", "| field | type | required | |", "|---|---|---|---|"]
    for name, field in schema.get("properties", {}).items():
        must = "yes" if name in required else ""
        lines.append(f"| `{name}` | {cell(type_of(field))} | {must} | {cell(one_line(described(field)))} |")
    return lines


def type_of(field: Any) -> str:
    if not isinstance(field, dict):
        return ""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "const" in field:
        return json.dumps(field["const"])
    if "enum" in field:
        return "one of " + ", ".join(json.dumps(value) for value in field["enum"])
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " or ".join(dict.fromkeys(kind for part in field[key] if (kind := type_of(part))))
    kinds = field.get("type", "")
    kind = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    items = type_of(field["items"]) if "items" in field else ""
    return f"{kind} of {items}" if items else kind


def described(field: Any) -> str:
    return str(field.get("description", "")) if isinstance(field, dict) else ""


# --- text ------------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def one_paragraph(text: str) -> str:
    return "\n\n".join(one_line(part) for part in text.strip().split("\n\n"))


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write() -> None:
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
