"""Crash enumeration of the installation of another member's snapshot: from the first byte fetched to the reset log.

For every disk that can result, the node starts either with the old log and state, or with the snapshot and a log that
goes on from it: never with a log that begins after the state.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from crc32c import crc32c

from dledger.clock import Clock
from dledger.config import Member, ReplicationConfig, ServerConfig
from dledger.core.messages import SnapshotFetch
from dledger.monitoring import Conditions
from dledger.rpc.peers.codec import SnapshotRequest
from dledger.rpc.peers.exchanges import PeerSnapshotClient
from dledger.runtime.threads import Supervisor
from dledger.statemachine.commands import Duplicates
from dledger.statemachine.fetching import SnapshotFetcher
from dledger.statemachine.host import MachineHost
from dledger.statemachine.snapshots import PRODUCERS_FILE, STATE_FILE, SnapshotFile, SnapshotMeta, encode_meta
from dledger.store.fs import FileSystem
from dledger.types import NO_INDEX, Boundary, Configuration, LogIndex, NodeId, Position, Term
from tests.crash.crash_fs import RecordingFs, crash_states
from tests.support.cluster import N0, N1
from tests.support.counting import History
from tests.support.sweeps import fewer, thinned
from tests.unit.dledger.store.support import UnsyncedFs, abandon, fill, open_store, small_config

OLD_LAST, COMMITTED = 9, 6
AT = Boundary(LogIndex(40), Term(1), Position(5000), 77)
SIZES = {"segment_bytes": 512, "index_segment_bytes": 128, "warm_bytes": 128}
BODIES = [f"{number}" for number in range(AT.index + 1)]


class Sender:
    """The leader, which sends pieces of ten bytes; in the place of ``PeerSnapshotClient``."""

    peers: tuple[NodeId, ...] = (N1,)

    def __init__(self) -> None:
        self.files = {
            STATE_FILE: json.dumps(BODIES).encode(),
            PRODUCERS_FILE: b"".join(Duplicates(ReplicationConfig()).view(0).encode()),
        }
        files = {name: SnapshotFile(len(content), crc32c(content)) for name, content in self.files.items()}
        self.description = encode_meta(SnapshotMeta(AT, None, 0, 1, files))

    @contextmanager
    def transfer(self, _peer: NodeId, _request: SnapshotRequest) -> Iterator[Sender]:
        yield self

    def pieces(self, file: str, offset: int, length: int) -> Iterator[bytes]:
        for start in range(offset, length, 10):
            yield self.files[file][start : start + 10]

    def close(self) -> None:
        pass


class Installed:
    """A node's log and state machine, without the node."""

    def __init__(self, directory: Path, fs: FileSystem) -> None:
        self.failed = threading.Event()
        self.supervisor = Supervisor(lambda _error: self.failed.set())
        self.clock, self.machine = Clock(), History()
        self.conditions = Conditions("n0", self.clock)
        store = small_config(directory, **SIZES)
        self.log = open_store(store, fs)
        config = ServerConfig(node_id=N0, members=(Member(N0, "127.0.0.1", 1),), store=store)
        try:
            self.host = MachineHost(
                config, self.machine, self.log, self.clock, self.supervisor, self.conditions, lambda: None
            )
        except BaseException:
            abandon(self.log)
            raise

    def fetch(self) -> None:
        """Fetch the leader's snapshot, and wait until the log is reset to it and durable."""
        done = threading.Event()

        def reset(at: Boundary, configuration: Configuration | None) -> bool:
            self.log.reset(at, configuration)
            self.log.set_committed(at.index)
            self.log.flush()
            if self.host.applied_index == at.index:
                done.set()
            return True

        self.host.reset_log = reset
        fetcher = SnapshotFetcher(
            "n0",
            self.host,
            self.host.snapshots,
            self.log,
            cast(PeerSnapshotClient, Sender()),
            self.clock,
            self.supervisor,
            self.conditions,
            leader=lambda: N1,
            is_learner=lambda: False,
            fenced=lambda: None,
        )
        self.host.start()
        fetcher.start()
        fetcher.want(SnapshotFetch(N1, LogIndex(20)))
        assert done.wait(30)
        fetcher.stop(60)
        self.host.stop(graceful=False)
        assert not self.failed.is_set()

    def abandon(self) -> None:
        self.host.stop(graceful=False)
        abandon(self.log)


@pytest.mark.sweep
def test_no_crash_of_an_installation_leaves_a_log_without_its_state(tmp_path: Path) -> None:
    """S8: and what was reported as done is done."""
    base, fs = tmp_path / "run", RecordingFs()
    node = Installed(base, fs)
    fill(node.log, OLD_LAST + 1, 60)
    node.log.set_committed(LogIndex(COMMITTED))
    node.log.flush()
    node.log.sync_checkpoint()
    start = len(fs.changes)
    node.fetch()
    assert (node.log.begin, node.machine.bodies) == (AT, [body.encode() for body in BODIES])

    seen: dict[bytes, bool] = {}
    for at in thinned(range(start, len(fs.changes) + 1)):
        for state in crash_states(fs.changes, at):
            content = state.content
            if content not in seen:
                disk = tmp_path / "disk"
                state.write_to(base, disk)
                seen[content] = _is_new(disk)
                shutil.rmtree(disk)
            assert seen[content] or at < len(fs.changes), f"not installed after all, lost {state.lost}"
    assert len(seen) > fewer(20, 4)
    assert set(seen.values()) == {False, True}, "the sweep met both sides"
    abandon(node.log)


def _is_new(disk: Path) -> bool:
    """Whether the node starts with the snapshot; if not, with all that it had."""
    node = Installed(disk, UnsyncedFs())
    try:
        log, applied = node.log, node.host.applied_index
        assert log.begin.index <= applied <= log.last.index
        if applied == NO_INDEX:
            assert (log.begin.index, log.last.index) == (NO_INDEX, OLD_LAST)
            assert node.machine.bodies == []
            return False
        assert applied == AT.index
        assert (log.begin, log.last.index, log.committed_index) == (AT, AT.index, AT.index)
        assert node.machine.bodies == [body.encode() for body in BODIES]
        return True
    finally:
        node.abandon()
