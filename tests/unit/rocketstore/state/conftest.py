"""Members whose state is stepped by hand instead of by their threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rocketstore.state.broker_state import BrokerState, StateSettings
from rocketstore.types import BrokerRole, PutResult
from tests.support.fake_store import FakeLog, FakeStore
from tests.support.waiting import ManualClock


class Member:
    """A store and its state on a disk of its own."""

    def __init__(self, log: FakeLog, directory: Path, clock: ManualClock, settings: StateSettings) -> None:
        self.log = log
        self.directory = directory
        self.clock = clock
        self.settings = settings
        self.store = FakeStore(log, role=BrokerRole.SLAVE, clock=clock)
        self.state = self._new_state()

    def _new_state(self) -> BrokerState:
        state = BrokerState(self.store, self.directory, clock=self.clock, settings=self.settings)
        state.load()
        return state

    def restart(self, *, clean: bool = True) -> None:
        """Begin again from the disk and the log; not ``clean``: without the snapshot that a stop writes."""
        if clean:
            self.state.shutdown()
        self.log.stores.remove(self.store)
        expired = self.store.min_offset("RMQ_SYS_BROKER_STATE", 0)
        self.store = FakeStore(self.log, role=BrokerRole.SLAVE, clock=self.clock)
        if expired > 0:
            self.store.expire("RMQ_SYS_BROKER_STATE", 0, expired)
        self.state = self._new_state()

    def promote(self) -> None:
        """Make it the master, as a role change does."""
        self.state.catch_up(1)
        self.store.incarnation += 1
        self.store.role = BrokerRole.SYNC_MASTER
        self.settle()

    def settle(self) -> None:
        """Step until nothing more happens."""
        for _ in range(100):
            before = (self.log.end, self.state.runtime_info())
            self.state.step()
            if (self.log.end, self.state.runtime_info()) == before:
                self.state.step()
                return
        raise AssertionError("broker state never comes to rest")

    def do(self, change: Callable[[Callable[[PutResult], None]], None]) -> PutResult:
        """Make a change and step until it is answered."""
        answers: list[PutResult] = []
        change(answers.append)
        self.settle()
        assert len(answers) == 1
        return answers[0]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def settings() -> StateSettings:
    return StateSettings()


@pytest.fixture
def log() -> FakeLog:
    return FakeLog()


@pytest.fixture
def add_member(log: FakeLog, tmp_path: Path, clock: ManualClock, settings: StateSettings) -> Callable[[str], Member]:
    """Makes members of one group; a name is a directory."""
    return lambda name: Member(log, tmp_path / name, clock, settings)


@pytest.fixture
def master(add_member: Callable[[str], Member]) -> Member:
    """A master."""
    member = add_member("master")
    member.promote()
    return member
