"""The applier alone, with entries given to it: ranges that end anywhere, leaders that replace each other's entries."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from dledger.clock import Clock
from dledger.config import Member, ServerConfig
from dledger.core.membership import encode_configuration
from dledger.core.noop_payload import Registration, encode_registration, encode_time
from dledger.errors import (
    CorruptLogError,
    DLedgerError,
    FencedError,
    ShutdownError,
    StateMachineError,
    TermChangedError,
)
from dledger.monitoring import ConditionKind, Conditions
from dledger.runtime.threads import Supervisor
from dledger.statemachine.applier import RESULT_BYTES_MAX, Applier, SnapshotJob
from dledger.statemachine.commands import CommandBatch
from dledger.statemachine.ports import Applied
from dledger.statemachine.snapshots import PRODUCERS_FILE, STATE_FILE, SnapshotBuilder, SnapshotMeta, SnapshotStore
from dledger.store.file_store import FileStore
from dledger.store.format import columns_of
from dledger.store.fs import FileSystem
from dledger.types import (
    NO_INDEX,
    AppendedBatch,
    ClusterMember,
    Configuration,
    Entry,
    EntryColumns,
    EntryId,
    LogIndex,
    Magic,
    NodeId,
    Position,
    Term,
)
from tests.support.cluster import N0
from tests.support.counting import History


@dataclass
class GivenLog:
    """A log of given entries, read in ranges of which each ends where it is told."""

    entries: list[Entry]
    ends: list[int] = field(default_factory=list)
    uncommitted: int = 0

    @property
    def last(self) -> EntryId:
        end = self.entries[-1]
        return EntryId(end.term, end.index)

    @property
    def committed_index(self) -> LogIndex:
        return LogIndex(self.last.index - self.uncommitted) if self.entries else NO_INDEX

    def read_columns(self, first: LogIndex, last: LogIndex, _bytes_max: int) -> EntryColumns:
        end = next((one for one in self.ends if one >= first), last)
        return columns_of([one for one in self.entries if first <= one.index <= end])


def entry(index: int, term: int, body: bytes, *, slot: int = 0) -> Entry:
    return Entry(LogIndex(index), Term(term), Position(100 * index), body, channel=slot)


def noop(index: int, body: bytes) -> Entry:
    return Entry(LogIndex(index), Term(1), Position(100 * index), body, Magic.NOOP)


class StateWriter:
    """A ``SnapshotWriter``."""

    def __init__(self, builder: SnapshotBuilder) -> None:
        self._builder = builder

    def write(self, data: bytes) -> None:
        self._builder.write(STATE_FILE, data)


def written(job: SnapshotJob, store: SnapshotStore) -> SnapshotMeta:
    """A durable snapshot."""
    with store.build(job.meta.index) as builder:
        job.state.write(StateWriter(builder))
        for part in job.producers.encode():
            builder.write(PRODUCERS_FILE, part)
        meta = replace(job.meta, files=builder.files())
        builder.commit(meta)
    return meta


def registration(index: int, name: str, slot: int, *, dropped: int = 0) -> Entry:
    body = encode_registration(Registration(name, slot, dropped))
    return noop(index, body)


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


def test_nothing_is_applied_before_it_is_committed(tmp_path: Path) -> None:
    """S1: what is only written may yet be replaced by another leader's entry."""
    log = GivenLog([entry(0, 1, b"a"), entry(1, 1, b"b")], uncommitted=1)
    machine = History()
    applier = applier_of(log, tmp_path, machine)

    applier._step()

    assert (machine.bodies, applier.applied_index) == ([b"a"], 0)
    log.uncommitted = 0
    applier._step()
    assert (machine.bodies, applier.applied_index) == ([b"a", b"b"], 1)


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


@pytest.mark.parametrize("ends", [[], [0], [1], [2], [0, 1, 2, 3, 4]])
def test_batches_get_the_results_of_their_own_entries(tmp_path: Path, ends: list[int]) -> None:
    """S3: in ranges that end within a batch, beside entries that nobody waits for."""
    log = GivenLog([entry(index, 1, b"a") for index in range(6)], ends)
    applier, first, second = applier_of(log, tmp_path, History()), list[object](), list[object]()
    submit(applier, 1, 1, 2, first)
    submit(applier, 4, 1, 2, second)
    applier._step()
    assert (first, second) == ([(b"2", b"3")], [(b"5", b"6")])
    assert len(applier.waiters) == 0


def test_a_batch_takes_no_result_of_another_term_in_the_same_range(tmp_path: Path) -> None:
    """S3: the rest of it was replaced by another leader's command, whose result goes to who sent that one."""
    log = GivenLog([entry(0, 1, b"a"), entry(1, 3, b"b")])
    applier, lost, found = applier_of(log, tmp_path, History()), list[object](), list[object]()
    submit(applier, 0, 1, 2, lost)
    submit(applier, 1, 3, 1, found)
    applier._step()
    assert (lost, found) == ([], [(b"2",)])


def test_applying_takes_no_call_for_each_entry(tmp_path: Path) -> None:
    """Every member applies every entry: a call of Python for each cost as much as replicating it."""

    class Idle(History):
        def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
            return [b""] * len(entries)

    entries = [registration(0, "p", 1), *(entry(index, 1, b"a", slot=1) for index in range(1, 1001))]
    applier = applier_of(GivenLog(entries), tmp_path, Idle())
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    read = applier._log.read_columns(LogIndex(0), LogIndex(1000), 0)
    sys.setprofile(count)
    try:
        applier._apply(read)
    finally:
        sys.setprofile(None)
    assert applier.applied_index == 1000
    assert calls < 200


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
    (told,) = answers
    assert isinstance(told, FencedError)
    assert told.outcome == "unknown"  # it is written, and the others may have committed it


def test_a_snapshot_holds_what_the_no_ops_say_and_is_loaded_with_it(tmp_path: Path) -> None:
    """S1, S6: members, time and producers; a member that starts from it goes on as one that has applied all."""
    members = (ClusterMember(N0, "h", 20911, uid=1 << 63), ClusterMember(NodeId("n1"), "h", 20912, uid=3 << 62))
    log = GivenLog(
        [
            noop(0, encode_configuration(Configuration(members[:1], NO_INDEX, Term(0), 1, 77))),
            registration(1, "p", 1),
            noop(2, encode_time(5000)),
            entry(3, 1, b"a", slot=1),
            noop(4, encode_configuration(Configuration(members, NO_INDEX, Term(0), 1, 78))),
            noop(5, encode_time(4000)),
            entry(6, 1, b"b", slot=1),
        ]
    )
    store, machine = SnapshotStore(FileSystem(), tmp_path), History()
    applier = applier_of(log, tmp_path, machine)
    applier._step()
    job = applier.save()
    assert job.meta.configuration is not None
    assert (job.meta.configuration.members, job.meta.configuration.index) == (members, 4)
    assert (job.meta.time_ms, job.meta.boundary.index) == (5000, 6)
    meta = written(job, store)

    again = History()
    loaded = applier_of(log, tmp_path, again)
    loaded.load(meta)
    log.entries.append(entry(7, 1, b"c", slot=1))
    for one in (applier, loaded):
        one._step()
    assert (again.seen, again.bodies) == (machine.seen[-1:], machine.bodies)
    assert loaded.save().meta == applier.save().meta
    assert loaded.save().producers == applier.save().producers


def test_commands_that_a_snapshot_replaces_are_answered(tmp_path: Path) -> None:
    """S3: those that were half applied and those that wait; their results are never known here."""
    newer = applier_of(GivenLog([entry(number, 1, b"%d" % number) for number in range(7)]), tmp_path, History())
    newer._step()
    meta = written(newer.save(), SnapshotStore(FileSystem(), tmp_path))
    machine, answers, installed = History(), list[object](), list[bool]()
    applier = applier_of(GivenLog([entry(0, 1, b"0")]), tmp_path, machine)
    submit(applier, 0, 1, 2, answers)
    submit(applier, 3, 1, 1, answers)
    applier._step()
    assert answers == []

    applier.install(meta, lambda: installed.append(True))
    applier._step()

    assert [type(one) for one in answers] == [StateMachineError, StateMachineError]
    assert (installed, applier.applied_index, len(applier.waiters), len(machine.bodies)) == ([True], 6, 0, 7)


@pytest.mark.parametrize("results", [[], [b"", b""], [bytes(RESULT_BYTES_MAX + 1)]])
def test_results_that_are_not_one_for_each_or_too_large_are_the_machines_fault(
    tmp_path: Path, results: list[bytes]
) -> None:
    """S2: they would go to other commands, or fill the memory of every member."""

    class Wrong(History):
        def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
            return results

    applier = applier_of(GivenLog([entry(0, 1, b"a")]), tmp_path, Wrong())
    with pytest.raises(StateMachineError, match="one for each"):
        applier._step()


def test_what_waits_is_told_when_the_node_stops(tmp_path: Path) -> None:
    """S3, S5: commands whose entries are not applied, and queries for later ones."""
    applier, answers, told = applier_of(GivenLog([]), tmp_path, History()), list[object](), list[object]()
    submit(applier, 3, 1, 1, answers)
    applier.when_applied(LogIndex(3), 1 << 60, lambda: told.append("applied"), told.append)
    applier.stop(60)
    assert [type(one) for one in (*answers, *told)] == [ShutdownError, ShutdownError]
    assert len(applier.waiters) == 0


def test_no_wait_ends_before_its_entry(tmp_path: Path) -> None:
    """S5: a read that does not see the entry would be one of the past."""
    log = GivenLog([entry(index, 1, b"a") for index in range(3)])
    applier, told = applier_of(log, tmp_path, History()), list[object]()
    for index in (2, 3):
        applier.when_applied(LogIndex(index), 1 << 60, lambda index=index: told.append(index), told.append)  # type: ignore[misc]
    applier._step()
    assert told == [2]


def test_a_damaged_entry_is_waited_for_and_told(tmp_path: Path) -> None:
    """S11: it is repaired meanwhile; then the machine goes on, and nothing is told any more."""

    class Damaged(GivenLog):
        is_damaged = True

        def read_columns(self, first: LogIndex, last: LogIndex, _bytes_max: int) -> EntryColumns:
            if self.is_damaged:
                raise CorruptLogError(Path("data/0"), 0, "a byte of it is another one", "it is repaired")
            return super().read_columns(first, last, _bytes_max)

    log, machine = Damaged([entry(0, 1, b"a")]), History()
    applier = applier_of(log, tmp_path, machine)
    assert applier._step() is not None, "it looks again by itself"
    assert [one.kind for one in applier._conditions.now()] == [ConditionKind.APPLIER_WAITING]
    log.is_damaged = False
    applier._step()
    assert machine.bodies == [b"a"]
    assert not applier._conditions.now()


def test_queries_and_apply_exclude_each_other(tmp_path: Path) -> None:
    """S5: a machine need not be thread-safe unless it says so."""
    inside, asked, both = threading.Event(), threading.Event(), list[str]()

    class Slow(History):
        def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
            inside.set()
            assert asked.wait(60)
            both.append("apply")
            return super().apply(entries)

        def query(self, request: bytes) -> bytes:
            both.append("query")
            return super().query(request)

    applier = applier_of(GivenLog([entry(0, 1, b"a")]), tmp_path, Slow())
    thread = threading.Thread(target=applier._step)
    thread.start()
    assert inside.wait(60)
    assert applier._machine_lock.locked()
    reader = threading.Thread(target=applier.query, args=(b"",))
    reader.start()
    asked.set()
    for one in (thread, reader):
        one.join(60)
    assert both == ["apply", "query"]


def test_a_query_names_no_entry_that_it_did_not_see(tmp_path: Path) -> None:
    """S5: whoever watches asks for what comes after that entry, and would miss it. The machine is asked meanwhile."""
    log, told = GivenLog([entry(0, 1, b"a")]), list[int]()

    class Asked(History):
        queries_are_concurrent = True

        def query(self, request: bytes) -> bytes:
            answer = super().query(request)
            log.entries.append(entry(1, 1, b"b"))
            applier._step()
            told.append(applier.applied_index)
            return answer

    applier = applier_of(log, tmp_path, Asked())
    applier._step()

    assert applier.query(b"") == (b'["a"]', 0)
    assert told == [1]


def test_entries_are_gathered_only_while_nobody_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up for each commit would cost appends half their rate; a command is answered at once nevertheless."""
    applier, woken = applier_of(GivenLog([entry(0, 1, b"a")]), tmp_path, History()), list[str]()
    monkeypatch.setattr(applier._worker, "wake", lambda: woken.append("woken"))
    applier.committed()
    assert woken == ["woken"]
    applier._step()

    applier.committed()
    assert woken == ["woken"]
    batch = submit(applier, 1, 1, 1, [])
    applier.committed()
    assert woken == ["woken"] * 2
    batch.failed(TermChangedError("lost"))
    applier.when_applied(LogIndex(9), 1 << 60, lambda: None, lambda _error: None)
    applier.committed()
    assert woken == ["woken"] * 4


def test_the_end_of_what_is_applied_is_that_of_the_last_entry(tmp_path: Path) -> None:
    """S6: a snapshot's boundary is where the log goes on, also if a no-op comes last."""
    log = GivenLog([entry(0, 1, b"a"), registration(1, "p", 1), entry(2, 2, b"bc"), registration(3, "q", 2)], [])
    for count, last in enumerate(log.entries, 1):
        applier = applier_of(GivenLog(log.entries[:count]), tmp_path, History())
        applier._step()
        assert (applier.at.index, applier.at.term) == (last.index, last.term)
        assert applier.at.position == last.position + 48 + len(last.body)
