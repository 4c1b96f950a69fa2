"""A log of records in memory, of which a master's death takes what is not committed, and members that have it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from dledger.types import ProducerBatch
from rocketstore.commit_log.port import PutDone
from rocketstore.message.message import Message
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset, TopicConfig
from rocketstore.state.publisher import StateDone
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult, ScannedRecords
from tests.support.fake_store import FakeLog, FakeStore

BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied")


class Log(FakeLog):
    """Records, the first ``committed`` of which stay."""

    def __init__(self) -> None:
        super().__init__()
        self.committed = 0

    @property
    def min_offset(self) -> int:
        return 0

    @property
    def end_offset(self) -> int:
        return self.end

    @property
    def max_offset(self) -> int:
        return self.records[self.committed].head.offset if self.committed < len(self.records) else self.end

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        """A few at once."""
        found = [one.head for one in self.records[: self.committed] if one.head.offset >= offset][:3]
        return ScannedRecords(found, found[-1].offset + found[-1].size if found else offset)

    def cut(self, count: int) -> None:
        """Lose all but so many."""
        del self.records[max(count, self.committed) :]
        self.end = self.records[-1].head.offset + self.records[-1].head.size if self.records else 0
        self.queue_offsets = {(one.head.topic, one.head.queue_id): one.head.queue_offset + 1 for one in self.records}


class Store(FakeStore):
    """A member. ``mode`` says what becomes of the next put, ``modes`` of the next one whose first message has that
    topic; ``behind`` holds up its dispatch.
    """

    log: Log  # type: ignore[misc]
    mode = "ok"
    behind = False

    @cached_property
    def modes(self) -> dict[str, str]:
        return {}

    def submit(
        self,
        messages: Sequence[Message],
        done: PutDone,
        *,
        wait: bool = True,
        own: bool = False,
        producer: ProducerBatch | None = None,
    ) -> None:
        mode, self.mode = self.modes.pop(messages[0].topic, self.mode), "ok"
        if mode == "refused" or self.role is BrokerRole.SLAVE:
            done([BUSY] * len(messages))
            return
        results = [self._append(one) for one in messages]
        if mode == "ok":
            self.log.committed = len(self.log.records)
            done(results)
        elif mode == "late":
            self.held.append(lambda: done(results))
        else:
            done([PutResult(PutMessageStatus.UNKNOWN_ERROR, one.stored, "unknown") for one in results])
        self.dispatch()

    def dispatch(self) -> None:
        self.dispatched_to = self._in_queues if self.behind else self.log.committed
        super().dispatch()

    def wait_dispatched(self, timeout: float) -> bool:
        self.behind = False
        self.dispatch()
        return True

    def read_record(self, offset: int) -> bytes | None:
        return next((one.record for one in self.log.records if one.head.offset == offset), None)


class State(BrokerState):
    """What masters leave to each other."""

    def __init__(self) -> None:
        self.noted: dict[str, int] = {}

    def offsets(self, group: str, topic: str = "") -> list[QueueOffset]:
        return [QueueOffset(name, 0, offset) for name, offset in self.noted.items()]

    def commit_own_offsets(self, group: str, offsets: Sequence[tuple[str, int, int]], done: StateDone) -> None:  # type: ignore[override]
        for topic, _, offset in offsets:
            assert offset >= self.noted.get(topic, 0)
            self.noted[topic] = offset
        done(PutResult(PutMessageStatus.PUT_OK))

    def topic(self, name: str) -> TopicConfig | None:
        return TopicConfig(name, 1, 1)
