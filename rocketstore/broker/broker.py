"""The rules of one broker, which every protocol serves: an adapter decodes a request, calls this, encodes the answer.

Nothing in ``rocketstore.broker`` knows a protocol. Everything runs on the loop's thread, unless stated otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

from dledger.access.guard import AccessGuard
from dledger.access.quota import Limits, Quotas
from dledger.clock import Clock
from dledger.monitoring import Conditions
from dledger.rpc.clients.connections import AnswerRoom
from dledger.rpc.loops import LoopBridge
from rocketstore.broker.groups import Groups, Retries
from rocketstore.broker.mastership import Mastership, MemberHosts, StateChanges
from rocketstore.broker.offsets import Offsets
from rocketstore.broker.popping.service import make_popping
from rocketstore.broker.pull import PullService, WaitingPulls
from rocketstore.broker.reading import QueueReading, ReadThreads, RecordReader, SubscriptionFilters
from rocketstore.broker.schedule import ScheduleService
from rocketstore.broker.sending import Sending
from rocketstore.broker.statistics import ServiceCounters, Stats
from rocketstore.broker.timed.service import TimedSends, TimedService
from rocketstore.broker.topics import CreationQuota, TopicRetention, Topics
from rocketstore.broker.transactions.service import HalfMessages, ProducerChecks, TransactionEnds, TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import HostAddress
from rocketstore.settings import LiveConfig
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore


class Storage(NamedTuple):
    """The storage of a broker, and the services on it that run whether or not clients are served; for any thread."""

    store: MessageStore
    state: BrokerState
    transactions: TransactionService
    schedule: ScheduleService
    timed: TimedService


class LoopTools(NamedTuple):
    """The threads, the clock and the conditions that work on the loop uses."""

    bridge: LoopBridge
    clock: Clock
    readers: ReadThreads
    conditions: Conditions
    """For any thread."""


class ClientQuotas:
    """Access control, and what clients may occupy of this broker: each its share."""

    def __init__(self, config: BrokerConfig, guard: AccessGuard | None) -> None:
        limits = Limits(
            entries_max=config.send_pending_messages_max,
            bytes_max=config.send_pending_bytes_max,
            streams_max=config.streams_max,
            waits_max=config.pulls_waiting_max,
            answer_bytes_max=config.limits.answer_bytes_max,
        )
        self.guard: Final = guard
        """None: everybody may do everything."""
        self.quotas: Final = Quotas(limits, owner_percent=config.access.account_share_percent)
        self.room: Final = AnswerRoom()


class Broker:
    """Create it on the loop's thread, and ``close`` it there; ``store_host`` is in records and message ids."""

    def __init__(
        self,
        config: BrokerConfig,
        storage: Storage,
        mastership: Mastership,
        loop: LoopTools,
        shares: ClientQuotas,
        store_host: HostAddress,
    ) -> None:
        store, state, transactions, _, timed = storage
        bridge, clock, readers, conditions = loop
        self.live: Final = LiveConfig(config)
        self.storage: Final = storage
        self.mastership: Final = mastership
        self.loop: Final = loop
        self.shares: Final = shares
        self.store_host: Final = store_host
        self.member_hosts: Final = MemberHosts(mastership, readers)
        """``start`` it where requests are passed on."""
        self.records: Final = RecordReader(store, readers)
        self.changes: Final = StateChanges(bridge, mastership)
        self.topics: Final = Topics(self.live, state, mastership, self.changes)
        halves = HalfMessages(self.live, transactions)
        confirm = partial(state.pop.write, ())  # no rows: that this is the master, and nothing else
        self.timed: Final = TimedSends(self.live, timed, mastership, readers, bridge, clock, confirm)
        self.sending: Final = Sending(self.live, store, self.topics, halves, self.timed, mastership, bridge, conditions)
        waiting = WaitingPulls(bridge, waiting_max=config.pulls_waiting_max)
        store.add_arrival_listener(waiting.arrived)
        self.filters: Final = SubscriptionFilters(self.live, readers)
        self.reading: Final = QueueReading(store, readers)
        self.pulling: Final = PullService(self.live, self.topics, self.reading, waiting, clock, self.filters)
        retries = Retries(self.live, state, mastership, self.topics, self.sending, self.records, store_host)
        self.groups: Final = Groups(self.live, state, mastership, retries, self.topics.news, self.changes, conditions)
        most = config.groups_max * config.access.account_share_percent // 100
        made_groups = CreationQuota("groups", "groups_max", most, state.has_group)
        self.offsets: Final = Offsets(store, state, mastership, self.topics, self.changes, readers, made_groups)
        self.popping: Final = make_popping(
            self.live,
            store,
            state,
            mastership,
            bridge,
            clock,
            waiting,
            self.reading,
            self.filters,
            self.topics,
            self.groups,
            self.offsets,
            self.sending,
            store_host,
        )
        popping = self.popping
        store.pace.is_awaited = lambda: len(waiting) > 0 or popping.is_awaited  # dispatch runs already
        self.stats: Final = Stats(store, state, self.topics, self.offsets, clock)
        """For read threads."""
        self.ends: Final = TransactionEnds(transactions, readers, bridge, mastership)
        self.retention: Final = TopicRetention(store, state, mastership, self.changes, readers, clock)
        self.retention.start()
        self._checks = ProducerChecks(store, transactions, self.groups.clients, readers, bridge, store_host)

    @property
    def config(self) -> BrokerConfig:
        """The configuration as it is now; may be read on any thread."""
        return self.live.now

    @property
    def store(self) -> MessageStore:
        """For any thread."""
        return self.storage.store

    @property
    def state(self) -> BrokerState:
        """For any thread."""
        return self.storage.state

    def counters(self) -> ServiceCounters:
        """Requests in progress; for any thread."""
        transactions = self.storage.transactions
        return ServiceCounters(
            messages_pending=self.sending.messages_pending,
            bytes_pending=self.sending.bytes_pending,
            pulls_waiting=len(self.pulling.waiting),
            filter_errors=self.filters.errors,
            streams=sum(self.shares.quotas.root.streams.values()),
            transactions_open=transactions.open_count,
            transactions_given_up=transactions.given_up_count,
            dropped_messages=transactions.dropped_count,
            pop=self.popping.counters(),
        )

    def stop_waiting(self) -> None:
        """Have waiting pulls and receives answered now, and let none wait any more."""
        self.pulling.waiting.close()
        self.popping.stop_waiting()

    async def close(self) -> None:
        """Tell and ask no clients any more."""
        await self.popping.close()
        self.groups.close()
        self.offsets.close()
        await self.member_hosts.close()
        await self._checks.close()
        await self.retention.close()
