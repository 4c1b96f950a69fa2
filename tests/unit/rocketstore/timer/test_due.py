"""What a leader delivers, in which order, and where its successor goes on: against every message there is."""

from __future__ import annotations

import random
from itertools import count

import pytest

from rocketstore.timer import due as due_module
from rocketstore.timer.due import DueTable
from rocketstore.timer.hours import (
    ENTRY,
    NOTHING_DELIVERED,
    EntryKind,
    TimedEntry,
    TimedProgress,
    decode_entries,
    entries_of,
    open_entries,
)
from tests.support.sweeps import thinned

HOUR = 3_600_000


def entry(due_ms: int, offset: int, origin: int = -1, kind: EntryKind = EntryKind.MESSAGE) -> TimedEntry:
    return TimedEntry(due_ms, offset, offset if origin < 0 else origin, offset * 100, 0, 100, kind)


def test_of_a_message_the_newest_record_counts_and_none_once_it_is_recalled() -> None:
    """T5, T6: a copy replaces what it copies, a recall ends all of them."""
    known = [
        entry(9, 0),
        entry(5, 1),
        entry(5, 2, 1, EntryKind.COPY),
        entry(7, 3),
        entry(7, 4, 3, EntryKind.RECALL),
        entry(5, 5),
        entry(5, 6, 1, EntryKind.COPY),
    ]
    found = open_entries(entries_of(known))
    assert found[["due_ms", "queue_offset", "origin"]].tolist() == [(5, 5, 5), (5, 6, 1), (9, 0, 0)]


def test_entries_are_read_as_they_were_written() -> None:
    made = [entry(1 << 40, 1 << 41, 7, EntryKind.RECALL), entry(2, 3)]
    found = decode_entries(b"".join(one.encode() for one in made) + b"torn")
    assert [TimedEntry(*map(int, row)) for row in found] == made
    assert len(made[0].encode()) == ENTRY.size


class World:
    """A group's log of timed messages and its leaders, one after the other, each with a table of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.log: list[TimedEntry] = []
        self.now_ms = 1000
        self.progress = NOTHING_DELIVERED
        """Replicated."""
        self.delivered: list[int] = []
        self.recalled: set[int] = set()
        self.forgotten: list[int] = []
        """Delivered by leaders that died before they noted it."""
        self.lead()

    def lead(self) -> None:
        self.table = DueTable(self.progress)
        self.table.load(entries_of(self.log), HOUR)
        self.pending: list[TimedEntry] = []

    def send(self) -> None:
        """Most are due soon, at few different times; some are late."""
        due_ms = max(0, self.now_ms + self.random.randint(-5, 12))
        self._store(entry(due_ms, len(self.log)))

    def copy(self) -> None:
        """Of one that waits."""
        waiting = [
            one
            for one in open_entries(entries_of(self.log))
            if one["due_ms"] > max(self.now_ms + 5, self.table.progress.due_ms + 1)
        ]
        if waiting:
            one = self.random.choice(waiting)
            self._store(entry(int(one["due_ms"]), len(self.log), int(one["origin"]), EntryKind.COPY))

    def recall(self) -> None:
        messages = [one for one in self.log if one.kind == EntryKind.MESSAGE and one.origin not in self.recalled]
        if messages:
            origin = self.random.choice(messages).origin
            self.table.add(self.pending)
            self.pending = []
            if self.table.find(origin) is not None:
                assert origin not in self.delivered or origin in self.forgotten
                self.recalled.add(origin)
                due_ms = next(one.due_ms for one in self.log if one.origin == origin)
                self._store(entry(due_ms, len(self.log), origin, EntryKind.RECALL))

    def _store(self, one: TimedEntry) -> None:
        self.log.append(one)
        self.pending.append(one)

    def round(self, *, cut: bool) -> None:
        """Deliver what is due, in part if ``cut``: then this leader dies, and what it noted last is what is known."""
        self.table.add(self.pending)
        self.pending = []
        made = self.table.begin_round(self.now_ms, len(self.log))
        if made is None:
            return
        end = self.random.randint(0, len(made)) if cut else len(made)
        noted = self.random.randint(0, end)
        before, self.progress = self.progress, made.progress(noted)
        assert self.progress.includes(before)  # never back
        offsets = made.entries["queue_offset"].tolist()
        again = [at for at, row in enumerate(made.entries) if self.progress.settles(row["due_ms"], row["queue_offset"])]
        assert again == list(range(noted)), f"settled: {again}, delivered and noted: {noted} of {offsets}"
        for at, row in enumerate(made.entries[:end]):
            if self.table.is_current(int(row["origin"]), int(row["queue_offset"])):
                assert int(row["due_ms"]) <= max(self.now_ms, before.due_ms)
                assert row["origin"] not in self.recalled
                self.delivered.append(int(row["origin"]))
                if at >= noted and cut:
                    self.forgotten.append(int(row["origin"]))
        if not cut:
            self.table.end_round(made)
            self.progress = self.table.progress


@pytest.mark.parametrize("seed", thinned(range(600), 120))
def test_every_message_is_delivered_and_again_only_after_a_failover(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """T3, T4, T5, T6: none before its time, none that was recalled, none twice under one leader, and each of the others
    in the end, whatever leaders die in between, and however small rounds are.
    """
    monkeypatch.setattr(due_module, "ROUND_MAX", 1 + seed % 5)
    monkeypatch.setattr(due_module, "_FRESH_MAX", seed % 7)
    world = World(seed)
    for _ in range(120):
        step = world.random.random()
        if step < 0.45:
            world.send()
        elif step < 0.5:
            world.copy()
        elif step < 0.55:
            world.recall()
        elif step < 0.85:
            world.now_ms += world.random.randint(0, 3)
            world.round(cut=False)
        elif step < 0.9:
            world.now_ms = max(1, world.now_ms - 4)  # T9: the clock is set back
        else:
            world.round(cut=True)
            world.lead()
    unsettled = len(world.delivered)
    world.lead()
    world.now_ms += 1000
    for _ in count():
        world.round(cut=False)
        if world.table.next_due_ms() is None and not world.pending:
            break
    sent = {one.origin for one in world.log if one.kind == EntryKind.MESSAGE}
    assert set(world.delivered) | world.recalled == sent
    assert world.recalled & set(world.delivered) <= set(world.forgotten)
    assert len(world.delivered) - len(set(world.delivered)) <= len(world.forgotten)
    assert len(set(world.delivered[unsettled:])) == len(world.delivered[unsettled:])  # the last leader repeats nothing


def test_what_is_due_at_one_time_is_in_the_order_in_which_it_was_stored() -> None:
    """T3: by due time, then by queue offset; what came too late goes first."""
    table = DueTable(TimedProgress(10, 3, 0))
    table.load(entries_of([entry(5, 1), entry(12, 2), entry(11, 4), entry(12, 5)]), HOUR)
    table.add([entry(12, 6), entry(3, 7), entry(9, 8)])
    made = table.begin_round(12, 9)
    assert made is not None
    assert made.entries["queue_offset"].tolist() == [7, 8, 4, 2, 5, 6]
    assert [tuple(made.progress(done)) for done in range(7)] == [
        (10, 7, 0), (10, 8, 0), (10, 9, 4), (11, 9, 2), (11, 9, 5), (11, 9, 6), (12, 9, 0),
    ]  # fmt: skip


def test_a_copy_that_arrives_after_its_message_was_loaded_as_recalled_is_none() -> None:
    """T5, T6: it was on its way when the recall was stored."""
    table = DueTable(NOTHING_DELIVERED)
    table.load(entries_of([entry(5, 0), entry(5, 1, 0, EntryKind.RECALL), entry(6, 2)]), HOUR)
    table.add([entry(5, 3, 0, EntryKind.COPY), entry(6, 4, 2, EntryKind.COPY)])
    made = table.begin_round(10, 5)
    assert made is not None
    current = [one for one in made.entries.tolist() if table.is_current(one[2], one[1])]
    assert [one[1] for one in current] == [4]


def test_what_is_in_a_round_cannot_be_found_any_more_and_the_next_one_can() -> None:
    table = DueTable(NOTHING_DELIVERED)
    table.load(entries_of([entry(5, 0), entry(6, 1)]), HOUR)
    table.add([entry(5, 2), entry(7, 3)])
    made = table.begin_round(5, 4)
    assert made is not None
    assert [table.find(origin) is not None for origin in range(5)] == [False, True, False, True, False]
    assert (table.next_due_ms(), table.count_due(6)) == (6, 1)
    table.end_round(made)
    assert (table.next_due_ms(), len(table)) == (6, 2)


def test_a_message_is_found_by_its_time_and_without() -> None:
    """T5: of many, and the newest record of it, wherever that came from."""
    table = DueTable(NOTHING_DELIVERED)
    table.load(entries_of([entry(5 + number // 2, number) for number in range(9)]), HOUR)
    table.add([entry(6, 9, 2, EntryKind.COPY), entry(7, 10), entry(7, 11, 5, EntryKind.RECALL)])
    for due_ms in (None, 6, 7):
        found = [table.find(origin, due_ms) for origin in (2, 3, 4, 10, 5, 99)]
        offsets = [one.queue_offset if one is not None else None for one in found]
        assert offsets == [9, 3 if due_ms != 7 else None, 4 if due_ms != 6 else None, 10, None, None]
    assert [table.is_recalled(origin) for origin in (5, 4)] == [True, False]


def test_what_came_while_its_hour_was_read_is_in_order() -> None:
    """T3: entries of the hours that are loaded now may have been added before."""
    table = DueTable(NOTHING_DELIVERED)
    table.load(entries_of([entry(5, 0)]), HOUR)
    table.add([entry(HOUR + 5, 3), entry(6, 4), entry(HOUR + 9, 5, 1, EntryKind.RECALL)])
    table.load(entries_of([entry(HOUR + 9, 1), entry(HOUR + 7, 2)]), 2 * HOUR)
    made = table.begin_round(HOUR + 100, 6)
    assert made is not None
    assert made.entries["queue_offset"].tolist() == [0, 4, 3, 2, 1]
    assert [table.is_current(origin, origin) for origin in (0, 1, 2)] == [True, False, True]
