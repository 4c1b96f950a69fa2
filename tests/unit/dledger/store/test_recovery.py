"""Recovery's decision table, case by case, without a file."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.store.checkpoint import LogCheckpoint, Mark
from dledger.store.recovery import Cut, Damage, Keep, Plan, Refuse, ScanFacts, doubt, plan
from dledger.store.traces import LastLife
from dledger.types import LogIndex

_END = Mark(9, 1000, 5)
_STOP = Damage(Path("data/0"), 1000, 1000, "no record starts here")
_BEFORE = Damage(Path("data/short"), 10, 512, "the segment has 10 bytes instead of 512")
_AFTER = Damage(Path("data/short"), 10, 1024, "the segment has 10 bytes instead of 512")
_WHOLE = ScanFacts(
    checkpoint=LogCheckpoint(flushed=_END, committed=LogIndex(5)),
    end=_END,
    stop=_STOP,
    stopped_at_bad=False,
    rest_in_use=False,
    mark_agrees=True,
)
_UNFLUSHED = replace(_WHOLE, checkpoint=LogCheckpoint(flushed=Mark(7, 800, 4)))
_ABOVE = replace(_WHOLE, checkpoint=LogCheckpoint(flushed=Mark(10, 1100, 6)))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param(_WHOLE, Keep(), id="whole"),
        pytest.param(_UNFLUSHED, Keep(), id="whole entries above the mark are kept"),
        pytest.param(replace(_WHOLE, misshapen_middle=_AFTER), Refuse(_AFTER), id="short file in the middle"),
        pytest.param(replace(_WHOLE, bad_files=(_BEFORE,)), Refuse(_BEFORE), id="bad file below the mark"),
        pytest.param(replace(_ABOVE, bad_files=(_BEFORE, _AFTER)), Refuse(_BEFORE), id="the oldest bad file is named"),
        pytest.param(
            replace(_WHOLE, bad_files=(_AFTER,)),
            Cut(_END, "unflushed remains after the last whole entry"),
            id="short last file above the mark",
        ),
        pytest.param(replace(_UNFLUSHED, stopped_at_bad=True), Cut(_END, _STOP.reason), id="bad record above the mark"),
        pytest.param(
            replace(_UNFLUSHED, rest_in_use=True),
            Cut(_END, "unflushed remains after the last whole entry"),
            id="zeros, then remains",
        ),
        pytest.param(
            replace(_UNFLUSHED, checkpoint=replace(_UNFLUSHED.checkpoint, clean_stop=True)),
            Cut(Mark(7, 800, 4), "2 entries after the end of a cleanly stopped log"),
            id="entries behind a clean stop",
        ),
    ],
)
def test_plan(facts: ScanFacts, expected: Plan) -> None:
    """The table in the module's docstring."""
    assert plan(facts) == expected


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        pytest.param(_ABOVE, "entries up to 10 were flushed, but the log ends at 9", id="shorter than the mark"),
        pytest.param(replace(_ABOVE, stopped_at_bad=True), "were flushed", id="bad record below the mark"),
        pytest.param(replace(_WHOLE, mark_agrees=False), "entry 9 is not the one that was flushed", id="other entry"),
        pytest.param(
            replace(_WHOLE, checkpoint=LogCheckpoint(flushed=_END, committed=LogIndex(10))),
            "entries up to 10 were committed",
            id="shorter than the commit index",
        ),
    ],
)
def test_plan_refuses_where_the_scan_stopped(facts: ScanFacts, reason: str) -> None:
    """Damage of flushed bytes is never cut away; the place and the reason are told."""
    decision = plan(facts)

    assert isinstance(decision, Refuse)
    assert (decision.damage.path, decision.damage.offset) == (_STOP.path, _STOP.offset)
    assert reason in decision.damage.reason
    assert _STOP.reason in decision.damage.reason


_ANY = None
# replaced, clean stop, flushed late, same boot, cut, bad record, torn; and whether that is a reason for doubt
_DOUBTS: tuple[tuple[tuple[bool | None, ...], bool], ...] = (
    ((True, _ANY, _ANY, _ANY, _ANY, _ANY, _ANY), True),
    ((False, True, _ANY, _ANY, True, _ANY, _ANY), True),
    ((False, True, _ANY, _ANY, False, _ANY, _ANY), False),
    ((False, False, True, False, _ANY, _ANY, _ANY), True),
    ((False, False, True, True, True, _ANY, _ANY), True),
    ((False, False, True, True, False, _ANY, _ANY), False),
    ((False, False, False, _ANY, True, _ANY, False), True),
    ((False, False, False, _ANY, True, _ANY, True), False),
    ((False, False, False, _ANY, False, _ANY, _ANY), False),
)


@pytest.mark.parametrize(
    "case", list(itertools.product((False, True), repeat=7)), ids=lambda case: "".join(map("-x".__getitem__, case))
)
def test_doubt(case: tuple[bool, ...]) -> None:
    """The second table in the module's docstring: every combination is one case of it, and no other."""
    replaced, clean, late, same_boot, cut, bad, torn = case
    facts = replace(_WHOLE, checkpoint=replace(_WHOLE.checkpoint, clean_stop=clean), stopped_at_bad=bad, torn=torn)
    life = LastLife(same_boot, late, "copied" if replaced else "")
    decision = Cut(_END, "because") if cut else Keep()

    expected = [
        doubtful
        for pattern, doubtful in _DOUBTS
        if all(wanted in (_ANY, found) for wanted, found in zip(pattern, case, strict=True))
    ]

    assert len(expected) == 1
    assert bool(doubt(facts, decision, life)) is expected[0]
