"""Timed messages that a leader has to deliver next, and how far it has come: the entries of the hours that it has
loaded. Pure.

It delivers in *rounds*. A round has a fixed end of the topic's queue and a fixed time, up to which everything known is
put into one order: first those whose time had passed when they were stored, by queue offset, then the others, by due
time and queue offset. However far delivery has come in that order, three numbers describe it (``TimedProgress``), so
that the next leader can go on there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final

import numpy as np

from dledger.errors import invariant
from rocketstore.timer.hours import ROW, Entries, EntryKind, TimedEntry, TimedProgress, entries_of, open_entries, select

ROUND_MAX: Final = 20_000
"""Entries of one round, besides late ones: those that are stored meanwhile wait for its end."""
_FRESH_MAX: Final = 50_000
"""So many entries that were added one by one are sorted in with the others."""
_NONE: Final = np.empty(0, ROW)


class DueRound:
    """Entries to deliver in order, and the progress after any number of them."""

    def __init__(self, before: TimedProgress, late: Entries, due: Entries, until: int, *, is_cut: bool) -> None:
        """``until``: every entry before this queue offset is known. ``is_cut``: more are due when the last one is."""
        self._before = before
        self._late = len(late)
        self._until = max(until, before.offset)
        self._is_cut = is_cut
        self.entries: Final = np.concatenate((late, due))

    def __len__(self) -> int:
        return len(self.entries)

    def progress(self, done: int) -> TimedProgress:
        """After the first ``done`` entries."""
        before = self._before
        if done < self._late:
            following = int(self.entries["queue_offset"][done])
            return TimedProgress(before.due_ms, max(before.offset, following), before.part)
        if done < len(self.entries):
            following = self.entries[done]
            return TimedProgress(int(following["due_ms"]) - 1, self._until, int(following["queue_offset"]))
        if self._late == len(self.entries):
            return TimedProgress(before.due_ms, self._until, before.part)
        last = self.entries[-1]
        if self._is_cut:
            return TimedProgress(int(last["due_ms"]) - 1, self._until, int(last["queue_offset"]) + 1)
        return TimedProgress(int(last["due_ms"]), self._until, 0)


class DueTable:
    """The open entries of all hours up to ``loaded_ms``. Not thread-safe."""

    def __init__(self, progress: TimedProgress) -> None:
        self.progress = progress
        self.loaded_ms = 0
        """Everything due before this time is here."""
        self._sorted: Entries = _NONE
        self._at = 0
        self._taken = 0
        """How many of the sorted ones are in the round."""
        self._fresh: list[TimedEntry] = []  # a heap
        self._fresh_origins: dict[int, TimedEntry] = {}  # the newest record of each
        self._copies: dict[int, int] = {}  # origin: the queue offset of its newest record
        self._recalled: set[int] = set()
        self._gone: Entries = _NONE
        """Recalls that were found when their hours were loaded, without the messages."""

    def __len__(self) -> int:
        return len(self._sorted) - self._at + len(self._fresh)

    def load(self, entries: Entries, before_ms: int) -> None:
        """Take over all entries of the hours from ``loaded_ms`` up to ``before_ms``, at first also of earlier ones.

        Not during a round.
        """
        recalls = np.concatenate((self._gone, select(entries, entries["kind"] == EntryKind.RECALL)))
        self._gone = select(recalls, recalls["due_ms"] > self.progress.due_ms)
        added = open_entries(entries)
        added = select(added, ~self.progress.settled(added))
        self._sorted, self._at = np.concatenate((self._sorted[self._at :], added)), 0  # these are due later
        self._merge_fresh()  # may be due in the same hours
        self._forget()
        self.loaded_ms = before_ms

    def add(self, entries: Iterable[TimedEntry]) -> None:
        """Entries that were stored since their hours were loaded, in the log's order."""
        for entry in entries:
            if entry.kind == EntryKind.RECALL:
                self._recalled.add(entry.origin)
                continue
            if entry.kind == EntryKind.COPY:
                if len(self._gone) and (self._gone["origin"] == entry.origin).any():
                    continue  # it was on its way when the recall was stored
                self._copies[entry.origin] = entry.queue_offset
            heapq.heappush(self._fresh, entry)
            self._fresh_origins[entry.origin] = entry

    def find(self, origin: int, due_ms: int | None = None) -> TimedEntry | None:
        """A message's newest record, if the message is here, in no round, and not recalled.

        Without the time at which it is due, every entry is looked at.
        """
        if origin in self._recalled:
            return None
        if origin in self._fresh_origins:
            return self._fresh_origins[origin]  # newer than any that was loaded
        rest = self._sorted[self._at + self._taken :]
        if due_ms is not None:
            begin, end = np.searchsorted(rest["due_ms"], (due_ms, due_ms + 1))
            rest = rest[begin:end]
        found = rest[rest["origin"] == origin]
        return max((TimedEntry(*map(int, row)) for row in found), key=lambda one: one.queue_offset, default=None)

    def is_recalled(self, origin: int) -> bool:
        """Whether a recall was added since the hours were loaded, also of a message that is in none of them."""
        return origin in self._recalled

    def is_current(self, origin: int, queue_offset: int) -> bool:
        """Whether a record in a round is still to be delivered: neither recalled nor copied since."""
        return origin not in self._recalled and self._copies.get(origin, queue_offset) == queue_offset

    def next_due_ms(self) -> int | None:
        """When the first entry is due that is in no round; None if there is none."""
        found = [self._fresh[0].due_ms] if self._fresh else []
        at = self._at + self._taken
        if at < len(self._sorted):
            found.append(int(self._sorted["due_ms"][at]))
        return min(found, default=None)

    def count_due(self, by_ms: int) -> int:
        """How many are due by a time, without those of the round."""
        rest = self._sorted[self._at + self._taken :]
        fresh = sum(1 for one in self._fresh if one.due_ms <= by_ms)
        return int(np.searchsorted(rest["due_ms"], by_ms, side="right")) + fresh

    def begin_round(self, by_ms: int, until: int) -> DueRound | None:
        """The messages due by a time, up to which everything must be loaded; None if that is nothing.

        Messages that were stored when later ones were already delivered come at once, also if the clock was set back.
        ``until``: every entry before this queue offset was loaded or added, and no other was. ``end_round`` must follow
        before the next one begins.
        """
        by_ms = max(by_ms, self.progress.due_ms)
        invariant(by_ms < self.loaded_ms, "not everything that is due is loaded", by_ms=by_ms, before=self.loaded_ms)
        due_ms = self.next_due_ms()
        if due_ms is None or due_ms > by_ms:
            return None
        if len(self._fresh) > max(_FRESH_MAX, len(self) // 4):
            self._merge_fresh()
        rest = self._sorted[self._at :]
        rest = rest[: int(np.searchsorted(rest["due_ms"], by_ms, side="right"))]
        fresh = []
        while self._fresh and self._fresh[0].due_ms <= by_ms:
            fresh.append(heapq.heappop(self._fresh))
        everything = np.concatenate((rest, entries_of(fresh))) if fresh else rest
        is_late = everything["due_ms"] <= self.progress.due_ms
        late, due = everything[is_late], everything[~is_late]
        late = late[np.argsort(late["queue_offset"], kind="stable")]
        due = due[np.lexsort((due["queue_offset"], due["due_ms"]))] if fresh else due
        taken, left = due[:ROUND_MAX], due[ROUND_MAX:]
        is_cut = len(left) > 0 and int(left["due_ms"][0]) == int(taken["due_ms"][-1])
        made = DueRound(self.progress, late, taken, until, is_cut=is_cut)
        self._taken = len(made) - self._keep(fresh, left)
        return made

    def _keep(self, fresh: list[TimedEntry], left: Entries) -> int:
        """Take back those of ``fresh`` that are among ``left``; returns how many are not, and so are in the round."""
        later = set(left["queue_offset"].tolist()) if fresh and len(left) else set()
        gone = 0
        for entry in fresh:
            if entry.queue_offset in later:
                heapq.heappush(self._fresh, entry)
            else:
                self._fresh_origins.pop(entry.origin, None)
                gone += 1
        return gone

    def end_round(self, ended: DueRound) -> None:
        """Everything in it is settled."""
        self._at += self._taken
        self._taken = 0
        self.progress = ended.progress(len(ended))

    def _merge_fresh(self) -> None:
        if not self._fresh:
            return
        together = np.concatenate((self._sorted[self._at :], entries_of(self._fresh)))
        self._sorted, self._at = together[np.lexsort((together["queue_offset"], together["due_ms"]))], 0
        self._fresh, self._fresh_origins = [], {}

    def _forget(self) -> None:
        """Records about messages that are not here any more."""
        told = np.array([*self._recalled, *self._copies], np.int64)
        here = set(told[np.isin(told, self._sorted["origin"])].tolist()) if len(told) else set()
        self._recalled &= here
        self._copies = {origin: at for origin, at in self._copies.items() if origin in here}
