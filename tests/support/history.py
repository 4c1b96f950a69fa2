"""What clients asked and were told, and whether one log can explain all of it.

An acknowledgement fixes an entry's index, so no search is needed: the log itself is the only candidate for the order,
and every rule is one comparison in a sweep over time. O(n log n).

The rules (a *value* is the body of an append; every append of a history has its own):

- indexes and values are bijective: no value is in the log twice, no entry holds a value that nobody appended;
- an acknowledged append is in the log, once, at the index it was told; one of unknown outcome 0 or 1 times; one that
  was refused ("not applied") never;
- real-time order: an append that began after another was acknowledged, or was seen by a read, has the higher index;
- a linearizable read gives the log's own entries without gaps, among them everything acknowledged before it began and
  nothing that was appended after it ended; the tails that reads see never move back.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.support.waiting import PATIENCE_S

COMPLAINTS_MAX = 20


class Outcome(StrEnum):
    """What a client knows of its append."""

    ACKED = "acked"
    UNKNOWN = "unknown"
    NOT_APPLIED = "not_applied"


@dataclass(frozen=True, slots=True)
class AppendOp:
    """One append: its time span on one clock, and ``index`` if it was acknowledged."""

    value: bytes
    began: float
    ended: float
    outcome: Outcome
    index: int | None = None
    error: str = ""


def longest_gap_s(ends: Iterable[float]) -> float:
    """The longest time between two acknowledgements that followed each other; ``ends``: when they came."""
    return max(second - first for first, second in itertools.pairwise(sorted(ends)))


@dataclass(frozen=True, slots=True)
class ReadOp:
    """One linearizable read that succeeded: ``values`` are the entries from ``first_index`` on, None for a no-op.

    ``complete`` tells that nothing but the end of the log limited it.
    """

    first_index: int
    values: tuple[bytes | None, ...]
    began: float
    ended: float
    complete: bool

    @property
    def tail(self) -> int:
        """The last index it saw."""
        return self.first_index + len(self.values) - 1


class History:
    """Operations as they finish; threads may record at the same time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the three fields below
        self._appends: list[AppendOp] = []
        self._reads: list[ReadOp] = []
        self._acked = 0

    def record(self, operation: AppendOp | ReadOp) -> None:
        """Add one that is over."""
        with self._changed:
            if isinstance(operation, ReadOp):
                self._reads.append(operation)
            else:
                self._appends.append(operation)
                self._acked += operation.outcome is Outcome.ACKED
            self._changed.notify_all()

    @property
    def appends(self) -> tuple[AppendOp, ...]:
        """The appends so far, in the order in which they ended."""
        with self._changed:
            return tuple(self._appends)

    @property
    def reads(self) -> tuple[ReadOp, ...]:
        """The reads so far, in the order in which they ended."""
        with self._changed:
            return tuple(self._reads)

    def count(self, outcome: Outcome) -> int:
        """How many appends ended so."""
        return sum(one.outcome is outcome for one in self.appends)

    def wait_for_acks(self, more: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until ``more`` appends than now are acknowledged; fail after ``timeout_s``."""
        with self._changed:
            goal = self._acked + more
            done = self._changed.wait_for(lambda: self._acked >= goal, timeout_s)
            missing = goal - self._acked
            last_errors = sorted({one.error for one in self._appends[-200:] if one.error})
        if not done:
            raise AssertionError(f"{missing} of {more} acknowledgements did not come in {timeout_s} s: {last_errors}")

    def dump(self, file: Path) -> None:
        """Keep it as JSON lines, for whoever wants to check it again."""
        with file.open("w") as out:
            for one in self.appends:
                row: dict[str, object] = {"op": "append", "value": one.value.decode(), "outcome": one.outcome}
                row |= {"index": one.index, "began": one.began, "ended": one.ended, "error": one.error}
                out.write(json.dumps(row) + "\n")
            for read in self.reads:
                values = [None if value is None else value.decode() for value in read.values]
                row = {"op": "read", "first_index": read.first_index, "values": values, "complete": read.complete}
                row |= {"began": read.began, "ended": read.ended}
                out.write(json.dumps(row) + "\n")


def check(appends: Sequence[AppendOp], reads: Sequence[ReadOp], log: Mapping[int, bytes | None]) -> list[str]:
    """What the final log (index to value, None for a no-op) cannot explain; empty if the history is linearizable."""
    complaints = _check_log(log)
    where = {value: index for index, value in log.items() if value is not None}
    complaints += _check_outcomes(appends, where, log)
    complaints += _check_reads(reads, log)
    complaints += _check_real_time(appends, reads, where)
    return complaints[:COMPLAINTS_MAX]


def _check_log(log: Mapping[int, bytes | None]) -> list[str]:
    complaints = []
    if log and len(log) != max(log) - min(log) + 1:
        complaints.append(f"the log has gaps: {len(log)} entries from {min(log)} to {max(log)}")
    seen: dict[bytes, int] = {}
    for index, value in log.items():
        if value is None:
            continue
        if value in seen:
            complaints.append(f"duplicate: {value!r} is at {seen[value]} and at {index}")
        seen[value] = index
    return complaints


def _check_outcomes(
    appends: Sequence[AppendOp], where: Mapping[bytes, int], log: Mapping[int, bytes | None]
) -> list[str]:
    complaints = []
    acked_at: dict[int, bytes] = {}
    for append in appends:
        at = where.get(append.value)
        if append.outcome is Outcome.NOT_APPLIED and at is not None:
            complaints.append(f"refused ({append.error}) but applied: {append.value!r} is at {at}")
        if append.outcome is not Outcome.ACKED:
            continue
        if append.index is None:  # stored by an earlier attempt, nobody remembers where
            if at is None:
                complaints.append(f"lost: {append.value!r} was acknowledged, nowhere in the log")
            continue
        if append.index in acked_at:
            complaints.append(
                f"index {append.index} was acknowledged to {acked_at[append.index]!r} and {append.value!r}"
            )
        acked_at[append.index] = append.value
        if log.get(append.index) != append.value:
            found = f"found at {at}" if at is not None else "nowhere in the log"
            complaints.append(f"lost: {append.value!r} was acknowledged at {append.index}, {found}")
    known = {append.value for append in appends}
    complaints += [
        f"phantom: nobody appended {value!r} (index {at})" for value, at in where.items() if value not in known
    ]
    return complaints


def _check_reads(reads: Iterable[ReadOp], log: Mapping[int, bytes | None]) -> list[str]:
    complaints = []
    for read in reads:
        for index, value in enumerate(read.values, read.first_index):
            if index not in log or log[index] != value:
                complaints.append(f"read saw {value!r} at {index}, the log holds {log.get(index)!r}")
                break
    return complaints


@dataclass(frozen=True, slots=True)
class _Moment:
    """At ``time`` something ended that proves the log to reach ``proves``, or began what must reach beyond."""

    time: float
    begins: bool
    index: int
    must_exceed: bool
    what: str


def _check_real_time(appends: Sequence[AppendOp], reads: Sequence[ReadOp], where: Mapping[bytes, int]) -> list[str]:
    moments: list[_Moment] = []
    for append in appends:
        at = where.get(append.value)
        if at is None:
            continue
        what = f"append of {append.value!r} at {at}"
        moments.append(_Moment(append.began, True, at, True, what))
        if append.outcome is Outcome.ACKED:
            moments.append(_Moment(append.ended, False, at, True, what))
    for read in reads:
        what = f"read up to {read.tail}"
        moments.append(_Moment(read.ended, False, read.tail, False, what))
        if read.complete:
            moments.append(_Moment(read.began, True, read.tail, False, what))
    # Two things at the same instant overlap: what begins is looked at before what ends.
    moments.sort(key=lambda moment: (moment.time, not moment.begins))
    complaints = []
    reached, by = -1, ""
    for moment in moments:
        if not moment.begins:
            if moment.index > reached:
                reached, by = moment.index, moment.what
        elif moment.index < reached or (moment.must_exceed and moment.index == reached):
            kind = "order" if moment.must_exceed else "stale"
            complaints.append(f"{kind}: {moment.what} began after the end of the {by}")
    return complaints
