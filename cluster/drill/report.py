"""A drill's result as tables and as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import click

from cluster.drill.history import DrillEvent, EventKind, FaultEffects
from cluster.drill.runner import DrillResult
from cluster.drill.verdict import DefectKind, DrillVerdict
from dledger_cli import terminal

MARKS: Final = {
    EventKind.FAULT: "FAULT",
    EventKind.HEAL: "heal",
    EventKind.ROLE: "role",
    EventKind.FIRST_FAILED: "fails",
    EventKind.FIRST_ACKNOWLEDGED: "serves",
    EventKind.RECOVERED: "whole",
    EventKind.PROBLEM: "PROBLEM",
    EventKind.STEP: "",
}
"""One word per kind of event."""
_STYLES: Final = {"FAULT": "red", "PROBLEM": "bold red", "heal": "green", "whole": "green", "serves": "cyan"}
_COUNTED: Final = (DefectKind.LOST, DefectKind.DUPLICATED, DefectKind.OUT_OF_ORDER)
_TEXT_CHARS_MAX: Final = 110


def print_result(result: DrillResult) -> None:
    """Print timeline, figures and verdict of one drill."""
    click.echo(f"\n{result.name}: {result.summary}")
    click.echo(f"{len(result.nodes)} {result.target}, {result.rate:g} messages/s, {result.seconds:.1f} s")
    for note in result.notes:
        click.echo(f"note: {note}")
    click.echo()
    rows = [(f"{one.at_s:.2f}", MARKS[one.kind], one.node or "", shortened(one.text)) for one in result.events]
    terminal.print_table(("seconds", "", "node", "what happened"), rows, _STYLES)
    click.echo()
    terminal.print_table(
        ("fault", "without service", "failed meanwhile", "leader", "term", "recovered after"),
        [round_row(one) for one in result.rounds],
    )
    click.echo()
    if result.verdict is not None:
        terminal.print_table(("messages", ""), message_rows(result.verdict))
        click.echo()
    for line in verdict_lines(result):
        click.echo(line)


def shortened(text: str) -> str:
    """The sentence, shortened to one line."""
    return text if len(text) <= _TEXT_CHARS_MAX else text[: _TEXT_CHARS_MAX - 1] + "…"


def round_row(one: FaultEffects) -> tuple[str, ...]:
    """A fault's effects in words."""
    here = one.round
    whole = here.recovered_s - here.fault_s
    return (
        f"{here.number}" + (f" ({here.victim})" if here.victim else ""),
        seconds(one.without_service_s),
        f"{one.failed:,}",
        f"{one.leader_before or '-'} → {one.leader_after or '-'}",
        f"{_term(one.term_before)} → {_term(one.term_after)}",
        seconds(whole),
    )


def _term(term: int) -> str:
    """Plain brokers have none."""
    return str(term) if term >= 0 else "-"


def seconds(value: float) -> str:
    """``0.83 s``, or a word for something that never happened."""
    return f"{value:.2f} s" if math.isfinite(value) else "never"


def message_rows(verdict: DrillVerdict) -> list[tuple[str, str]]:
    """The messages by outcome."""
    unknown = f"{verdict.unknown:,}"
    if verdict.unknown:
        unknown += f" ({verdict.unknown_stored:,} of them stored)"
    rows = [
        ("sent", f"{verdict.sent:,}"),
        ("acknowledged", f"{verdict.acknowledged:,}"),
        ("unknown outcome", unknown),
        ("refused", f"{verdict.refused:,}"),
        ("consumed", f"{verdict.consumed:,}" + (f" ({verdict.redelivered:,} again)" if verdict.redelivered else "")),
    ]
    rows += [(kind.value, f"{verdict.count(kind):,}") for kind in _COUNTED]
    rows += [(one.kind.value, f"{one.count:,}") for one in verdict.defects if one.kind not in _COUNTED]
    return rows


def verdict_lines(result: DrillResult) -> list[str]:
    """The verdict, with all defects."""
    lines = [f"✗ {problem}" for problem in result.problems]
    if result.verdict is None:
        return [*lines, "✗ cannot read the messages back: no verdict"]
    for defect in result.verdict.defects:
        lines.append(f"✗ {defect.kind.value}: {defect.count:,}")
        lines += [f"    {example}" for example in defect.examples]
    if result.passed:
        lines.append(f"✓ {passed_sentence(result.verdict)}")
    return lines


def passed_sentence(verdict: DrillVerdict) -> str:
    """The finding of a passed drill, as a sentence."""
    if verdict.earlier:
        return (
            f"every one of {verdict.acknowledged:,} acknowledged messages is on {', '.join(verdict.nodes)}, once, in "
            f"order, at its acknowledged position, and the earlier ones were on {', '.join(verdict.earlier)}; queue "
            "offsets go on without gaps, and no step changed a message"
        )
    return (
        f"every one of {verdict.acknowledged:,} acknowledged messages is on {', '.join(verdict.nodes)}, once, in "
        "order, at its acknowledged position; all nodes hold the same log"
    )


def failed_elsewhere(result: DrillResult) -> str:
    """A sentence if messages failed that no fault's row counts, so that the rows and the verdict add up."""
    if result.verdict is None:
        return ""
    more = result.verdict.unknown + result.verdict.refused - sum(one.failed for one in result.rounds)
    return f"{more:,} more failed at other times." if more > 0 else ""


def summary_table(results: Sequence[DrillResult]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Names of columns, and a row per drill."""
    rows: list[tuple[str, ...]] = []
    for one in results:
        verdict = one.verdict
        counts = ["?"] * 7
        if verdict is not None:
            wrong = sum(defect.count for defect in verdict.defects if defect.kind not in _COUNTED)
            figures = (verdict.acknowledged, verdict.unknown, verdict.refused, *map(verdict.count, _COUNTED), wrong)
            counts = [f"{figure:,}" for figure in figures]
        rows.append((one.name, "passed" if one.passed else "FAILED", seconds(one.without_service_s), *counts))
    counted = (kind.value for kind in _COUNTED)
    return (
        "drill",
        "verdict",
        "without service",
        "acknowledged",
        "unknown",
        "refused",
        *counted,
        "other defects",
    ), rows


def print_summary(results: Sequence[DrillResult]) -> None:
    """One line per drill."""
    names, rows = summary_table(results)
    click.echo()
    terminal.print_table(names, rows, {"FAILED": "red"})


# --- JSON ------------------------------------------------------------------------------------------------------------


def document(
    results: Sequence[DrillResult], notes: Sequence[str] = (), not_run: Sequence[str] = ()
) -> dict[str, object]:
    """All results as one JSON document; times are seconds since the start of each drill's load.

    ``not_run``: drills without a result, with the reason.
    """
    return {
        "passed": bool(results) and not not_run and all(one.passed for one in results),
        "notes": list(notes),
        "not_run": list(not_run),
        "drills": [_result(one) for one in results],
    }


def _result(result: DrillResult) -> dict[str, object]:
    return {
        "name": result.name,
        "summary": result.summary,
        "passed": result.passed,
        "on": result.target,
        "notes": list(result.notes),
        "nodes": list(result.nodes),
        "rate": result.rate,
        "seconds": _number(result.seconds),
        "without_service_s": _number(result.without_service_s),
        "problems": list(result.problems),
        "verdict": None if result.verdict is None else _verdict(result.verdict),
        "rounds": [_round(one) for one in result.rounds],
        "timeline": [_event(one) for one in result.events],
        "roles": {
            node: [
                {
                    "from_s": _number(one.begin_s),
                    "to_s": _number(one.end_s),
                    "role": one.view.role,
                    "term": one.view.term,
                }
                for one in mine
            ]
            for node, mine in result.state_periods.items()
        },
        "series": [
            {
                "at_s": _number(one.at_s),
                "acknowledged_per_s": _number(one.acknowledged_per_s),
                "failed_per_s": _number(one.failed_per_s),
                "p50_ms": _number(one.p50_ms),
                "p99_ms": _number(one.p99_ms),
            }
            for one in result.series
        ],
    }


def _verdict(verdict: DrillVerdict) -> dict[str, object]:
    return {
        "sent": verdict.sent,
        "acknowledged": verdict.acknowledged,
        "unknown": verdict.unknown,
        "unknown_stored": verdict.unknown_stored,
        "refused": verdict.refused,
        "consumed": verdict.consumed,
        "redelivered": verdict.redelivered,
        "lost": verdict.count(DefectKind.LOST),
        "duplicated": verdict.count(DefectKind.DUPLICATED),
        "out_of_order": verdict.count(DefectKind.OUT_OF_ORDER),
        "defects": [
            {"kind": one.kind.value, "count": one.count, "examples": list(one.examples)} for one in verdict.defects
        ],
    }


def _round(one: FaultEffects) -> dict[str, object]:
    here = one.round
    return {
        "number": here.number,
        "fault": here.fault,
        "victim": here.victim,
        "fault_s": _number(here.fault_s),
        "first_failed_s": _number(one.first_failed_s),
        "first_failed": one.first_failed_why,
        "first_acknowledged_s": _number(one.first_acknowledged_s),
        "healed_s": _number(here.healed_s),
        "recovered_s": _number(here.recovered_s),
        "without_service_s": _number(one.without_service_s),
        "failed": one.failed,
        "leader_before": one.leader_before,
        "leader_after": one.leader_after,
        "term_before": one.term_before,
        "term_after": one.term_after,
    }


def _event(one: DrillEvent) -> dict[str, object]:
    found: dict[str, object] = {"at_s": _number(one.at_s), "kind": one.kind.value, "text": one.text, "node": one.node}
    return found if one.term < 0 else {**found, "term": one.term}


def _number(value: float) -> float | None:
    """None for NaN and infinity, which JSON lacks."""
    return round(value, 4) if math.isfinite(value) else None
