"""The rules of a broker, over a store and a state in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Self, cast

from dledger.access.guard import AccessGuard
from dledger.access.rules import AccessRules
from dledger.clock import Clock
from dledger.errors import InvalidRequestError
from dledger.monitoring import Conditions
from dledger.rpc.loops import LoopBridge, LoopThread
from rocketstore.broker.broker import Broker, ClientQuotas, LoopTools, Storage
from rocketstore.broker.groups import Groups
from rocketstore.broker.mastership import GroupView, Mastership, StateDone
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.schedule import ScheduleService
from rocketstore.broker.timed.service import TimedService
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import DelayLevels, HostAddress
from rocketstore.message.record import decode_record
from rocketstore.pop.operations import PopRules
from rocketstore.pop.tables import LeaseWindow, PopPlace, PopRow, PopTables
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import GroupConfig, QueueOffset, TopicConfig
from rocketstore.state.publisher import PopState
from rocketstore.store.message_store import IndexEnd, MessageStore
from rocketstore.store.stats import StoreStats
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult, QueueUnit, ScannedRecords
from tests.support.fake_store import FakeStore

STORE_HOST = HostAddress(b"\x7f\0\0\1", 10911)


class FakeExtent:
    """The commit log as the status shows it."""

    min_offset, max_offset, end_offset, is_replicated = 0, 100, 120, True

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        """Nothing of it can be seen."""
        return ScannedRecords((), 1 << 60)


class ServedFakeStore(FakeStore):
    """A store in memory with what only the service needs."""

    dispatch_behind_bytes = 7

    def __init__(self) -> None:
        super().__init__(clock=Clock())
        self.extent = FakeExtent()
        self.stats = StoreStats(Clock())  # type: ignore[misc]  # in the place of what the real constructor sets
        self.illegal_topic = ""
        self.cleanings = 0
        self.unique_queries: list[bool] = []
        """Of each query by key, whether the key was a unique id."""

    def query(
        self,
        topic: str,
        key: str,
        max_num: int,
        begin_ms: int,
        end_ms: int,
        *,
        unique: bool = False,
        max_bytes: int = 0,
    ) -> list[bytes]:
        self.unique_queries.append(unique)
        found = [one.record for one in self.log.records if one.head.topic == topic]
        if unique:
            return [one for one in found if key == decode_record(one).unique_key][:max_num]
        return [one for one in found if key in decode_record(one).keys][:max_num]

    def index_end(self) -> IndexEnd:
        head = self.log.records[-1].head
        return IndexEnd(head.store_timestamp, head.offset)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        return min(timestamp_ms, self.max_offset(topic, queue_id))

    def store_time(self, topic: str, queue_id: int, queue_offset: int) -> int:
        records = self._kept[topic, queue_id].records if (topic, queue_id) in self._kept else []
        return records[queue_offset].head.store_timestamp if 0 <= queue_offset < len(records) else -1

    def unit(self, topic: str, queue_id: int, offset: int) -> QueueUnit | None:
        records = self._kept[topic, queue_id].records if (topic, queue_id) in self._kept else []
        head = records[offset].head if 0 <= offset < len(records) else None
        return None if head is None else QueueUnit(head.offset, head.size, head.tags_code)

    def queues(self) -> list[tuple[str, int]]:
        return list(self._kept)

    def request_clean(self) -> None:
        self.cleanings += 1

    def earliest_message_time(self) -> int:
        return 5

    def runtime_info(self) -> dict[str, str]:
        return {"commitLogDiskRatio": "0.25"}


class _Observed:
    """``log`` is the fake's records in ``FakeStore`` and the log's extent in the status."""

    def __init__(self, store: ServedFakeStore) -> None:
        self._store = store

    @property
    def log(self) -> FakeExtent:
        return self._store.extent

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class FakePopState(PopState):
    """Windows of one node, changed at once."""

    def __init__(self, state: FakeState) -> None:
        self._state = state
        self.tables = PopTables()

    def pop_window(self, place: PopPlace) -> LeaseWindow | None:
        return self.tables.windows.get(place)

    def pop_epoch(self) -> int:
        return self.tables.epoch

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        return self._state.offset(group, topic, queue_id)

    def pop_rules(self, group: str) -> PopRules:
        config = self._state.group(group)
        return PopRules(config.ordered, config.retry_times_max + 1)

    def parked_of(self, group: str) -> int:
        return self.tables.parked_of(group)

    @contextmanager
    def room(self, group: str, queues: Collection[tuple[str, int]]) -> Iterator[None]:
        yield

    def write(self, rows: Iterable[PopRow], done: StateDone) -> None:
        def apply() -> None:
            for row in rows:
                offset = self.tables.apply(row, self._state.committed.get(row.place))
                if offset is not None:
                    self._state.committed[row.place] = offset

        self._state.apply(apply, done)


class FakeState(BrokerState):
    """Broker state of one node, changed at once."""

    def __init__(self, *topics: TopicConfig) -> None:
        self.table = {one.name: one for one in topics}
        self.committed: dict[tuple[str, str, int], int] = {}
        self.configs: dict[str, GroupConfig] = {}
        self.modes: dict[tuple[str, str], TopicRequestMode] = {}
        self.begins: dict[tuple[str, int], int] = {}
        self.delays: dict[int, int] = {}
        self.expired: list[str] = []
        """Topics of which messages have expired, each time."""
        self.largest_commit = 0
        self.refusal: PutResult | None = None
        self.held: list[Callable[[], None]] | None = None
        """Not None: changes wait here until they are called."""
        self.pop = FakePopState(self)  # type: ignore[misc]  # in the place of what the real constructor sets

    @property
    def topic_changes(self) -> int:
        return hash(tuple(self.table.values()))

    def topic(self, name: str) -> TopicConfig | None:
        return self.table.get(name)

    def begin_offset(self, topic: str, queue_id: int) -> int:
        return self.begins.get((topic, queue_id), 0)

    def place_for(self, name: str, queue_id: int, waited: QueueOffset) -> int | None:
        return queue_id

    def topics(self) -> list[TopicConfig]:
        return list(self.table.values())

    def groups(self) -> list[str]:
        return sorted({group for group, _, _ in self.committed} | self.configs.keys())

    def offsets(self, group: str, topic: str = "") -> list[QueueOffset]:
        return [
            QueueOffset(name, queue_id, offset)
            for (owner, name, queue_id), offset in self.committed.items()
            if owner == group and topic in ("", name)
        ]

    def delay_offset(self, level: int) -> int:
        return self.delays.get(level, 0)

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        return self.committed.get((group, topic, queue_id), -1)

    def group(self, name: str) -> GroupConfig:
        return self.configs.get(name) or GroupConfig(name)

    def put_group(self, group: GroupConfig, done: StateDone) -> None:
        self.apply(lambda: self.configs.update({group.name: group}), done)

    def put_topic(self, topic: TopicConfig, done: StateDone, *, automatic: bool = False) -> None:
        self.apply(lambda: self.table.update({topic.name: topic}), done)

    def delete_topic(self, name: str, done: StateDone) -> None:
        self.apply(lambda: self.table.pop(name), done)

    def expire_messages(self, name: str, begins: Iterable[tuple[int, int]], done: StateDone) -> None:
        raised = {(name, queue_id): begin for queue_id, begin in begins}
        self.expired.append(name)
        self.apply(lambda: self.begins.update(raised), done)

    def request_modes(self) -> list[TopicRequestMode]:
        return list(self.modes.values())

    def request_mode(self, topic: str, group: str) -> TopicRequestMode | None:
        return self.modes.get((topic, group))

    def set_request_mode(self, mode: TopicRequestMode, done: StateDone) -> None:
        self.apply(lambda: self.modes.update({(mode.topic, mode.group): mode}), done)

    def has_group(self, name: str) -> bool:
        return name in self.groups()

    def delete_group(self, group: str, done: StateDone) -> None:
        def forget() -> None:
            self.committed = {key: offset for key, offset in self.committed.items() if key[0] != group}
            self.configs.pop(group, None)

        self.apply(forget, done)

    def commit_offsets(
        self,
        group: str,
        offsets: Iterable[tuple[str, int, int]],
        reset: bool = False,
        done: StateDone = lambda _result: None,
    ) -> None:
        noted = {(group, topic, queue_id): offset for topic, queue_id, offset in offsets}
        self.largest_commit = max(self.largest_commit, len(noted))
        if any(offset < 0 for offset in noted.values()):
            raise InvalidRequestError("negative")

        def commit() -> None:
            for place, offset in noted.items():  # never back unless it is a reset, as the real one
                self.committed[place] = offset if reset else max(offset, self.committed.get(place, offset))

        self.apply(commit, done)

    def commit_own_offsets(self, group: str, offsets: Iterable[tuple[str, int, int]], done: StateDone) -> None:
        self.commit_offsets(group, offsets, done=done)

    def runtime_info(self) -> dict[str, str]:
        return {"brokerStateOffset": "1,1"}

    def apply(self, change: Callable[[], object], done: StateDone) -> None:
        def answer() -> None:
            if self.refusal is not None:
                done(self.refusal)
            else:
                change()
                done(PutResult(PutMessageStatus.PUT_OK))

        if self.held is None:
            answer()
        else:
            self.held.append(answer)


class Harness:
    """A broker, which no client can reach."""

    def __init__(
        self,
        config: BrokerConfig | None = None,
        *topics: TopicConfig,
        has_caught_up: Callable[[], bool] = lambda: True,
        rules: AccessRules | None = None,
    ) -> None:
        self.config = config or BrokerConfig()
        self.guard = None if rules is None else AccessGuard(rules, name="n0", clock=Clock())
        self._has_caught_up = has_caught_up
        self.store = ServedFakeStore()
        self.state = FakeState(*(topics or (TopicConfig("T", 4, 4),)))
        self.view = GroupView("LEADER", 3, "n0", "host:1", {"n0": "host:1", "n1": ""})
        self._loop = LoopThread("test-broker")
        self._stopped = False
        self.conditions = Conditions("broker")

    def __enter__(self) -> Self:
        self.bridge = self._loop.start()
        self.bridge.run(self._serve(self.bridge))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.stop()

    def on_loop(self, act: Callable[[], object]) -> None:
        """Do something on the broker's loop, and wait until it is done."""

        async def acting() -> None:
            act()

        self.bridge.run(acting())

    async def _serve(self, bridge: LoopBridge) -> None:
        store = cast("MessageStore", _Observed(self.store))  # it passes everything else on
        clock = Clock()
        transactions = TransactionService(self.config, store, self.state, clock)
        delays = DelayLevels.parse(self.config.store.message_delay_level)
        schedule = ScheduleService(store, self.state, delays, clock)
        self.timed = TimedService(self.config, store, self.state, clock)
        self.broker = Broker(
            self.config,
            Storage(store, self.state, transactions, schedule, self.timed),
            Mastership(store, lambda: self.view, self._has_caught_up),
            LoopTools(bridge, clock, ReadThreads(self.config.read_threads), self.conditions),
            ClientQuotas(self.config, self.guard),
            STORE_HOST,
        )

    def stop(self, grace_s: float | None = None) -> None:
        """As the broker's server does."""
        if not self._stopped:
            self._stopped = True
            self.bridge.run(self._end(grace_s))
            self.broker.loop.readers.close()

    async def _end(self, grace_s: float | None) -> None:  # for those that serve it
        await self.broker.close()

    @property
    def groups(self) -> Groups:
        """Its producer and consumer groups."""
        return self.broker.groups

    def become(self, role: BrokerRole) -> None:
        """Change the store's role."""
        self.store.role = role
