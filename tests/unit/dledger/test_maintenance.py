"""The work on a log by time: often while it changes, seldom while it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger import maintenance
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.server import DLedgerServer
from dledger.types import AppendedBatch, NodeId
from dledger_cli.local.group import free_ports
from tests.support.cluster import Outcome
from tests.support.waiting import wait_until


@pytest.fixture
def resting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DLedgerServer]:
    """A group of one whose log has not changed for a while, and that looks at such a log once in an hour."""
    monkeypatch.setattr(maintenance, "_REST_INTERVAL_MS", 3_600_000)
    (port,) = free_ports(1)
    store = StoreConfig(tmp_path, segment_bytes=1 << 20, index_segment_bytes=1 << 16)
    members = (Member(NodeId("n0"), "127.0.0.1", port),)
    server = DLedgerServer(ServerConfig(node_id=NodeId("n0"), members=members, client_port=0, store=store))
    server.start()
    wait_until(lambda: server.status().committed_index >= 0 and _rests(server), "it leads, and rests")
    yield server
    server.stop(graceful=False)


def _rests(server: DLedgerServer) -> bool:
    return server._maintenance._checkpoints._is_resting and server._maintenance._warming._is_resting


def test_an_idle_log_is_left_alone(resting: DLedgerServer) -> None:
    """An idle group costs no processor time: neither its checkpoint nor the space ahead of its end needs work."""
    soon_ms = resting._clock.monotonic_ms() + 1_000_000
    tasks = (resting._maintenance._checkpoints.task, resting._maintenance._warming.task)

    assert all(task.due_ms is not None and task.due_ms > soon_ms for task in tasks)


def test_an_append_ends_the_rest(resting: DLedgerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses at most the marks of the last ``checkpoint_interval_ms``, however long the log was idle."""
    synced_at: list[int] = []
    sync, warm, warmed = resting.log.sync_checkpoint, resting.log.warm, list[None]()

    def note_sync() -> None:
        sync()
        synced_at.append(resting.log.committed_index)

    def note_warm() -> bool:
        warmed.append(None)
        return warm()

    monkeypatch.setattr(resting.log, "sync_checkpoint", note_sync)
    monkeypatch.setattr(resting.log, "warm", note_warm)
    appended = Outcome[AppendedBatch]()

    resting.submit_append([b"body"], appended)

    wait_until(lambda: bool(synced_at) and synced_at[-1] == resting.log.last.index, "the checkpoint has it")
    wait_until(lambda: bool(warmed), "space is prepared again")
    wait_until(lambda: _rests(resting), "it rests again")


def test_a_change_during_the_last_step_before_a_rest_is_not_missed() -> None:
    """The step may not have seen it: there is another one at the busy pace."""
    pace = maintenance._Pace(10)
    pace.begin()
    assert not pace.begin()

    pace.changed()

    assert pace.pause_ms(more=False) == 10
    assert pace.begin()
    assert pace.pause_ms(more=True) == 10
    assert not pace.begin()
    assert pace.pause_ms(more=False) == maintenance._REST_INTERVAL_MS
