"""Crash enumeration of a group's first start on a plain broker's log: cut at every change, with unsynced ones lost.

For every disk that can result, the next start takes the old log over by itself, and

- every message that the plain broker had acknowledged after its flush is there, and nothing that was never put;
- once the group's log has had a durable entry, it has it still, where the old log ends, and the old log ends there;
- until then, the plain broker may go on instead.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.store.file_store import FileStore
from dledger.store.fs import FileSystem
from dledger.store.identity import layout_of
from dledger.types import LogIndex, Term
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.message.record import decode_record
from rocketstore.store.takeover import take_over
from rocketstore.types import FlushDiskType
from tests.crash.crash_fs import CrashState, RecordingFs, crash_states
from tests.crash.test_message_store_crash import StoppedWallClock, tiny_config
from tests.unit.rocketstore.bench import UnsyncedFs, fill, make_store

MESSAGES = 16
ENTRIES = [b"first", b"second"]


def node_config(root: Path) -> StoreConfig:
    """A member's log with segments as large as the plain log's files."""
    return StoreConfig(root, segment_bytes=KIB, index_segment_bytes=320)


def open_node(config: MessageStoreConfig, fs: FileSystem) -> FileStore:
    """As a broker in DLedger mode starts: the old log is taken over, then the node opens its own."""
    node = node_config(config.store_path_root_dir)
    old = take_over(config, layout_of(node, "n0"), KIB, clock=StoppedWallClock(), fs=fs)
    assert old is not None
    return FileStore.open(
        node, cluster_id="c", group="G", node_id="n0", clock=Clock(), fs=fs, first_position=old.record.end
    )


def bodies_of(log: PlainCommitLog) -> list[int]:
    """What a plain log holds."""
    found, offset = list[int](), log.min_offset
    while True:
        scanned = log.scan(offset, 4 * KIB)
        for head in scanned.heads:
            record = log.read(head.offset, head.size)
            assert record is not None
            found.append(int(decode_record(record).body.rstrip(b".")))
        if scanned.next_offset == offset:
            return found
        offset = scanned.next_offset


def old_bodies(config: MessageStoreConfig, end: int) -> list[int]:
    """What the sealed log holds."""
    log = PlainCommitLog(config, clock=Clock(), fs=UnsyncedFs())
    log.load_sealed(end)
    try:
        assert log.max_offset == end
        return bodies_of(log)
    finally:
        log.shutdown()


def plain_bodies(config: MessageStoreConfig) -> list[int]:
    """What a plain broker finds that goes on."""
    store = make_store(config, clock=StoppedWallClock())
    try:
        store.load()
        assert isinstance(store.log, PlainCommitLog)
        return bodies_of(store.log)
    finally:
        store.shutdown()


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_no_crash_of_the_first_start_loses_anything(tmp_path: Path, *, torn: bool) -> None:
    """A crash may come before, between and after all steps, and take any of what is not synced; also if the plain
    broker was killed in the middle of a record.
    """
    root, disk = tmp_path / "recorded", tmp_path / "disk"
    config, fs = tiny_config(root, FlushDiskType.SYNC_FLUSH), RecordingFs()
    store = make_store(replace(config, message_index_enable=False), fs=fs, clock=StoppedWallClock())
    store.load()
    store.start()
    fill(store, MESSAGES, size=30)
    state, written_to = next(crash_states(fs.changes, len(fs.changes))), store.log.end_offset  # it is killed
    store.shutdown()
    if torn:
        last = config.commit_log_dirs[0] / f"{written_to - written_to % KIB:020d}"
        at, record = written_to % KIB, state.files[last][:40]
        assert at + 100 < KIB
        state.files[last] = state.files[last][:at] + record + state.files[last][at + len(record) :]
    killed, fs = tmp_path / "killed", RecordingFs()
    _copy_by(fs, state, root, killed)
    config = replace(config, store_path_root_dir=killed)
    begun = len(fs.changes)
    node = open_node(config, fs)
    end = int(node.end_position)
    assert end == written_to - written_to % KIB + KIB
    node.append_as_leader(Term(1), ENTRIES)
    node.flush()
    durable = len(fs.changes)
    node.close()

    seen = set[bytes]()
    for at in range(begun, len(fs.changes) + 1):
        for state in crash_states(fs.changes, at):
            if state.content in seen:
                continue
            seen.add(state.content)
            shutil.rmtree(disk, ignore_errors=True)
            state.write_to(killed, disk)
            there = replace(config, store_path_root_dir=disk)
            reopened = open_node(there, UnsyncedFs())
            try:
                assert reopened.begin.position == end, state
                if at >= durable:
                    found = [reopened.read(LogIndex(index)).body for index in range(len(ENTRIES))]
                    assert found == ENTRIES, state
                has_entries = reopened.last.index >= 0
            finally:
                reopened.close()
            assert old_bodies(there, end) == list(range(MESSAGES)), state
            if not has_entries:
                assert plain_bodies(there) == list(range(MESSAGES)), state
    assert len(seen) > 30


def _copy_by(fs: RecordingFs, state: CrashState, source: Path, target: Path) -> None:
    """Put a disk's files below ``target``, recorded and durable."""
    for path, content in sorted(state.files.items()):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        fd = fs.create(place)
        fs.write(fd, content, 0)
        fs.sync(fd)
        fs.close(fd)
        fs.sync_dir(place.parent)
