"""The store over a replicated log of one member: recovery, and queues that know more than the commit position."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.config import Member, ServerConfig
from dledger.server import DLedgerServer
from dledger.types import Role
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole, GetMessageStatus, PutMessageStatus
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import WAIT_S, UnsyncedFs, bodies, fill, small_config, with_key
from tests.unit.rocketstore.commit_log.replicas import members_of, node_config

EVENS, ODDS = list(range(0, 100, 2)), list(range(1, 100, 2))


@pytest.fixture
def config(tmp_path: Path) -> MessageStoreConfig:
    return small_config(tmp_path / "store", enable_dledger_commit_log=True)


@contextmanager
def opened(
    config: MessageStoreConfig,
    members: tuple[Member, ...],
    kind: type[ReplicatedCommitLog] = ReplicatedCommitLog,
    *,
    node: ServerConfig | None = None,
) -> Iterator[MessageStore]:
    """A store on the first of ``members``, a slave as it begins."""
    root = config.store_path_root_dir
    root.mkdir(exist_ok=True)
    server = DLedgerServer(node or node_config(root, members), bodies=MESSAGES)
    fs = UnsyncedFs()
    store = MessageStore(config, kind(server, config), fs=fs)
    try:
        store.load()
        store.start()
        yield store
    finally:
        store.shutdown()


def promote(store: MessageStore) -> None:
    """What ``rocketstore.broker.role_change`` does."""
    log = store.log
    assert isinstance(log, ReplicatedCommitLog)
    server = log._server
    wait_until(lambda: server.status().role is Role.LEADER, "it leads")
    wait_until(lambda: server.status().end_index == server.status().committed_index, "all is committed")
    assert store.wait_dispatched(WAIT_S)
    store.rebuild_queue_offsets()
    log.open_term(server.status().term)
    store.become_master(BrokerRole.SYNC_MASTER)


@contextmanager
def master(config: MessageStoreConfig) -> Iterator[MessageStore]:
    with opened(config, members_of(1)) as store:
        promote(store)
        yield store


def test_it_begins_as_slave(config: MessageStoreConfig) -> None:
    """broker-ha.md 2: else puts come in before the queue offsets are counted."""
    with opened(config, members_of(1)) as store:
        assert store.role is BrokerRole.SLAVE
        assert store.put(Message("T", b"x")).status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        promote(store)
        assert store.put(Message("T", b"x")).status is PutMessageStatus.PUT_OK


@pytest.mark.parametrize("stop", ["clean", "killed"])
@pytest.mark.parametrize("lost", ["", "consumequeue", "consumequeue/T/0", "index", "checkpoint"])
def test_messages_survive_restarts(config: MessageStoreConfig, tmp_path: Path, stop: str, lost: str) -> None:
    """DLedgerCommitlogTest.testRecover; rocketmq 1397, 7355 with a queue lost."""
    killed = tmp_path / "killed"
    with master(config) as store:
        fill(store, 40)
        store.flush()
        fill(store, 60, first=40)
        shutil.copytree(config.store_path_root_dir, killed, ignore=shutil.ignore_patterns("*.tmp"))
    root = config.store_path_root_dir if stop == "clean" else killed
    if lost:
        target = root / lost
        target.unlink() if target.is_file() else shutil.rmtree(target)

    with master(replace(config, store_path_root_dir=root)) as store:
        assert (bodies(store), bodies(store, 1)) == (EVENS, ODDS)
        assert [with_key(store, number) for number in (0, 39, 40, 99)] == [[0], [39], [40], [99]]
        fill(store, 2, first=100)
        assert bodies(store) == [*EVENS, 100]


def test_retention_has_the_checkpoint_written_that_it_waits_for(config: MessageStoreConfig) -> None:
    """As on a plain broker. Else a full disk waits for the minute in which the next checkpoint is due anyway."""
    config = replace(config, flush_interval_consume_queue=50, flush_consume_queue_thorough_interval=3_600_000)
    members = members_of(1)
    root = config.store_path_root_dir
    root.mkdir(exist_ok=True)
    node = node_config(root, members)
    expiring = replace(
        node.store,
        retention_hours=0,
        delete_hour=tuple(range(24)),
        clean_interval_ms=50,
        disk_full_ratio=1.0,
        disk_check_ratio=0.999,
        disk_clean_ratio=0.9995,
    )
    with opened(config, members, node=replace(node, store=expiring)) as store:
        promote(store)
        fill(store, 40, size=2000)
        wait_until(lambda: store.log.min_offset > 0, "the first file is removed", WAIT_S)


class Forgetful(ReplicatedCommitLog):
    """A log that does not know of any commit until it is told to remember."""

    remembers = False

    @property
    def max_offset(self) -> int:
        return super().max_offset if self.remembers else 0


@pytest.mark.parametrize("stop", ["clean", "killed"])
def test_a_member_that_forgot_the_commit_position_keeps_what_it_knows(
    config: MessageStoreConfig, tmp_path: Path, stop: str
) -> None:
    """broker-ha.md 1.6: "committedPos may be missing". Queues are kept, and not read before their time."""
    killed = tmp_path / "killed"
    with master(config) as store:
        fill(store, 100)
        store.flush()
        shutil.copytree(config.store_path_root_dir, killed, ignore=shutil.ignore_patterns("*.tmp"))
    root = config.store_path_root_dir if stop == "clean" else killed

    with opened(replace(config, store_path_root_dir=root), members_of(1), Forgetful) as store:
        log = store.log
        assert isinstance(log, Forgetful)
        assert store.max_offset("T", 0) == 50
        result = store.get("T", 0, 0, max_count=10)
        assert (result.status, result.next_offset) == (GetMessageStatus.OFFSET_OVERFLOW_ONE, 0)
        assert store.dispatch_behind_bytes == 0

        log.remembers = True
        promote(store)

        assert (bodies(store), bodies(store, 1)) == (EVENS, ODDS)
        fill(store, 2, first=100)
        assert bodies(store) == [*EVENS, 100]
