"""One life of a broker: what ``rocketstore.server`` puts together, without gRPC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from dledger.config import ServerConfig
from dledger.monitoring import Conditions
from dledger.server import DLedgerServer
from rocketstore.broker.mastership import CatchUp
from rocketstore.broker.role_change import BrokerRoleChange, MasterService
from rocketstore.broker.schedule import ScheduleService
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog, for_broker
from rocketstore.config import MessageStoreConfig
from rocketstore.ha.service import HaService
from rocketstore.message.message import DelayLevels
from rocketstore.state.broker_state import BrokerState, StateSettings
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole
from tests.sim_store.model import Model
from tests.sim_store.threads import Clock, Group, Scheduler
from tests.sim_store.transactions import CONFIG, Producers


class WatchedSchedule(ScheduleService):
    """Tells the model where the log begins when messages are passed over: what lies further on must be delivered."""

    def __init__(
        self, store: MessageStore, state: BrokerState, delays: DelayLevels, clock: Clock, model: Model
    ) -> None:
        super().__init__(store, state, delays, clock)
        self._log = store.log
        self._model = model

    def skip(self, level: int, offset: int, why: str) -> None:
        """As it is, and noted."""
        super().skip(level, offset, why)
        self._model.passed_over_to = max(self._model.passed_over_to, self._log.min_offset)


@dataclass(eq=False)
class PlainBroker:
    """Store, state and delayed delivery over a plain log."""

    group: Group
    store: MessageStore
    state: BrokerState
    schedule: ScheduleService
    transactions: TransactionService
    with_transactions: bool
    conditions: Conditions
    recovered_end: int = 0
    """Where the log ended when it was opened."""

    @classmethod
    def make(
        cls,
        group: Group,
        config: MessageStoreConfig,
        settings: StateSettings,
        scheduler: Scheduler,
        producers: Producers | None = None,
    ) -> PlainBroker:
        """As ``BrokerServer`` does it; nothing is opened yet."""
        clock, fs = Clock(scheduler), group.fs
        conditions = Conditions("broker", clock)
        log = PlainCommitLog(config, clock=clock, fs=fs)
        store = MessageStore(config, log, clock=clock, fs=fs, conditions=conditions)
        state = BrokerState(store, config.config_dir, clock=clock, fs=fs, settings=settings, conditions=conditions)
        schedule = ScheduleService(store, state, DelayLevels.parse(config.message_delay_level), clock)
        transactions = TransactionService(CONFIG, store, state, clock)
        if producers is not None:
            producers.serve(store, transactions)
        return cls(group, store, state, schedule, transactions, producers is not None, conditions)

    def start(self) -> None:
        """Open, recover, serve."""
        self.store.load()
        self.recovered_end = self.store.log.end_offset
        self.state.load()
        self.state.start()
        self.store.start()
        self.state.catch_up()
        self.schedule.start()
        if self.with_transactions:
            self.transactions.start()

    def stop(self) -> None:
        """In the server's order."""
        self.transactions.stop()
        self.schedule.stop()
        self.state.shutdown()
        self.store.shutdown()

    @property
    def failure(self) -> BaseException | None:
        """Why a part of it ended, if one did."""
        return self.store.failure or self.state.fatal or self.schedule.fatal or self.transactions.fatal

    @property
    def poison(self) -> str:
        """Why the log takes nothing more."""
        log = self.store.log
        return log.poison if isinstance(log, PlainCommitLog) else ""


@dataclass(eq=False)
class ReplicatingBroker(PlainBroker):
    """A plain broker that is a master with a port for slaves, or a slave."""

    replication: HaService | None = None

    @classmethod
    def make_replicating(
        cls,
        group: Group,
        config: BrokerConfig,
        settings: StateSettings,
        scheduler: Scheduler,
        master: Callable[[], str],
    ) -> ReplicatingBroker:
        """As ``BrokerServer`` does it; ``master`` gives a slave its master's address."""
        made = cls.make(group, config.store, settings, scheduler)
        log, store = made.store.log, made.store
        if not isinstance(made, ReplicatingBroker) or not isinstance(log, PlainCommitLog):
            raise TypeError(log)

        def report(error: BaseException) -> None:
            if not group.dead:
                group.failure = group.failure or error

        made.replication = replication = HaService(
            config,
            log,
            made.conditions,
            Clock(scheduler),
            tls=None,
            report=report,
            require_replicas=store.require_replicas,
            supersede=store.supersede,
            fs=group.fs,
        )
        replication.known_master = master
        store.pace.log_goes_first = replication.is_catching_up
        return made

    @property
    def ha(self) -> HaService:
        """Replication."""
        assert self.replication is not None
        return self.replication

    @property
    def is_master(self) -> bool:
        """Whether it takes puts."""
        return self.store.role is not BrokerRole.SLAVE

    def start(self) -> None:
        """Open, recover, serve, and serve slaves or follow the master."""
        self.store.load()
        self.recovered_end = self.store.log.end_offset
        self.state.load()
        self.ha.prepare()
        self.state.start()
        self.store.start()
        if self.is_master:
            self.state.catch_up()
            self.schedule.start()
        self.ha.start(0)

    def stop(self) -> None:
        """In the server's order."""
        self.schedule.stop()
        self.ha.stop(graceful=True)
        super().stop()


@dataclass(eq=False)
class MemberBroker:
    """The same over a replicated log, with the role that follows its node's."""

    group: Group
    node: DLedgerServer
    store: MessageStore
    state: BrokerState
    schedule: ScheduleService
    transactions: TransactionService
    roles: BrokerRoleChange
    caught_up: CatchUp | None = None

    @classmethod
    def make(
        cls,
        group: Group,
        node_config: ServerConfig,
        config: MessageStoreConfig,
        settings: StateSettings,
        clock: Clock,
        model: Model,
        *,
        repair: bool = False,
        producers: Producers | None = None,
    ) -> Self:
        """As ``BrokerServer`` does it, on a task of the process: its log is opened."""
        fs = group.fs
        node = DLedgerServer(for_broker(node_config), repair=repair, clock=clock, bodies=MESSAGES)
        log = ReplicatedCommitLog(node, config, clock=clock)
        store = MessageStore(config, log, clock=clock, fs=fs, conditions=node.conditions)
        state = BrokerState(store, config.config_dir, clock=clock, fs=fs, settings=settings, conditions=node.conditions)
        schedule = WatchedSchedule(store, state, DelayLevels.parse(config.message_delay_level), clock, model)
        transactions = TransactionService(CONFIG, store, state, clock)
        services: list[MasterService] = [schedule]
        if producers is not None:
            producers.serve(store, transactions)
            services.append(transactions)
        further = cls.further_services(node_config, store, state, clock, model)
        services += further.values()
        name = node_config.node_id
        roles = BrokerRoleChange(node, log, store, state, *services, name=name, listener=lambda _role: state.wake())
        node.add_role_change_handler(roles)
        return cls(group, node, store, state, schedule, transactions, roles, **further)

    @classmethod
    def further_services(
        cls, _node: ServerConfig, _store: MessageStore, _state: BrokerState, _clock: Clock, _model: Model
    ) -> dict[str, Any]:  # Any: of fields
        """What else only a master runs, by the field that it is."""
        return {}

    def start(self) -> None:
        """Open, recover, take part."""
        self.store.load()
        self.state.load()
        node, store, state = self.node, self.store, self.state
        self.caught_up = CatchUp(node.status, store, lambda: store.log.max_offset, lambda: state.is_applied)
        self.state.start()
        self.store.start()

    def stop(self) -> None:
        """In the server's order."""
        self.transactions.stop()
        self.schedule.stop()
        self.state.shutdown()
        try:
            self.store.shutdown()
        finally:
            self.node.stop(graceful=False)

    @property
    def serves(self) -> bool:
        """Whether clients get answers of it."""
        return self.caught_up is not None and not self.node.fenced and self.caught_up()

    @property
    def is_master(self) -> bool:
        """Whether it takes puts."""
        return self.store.role is not BrokerRole.SLAVE

    @property
    def failure(self) -> BaseException | None:
        """What its process ends for."""
        failure = self.state.fatal or self.schedule.fatal or self.transactions.fatal or self.roles.fatal
        return self.node.fatal or self.store.failure or failure
