"""Reports say what happened: to people, to programs, and in a browser without any other file."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from cluster.drill import html, report
from cluster.drill.history import DrillEvent, EventKind, NodeView, Round, SendOutcome, StatePeriod, effects_of
from cluster.drill.html import chart
from tests.unit.cluster.drill.histories import N0, failover, perfect, result_of


def test_a_passed_drill_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Timeline, time without service, counts and the judgement."""
    report.print_result(result_of(failover(), perfect().verdict()))

    said = capsys.readouterr().out
    assert "kill-leader: SIGKILL to the leader" in said
    assert "note: a note <of the target>" in said
    assert re.search(r"1\.00 +FAULT +n0 +SIGKILL to n0", said)
    assert re.search(r"1 \(n0\) +1\.10 s +1 +n0 → n1 +1 → 2 +2\.50 s", said)
    assert re.search(r"lost +0\n", said)
    assert "✓ every one of 10 acknowledged messages is on n0, n1, n2, once, in order" in said


def test_a_failed_drill_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong stands there with examples, and nothing sounds as if it had passed."""
    history = perfect()
    history.change_queue(1, [])

    report.print_result(result_of(failover(), history.verdict(), "not every node has caught up within 90 s"))

    said = capsys.readouterr().out
    assert "✗ not every node has caught up" in said
    assert re.search(r"lost +5\n", said)
    assert "number 1, acknowledged at queue 1 offset 0, is not on n0, n1, n2" in said
    assert "✓" not in said


def test_what_was_not_read_back_is_not_proved() -> None:
    """No verdict is no pass."""
    result = result_of(failover(), None, "cannot read back what n1 holds")

    assert not result.passed
    assert report.verdict_lines(result)[-1] == "✗ cannot read the messages back: no verdict"


def test_the_document_is_json_and_says_the_same() -> None:
    """Also of what never came: JSON knows neither NaN nor infinity."""
    good = result_of(failover(), perfect().verdict())
    never = result_of(failover(), None, "broken")

    document = json.loads(json.dumps(report.document([good, never], ["a note"]), allow_nan=False))

    first, second = document["drills"]
    assert document["passed"] is False
    assert document["notes"] == ["a note"]
    assert first["passed"] is True
    assert first["verdict"]["acknowledged"] == 10
    assert [first["verdict"][name] for name in ("lost", "duplicated", "out_of_order")] == [0, 0, 0]
    assert first["without_service_s"] == pytest.approx(1.1)
    assert first["rounds"][0]["leader_after"] == "n1"
    assert {"at_s": 1.0, "kind": "fault", "text": "SIGKILL to n0", "node": "n0"} in first["timeline"]
    assert first["roles"]["n1"][-1]["role"] == "LEADER"
    assert any(one["p50_ms"] is None for one in first["series"])
    assert second["verdict"] is None
    assert report.document([])["passed"] is False


def test_the_summary_has_a_line_per_drill(capsys: pytest.CaptureFixture[str]) -> None:
    """Passed or failed at a glance."""
    report.print_summary(
        [result_of(failover(), perfect().verdict()), result_of(failover(), None, "x", name="fill-disk")]
    )

    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"kill-leader +passed +1\.10 s +10 +0 +0 +0 +0 +0", lines[-2])
    assert re.match(r"fill-disk +FAILED +1\.10 s +\?", lines[-1])


def test_long_sentences_are_cut_in_the_table_only() -> None:
    """A terminal has so many columns."""
    assert report.shortened("short") == "short"
    assert len(report.shortened("long " * 100)) == 110


class Page(HTMLParser):
    """What a browser would fetch, and whether every element ends."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [
            str(value) for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")
        ]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Ends at once."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    """One file: no address is fetched, every element ends, what came from outside is escaped."""
    page = html.page(
        [result_of(failover(), perfect().verdict()), result_of(failover(), None, "<b>broken</b>")], ["note"]
    )

    parsed = Page(page)

    assert parsed.fetched == []
    assert parsed.open == []
    assert "http" not in page.replace("http-equiv", "")
    assert "&lt;b&gt;broken" in page
    assert "a note &lt;of the target&gt;" in page
    assert "prefers-color-scheme: dark" in page
    assert "✗ 1 of 2 drills failed: kill-leader" in page


def test_a_page_has_one_verdict() -> None:
    """A single drill's is the page's; of several, each has a word of its own below the common one."""
    good, bad = result_of(failover(), perfect().verdict()), result_of(failover(), None, "it broke", name="fill-disk")

    alone, failed, both = html.page([good]), html.page([bad]), html.page([good, bad])

    assert [one.count('class="banner') for one in (alone, failed, both)] == [1, 1, 1]
    assert [one.count('class="badge') for one in (alone, failed, both)] == [0, 0, 4]
    assert "✓ Passed: every one of 10 acknowledged messages is on n0, n1, n2" in alone
    assert "✗ Failed<ul><li>it broke</li><li>cannot read the messages back: no verdict</li></ul>" in failed
    assert both.count("<li>it broke</li>") == 1


def test_nothing_run_is_nothing_passed() -> None:
    """What could not be run is named with its reason, and is no failure of a drill."""
    good = result_of(failover(), perfect().verdict())

    assert "✗ No drill was run" in html.page([])
    partly = html.page([good], not_run=["fill-disk: no root"])
    assert "✗ Not every drill was run<ul><li>not run: fill-disk: no root</li></ul>" in partly
    assert "<title>Drills: FAILED</title>" in partly
    bad = result_of(failover(), None, "it broke", name="fill-disk")
    failed = html.page([good, bad], not_run=["fill-memory: no root"])
    assert "✗ 1 of 2 drills failed: fill-disk<ul><li>not run: fill-memory: no root</li></ul>" in failed
    assert "✓ All 2 drills passed: 20 messages were acknowledged" in html.page([good, good])


def test_the_pages_figures_are_those_of_the_verdict_and_add_up() -> None:
    """Sent is acknowledged, unknown and refused together; failures that no fault's row has are told."""
    history = perfect()
    history.with_outcome(3, SendOutcome.UNKNOWN)
    history.with_outcome(5, SendOutcome.REFUSED)
    history.change_queue(0, history.queue(0)[:3])
    verdict = history.verdict()
    page = html.page([result_of(failover(), verdict)])

    figures = {name: value for value, name in re.findall(r"<b>([^<]*)</b><span>([^<]*)</span>", page)}
    assert (figures["sent"], figures["acknowledged"], figures["refused"]) == ("10", "8", "1")
    assert figures["unknown outcome"].startswith("1 (1 of them stored")
    assert figures["lost"] == "2"
    assert {one.kind.value for one in verdict.defects} <= set(figures)
    assert "1 more failed at other times." in page
    assert "at other times" not in html.page([result_of(failover(), perfect().verdict())])


def test_no_defect_is_counted_twice_in_the_summary() -> None:
    """Those with a column of their own are no other defects."""
    history = perfect()
    history.change_queue(0, history.queue(0)[:3])
    verdict = history.verdict()

    names, (row,) = report.summary_table([result_of(failover(), verdict)])

    counts = dict(zip(names[-4:], map(int, row[-4:]), strict=True))
    assert list(counts) == ["lost", "duplicated", "out of order", "other defects"]
    assert counts["lost"] == 2
    assert sum(counts.values()) == sum(one.count for one in verdict.defects)


def test_the_charts_figures_add_up_to_the_drills() -> None:
    """A row per second counts messages, of which the chart shows rates."""
    notes = failover()
    text = html.page([result_of(notes, perfect().verdict())]).partition("<summary>The chart's figures")[2]

    rows = re.findall(r"<tr>(?:<td[^>]*>([^<]*)</td>)(?:<td[^>]*>([^<]*)</td>)(?:<td[^>]*>([^<]*)</td>)", text)

    outcomes = [one.outcome is SendOutcome.ACKNOWLEDGED for one in notes.sends]
    assert [second for second, _, _ in rows] == ["0 s", "1 s", "2 s", "3 s"]
    assert sum(int(acknowledged) for _, acknowledged, _ in rows) == outcomes.count(True)
    assert sum(int(failed) for _, _, failed in rows) == outcomes.count(False)


def test_the_chart_is_well_formed_and_described() -> None:
    """For screen readers, too; the fault, the heal and the gap are marked on it."""
    svg = chart(result_of(failover(), perfect().verdict()), 7)

    root = ElementTree.fromstring(svg)
    texts = ["".join(element.itertext()) for element in root.iter("text")]

    assert root.attrib["role"] == "img"
    assert root.attrib["aria-labelledby"] == "chart-title-7 chart-text-7"
    assert "SIGKILL to n0, then 1.10 s without service" in (root.findtext("desc") or "")
    assert {"n0", "n1", "n2", "fault", "healed", "1.10 s without service"} <= set(texts)
    assert "leads, term 2" in texts


def test_the_chart_of_a_drill_that_broke_off_is_drawn_all_the_same() -> None:
    """It was never healed, nothing was acknowledged again, and many faults have no room for all their words."""
    notes = failover()
    notes.sends = [one for one in notes.sends if one.ended_s < 1.0]
    notes.events.append(DrillEvent(3.9, EventKind.PROBLEM, "no leader that accepts messages"))
    result = result_of(notes, None, "no leader that accepts messages")
    rounds = tuple(effects_of(Round(n, "x", N0, 1.0 + n / 100), notes) for n in range(1, 5))
    broken = type(result)(**{name: getattr(result, name) for name in result.__slots__} | {"rounds": rounds})

    root = ElementTree.fromstring(chart(broken, 1))

    texts = ["".join(element.itertext()) for element in root.iter("text")]
    assert texts.count("fault 1") == 1
    assert "fault 2" not in texts
    assert math.isinf(rounds[0].without_service_s)


def test_a_role_of_a_broker_is_text() -> None:
    """It is what the other side says, and the page shows it where a role is too long for its period."""
    result = result_of(failover(), perfect().verdict())
    evil = replace(result, state_periods={N0: [StatePeriod(0.0, result.seconds, NodeView("<b>&", 3))]})

    drawn = chart(evil, 1)

    assert "<b>" not in drawn
    assert "&lt;b&gt;&amp;, term 3</text>" in drawn
