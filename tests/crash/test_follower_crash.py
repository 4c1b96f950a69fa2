"""Crash enumeration of a follower's message store: its log grows, loses a tail, begins anew behind what it had.

The node is left out: the test writes to the log what a leader's pushes would. For every disk that can result, the store
opens, shows nothing that was not committed somewhere, and holds, once it was sent what it lacks, exactly what the
leader holds: every message in its queue, under its offset, in the index once, and the next offset of each queue.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dledger.config import Member, ServerConfig
from dledger.rpc.ports import CommitEvent, NodeEvent
from dledger.store.durable_state import BOOT_RECORD_FILE
from dledger.store.file_store import FileStore
from dledger.store.fs import FileSystem
from dledger.types import LogIndex
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.store.message_store import MessageStore
from rocketstore.types import FlushDiskType, GetMessageStatus
from tests.crash.crash_fs import CrashState, crash_states
from tests.crash.test_message_store_crash import QUEUES, MappedSlotsFs, StoppedWallClock, tiny_config
from tests.support.sweeps import fewer, thinned
from tests.support.waiting import wait_until
from tests.unit.dledger.store.support import runs_of
from tests.unit.rocketstore.bench import FOREVER_MS, WAIT_S, UnsyncedFs
from tests.unit.rocketstore.commit_log.replicas import members_of, node_config
from tests.unit.rocketstore.store.test_message_store_replicated import opened, promote

SEGMENT_BYTES = 2048
BODY_BYTES = 120
CRASHES = 30
"""That are looked at by default."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of a leader's."""

    queue: int
    queue_offset: int
    position: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Source:
    """A leader's directory, and all messages that it ever stored."""

    config: MessageStoreConfig
    node: ServerConfig
    stored: tuple[Stored, ...]

    @contextmanager
    def log(self) -> Iterator[FileStore]:
        """Its log."""
        found = _open_log(self.node, UnsyncedFs())
        yield found
        found.close()


def _open_log(node: ServerConfig, fs: FileSystem) -> FileStore:
    return FileStore.open(
        node.store,
        cluster_id=node.effective_cluster_id,
        group=node.group,
        node_id=node.node_id,
        clock=StoppedWallClock(),
        fs=fs,
    )


def _settings(root: Path, members: tuple[Member, ...]) -> tuple[MessageStoreConfig, ServerConfig]:
    root.mkdir(exist_ok=True)
    config = replace(tiny_config(root, FlushDiskType.SYNC_FLUSH), enable_dledger_commit_log=True)
    node = node_config(root, members, segment_bytes=SEGMENT_BYTES)
    return config, replace(node, store=replace(node.store, index_segment_bytes=320, warm_bytes=0, max_entry_bytes=1024))


def _lead(source: Source, count: int, *, expire: bool = False) -> Source:
    """Go on as leader of a further term, with that many more messages; ``expire``: until the log begins later."""
    stored = list(source.stored)
    node = source.node
    if expire:
        store = replace(node.store, retention_hours=0, delete_hour=tuple(range(24)), clean_interval_ms=20)
        node = replace(node, store=replace(store, disk_full_ratio=1.0, disk_check_ratio=0.999, disk_clean_ratio=0.9995))
    with opened(replace(source.config, flush_interval_consume_queue=20), node.members, node=node) as leader:
        promote(leader)
        for _ in range(count):
            number = len(stored)
            body = f"{number} of {count} ".encode().ljust(BODY_BYTES, b".")
            result = leader.put(Message("T", body, number % QUEUES, {"KEYS": f"k{number}"}))
            assert result.stored is not None
            stored.append(Stored(number % QUEUES, result.stored.queue_offset, result.stored.offset, body))
        assert leader.wait_dispatched(WAIT_S)
        if expire:
            wait_until(lambda: leader.log.min_offset > 0, "the log begins later", WAIT_S)
        leader.flush()
    return replace(source, stored=tuple(stored))


@dataclass(frozen=True, slots=True)
class Sources:
    """``first`` lost its end to ``second``; ``later`` is that one, after retention."""

    first: Source
    second: Source
    later: Source
    common: LogIndex


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Three leaders' logs."""
    base, members = tmp_path_factory.mktemp("leaders"), members_of(1)

    def at(name: str, like: Source | None = None) -> Source:
        if like is not None:
            shutil.copytree(like.config.store_path_root_dir, base / name)
        return Source(*_settings(base / name, members), () if like is None else like.stored)

    begun = _lead(at("first"), 16)
    with begun.log() as log:
        common = log.last.index
    second = _lead(_lead(at("second", begun), 0), 12)
    later = _lead(at("later", second), 16, expire=True)
    return Sources(_lead(begun, 9), second, later, common)


class Node:
    """What a replicated commit log needs of its node."""

    def __init__(self, config: ServerConfig, fs: FileSystem) -> None:
        self.config = config
        self.log = _open_log(config, fs)
        self.bodies = MESSAGES
        self._listener: Callable[[NodeEvent], None] = lambda _event: None

    def keep_from(self, *_: object) -> None:
        """It removes nothing."""

    def add_batch_hook(self, hook: object) -> None:
        """It leads never."""

    def subscribe(self, listener: Callable[[NodeEvent], None]) -> Callable[[], None]:
        """One is enough."""
        self._listener = listener
        return lambda: None

    def start(self) -> None:
        """There are no threads."""

    def stop(self) -> None:
        """Close the log."""
        self.log.close()

    def follow(self, leader: FileStore, last: int | None = None, commit: int | None = None) -> None:
        """Take over what the leader has up to ``last``, and that it is committed up to ``commit`` (default: all)."""
        log = self.log
        if log.last.index < leader.begin.index:
            log.reset(leader.begin)
        common = min(log.last.index, leader.last.index)
        while common > max(log.begin.index, leader.begin.index) and log.chain_crc_at(common) != leader.chain_crc_at(
            common
        ):
            common = LogIndex(common - 1)
        if common < log.last.index:
            log.truncate(LogIndex(common + 1))
        end = leader.last.index if last is None else last
        for run in runs_of(leader, log.last.index + 1, 700):
            if run.first_index <= end:
                log.append_run(log.check_run(run), run.first_index)
        log.flush()
        committed = LogIndex(min(log.last.index, end if commit is None else commit))
        log.set_committed(committed)
        self._listener(CommitEvent(committed))


@contextmanager
def _following(config: MessageStoreConfig, node: ServerConfig, fs: FileSystem) -> Iterator[tuple[Node, MessageStore]]:
    """A follower's store."""
    clock = StoppedWallClock()
    config.store_path_root_dir.mkdir(exist_ok=True)
    member = Node(node, fs)
    log = ReplicatedCommitLog(member, config, clock=clock)  # type: ignore[arg-type]  # as much of it as is needed
    store = MessageStore(config, log, clock=clock, fs=fs)
    try:
        store.load()
        store.start()
        yield member, store
    finally:
        store.shutdown()


def _lost_tail(member: Node, store: MessageStore, sources: Sources) -> None:
    with sources.first.log() as leader:
        member.follow(leader, sources.common - 6)
        assert store.wait_dispatched(WAIT_S)
        store.flush()
        member.follow(leader, commit=sources.common)
    assert store.wait_dispatched(WAIT_S)
    with sources.second.log() as leader:
        member.follow(leader)
    assert store.wait_dispatched(WAIT_S)
    store.flush()


def _installed(member: Node, store: MessageStore, sources: Sources) -> None:
    with sources.later.log() as later:
        begin = later.begin.index
        with sources.first.log() as leader:
            member.follow(leader, begin - 6)
            assert store.wait_dispatched(WAIT_S)
            store.flush()
            member.follow(leader, begin - 1, commit=begin - 3)
        assert store.wait_dispatched(WAIT_S)
        member.follow(later, later.last.index - 4)
        assert member.log.begin.index == begin
        assert store.wait_dispatched(WAIT_S)
        store.flush()
        member.follow(later)
    assert store.wait_dispatched(WAIT_S)


@dataclass(frozen=True, slots=True)
class Truth:
    """The leader that a crashed follower comes back to, its log, and what may be there before."""

    source: Source
    log: FileStore
    known: frozenset[tuple[int, int, bytes]]

    def look(self, member: Node, store: MessageStore) -> None:
        """Before it is sent anything, what is there is right; afterwards it is complete."""
        stored = self.source.stored
        for queue in range(QUEUES):
            assert _read(store, queue) <= self.known
        member.follow(self.log)
        assert store.wait_dispatched(WAIT_S)
        kept = [one for one in stored if one.position >= store.log.min_offset]
        for queue in range(QUEUES):
            expected = {(one.queue, one.queue_offset, one.body) for one in kept if one.queue == queue}
            assert _read(store, queue) == expected
        for one in kept[:1] + kept[-1:]:
            records = store.query("T", f"k{stored.index(one)}", 8, 0, FOREVER_MS)
            assert [decode_record(record).body for record in records] == [one.body]
        store.rebuild_queue_offsets()
        following = {queue: sum(one.queue == queue for one in stored) for queue in range(QUEUES)}
        assert {queue: store.log.queue_offsets["T", queue] for queue in range(QUEUES)} == following


def _read(store: MessageStore, queue: int) -> set[tuple[int, int, bytes]]:
    found: set[tuple[int, int, bytes]] = set()
    at = max(0, store.min_offset("T", queue))
    while (result := store.get("T", queue, at, max_count=32)).status is GetMessageStatus.FOUND:
        messages = [decode_record(record) for record in result.records]
        found |= {(message.queue_id, message.queue_offset, message.body) for message in messages}
        at = result.next_offset
    return found


def check_all(tmp_path: Path, sources: Sources, kind: str, *, thorough: bool) -> int:
    """Check what crashes leave; gives how many disks were opened."""
    live, disk, fs = tmp_path / "live", tmp_path / "disk", MappedSlotsFs()
    steps, source = (_lost_tail, sources.second) if kind == "lost tail" else (_installed, sources.later)
    members = source.node.members
    with _following(*_settings(live, members), fs) as (member, store):
        start = len(fs.changes)
        steps(member, store, sources)
    changes, seen = fs.changes, set[bytes]()
    every = 1 if thorough else len(changes) // CRASHES
    known = frozenset((one.queue, one.queue_offset, one.body) for one in (*source.stored, *sources.first.stored))
    with source.log() as log:
        truth = Truth(source, log, known)
        for at in thinned(range(start, len(changes) + 1, every), 4):
            for state in crash_states(changes, at, lost_max=1 if thorough else 0):
                if state.content not in seen:
                    seen.add(state.content)
                    _check(state, live, disk, members, truth)
    return len(seen)


def _check(state: CrashState, live: Path, disk: Path, members: tuple[Member, ...], truth: Truth) -> None:
    state.write_to(live, disk)
    (disk / "dledger-n0" / BOOT_RECORD_FILE).unlink(missing_ok=True)  # of files that were copied
    try:
        with _following(*_settings(disk, members), UnsyncedFs()) as (member, store):
            truth.look(member, store)
    except BaseException as error:
        error.add_note(f"crash before change {state.at}, lost {state.lost}")
        raise
    shutil.rmtree(disk)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["lost tail", "installed"])
def test_no_crash_of_a_follower_keeps_it_from_what_the_leader_has(tmp_path: Path, sources: Sources, kind: str) -> None:
    """Wherever it was cut, with all or none of what was not synced."""
    assert check_all(tmp_path, sources, kind, thorough=False) > fewer(20, 5)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["lost tail", "installed"])
def test_no_crash_of_a_follower_at_any_change_keeps_it_from_what_the_leader_has(
    tmp_path: Path, sources: Sources, kind: str
) -> None:
    """At all of them."""
    assert check_all(tmp_path, sources, kind, thorough=True) > 100
