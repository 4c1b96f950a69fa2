"""The report as one HTML file: it needs no network or other file, and is complete without its script.

The chart is one SVG: who led, throughput, latencies, and the actions. Three panels share one time axis. Colours are
those of the page (classes, see ``report.css``); nothing depends on colour alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from typing import Final

from cluster.drill import report
from cluster.drill.history import BUCKET_S, Bucket, EventKind, FaultEffects, NodeView
from cluster.drill.runner import DrillResult
from dledger.command_line import report_page
from dledger.command_line.report_page import CHART_WIDTH, drawing, legend

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
        *(report_page.paragraph(note, "note") for note in notes),
    ]
    if not is_single and results:
        body.append(_summary(results))
    body += [_section(one, number, is_single=is_single) for number, one in enumerate(results, 1)]
    verdict = "FAILED" if failed or not_run or not results else "passed"
    return report_page.document(f"Drills: {verdict}", _own_file("report.css"), body, _own_file("report.js"))


def _own_file(name: str) -> str:
    return resources.files("cluster.drill").joinpath(name).read_text(encoding="utf-8")


def _banner(results: Sequence[DrillResult], failed: Sequence[str], not_run: Sequence[str]) -> str:
    """The verdict on several drills, or on none."""
    if not results and not not_run:
        return report_page.banner("✗ No drill was run")
    if failed or not_run:
        words = (
            f"{len(failed)} of {len(results)} drills failed: {', '.join(failed)}"
            if failed
            else "Not every drill was run"
        )
        return report_page.banner(f"✗ {words}", items=[f"not run: {one}" for one in not_run])
    total = sum(one.verdict.acknowledged for one in results if one.verdict is not None)
    return report_page.banner(
        f"✓ All {len(results)} drills passed: {total:,} messages were acknowledged, and every one is on every node, "
        "once, in order",
        "passed",
    )


def _summary(results: Sequence[DrillResult]) -> str:
    names, rows = report.summary_table(results)
    cells = []
    for number, (one, row) in enumerate(zip(results, rows, strict=True), 1):
        link = f'<td><a href="#drill-{number}">{escape(one.name)}</a></td><td>{_badge(one)}</td>'
        cells.append(report_page.row([link, *_cells(row[2:])]))
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
            report_page.paragraph(f"{about}{size} over {result.seconds:.0f} s."),
            "" if is_single else _reasons(result),
            _tiles(result),
            report_page.picture(chart(result, number), beside),
            *(report_page.paragraph(note, "note") for note in result.notes),
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
        return report_page.banner(f"✓ Passed: {report.passed_sentence(result.verdict)}", "passed")
    return report_page.banner("✗ Failed", items=_defects(result))


def _reasons(result: DrillResult) -> str:
    """Why a drill of several has its badge."""
    if result.passed and result.verdict is not None:
        return report_page.paragraph(_sentence(report.passed_sentence(result.verdict)) + ".", "")
    return f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in _defects(result))}</ul>"


def _defects(result: DrillResult) -> list[str]:
    return [line.removeprefix("✗ ").strip() for line in report.verdict_lines(result)]


def _tiles(result: DrillResult) -> str:
    tiles = [report_page.tile("longest without service", report.seconds(result.without_service_s))]
    if result.verdict is not None:
        wrong = {one.kind.value for one in result.verdict.defects}
        tiles += [
            report_page.tile(name, value, "wrong" if name in wrong else "")
            for name, value in report.message_rows(result.verdict)
        ]
    return report_page.tiles(tiles)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _timeline(result: DrillResult) -> str:
    rows = [
        report_page.row(
            [
                report_page.cell(f"{one.at_s:.2f} s", is_number=True),
                report_page.cell(one.node or ""),
                f'<td class="kind">{escape(report.MARKS[one.kind])}</td>',
                report_page.cell(one.text),
            ],
            _ROW_CLASSES.get(one.kind, ""),
        )
        for one in result.events
    ]
    return _table([">time", "node", "", "what happened"], rows)


def _rounds(result: DrillResult) -> str:
    rows = [
        report_page.row([report_page.cell(one.round.fault), *_cells(report.round_row(one)[1:])])
        for one in result.rounds
    ]
    names = ["fault", ">without service", ">failed meanwhile", ">leader", ">term", ">recovered after"]
    return _table(names, rows) + report_page.paragraph(report.failed_elsewhere(result), "quiet")


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
        rows.append(report_page.row(_cells(values)))
    return _table([">second", ">acknowledged", ">failed", ">highest median", ">highest 99th percentile"], rows)


def _ms(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.1f} ms"


def _table(names: Sequence[str], rows: Sequence[str]) -> str:
    """Names starting with > are numeric columns."""
    return report_page.table([(name.removeprefix(">"), name.startswith(">")) for name in names], rows)


def _cells(values: Iterable[str]) -> list[str]:
    return [report_page.cell(value, is_number=True) for value in values]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 2)


LEFT: Final = 74
RIGHT: Final = 12
TOP: Final = 34
LANE: Final = 22
GAP: Final = 30
RATE_HEIGHT: Final = 150
LATENCY_HEIGHT: Final = 130
AXIS: Final = 24
LATENCY_MS_MIN: Final = 1.0
RATES_SHOWN: Final = 3
"""The throughput panel's upper limit, as a multiple of the sent rate."""
_LANE_TEXT_PX: Final = 6.6
"""Width of a character in a lane."""


def chart(result: DrillResult, number: int) -> str:
    """The SVG element; ``number`` makes its ids unique on the page."""
    span_s = max([result.seconds, *(one.at_s for one in result.series[-1:])]) or 1.0
    x = _scale(0, span_s, LEFT, CHART_WIDTH - RIGHT)
    lanes_end = TOP + LANE * len(result.nodes)
    rate_top = lanes_end + GAP
    latency_top = rate_top + RATE_HEIGHT + GAP
    bottom = latency_top + LATENCY_HEIGHT
    parts = [
        _bands(result.rounds, x, bottom, span_s),
        _lanes(result, x),
        _rate_panel(result, x, rate_top),
        _latency_panel(result.series, x, latency_top),
        _time_axis(x, span_s, bottom),
        _marks(result.rounds, x, bottom),
        _gaps(result.rounds, x, rate_top),
        _panel_title(rate_top, "messages/s"),
        _panel_title(latency_top, "latency: median, and 99th percentile (dashed); logarithmic"),
        f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{bottom}" visibility="hidden"/>',
    ]
    names = (
        f"{result.name}: roles, throughput and latency over {span_s:.0f} seconds",
        _described(result),
    )
    keys, keys_height = legend(_KEYS, 14, bottom + AXIS + 6)
    parts.append(keys)
    data = f' data-left="{LEFT}" data-right="{CHART_WIDTH - RIGHT}" data-span="{span_s:.3f}"'
    return drawing(number, bottom + AXIS + 6 + keys_height, names, "".join(parts), data)


_KEYS: Final = (
    (('class="leads" rx="2"',), "leads"),
    (('class="follows" rx="2"',), "follows"),
    (('class="stands" rx="2"',), "candidate"),
    (('class="silent" rx="2"',), "no answer"),
    (('class="acknowledged"',), "acknowledged"),
    (('class="failed"',), "failed"),
    (('class="hurt"',), "from the fault to the heal"),
    (('class="healing"',), "until all have caught up"),
)


def _described(result: DrillResult) -> str:
    faults = "; ".join(
        f"at {one.round.fault_s:.1f} s {one.round.fault}, then {_seconds(one.without_service_s)} without service"
        for one in result.rounds
    )
    return f"{faults}. The table below the chart has the same figures."


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if math.isfinite(value) else "for ever"


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    return lambda value: first + (min(max(value, low), high) - low) / (high - low) * (last - first)


# --- what was done ---------------------------------------------------------------------------------------------------


def _bands(rounds: Iterable[FaultEffects], x: Callable[[float], float], bottom: float, span_s: float) -> str:
    """Background bands: from the fault to its heal, and from there until all nodes have caught up."""
    found = []
    for one in rounds:
        healed_s = _or(one.round.healed_s, span_s)
        recovered_s = _or(one.round.recovered_s, span_s)
        for name, begin_s, end_s in (("hurt", one.round.fault_s, healed_s), ("healing", healed_s, recovered_s)):
            width = max(x(end_s) - x(begin_s), 0.0)
            found.append(
                f'<rect class="{name}" x="{x(begin_s):.1f}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}"/>'
            )
    return "".join(found)


def _marks(rounds: Sequence[FaultEffects], x: Callable[[float], float], bottom: float) -> str:
    """A line and a word for each fault, heal and recovery; words that would overlap are left out."""
    moments = [
        (at_s, kind, word)
        for one in rounds
        for at_s, kind, word in (
            (one.round.fault_s, "fault", f"fault {one.round.number}" if len(rounds) > 1 else "fault"),
            (one.round.healed_s, "heal", "healed"),
            (one.round.recovered_s, "whole", "caught up"),
        )
        if math.isfinite(at_s)
    ]
    found, free_from = [], 0.0
    for at_s, kind, word in sorted(moments):
        at = x(at_s)
        found.append(f'<line class="mark {kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
        if at >= free_from:
            anchor = "end" if at > CHART_WIDTH - 80 else "start"
            found.append(f'<text class="mark {kind}" x="{at:.1f}" y="{TOP - 12}" text-anchor="{anchor}">{word}</text>')
            free_from = at + 7.2 * len(word) + 8
    return "".join(found)


def _gaps(rounds: Iterable[FaultEffects], x: Callable[[float], float], top: float) -> str:
    """Above the throughput: periods without acknowledgements."""
    found = []
    for one in rounds:
        if not math.isfinite(one.without_service_s):
            continue
        end, begin = x(one.first_acknowledged_s), x(one.first_acknowledged_s - one.without_service_s)
        y = top - 7
        words = f"{one.without_service_s:.2f} s without service"
        at, anchor = (end + 6, "start") if end + 6 + 7.2 * len(words) < CHART_WIDTH else (begin - 6, "end")
        found.append(
            f'<path class="gap" d="M{begin:.1f} {y - 4}V{y + 4}M{begin:.1f} {y}H{end:.1f}M{end:.1f} {y - 4}V{y + 4}"/>'
            f'<text class="gap" x="{at:.1f}" y="{y + 4}" text-anchor="{anchor}">{words}</text>'
        )
    return "".join(found)


# --- panels ----------------------------------------------------------------------------------------------------------


def _lanes(result: DrillResult, x: Callable[[float], float]) -> str:
    found = []
    for row, node in enumerate(result.nodes):
        y = TOP + row * LANE
        found.append(f'<text class="label" x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(node)}</text>')
        for period in result.state_periods.get(node, ()):
            begin, width = x(period.begin_s), max(x(period.end_s) - x(period.begin_s), 1.0)
            found.append(
                f'<rect class="{_role_class(period.view)}" x="{begin:.1f}" y="{y + 2}" width="{width:.1f}" '
                f'height="{LANE - 4}" rx="3"><title>{escape(_lane_title(node, period.view))}, '
                f"{period.begin_s:.2f} to {period.end_s:.2f} s</title></rect>"
            )
            word = _lane_word(period.view)
            if width > _LANE_TEXT_PX * len(word) + 10:
                found.append(
                    f'<text class="{_role_class(period.view)}" x="{begin + 6:.1f}" y="{y + 15}">{escape(word)}</text>'
                )
    return "".join(found)


def _role_class(view: NodeView) -> str:
    found = {"LEADER": "leads", "FOLLOWER": "follows", "SLAVE": "follows", "CANDIDATE": "stands"}.get(
        view.role, "silent"
    )
    return "leads" if view.is_master else found


def _lane_word(view: NodeView) -> str:
    if not view.role:
        return "no answer"
    if view.term < 0:
        return "plain master" if view.is_master else "plain slave"
    word = {"LEADER": "leads", "FOLLOWER": "follows", "CANDIDATE": "candidate"}.get(view.role, view.role)
    return f"{word}, term {view.term}"


def _lane_title(node: str, view: NodeView) -> str:
    return f"{node} {view.words}" + (f", term {view.term}" if view.term >= 0 else "")


def _rate_panel(result: DrillResult, x: Callable[[float], float], top: float) -> str:
    """A backlog is acknowledged all at once: such peaks are cut off, and labelled."""
    series = result.series
    highest = max([one.acknowledged_per_s + one.failed_per_s for one in series] or [1.0]) or 1.0
    ceiling, step = _nice(min(highest, RATES_SHOWN * result.rate))
    y = _scale(0, ceiling, top + RATE_HEIGHT, top)
    found = [_grid([(value, f"{value:,.0f}") for value in _steps(step, ceiling)], y)]
    found.append(f'<path class="acknowledged" d="{_steps_path(series, x, y)}"/>')
    for one in series:
        if one.failed_per_s:
            begin, end = x(one.at_s), x(one.at_s + BUCKET_S)
            height = y(0) - y(one.failed_per_s)
            found.append(
                f'<rect class="failed" x="{begin:.1f}" y="{y(one.failed_per_s):.1f}" '
                f'width="{max(end - begin, 1.0):.1f}" height="{height:.1f}"/>'
            )
    for one in series:
        if one.acknowledged_per_s > ceiling:
            at, anchor = x(one.at_s + BUCKET_S) + 5, "start"
            if at > CHART_WIDTH - 70:
                at, anchor = x(one.at_s) - 5, "end"
            found.append(
                f'<text class="clipped" x="{at:.1f}" y="{top + 12}" text-anchor="{anchor}">'
                f"↑ {one.acknowledged_per_s:,.0f}</text>"
            )
            break  # no room for a second label
    return "".join(found)


def _steps_path(series: Sequence[Bucket], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    steps = "".join(f"V{y(one.acknowledged_per_s):.1f}H{x(one.at_s + BUCKET_S):.1f}" for one in series)
    return f"M{x(0):.1f} {y(0):.1f}{steps}V{y(0):.1f}Z"


def _latency_panel(series: Sequence[Bucket], x: Callable[[float], float], top: float) -> str:
    """Logarithmic: a failover takes a hundred times as long as an append."""
    known = [one.p99_ms for one in series if not math.isnan(one.p99_ms)]
    decades = max(2, math.ceil(math.log10(max([*known, LATENCY_MS_MIN * 10]) / LATENCY_MS_MIN)))
    log = _scale(0, decades, top + LATENCY_HEIGHT, top)

    def y(value_ms: float) -> float:
        return log(math.log10(max(value_ms, LATENCY_MS_MIN) / LATENCY_MS_MIN))

    ticks = [(LATENCY_MS_MIN * 10**power, f"{LATENCY_MS_MIN * 10**power:,.0f} ms") for power in range(decades + 1)]
    return "".join(
        [
            _grid(ticks, y),
            f'<path class="p99" d="{_line([(one.at_s, one.p99_ms) for one in series], x, y)}"/>',
            f'<path class="p50" d="{_line([(one.at_s, one.p50_ms) for one in series], x, y)}"/>',
        ]
    )


def _line(points: Iterable[tuple[float, float]], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Interrupted where there is no value; a single point is a short dash."""
    words, drawing = [], False
    for at_s, value in points:
        if math.isnan(value):
            drawing = False
            continue
        middle = at_s + BUCKET_S / 2
        words.append(f"{'L' if drawing else 'M'}{x(middle):.1f} {y(value):.1f}" + ("" if drawing else "h0.1"))
        drawing = True
    return "".join(words)


def _grid(ticks: Iterable[tuple[float, str]], y: Callable[[float], float]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{CHART_WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        f'<text class="label" x="{LEFT - 10}" y="{y(value) + 4:.1f}" text-anchor="end">{word}</text>'
        for value, word in ticks
    )


def _panel_title(top: float, text: str) -> str:
    """From the margin on, where a short one meets no line; a longer one is drawn over them."""
    return f'<text class="panel" x="0" y="{top - 8}">{text}</text>'


def _time_axis(x: Callable[[float], float], span_s: float, bottom: float) -> str:
    _, step = _nice(span_s, most=14)
    return "".join(
        f'<line class="tick" x1="{x(at_s):.1f}" x2="{x(at_s):.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        f'<text class="label" x="{x(at_s):.1f}" y="{bottom + 18}" text-anchor="middle">{at_s:g} s</text>'
        for at_s in _steps(step, span_s)
        if at_s <= span_s
    )


def _nice(highest: float, *, most: int = 4) -> tuple[float, float]:
    """A round upper limit and step."""
    for exponent in range(-2, 9):
        for digit in (1, 2, 5):
            step = digit * 10.0**exponent
            if highest / step <= most:
                return math.ceil(highest / step) * step, step
    return highest, highest


def _steps(step: float, ceiling: float) -> list[float]:
    return [number * step for number in range(math.floor(ceiling / step + 1e-9) + 1)]


def _or(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise
