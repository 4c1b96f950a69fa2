"""Recovery's decision: a pure function from the findings of a scan to what must be done.

The evidence is the checkpoint's flushed mark: everything up to it was durable once. It is written before anything is
acknowledged, so after a kill nothing above it was acknowledged; after a power cut it may be a little old. (It is
lowered durably before a truncation touches what it covers.) The cases, first match wins:

    | what was found                                                   | plan                              |
    |------------------------------------------------------------------|-----------------------------------|
    | a file of a wrong length, and a later segment                    | Refuse, naming the file           |
    | a missing or misshapen file that starts below the mark           | Refuse, naming the file           |
    | a segment below the scan whose first record is bad               | Refuse, at its offset 0           |
    | the scan stopped (bad record, zeros, no file) below the mark     | Refuse, where it stopped          |
    | the entry at the mark is not the one that was flushed            | Refuse, at the mark               |
    | the log ends below the recorded commit index                     | Refuse, where it stopped          |
    | clean stop, and records follow the mark                          | Cut at the mark                   |
    | a bad record above the mark                                      | Cut where it starts               |
    | zeros or no file above the mark, something behind                | Cut there                         |
    | zeros or the end of the files above or at the mark, nothing left | Keep                              |

The part cut may have been acknowledged all the same, if the mark was old, or entries were flushed late. Then the
member's memory is in doubt (``doubt``): it takes part, and counts for nothing until it has caught up. The cases, first
match wins:

    | what was found                                                   | in doubt                          |
    |------------------------------------------------------------------|-----------------------------------|
    | own files are not those of the last start                        | yes: a copy, or restored          |
    | clean stop, and entries behind its mark                          | yes: files of different times     |
    | clean stop                                                       | no                                |
    | acknowledged before flushing, and the machine rebooted           | yes: the loss is unknown          |
    | acknowledged before flushing, and something was cut              | yes                               |
    | something cut that a partly completed write does not explain     | yes: a flipped bit looks the same |
    | anything else                                                    | no                                |

``dledger.store.torn`` recognizes the remains of a partly completed write.

A gap above the mark is not damage: removals of a truncation may reach the disk in any order. A file of a wrong length
is, because files appear under their name only when complete; only the last one may be a remnant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dledger.store.checkpoint import LogCheckpoint, Mark
from dledger.store.traces import LastLife


@dataclass(frozen=True, slots=True)
class Damage:
    """A problem at one place of one file; ``position`` is its place in the log."""

    path: Path
    offset: int
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class ScanFacts:
    """Recovery's findings, before it changes anything."""

    checkpoint: LogCheckpoint
    end: Mark
    """The last verified entry (or the boundary), its end and its chain CRC."""
    stop: Damage
    """Where the scan stopped and why."""
    stopped_at_bad: bool
    """Whether the bytes at the stop are something other than zeros or the end of the files."""
    rest_in_use: bool
    """Whether any byte after the stop, in this segment or a later one, is not zero."""
    mark_agrees: bool
    """Whether the entry at the flushed mark has the recorded end and chain CRC."""
    torn: bool = True
    """Whether sectors that did not reach the disk explain the missing record at the stop (``torn``)."""
    bad_files: tuple[Damage, ...] = ()
    """Segments missing, of a wrong length, or whose first record is bad, oldest first."""
    misshapen_middle: Damage | None = None
    """The first file of a wrong length that is followed by another segment."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The log is whole; nothing follows its end."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Drop everything from ``end`` on: it was never flushed, so never acknowledged."""

    end: Mark
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not open: flushed bytes are damaged."""

    damage: Damage


Plan = Keep | Cut | Refuse


def plan(facts: ScanFacts) -> Plan:
    """Decide (see the table above)."""
    mark = facts.checkpoint.flushed
    for refusal in (_bad_file, _below_mark, _wrong_mark, _below_commit):
        damage = refusal(facts)
        if damage:
            return Refuse(damage)
    if facts.checkpoint.clean_stop and facts.end.index > mark.index:
        return Cut(mark, f"{facts.end.index - mark.index} entries after the end of a cleanly stopped log")
    if facts.stopped_at_bad:
        return Cut(facts.end, facts.stop.reason)
    if facts.rest_in_use or facts.bad_files:
        return Cut(facts.end, "unflushed remains after the last whole entry")
    return Keep()


def doubt(facts: ScanFacts, decision: Keep | Cut, life: LastLife) -> str:
    """Why the member may have forgotten statements; empty if it has not (see the second table above)."""
    if life.replaced:
        return life.replaced
    cut = decision.reason if isinstance(decision, Cut) else ""
    if facts.checkpoint.clean_stop:
        return f"its files are from different times: {cut}" if cut else ""
    if life.flushed_late and not life.same_boot:
        return "it acknowledged before flushing (flush_mode=async), and the machine has restarted since"
    if life.flushed_late and cut:
        return f"it acknowledged before flushing (flush_mode=async), and the end of its log was cut: {cut}"
    if cut and not facts.torn:
        return f"the end of its log was cut, and an interrupted write does not explain it: {cut}"
    return ""


Refusal = Callable[[ScanFacts], Damage | None]


def _bad_file(facts: ScanFacts) -> Damage | None:
    if facts.misshapen_middle:
        return facts.misshapen_middle
    flushed = facts.checkpoint.flushed
    return next((damage for damage in facts.bad_files if damage.position < flushed.position), None)


def _below_mark(facts: ScanFacts) -> Damage | None:
    mark = facts.checkpoint.flushed
    if facts.end.index >= mark.index:
        return None
    return _told(facts.stop, f"entries up to {mark.index} were flushed, but the log ends at {facts.end.index}")


def _wrong_mark(facts: ScanFacts) -> Damage | None:
    mark = facts.checkpoint.flushed
    if facts.mark_agrees:
        return None
    return _told(facts.stop, f"entry {mark.index} is not the one that was flushed (end or chainCrc differ)")


def _below_commit(facts: ScanFacts) -> Damage | None:
    committed = facts.checkpoint.committed
    if facts.end.index >= committed:
        return None
    return _told(facts.stop, f"entries up to {committed} were committed, but the log ends at {facts.end.index}")


def _told(stop: Damage, what: str) -> Damage:
    return Damage(stop.path, stop.offset, stop.position, f"{what}: {stop.reason}")
