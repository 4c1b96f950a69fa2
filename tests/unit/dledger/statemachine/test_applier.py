"""The applier alone, with entries given to it: ranges that end anywhere, leaders that replace each other's entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from dledger.clock import Clock
from dledger.conditions import Conditions
from dledger.config import Member, ServerConfig
from dledger.core.producer_payload import Registration, encode_registration
from dledger.errors import DLedgerError, FencedError, TermChangedError
from dledger.runtime.supervisor import Supervisor
from dledger.statemachine.applier import Applier
from dledger.statemachine.commands import CommandBatch
from dledger.statemachine.snapshots import SnapshotStore
from dledger.store.file_store import FileStore
from dledger.store.fs import FileSystem
from dledger.types import NO_INDEX, AppendedBatch, Entry, LogIndex, Magic, Position, Term
from tests.support.cluster import N0
from tests.support.counting import History


@dataclass
class GivenLog:
    """A log of given entries, read in ranges of which each ends where it is told."""

    entries: list[Entry]
    ends: list[int] = field(default_factory=list)

    @property
    def committed_index(self) -> LogIndex:
        return self.entries[-1].index if self.entries else NO_INDEX

    def read_range(self, first: LogIndex, last: LogIndex, _bytes_max: int) -> list[Entry]:
        end = next((one for one in self.ends if one >= first), last)
        return [one for one in self.entries if first <= one.index <= end]


def entry(index: int, term: int, body: bytes, *, slot: int = 0) -> Entry:
    return Entry(LogIndex(index), Term(term), Position(100 * index), body, channel=slot)


def registration(index: int, name: str, slot: int, *, dropped: int = 0) -> Entry:
    body = encode_registration(Registration(name, slot, dropped))
    return Entry(LogIndex(index), Term(1), Position(100 * index), body, Magic.NOOP)


def applier_of(
    log: GivenLog, directory: Path, machine: History, fenced: Callable[[], DLedgerError | None] = lambda: None
) -> Applier:
    config = ServerConfig(node_id=N0, members=(Member(N0, "127.0.0.1", 1),))
    store = cast("FileStore", log)  # all that the applier uses of it
    return Applier(
        config,
        machine,
        store,
        SnapshotStore(FileSystem(), directory),
        Clock(),
        Supervisor(lambda _error: None),
        Conditions(N0),
        applied=lambda: None,
        lacks=lambda _begin: None,
        fenced=fenced,
    )


def submit(applier: Applier, index: int, term: int, count: int, answers: list[object]) -> CommandBatch:
    """A batch that its leader wrote from ``index`` on."""
    applier.waiters.reserve(count)
    batch = CommandBatch(applier.waiters, [b"x"] * count, None, answers.append)
    batch.bodies(Term(term))
    batch.placed(AppendedBatch(Term(term), LogIndex(index), LogIndex(index + count - 1), (Position(0),) * count))
    return batch


def test_a_batch_of_which_a_later_leader_replaced_the_rest_takes_no_results(tmp_path: Path) -> None:
    """S3: its first entry was committed and applied before the change; the next command's result is that one's."""
    log = GivenLog([entry(0, 1, b"a")])
    applier, lost, found = applier_of(log, tmp_path, History()), list[object](), list[object]()
    batch = submit(applier, 0, 1, 2, lost)
    applier._step()
    batch.failed(TermChangedError("another leader"))
    submit(applier, 2, 3, 1, found)
    log.entries += [Entry(LogIndex(1), Term(2), Position(100), b"", Magic.NOOP), entry(2, 3, b"b")]
    applier._step()

    assert [type(one) for one in lost] == [TermChangedError]
    assert found == [(b"2",)]
    assert len(applier.waiters) == 0


@pytest.mark.parametrize("ends", [[], [0], [1], [2], [0, 1, 2, 3]])
def test_what_is_known_of_producers_does_not_depend_on_the_ranges(tmp_path: Path, ends: list[int]) -> None:
    """S4: the slot goes to another producer in the range of the first one's entry, or in a later one."""
    log = GivenLog(
        [
            registration(0, "first", 1),
            entry(1, 1, b"a", slot=1),
            registration(2, "second", 1, dropped=1),
            entry(3, 1, b"b", slot=1),
        ],
        ends,
    )
    applier = applier_of(log, tmp_path, History())
    applier._step()

    assert applier.applied_index == 3
    assert applier._duplicates.find("first", 0) is None
    assert applier._duplicates.find("second", 0) == b"2"
    (results,) = (kept for _, kept in applier._duplicates.view(0).results)
    assert results == ((0, b"2"),)


def test_a_fence_ends_it_between_two_ranges(tmp_path: Path) -> None:
    """S11: it may be far behind, and what it applies would be of another history."""
    machine = History()

    def fenced() -> DLedgerError | None:
        return FencedError("most have another history") if machine.bodies else None

    log = GivenLog([entry(index, 1, b"a") for index in range(4)], [0, 1, 2, 3])
    applier, answers = applier_of(log, tmp_path, machine, fenced), list[object]()
    submit(applier, 3, 1, 1, answers)
    applier._step()

    assert len(machine.bodies) == 1
    assert [type(one) for one in answers] == [FencedError]


def test_the_end_of_what_is_applied_is_that_of_the_last_entry(tmp_path: Path) -> None:
    """S6: a snapshot's boundary is where the log goes on, also if a no-op comes last."""
    log = GivenLog([entry(0, 1, b"a"), registration(1, "p", 1), entry(2, 2, b"bc"), registration(3, "q", 2)], [])
    for count, last in enumerate(log.entries, 1):
        applier = applier_of(GivenLog(log.entries[:count]), tmp_path, History())
        applier._step()
        assert (applier.at.index, applier.at.term) == (last.index, last.term)
        assert applier.at.position == last.position + 48 + len(last.body)
