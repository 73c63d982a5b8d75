"""The comparison as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from qworker.simulate.compare import Comparison, size, suggestion
from qworker.simulate.fleet import Outcome
from qworker.simulate.svg import Line, bars, lines, short

_POINTS = 400
_TOP_MODELS = 25
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#1f2937;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}svg{max-width:640px;width:100%;display:block}
svg text{font-size:11px;fill:currentColor}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8883}td:first-child,th:first-child{text-align:left}
.wide{overflow-x:auto}p.lead{font-size:1.1rem}
@media(prefers-color-scheme:dark){body{background:#111827;color:#e5e7eb}}
"""


def html(comparison: Comparison, title: str) -> str:
    """The page. ``title`` is any text, for instance the trace's name."""
    trace, fleet = comparison.trace, comparison.fleet
    drawn = f"; sizes or load times of {len(trace.drawn)} models were drawn, not measured" if trace.drawn else ""
    about = (
        f"{len(trace.times):,} requests for {len(trace.models)} models in {trace.seconds / 86_400:.3g} days; "
        f"{fleet.workers} worker(s) with {size(fleet.budget)} each, "
        f"all models take {size(trace.total_bytes)}{drawn}."
    )
    sections = [
        ("Load seconds", bars([(o.policy, o.load_seconds) for o in comparison.outcomes.values()], y="load seconds")),
        ("Over time", _over_time(comparison)),
        ("Waits of requests that found their model cold", _waits(comparison)),
    ]
    if comparison.curve:
        sections.append((f"Other budgets, with {comparison.first.policy}", _curve(comparison)))
    body = "".join(f"<h2>{escape(name)}</h2>{plot}" for name, plot in sections)
    name = escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f'<h1>{name}</h1><p>{escape(about)}</p><p class="lead">{escape(suggestion(comparison))}</p>'
        f"{_policies(comparison)}{body}{_models(comparison)}{_reasons(comparison.first)}</body></html>\n"
    )


def _policies(comparison: Comparison) -> str:
    head = [
        "policy",
        "load seconds",
        "of LRU",
        "regret",
        "loads",
        "misses",
        "wait p99 s",
        "cold p50 s",
        "longest s",
        "churn/h",
    ]
    rows = [
        [
            o.policy,
            f"{o.load_seconds:,.0f}",
            f"{comparison.relative(o):.1%}",
            f"{comparison.regret(o):.1%}",
            f"{o.loads:,}",
            f"{o.misses / max(1, o.requests):.2%}",
            f"{o.wait_p99:.2f}",
            f"{o.cold_wait(0.5):.2f}",
            f"{o.longest_wait:.1f}",
            f"{o.churn:.2f}",
        ]
        for o in comparison.outcomes.values()
    ]
    return _table(head, rows)


def _over_time(comparison: Comparison) -> str:
    start = comparison.trace.times[0]
    curves: list[Line] = []
    for outcome in comparison.outcomes.values():
        points, total = [(0.0, 0.0)], 0.0
        every = max(1, len(outcome.load_times) // _POINTS)
        for i, (at, seconds) in enumerate(zip(outcome.load_times, outcome.load_costs, strict=True)):
            total += seconds
            if i % every == 0:
                points.append(((at - start) / 3_600.0, total))
        points.append((max(points[-1][0], outcome.seconds / 3_600.0), total))
        curves.append(Line(outcome.policy, points))
    return lines(curves, x="hours", y="load seconds so far", steps=True)


def _waits(comparison: Comparison) -> str:
    curves: list[Line] = []
    for outcome in comparison.outcomes.values():
        waits = sorted(outcome.cold_waits)
        if not waits:
            continue
        last = len(waits) - 1
        picked = sorted({round(i * last / _POINTS) for i in range(_POINTS + 1)})
        curves.append(Line(outcome.policy, [(100.0 * i / max(1, last), waits[i]) for i in picked if i <= 0.99 * last]))
    return lines(curves, x="percent of cold requests (up to 99)", y="seconds waited, at most")


def _curve(comparison: Comparison) -> str:
    here = (comparison.fleet.budget, 100.0)
    points = [(point.budget, 100.0 * (1.0 - point.saved_share)) for point in comparison.curve]
    in_gib = [(budget / 2.0**30, percent) for budget, percent in sorted([*points, here])]
    return lines([Line(comparison.first.policy, in_gib, dots=True)], x="budget, GiB", y="load seconds, % of now")


def _models(comparison: Comparison) -> str:
    first, costs = comparison.first, comparison.trace.costs
    dearest = sorted(first.models.items(), key=lambda pair: -pair[1].load_seconds)[:_TOP_MODELS]
    rows = [
        [
            name,
            f"{totals.requests:,}",
            f"{totals.misses:,}",
            f"{totals.loads:,}",
            short(totals.load_seconds),
            f"{totals.evictions:,}",
            size(costs[name].nbytes),
            f"{costs[name].load_seconds:.3g}",
        ]
        for name, totals in dearest
    ]
    head = ["model", "requests", "misses", "loads", "load seconds", "evictions", "size", "s a load"]
    return f"<h2>Dearest models, with {escape(first.policy)}</h2>{_table(head, rows)}"


def _reasons(outcome: Outcome) -> str:
    if not outcome.reasons:
        return ""
    told = "".join(f"<li>{at:,.1f}: {escape(model)} {escape(why)}</li>" for at, model, why in outcome.reasons[-10:])
    return f"<h2>The last evictions, and why</h2><ul>{told}</ul>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
