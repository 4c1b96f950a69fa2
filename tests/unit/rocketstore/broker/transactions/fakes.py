"""A log of records in memory, of which a master's death takes what is not committed, and members that have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

from dledger.types import ProducerBatch
from rocketstore.broker.transactions.checks import AskedDone, Askers, Check
from rocketstore.broker.transactions.run import EndRefusedError, NotReadyError, Run
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.port import PutDone
from rocketstore.message.message import LOOPBACK, Message
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset, TopicConfig
from rocketstore.state.publisher import StateDone
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult, ScannedRecords, StoredPlace
from tests.support.fake_store import FakeLog, FakeStore
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.broker.transactions.bench import GROUP, half

BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied")


class Log(FakeLog):
    """Records, the first ``committed`` of which stay."""

    def __init__(self) -> None:
        super().__init__()
        self.committed = 0
        self.expired = 0
        """What lies before this offset has been removed."""

    @property
    def min_offset(self) -> int:
        return self.expired

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
        if offset < self.log.min_offset:
            return None
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

    def place_for(self, name: str, queue_id: int, waited: QueueOffset) -> int | None:
        return queue_id

    def topic(self, name: str) -> TopicConfig | None:
        return TopicConfig(name, 1, 1)


class Master:
    """One at a time, stepped by hand."""

    def __init__(self, log: Log, clock: ManualClock, state: State | None = None, **settings: int) -> None:
        self.clock = clock
        self.store = Store(log, clock=clock)
        self.store.dispatch()
        self.state = state or State()
        self.asked: list[Check] = []
        self.held: list[Callable[[], None]] | None = None
        self.is_anybody_there: Callable[[Check], bool] = lambda _check: True
        askers = Askers()
        askers.add(self._ask)
        self.run = Run(BrokerConfig(**settings), self.store, self.state, clock, lambda: LOOPBACK, askers)  # type: ignore[arg-type]
        self.store.add_arrival_listener(self.run.on_arrival)
        self.run.step()

    def _ask(self, checks: Sequence[Check], done: AskedDone) -> None:
        self.asked += checks
        about = [one.queue_offset for one in checks if self.is_anybody_there(one)]
        if self.held is None:
            done(about)
        else:
            self.held.append(partial(done, about))

    def prepare(self, body: bytes = b"x", **properties: str) -> StoredPlace:
        """Where the half message is."""
        message = half(body)
        message.property_string += b"".join(f"\x02{name}\x01{value}".encode() for name, value in properties.items())
        stored = self.store.put(message).stored
        assert stored is not None
        self.run.step()
        return stored

    def end(self, place: StoredPlace, *, commit: bool = True) -> bool:
        """Whether the request was taken."""
        try:
            self.run.end(place.queue_offset, place.offset, GROUP, commit=commit, done=lambda _result: None)
        except (EndRefusedError, NotReadyError):
            return False
        return True

    def after(self, ms: int) -> list[int]:
        """How often was asked about which, in the time up to then."""
        self.asked.clear()
        self.clock.now_ms += ms
        for _ in range(20):
            self.run.step()
        return [one.times for one in self.asked]

    def messages(self, topic: str) -> list[Message]:
        """All of a topic."""
        return [decode_record(one.record) for one in self.store.log.records if one.head.topic == topic]
