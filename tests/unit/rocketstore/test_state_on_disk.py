"""Broker state and delayed delivery over the real message store on a plain log: restarts after a stop and a kill."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dledger.clock import Clock
from rocketstore.broker.schedule import ScheduleService
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import DelayLevels, Message
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState, StateSettings
from rocketstore.state.changes import QueueOffset, TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import FlushDiskType
from tests.support.waiting import wait_until

LEVELS = "1s"
MILLISECONDS = DelayLevels((30,))


@dataclass
class PlainBroker:
    """A broker without its service."""

    store: MessageStore
    state: BrokerState
    schedule: ScheduleService

    def bodies(self, topic: str) -> list[bytes]:
        return [decode_record(record).body for record in self.store.get(topic, 0, 0, max_count=32).records]


@contextmanager
def running(root: Path) -> Iterator[PlainBroker]:
    config = MessageStoreConfig(
        store_path_root_dir=root,
        mapped_file_size_commit_log=1 << 20,
        mapped_file_size_consume_queue=20_000,
        flush_disk_type=FlushDiskType.SYNC_FLUSH,
        message_delay_level=LEVELS,
        max_hash_slot_num=100,
        max_index_num=1000,
    )
    clock = Clock()
    store = MessageStore(config, PlainCommitLog(config, clock=clock), clock=clock)
    state = BrokerState(store, config.config_dir, clock=clock, settings=StateSettings(accept_incomplete=True))
    schedule = ScheduleService(store, state, MILLISECONDS, clock)
    try:
        store.load()
        state.load()
        state.start()
        store.start()
        state.catch_up()
        schedule.start()
        yield PlainBroker(store, state, schedule)
    finally:
        schedule.stop()
        state.shutdown()
        store.shutdown()


def copy_of_disk(root: Path, target: Path) -> Path:
    """What a killed process leaves: the files as they are now, without those that only a living one has."""
    shutil.copytree(root, target)
    return target


def test_state_and_delayed_messages_outlive_restarts(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with running(root) as broker:
        assert broker.state.wait(lambda done: broker.state.put_topic(TopicConfig("T"), done)).ok
        assert broker.store.put(Message("T", b"now")).ok
        assert broker.store.put(Message("T", b"later", 0, {"DELAY": "1"})).ok
        assert broker.state.wait(lambda done: broker.state.commit_offsets("g", [("T", 0, 1)], done=done)).ok
        wait_until(lambda: broker.bodies("T") == [b"now", b"later"], "delivery")
        killed = copy_of_disk(root, tmp_path / "killed")

    for directory in (root, killed):
        (directory / "abort").touch()
        with running(directory) as broker:
            assert broker.state.topics() == [TopicConfig("T")]
            assert broker.state.offsets("g") == [QueueOffset("T", 0, 1)]
            assert broker.store.put(Message("T", b"again", 0, {"DELAY": "1"})).ok
            wait_until(lambda: b"again" in broker.bodies("T"), "delivery")
            assert broker.bodies("T")[:2] == [b"now", b"later"]

    (root / "config" / "brokerState.json").unlink()
    with running(root) as broker:
        assert broker.state.offsets("g") == [QueueOffset("T", 0, 1)]
        assert broker.bodies("T") == [b"now", b"later", b"again"]  # a clean stop repeats nothing
