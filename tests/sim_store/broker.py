"""One life of a plain broker: what ``rocketstore.broker.server`` puts together, without gRPC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dledger.conditions import Conditions
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.message.delay import DelayLevels
from rocketstore.message_store import MessageStore
from rocketstore.schedule import ScheduleService
from rocketstore.state.broker_state import BrokerState, StateSettings
from tests.sim_store.disk import Disk, SimFs
from tests.sim_store.threads import Clock, Group, Scheduler


@dataclass(eq=False)
class PlainBroker:
    """Store, state and delayed delivery over a plain log."""

    group: Group
    store: MessageStore
    state: BrokerState
    schedule: ScheduleService
    recovered_end: int = 0
    """Where the log ended when it was opened."""

    @classmethod
    def make(
        cls, group: Group, config: MessageStoreConfig, settings: StateSettings, disk: Disk, scheduler: Scheduler
    ) -> PlainBroker:
        """As ``BrokerServer`` does it; nothing is opened yet."""
        clock, fs = Clock(scheduler), SimFs(disk, lambda: group.dead)
        conditions = Conditions("broker", clock)
        log = PlainCommitLog(config, clock=clock, fs=fs)
        store = MessageStore(config, log, clock=clock, fs=fs, conditions=conditions)
        state = BrokerState(store, config.config_dir, clock=clock, fs=fs, settings=settings, conditions=conditions)
        schedule = ScheduleService(store, state, DelayLevels.parse(config.message_delay_level), clock)
        return cls(group, store, state, schedule)

    def start(self) -> None:
        """Open, recover, serve."""
        self.store.load()
        self.recovered_end = self.store.log.end_offset
        self.state.load()
        self.state.start()
        self.store.start()
        self.state.catch_up()
        self.schedule.start()

    def stop(self) -> None:
        """In the server's order."""
        self.schedule.stop()
        self.state.shutdown()
        self.store.shutdown()

    @property
    def failure(self) -> BaseException | None:
        """Why a part of it ended, if one did."""
        return self.store.failure or self.state.fatal or self.schedule.fatal

    @property
    def poison(self) -> str:
        """Why the log takes nothing more."""
        log = self.store.log
        return log.poison if isinstance(log, PlainCommitLog) else ""


Maker = Callable[[Group], PlainBroker]
