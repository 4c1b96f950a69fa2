"""A member of three whose log is damaged where a start dispatches it again: it starts, has it repaired, and goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError
from dledger.monitoring import ConditionKind
from dledger.store import reader
from tests.support.damage import turn
from tests.support.waiting import wait_until
from tests.unit.dledger.store.support import spoil
from tests.unit.rocketstore.bench import bodies
from tests.unit.rocketstore.commit_log.replicas import SEGMENT_BYTES
from tests.unit.rocketstore.queue_numbers.test_numbering_group import WAIT_S, Broker, Group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path, expires=False)
    yield group
    for broker in group.brokers.values():
        broker.stop()


DAMAGES = ("turned bit", "missing segment", "unreadable sector")
LOST = ("consumequeue", "consumequeue/T", "consumequeue/RMQ_SYS_QUEUE_NUMBERS", "checkpoint")


PAIRS = [
    pytest.param(damage, lost, marks=() if damage == DAMAGES[number % len(DAMAGES)] else pytest.mark.soak)
    for number, lost in enumerate(LOST)
    for damage in DAMAGES
]
"""Each of them with some other; the rest of the pairs is left to the soak."""


@pytest.mark.parametrize(("damage", "lost"), PAIRS)
def test_a_member_whose_log_is_damaged_where_it_is_dispatched_again_starts_and_is_repaired(
    group: Group, monkeypatch: pytest.MonkeyPatch, damage: str, lost: str
) -> None:
    """As at run time dispatch waits; the node, which can fetch what is damaged, must run for that."""
    for count in range(60):
        group.put("T", str(count).encode().ljust(1000, b"."))
    assert group.master().store.wait_dispatched(WAIT_S)
    before = bodies(group.master().store, topic="T")
    assert sorted(set(before)) == list(range(60)), "one whose outcome was unknown may be there twice"
    wait_until(
        lambda: all(one.store.max_offset("T", 0) == len(before) for one in group.brokers.values()),
        "all have it",
        WAIT_S,
    )
    number = group.stop_a_slave()
    others = list(group.brokers)
    while group.brokers:
        group.brokers.popitem()[1].stop()
    root = group.root_of(number)
    segment = next(path for path in root.rglob(f"{2 * SEGMENT_BYTES:020d}") if path.parent.name == "data")
    match damage:
        case "turned bit":
            turn(segment, SEGMENT_BYTES // 2)
        case "missing segment":
            segment.unlink()
        case _:
            monkeypatch.setattr(reader, "HOT_BYTES", SEGMENT_BYTES)
            spoil(monkeypatch, segment, SEGMENT_BYTES // 2)
    if lost == "checkpoint":  # and the last stop was not clean
        (root / lost).unlink()
        (root / "abort").touch()
    else:
        shutil.rmtree(root / lost)

    broker = group.brokers[number] = Broker(group, number)

    assert ConditionKind.DAMAGED in {one.kind for one in broker.server.conditions.now()}
    assert not broker.store.wait_dispatched(0.1)
    assert (broker.is_master, broker.store.failure) == (False, None)
    with suppress(CorruptLogError):
        assert len(bodies(broker.store, topic="T")) < len(before)

    for other in others:
        group.brokers[other] = Broker(group, other)
    last = group.put("T", b"60").queue_offset
    wait_until(lambda: broker.store.max_offset("T", 0) > last, "it is repaired, and dispatched", WAIT_S)
    found = bodies(broker.store, topic="T")
    assert (found[: len(before)], set(found[len(before) :])) == (before, {60})
    assert broker.store.failure is None
    kinds = (ConditionKind.DAMAGED, ConditionKind.REPAIRING)
    wait_until(lambda: not any(one.kind in kinds for one in broker.server.conditions.now()), "it is whole", WAIT_S)
    group.hand_over(number)
    assert group.put("T", b"61").queue_offset > last
