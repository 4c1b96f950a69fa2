"""Topics whose messages can be read for a shorter time than the log keeps them."""

from __future__ import annotations

import pytest

from rocketstore.broker.refusal import Refusal
from rocketstore.message.message import Message
from rocketstore.state.changes import ExpireMessages, PutTopic, TopicConfig
from rocketstore.state.tables import Tables
from rocketstore.types import BrokerRole
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

HOUR_MS = 3_600_000


def look(broker: RemotingHarness) -> None:
    broker.bridge.run(broker.broker.retention.look())


@pytest.mark.parametrize("role", [BrokerRole.SYNC_MASTER, BrokerRole.SLAVE])
def test_queues_begin_at_the_first_message_within_the_retention(
    role: BrokerRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself; the master says where, so that every member lets them begin at the same place."""
    with RemotingHarness() as broker:
        broker.state.table["T"] = TopicConfig("T", 3, 3, retention_ms=HOUR_MS)
        broker.state.table["All"] = TopicConfig("All", 1, 1)
        ages_h = {("T", 0): (5, 4, 0), ("T", 1): (5, 5), ("T", 2): (0,), ("All", 0): (5, 4, 0)}
        for (topic, queue_id), some in ages_h.items():
            broker.store.put_many([Message(topic, b"x", queue_id=queue_id) for _ in some])
        now_ms = broker.broker.loop.clock.wall_ms()

        def by_time(topic: str, queue_id: int, time_ms: int) -> int:
            return sum(now_ms - age_h * HOUR_MS < time_ms for age_h in ages_h[topic, queue_id])

        monkeypatch.setattr(broker.store, "offset_by_time", by_time)
        broker.become(role)
        look(broker)
        begins = [broker.broker.offsets.bounds_of("T", number)[0] for number in range(3)]
        assert begins == ([2, 2, 0] if role is not BrokerRole.SLAVE else [0, 0, 0])
        assert broker.broker.offsets.bounds_of("All", 0) == (0, 3)
        changes = len(broker.state.expired)
        look(broker)
        assert len(broker.state.expired) == changes  # nothing new has expired


def test_a_retention_is_at_most_the_logs() -> None:
    """The message names both, and nothing is changed."""
    with RemotingHarness() as broker:
        topics = broker.broker.topics
        hours = broker.broker.config.store.file_reserved_time
        longest = TopicConfig("T", retention_ms=hours * HOUR_MS)
        broker.bridge.run(topics.put([longest]))
        beyond = TopicConfig("T", retention_ms=hours * HOUR_MS + 1)
        with pytest.raises(Refusal, match=f"keeps messages for {hours} h"):
            broker.bridge.run(topics.put([beyond]))
        assert broker.state.table["T"] == longest


def test_begins_only_rise_and_end_with_their_topic() -> None:
    """Whatever a later master with a slower clock says, nothing comes back; a topic that is gone gets no begins."""
    tables = Tables([PutTopic(TopicConfig("T")), ExpireMessages("T", ((0, 5), (1, 2))), ExpireMessages("T", ((0, 3),))])
    assert tables.begins == {"T": {0: 5, 1: 2}}
    assert Tables(tables.as_changes()).begins == tables.begins
    tables.apply(ExpireMessages("Gone", ((0, 1),)))
    assert "Gone" not in tables.begins
