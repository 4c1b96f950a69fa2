"""The report as one HTML file: it needs no network or other file, and is complete without its script."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from cluster.drill import report
from cluster.drill.chart import chart
from cluster.drill.history import EventKind
from cluster.drill.runner import DrillResult
from cluster.drill.timeline import BUCKET_S, Bucket
from cluster.drill.verdict import DefectKind
from dledger import html_page

_ROW_CLASSES = {
    EventKind.FAULT: "fault",
    EventKind.HEAL: "heal",
    EventKind.RECOVERED: "whole",
    EventKind.FIRST_ACKNOWLEDGED: "serves",
    EventKind.PROBLEM: "problem",
}


def page(results: Sequence[DrillResult], notes: Sequence[str] = (), not_run: Sequence[str] = ()) -> str:
    """The whole document. ``not_run``: drills without a result, with the reason."""
    failed = [*(one.name for one in results if not one.passed), *not_run]
    names = ", ".join(one.name for one in results)
    body = [
        "<h1>Failover drills</h1>",
        html_page.paragraph(names or "none"),
        _banner(results, failed),
        *(html_page.paragraph(note, "note") for note in notes),
    ]
    if len(results) > 1:
        body.append(_summary(results))
    body += [_section(one, number) for number, one in enumerate(results, 1)]
    verdict = "FAILED" if failed or not results else "passed"
    return html_page.document(f"Drills: {verdict}", _own_file("report.css"), body, _own_file("report.js"))


def _own_file(name: str) -> str:
    return resources.files("cluster.drill").joinpath(name).read_text(encoding="utf-8")


def _banner(results: Sequence[DrillResult], failed: Sequence[str]) -> str:
    if failed or not results:
        words = f"Failed: {', '.join(failed)}" if failed else "No drill finished"
        return html_page.banner(f"✗ {words}")
    total = sum(one.verdict.acknowledged for one in results if one.verdict is not None)
    which = "The drill" if len(results) == 1 else f"All {len(results)} drills"
    return html_page.banner(
        f"✓ {which} passed: {total:,} messages were acknowledged, and every one is on every node, once, in order",
        "passed",
    )


def _summary(results: Sequence[DrillResult]) -> str:
    rows = []
    for number, one in enumerate(results, 1):
        counts = ["?"] * 3 if one.verdict is None else [f"{one.verdict.count(kind):,}" for kind in _COUNTED]
        link = f'<td><a href="#drill-{number}">{escape(one.name)}</a></td><td>{_badge(one)}</td>'
        rows.append(html_page.row([link, *_cells([report.seconds(one.without_service_s), *counts])]))
    return _table(["drill", "verdict", ">without service", *(f">{kind.value}" for kind in _COUNTED)], rows)


_COUNTED = (DefectKind.LOST, DefectKind.DUPLICATED, DefectKind.OUT_OF_ORDER)


def _badge(result: DrillResult) -> str:
    name, word = ("passed", "✓ passed") if result.passed else ("bad", "✗ failed")
    return f'<span class="badge {name}">{word}</span>'


def _section(result: DrillResult, number: int) -> str:
    series = [[_known(value) for value in one] for one in result.series]
    return "\n".join(
        [
            f'<section class="drill" id="drill-{number}" aria-labelledby="drill-name-{number}">',
            f'<div class="head"><h2 id="drill-name-{number}">{escape(result.name)}</h2>{_badge(result)}</div>',
            f'<p class="quiet">{escape(_sentence(result.summary))}. {len(result.nodes)} {result.target}, '
            f"{result.rate:g} messages/s over {result.seconds:.0f} s.</p>",
            _verdict(result),
            _tiles(result),
            '<div class="scroll"><div class="plot">',
            chart(result, number),
            '<div class="tip" hidden></div>',
            f'<script type="application/json">{json.dumps(series)}</script>',
            "</div></div>",
            _LEGEND,
            *(html_page.paragraph(note, "note") for note in result.notes),
            "<h3>What happened</h3>",
            _timeline(result),
            "<h3>Cost of each fault</h3>",
            _rounds(result),
            "<details><summary>The chart's figures as a table</summary>",
            _figures(result.series),
            "</details>",
            "</section>",
        ]
    )


_LEGEND = """<div class="legend" aria-hidden="true">
<span><i style="background:var(--accent)"></i>leads</span>
<span><i style="background:var(--follow)"></i>follows</span>
<span><i style="background:var(--stand)"></i>candidate</span>
<span><i style="background:var(--silent)"></i>no answer</span>
<span><i style="background:var(--accent-soft)"></i>acknowledged</span>
<span><i style="background:var(--bad)"></i>failed</span>
<span><i style="background:var(--hurt)"></i>from the fault to the heal</span>
<span><i style="background:var(--healing)"></i>until all have caught up</span></div>"""


def _verdict(result: DrillResult) -> str:
    if result.passed and result.verdict is not None:
        return html_page.banner(f"✓ {_sentence(report.passed_sentence(result.verdict))}", "passed")
    items = [line.removeprefix("✗ ").strip() for line in report.verdict_lines(result)]
    return html_page.banner("✗ This drill failed", items=items)


def _tiles(result: DrillResult) -> str:
    tiles = [("longest without service", report.seconds(result.without_service_s), False)]
    if result.verdict is not None:
        verdict = result.verdict
        tiles += [("acknowledged", f"{verdict.acknowledged:,}", False)]
        tiles += [(kind.value, f"{verdict.count(kind):,}", verdict.count(kind) > 0) for kind in _COUNTED]
        unknown = f"{verdict.unknown:,}"
        tiles += [("unknown outcome", unknown, False), ("refused", f"{verdict.refused:,}", False)]
    return html_page.tiles(html_page.tile(name, value, "wrong" if wrong else "") for name, value, wrong in tiles)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _timeline(result: DrillResult) -> str:
    rows = [
        html_page.row(
            [
                html_page.cell(f"{one.at_s:.2f} s", is_number=True),
                html_page.cell(one.node or ""),
                f'<td class="kind">{escape(report.MARKS[one.kind])}</td>',
                html_page.cell(one.text),
            ],
            _ROW_CLASSES.get(one.kind, ""),
        )
        for one in result.events
    ]
    return _table([">time", "node", "", "what happened"], rows)


def _rounds(result: DrillResult) -> str:
    rows = [
        html_page.row([html_page.cell(one.round.fault), *_cells(report.round_row(one)[1:])]) for one in result.rounds
    ]
    names = ["fault", ">without service", ">failed meanwhile", ">leader", ">term", ">recovered after"]
    return _table(names, rows)


def _figures(series: Iterable[Bucket]) -> str:
    """One row per second; a row per tenth of a second would be too many."""
    seconds: dict[int, list[Bucket]] = {}
    for one in series:
        seconds.setdefault(int(one.at_s + BUCKET_S / 2), []).append(one)
    rows = []
    for second, mine in seconds.items():
        acknowledged = sum(one.acknowledged_per_s for one in mine) * BUCKET_S
        failed = sum(one.failed_per_s for one in mine) * BUCKET_S
        median = max((one.p50_ms for one in mine if not math.isnan(one.p50_ms)), default=math.nan)
        worst = max((one.p99_ms for one in mine if not math.isnan(one.p99_ms)), default=math.nan)
        values = [f"{second} s", f"{acknowledged:,.0f}", f"{failed:,.0f}", _ms(median), _ms(worst)]
        rows.append(html_page.row(_cells(values)))
    return _table([">second", ">acknowledged", ">failed", ">highest median", ">highest 99th percentile"], rows)


def _ms(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.1f} ms"


def _table(names: Sequence[str], rows: Sequence[str]) -> str:
    """Names starting with > are numeric columns."""
    return html_page.table([(name.removeprefix(">"), name.startswith(">")) for name in names], rows)


def _cells(values: Iterable[str]) -> list[str]:
    return [html_page.cell(value, is_number=True) for value in values]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 2)
