"""Three members with whole stores: queue offsets are given out once, whatever a new master's disk has lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.errors import DLedgerError, LeaderHint
from dledger.server import DLedgerServer
from dledger.store.quarantine import set_aside_damaged
from dledger.types import Role
from rocketstore.broker.role_change import BrokerRoleChange
from rocketstore.broker.schedule import ScheduleService
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog
from rocketstore.message.message import DelayLevels, Message
from rocketstore.state.broker_state import BrokerState, StateSettings
from rocketstore.store.message_store import MessageStore
from rocketstore.types import StoredPlace
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import UnsyncedFs, bodies, small_config
from tests.unit.rocketstore.commit_log.replicas import SEGMENT_BYTES, members_of, node_config

WAIT_S = 60.0

_STATE = StateSettings(snapshot_interval_ms=100)
"""Retention waits for what no snapshot holds yet."""


class Broker:
    """A member as ``BrokerServer`` wires it, without a port. Its log keeps nothing longer than it must."""

    def __init__(self, group: Group, number: int) -> None:
        root = group.root_of(number)
        root.mkdir(exist_ok=True)
        config = small_config(root, enable_dledger_commit_log=True)
        node = node_config(root, group.members, number)
        store = replace(
            node.store,
            retention_hours=0 if group.expires else 1000,
            recovery_verify_bytes=SEGMENT_BYTES,
            delete_hour=tuple(range(24)),
            clean_interval_ms=50,
            disk_full_ratio=1.0,
            disk_check_ratio=0.999,
            disk_clean_ratio=0.9995,
        )
        self.server = DLedgerServer(replace(node, store=store), bodies=MESSAGES)
        self.log = ReplicatedCommitLog(self.server, config)
        self.store = MessageStore(config, self.log, fs=UnsyncedFs())
        self.state = BrokerState(self.store, config.config_dir, settings=_STATE)
        delays = DelayLevels.parse(config.message_delay_level)
        self.schedule = ScheduleService(self.store, self.state, delays)
        self.roles = BrokerRoleChange(
            self.server, self.log, self.store, self.state, self.schedule, listener=lambda _role: self.state.wake()
        )
        self.server.add_role_change_handler(self.roles)
        self.store.load()
        self.state.load()
        self.state.start()
        self.store.start()

    @property
    def is_master(self) -> bool:
        return self.roles.role == "SYNC_MASTER"

    def stop(self) -> None:
        self.schedule.stop()
        self.state.shutdown()
        self.store.shutdown()
        self.server.stop(graceful=False)


class Group:
    """The members that run."""

    def __init__(self, base: Path, *, expires: bool = True) -> None:
        self._base = base
        self.expires = expires
        self.members = members_of(3)
        self.brokers = {number: Broker(self, number) for number in range(3)}

    def root_of(self, number: int) -> Path:
        return self._base / f"n{number}"

    def master(self) -> Broker:
        found: list[Broker] = []

        def looked() -> bool:
            found[:] = [one for one in self.brokers.values() if one.is_master]
            return bool(found)

        wait_until(looked, "there is a master", WAIT_S)
        return found[0]

    def put(self, topic: str, body: bytes) -> StoredPlace:
        """As a client does: whoever is master."""
        stored: list[StoredPlace] = []

        def sent() -> bool:
            result = self.master().store.put(Message(topic, body, 0))
            if result.stored is not None and result.ok:
                stored.append(result.stored)
            return bool(stored)

        wait_until(sent, "the message is stored", WAIT_S)
        return stored[0]

    def expire(self, offset: int) -> None:
        """Fill the logs until the record at ``offset`` is gone on every member that runs.

        No faster than they dispatch, which retention waits for, and so does the next master: however slow it is.
        """
        while min(one.log.min_offset for one in self.brokers.values()) <= offset:
            self.put("busy", b"x" * 3000)
            for one in self.brokers.values():
                wait_until(
                    lambda one=one: one.store.dispatch_behind_bytes < SEGMENT_BYTES,  # type: ignore[misc]
                    "dispatch keeps up",
                    WAIT_S,
                )

    def stop_a_slave(self) -> int:
        number = next(number for number, one in self.brokers.items() if not one.is_master)
        self.brokers.pop(number).stop()
        return number

    def start(self, number: int) -> Broker:
        broker = self.brokers[number] = Broker(self, number)
        wait_until(
            lambda: (
                broker.log.max_offset == self.master().log.max_offset > 0 and not broker.store.dispatch_behind_bytes
            ),
            "it has caught up",
            WAIT_S,
        )
        return broker

    def hand_over(self, number: int) -> None:
        """Until that member is master: it may first have to hear of the state."""

        def taken() -> bool:
            leader = next((one for one in self.brokers.values() if one.server.status().role is Role.LEADER), None)
            if leader is not None and leader is not self.brokers[number]:
                leader.server.submit_transfer(self.members[number].node_id, _ignore)
            return self.brokers[number].is_master

        wait_until(taken, "it is master", WAIT_S)


def _ignore(_result: LeaderHint | DLedgerError) -> None:
    return


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    for broker in group.brokers.values():
        broker.stop()


def lose_disk(group: Group, number: int) -> None:
    shutil.rmtree(group.root_of(number))


def lose_log(group: Group, number: int) -> None:
    """What ``--repair`` does; queues and broker state stay."""
    store = node_config(group.root_of(number), group.members, number).store
    set_aside_damaged(store, node_id=group.members[number].node_id)


def lose_nothing(_group: Group, _number: int) -> None:
    """It was away for longer than retention keeps messages."""


@pytest.mark.parametrize("lose", [lose_disk, lose_log, lose_nothing])
def test_a_new_master_goes_on_counting_whatever_it_lost(group: Group, lose: Callable[[Group, int], None]) -> None:
    """Else the others take its messages for repeats of what they have: acknowledged, and nowhere to be read."""
    for _ in range(3):
        group.put("rare", b"1")
    number = group.stop_a_slave()
    last = [group.put("rare", b"2") for _ in range(2)][-1]
    assert last.queue_offset == 4
    group.expire(last.offset)
    lose(group, number)
    broker = group.start(number)
    wait_until(lambda: broker.store.max_offset("rare", 0) == 5, "it knows what it lost", WAIT_S)
    group.hand_over(number)

    assert group.put("rare", b"6").queue_offset == 5
    group.put("busy", b"0")

    for one in group.brokers.values():
        wait_until(lambda one=one: one.store.max_offset("rare", 0) == 6, "it is dispatched", WAIT_S)  # type: ignore[misc]
        assert bodies(one.store, topic="rare", offset=5) == [6]
        assert one.store.runtime_info()["queueOffsetsRepeated"] == "0"
        assert one.store.failure is None


def test_a_member_that_missed_very_many_messages_of_a_queue_serves_and_starts_again(group: Group) -> None:
    """More than could be filled up (sixteen files of units): what it missed has expired."""
    group.put("busy", b"0")
    number = group.stop_a_slave()
    store = group.master().store
    for _ in range(4):
        assert all(one.ok for one in store.put_many([Message("busy", b"x" * 100, 0) for _ in range(100)]))
    group.expire(group.put("busy", b"0").offset)

    broker = group.start(number)
    offset = group.put("busy", b"7").queue_offset
    assert offset > 400
    wait_until(lambda: broker.store.max_offset("busy", 0) == offset + 1, "it is dispatched", WAIT_S)
    assert bodies(broker.store, topic="busy", offset=offset) == [7]
    assert broker.store.failure is None
    group.brokers.pop(number).stop()
    again = group.start(number).store
    wait_until(lambda: again.max_offset("busy", 0) == offset + 1, "it is dispatched again", WAIT_S)
