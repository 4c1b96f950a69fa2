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
from dledger.command_line import html_page

_ROW_CLASSES = {
    EventKind.FAULT: "fault",
    EventKind.HEAL: "heal",
    EventKind.RECOVERED: "whole",
    EventKind.FIRST_ACKNOWLEDGED: "serves",
    EventKind.PROBLEM: "problem",
}


def page(results: Sequence[DrillResult], notes: Sequence[str] = (), not_run: Sequence[str] = ()) -> str:
    """The whole document, with one verdict on top. ``not_run``: drills without a result, with the reason."""
    failed = [one.name for one in results if not one.passed]
    is_single = len(results) == 1 and not not_run
    body = [
        "<h1>Failover drills</h1>" if not is_single else f"<h1>Failover drill {escape(results[0].name)}</h1>",
        _verdict(results[0]) if is_single else _banner(results, failed, not_run),
        *(html_page.paragraph(note, "note") for note in notes),
    ]
    if not is_single and results:
        body.append(_summary(results))
    body += [_section(one, number, is_single=is_single) for number, one in enumerate(results, 1)]
    verdict = "FAILED" if failed or not_run or not results else "passed"
    return html_page.document(f"Drills: {verdict}", _own_file("report.css"), body, _own_file("report.js"))


def _own_file(name: str) -> str:
    return resources.files("cluster.drill").joinpath(name).read_text(encoding="utf-8")


def _banner(results: Sequence[DrillResult], failed: Sequence[str], not_run: Sequence[str]) -> str:
    """The verdict on several drills, or on none."""
    if not results and not not_run:
        return html_page.banner("✗ No drill was run")
    if failed or not_run:
        words = (
            f"{len(failed)} of {len(results)} drills failed: {', '.join(failed)}"
            if failed
            else "Not every drill was run"
        )
        return html_page.banner(f"✗ {words}", items=[f"not run: {one}" for one in not_run])
    total = sum(one.verdict.acknowledged for one in results if one.verdict is not None)
    return html_page.banner(
        f"✓ All {len(results)} drills passed: {total:,} messages were acknowledged, and every one is on every node, "
        "once, in order",
        "passed",
    )


def _summary(results: Sequence[DrillResult]) -> str:
    names, rows = report.summary_table(results)
    cells = []
    for number, (one, row) in enumerate(zip(results, rows, strict=True), 1):
        link = f'<td><a href="#drill-{number}">{escape(one.name)}</a></td><td>{_badge(one)}</td>'
        cells.append(html_page.row([link, *_cells(row[2:])]))
    return f'<div class="card">{_table([*names[:2], *(f">{name}" for name in names[2:])], cells)}</div>'


def _badge(result: DrillResult) -> str:
    name, word = ("passed", "✓ passed") if result.passed else ("bad", "✗ failed")
    return f'<span class="badge {name}">{word}</span>'


def _section(result: DrillResult, number: int, *, is_single: bool) -> str:
    series = [[_known(value) for value in one] for one in result.series]
    summary, size = _sentence(result.summary), f"{len(result.nodes)} {result.target}, {result.rate:g} messages/s"
    name, about = (summary, "") if is_single else (result.name, f"{summary}. ")
    head = f'<h2 id="drill-name-{number}">{escape(name)}</h2>'
    beside = f'<div class="tip" hidden></div><script type="application/json">{json.dumps(series)}</script>'
    return "\n".join(
        [
            f'<section class="card" id="drill-{number}" aria-labelledby="drill-name-{number}">',
            head if is_single else f'<div class="head">{head}{_badge(result)}</div>',
            html_page.paragraph(f"{about}{size} over {result.seconds:.0f} s."),
            "" if is_single else _reasons(result),
            _tiles(result),
            html_page.picture(chart(result, number), beside),
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


def _verdict(result: DrillResult) -> str:
    """Of the only drill of a page."""
    if result.passed and result.verdict is not None:
        return html_page.banner(f"✓ Passed: {report.passed_sentence(result.verdict)}", "passed")
    return html_page.banner("✗ Failed", items=_defects(result))


def _reasons(result: DrillResult) -> str:
    """Why a drill of several has its badge."""
    if result.passed and result.verdict is not None:
        return html_page.paragraph(_sentence(report.passed_sentence(result.verdict)) + ".", "")
    return f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in _defects(result))}</ul>"


def _defects(result: DrillResult) -> list[str]:
    return [line.removeprefix("✗ ").strip() for line in report.verdict_lines(result)]


def _tiles(result: DrillResult) -> str:
    tiles = [html_page.tile("longest without service", report.seconds(result.without_service_s))]
    if result.verdict is not None:
        wrong = {one.kind.value for one in result.verdict.defects}
        tiles += [
            html_page.tile(name, value, "wrong" if name in wrong else "")
            for name, value in report.message_rows(result.verdict)
        ]
    return html_page.tiles(tiles)


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
    return _table(names, rows) + html_page.paragraph(report.failed_elsewhere(result), "quiet")


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
