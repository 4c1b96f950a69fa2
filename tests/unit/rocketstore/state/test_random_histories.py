"""Random histories of a group: whatever happens to its members, they agree, and nothing that was answered is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rocketstore.message.message import Message
from rocketstore.state.applier import SNAPSHOT_FILE
from rocketstore.state.broker_state import StateIncompleteError, StateSettings
from rocketstore.state.changes import CommitOffsets, DeleteTopic, PutTopic, QueueOffset, SetDelayOffsets, TopicConfig
from rocketstore.state.tables import Tables
from rocketstore.types import BROKER_STATE_TOPIC, BrokerRole, PutMessageStatus, PutResult
from tests.support.fake_store import FakeLog
from tests.support.sweeps import thinned
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.state.conftest import Member

BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied")
NAMES = ("A", "B", "C")
QUEUE_MESSAGES = 20


class Group:
    """Three members, one of them master, and tables that know what was answered."""

    def __init__(self, seed: int, root: Path) -> None:
        self.random = random.Random(seed)
        self.log = FakeLog()
        self.clock = ManualClock()
        self.members = [Member(self.log, root / str(number), self.clock, StateSettings()) for number in range(3)]
        self.master = self.members[0]
        self.answered = Tables()
        self.master.promote()
        for name in NAMES:
            self.master.store.put_many([Message(name, b"")] * QUEUE_MESSAGES)

    def step(self) -> None:
        action = self.random.choice((self.change,) * 8 + (self.fail_over, self.restart, self.expire, self.wait))
        action()

    def change(self) -> None:
        choose = self.random
        name = choose.choice(NAMES)
        offset = choose.randrange(QUEUE_MESSAGES)
        change = choose.choice(
            (
                PutTopic(TopicConfig(name, choose.randint(1, 8))),
                DeleteTopic(name, ((0, QUEUE_MESSAGES),)),
                CommitOffsets(choose.choice(("g", "h")), (QueueOffset(name, 0, offset),), choose.random() < 0.2),
                SetDelayOffsets(((choose.randint(1, 3), offset),)),
            )
        )
        refused = choose.random() < 0.1
        if refused:
            self.master.store.refusals.append(BUSY)
        answers: list[PutResult] = []
        self.master.state._change(change, answers.append)
        self.master.settle()
        assert len(answers) == 1
        if answers[0].ok:
            self.answered.apply(change)

    def fail_over(self) -> None:
        """To any member that can; the old master's threads know nothing of it yet."""
        self.master.store.role = BrokerRole.SLAVE
        for member in self.random.sample(self.members, 3):
            try:
                member.promote()
            except StateIncompleteError:
                continue
            self.master = member
            return
        raise AssertionError("no member can be master")

    def restart(self) -> None:
        member = self.random.choice(self.members)
        fate = self.random.choice(("clean", "killed", "killed", "lost its snapshot"))
        if fate == "lost its snapshot":
            (member.directory / SNAPSHOT_FILE).unlink(missing_ok=True)
        member.restart(clean=fate == "clean")
        if member is self.master:
            self.fail_over()

    def expire(self) -> None:
        """Retention removes some of the topic everywhere, perhaps the newest full state; the master sees it soon."""
        end = self.log.queue_offsets.get((BROKER_STATE_TOPIC, 0), 0)
        minimum = self.random.randint(0, end)
        for member in self.members:
            if minimum > max(member.store.min_offset(BROKER_STATE_TOPIC, 0), 0):
                member.store.expire(BROKER_STATE_TOPIC, 0, minimum)
        self.clock.now_ms += 10_000
        self.master.settle()

    def wait(self) -> None:
        self.clock.now_ms += self.random.choice((1000, 40_000, 7 * 3_600_000))
        for member in self.random.sample(self.members, 3):
            member.settle()

    def check(self) -> None:
        for member in self.members:
            member.settle()
            applier = member.state._applier
            assert applier.complete
            assert applier.tables.topics == self.answered.topics
            assert applier.tables.groups == self.answered.groups
            assert applier.tables.delay_offsets == self.answered.delay_offsets
            assert applier.tables.begins == self.answered.begins


@pytest.mark.sweep
@pytest.mark.parametrize("seed", thinned(range(40)))
def test_members_agree_and_know_what_was_answered(tmp_path: Path, seed: int) -> None:
    group = Group(seed, tmp_path)

    for _ in range(120):
        group.step()

    group.clock.now_ms += 7 * 3_600_000
    group.master.settle()  # a full state, for whoever lost its snapshot
    group.check()
