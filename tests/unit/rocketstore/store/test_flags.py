"""The gate gives one reason at a time, in RocketMQ's order."""

from __future__ import annotations

from rocketstore.store.rounds import Obstacle, PutGate
from rocketstore.types import BrokerRole, PutMessageStatus


def reason(gate: PutGate) -> str:
    return "" if gate.refusal is None else gate.refusal.reason


def test_reasons_come_in_rocketmqs_order() -> None:
    """store.md 3.1: shut down, slave, not writable."""
    gate = PutGate(BrokerRole.SLAVE)
    gate.close(Obstacle.DISK_FULL)
    gate.close(Obstacle.QUEUE_ERROR, "broken at 5")

    assert reason(gate) == "the store is not running"
    gate.open(Obstacle.NOT_RUNNING)
    assert reason(gate) == "this node is a slave"
    gate.become(BrokerRole.SYNC_MASTER)
    assert reason(gate) == "the consume queues cannot follow the log: broken at 5"
    gate.open(Obstacle.QUEUE_ERROR)
    assert reason(gate) == "the disk is full"
    gate.open(Obstacle.DISK_FULL)
    assert gate.refusal is None


def test_a_refusal_was_not_applied() -> None:
    gate = PutGate(BrokerRole.ASYNC_MASTER)

    assert gate.refusal is not None
    assert gate.refusal.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
    assert gate.refusal.outcome == "not_applied"
    assert not gate.refusal.ok


def test_closing_twice_keeps_the_first_detail() -> None:
    gate = PutGate(BrokerRole.ASYNC_MASTER)
    gate.open(Obstacle.NOT_RUNNING)

    assert gate.close(Obstacle.INDEX_ERROR, "first")
    assert not gate.close(Obstacle.INDEX_ERROR, "second")

    assert reason(gate).endswith("first")
    assert gate.has(Obstacle.INDEX_ERROR)
    assert gate.open(Obstacle.INDEX_ERROR)
    assert not gate.open(Obstacle.INDEX_ERROR)
