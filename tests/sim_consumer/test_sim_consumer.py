"""What docs/guarantees.md says of messages holds in every world; SIM_CONSUMER_SEEDS=50 plays more of each."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.sim_consumer.broker import ModelBroker
from tests.sim_consumer.drivers import GROUP, TOPIC, Driver, fast
from tests.sim_consumer.oracle import DISTURBED_S, Oracle
from tests.sim_consumer.remoting import ServerLoop
from tests.sim_consumer.worlds import KINDS, WAIT_S, WORLDS, Run, StuckError, play
from tests.support.sweeps import fewer

AT_ROCKETMQ = (
    "calm",
    "the_broker_comes_back_empty",
    "the_broker_loses_its_last_messages",
    "others_take_the_places_of_what_is_committed",
)
"""Worlds in which nobody else stores positions, which RocketMQ's brokers let a commit that was on its way undo."""
SEEDS = int(os.environ.get("SIM_CONSUMER_SEEDS", "3"))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [one for one in WORLDS if one != "anything"])
def test_a_world(name: str, kind: str) -> None:
    """Nothing is skipped or done twice without a reason, no position goes back, nobody falls silent."""
    for seed in range(fewer(SEEDS)):
        play(name, kind, seed)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_it_at_random(kind: str) -> None:
    """Combinations that nobody has thought of."""
    for seed in range(fewer(3 * SEEDS, 4)):
        play("anything", kind, seed)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["rocketmq member", "rocketmq in_order", "rocketmq assigned"])
@pytest.mark.parametrize("name", AT_ROCKETMQ)
def test_what_holds_at_rocketmqs_brokers(name: str, kind: str) -> None:
    """They do not know incarnations: what goes over one connection goes to one process."""
    for seed in range(fewer(SEEDS)):
        play(name, kind, seed)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_brings_what_is_in_the_queue_from_there_on(kind: str, place: int) -> None:
    """Each message once: also one that came after all others, if it is in that queue, and none of another queue."""
    run = Run(kind, 0, queues=2)
    with fast():
        run.join()
        for queue_id in (0, 1):
            run.send(20, queue_id)  # b"0" to b"19" are in queue 0
        run.send(1, place)  # b"40"
        run.all_done()
        run.all_committed()
        run.oracle.calls.clear()
        run.reset((TOPIC, 0), 15)
        run.all_committed()
        run.close()
    assert run.oracle.problems == []
    wanted = [*range(15, 20), *([40] if place == 0 else [])]
    assert run.oracle.calls == {b"%d" % number: 1 for number in wanted}


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_fails_at_the_moment_of_the_kill_does_not_end_its_thread_first(kind: str) -> None:
    """Nobody sees the failure of the dead, and the kill finds the loop that it wants to cancel on."""
    broker, servers = ModelBroker(), ServerLoop()
    broker.put_topic(TOPIC, 1)
    broker.send(TOPIC, 0, b"0")
    failed = threading.Event()

    def handle(driver: Driver, *_: object) -> None:
        driver.is_dead = True
        failed.set()
        raise ValueError("planned")

    with fast():
        driver = Driver(kind, broker, servers, handle, "first", 1)
        driver.start()
        assert failed.wait(WAIT_S)
        driver.kill()
        servers.close()


class Watched:
    """A broker with a topic of five messages, and who checks it."""

    def __init__(self) -> None:
        self.broker = ModelBroker()
        self.broker.put_topic(TOPIC, 1)
        self.oracle = Oracle(self.broker)
        self.stored = [self.broker.send(TOPIC, 0, b"%d" % number) for number in range(5)]

    def commit(self, offset: int, *, back: bool = False) -> None:
        self.broker.commit(GROUP, TOPIC, {0: offset}, back=back)


def test_a_position_behind_a_message_that_is_not_done_is_noticed() -> None:
    """In whatever order they were done; one that was sent back is the retry topic's."""
    watched = Watched()
    for number in (0, 2):
        watched.oracle.ends(watched.stored[number].at, b"%d" % number)
    watched.commit(1)
    assert watched.oracle.problems == []
    watched.broker.send_back(GROUP, watched.stored[1].at, dead=False)
    watched.commit(3)
    assert watched.oracle.problems == []
    watched.commit(4)
    assert ["b'3', 3 of ('T', 0), is skipped" in one for one in watched.oracle.problems] == [True]


def test_a_position_that_goes_back_by_itself_is_noticed() -> None:
    """Not after the broker has lost what was there."""
    watched = Watched()
    for one in watched.stored:
        watched.oracle.ends(one.at, one.body)
    watched.commit(5)
    watched.commit(3)
    assert watched.oracle.problems == []  # the broker keeps the higher one
    watched.oracle.may_go_back.add((TOPIC, 0))
    watched.commit(4, back=True)
    assert watched.oracle.problems == []
    watched.oracle.may_go_back.clear()
    watched.commit(3, back=True)
    assert len(watched.oracle.problems) == 1


def test_a_repetition_without_a_reason_is_noticed() -> None:
    """Some seconds after anything that happened there may be one."""
    watched = Watched()
    watched.oracle.disturbed()
    watched.oracle.ends(watched.stored[0].at, b"0")
    watched.oracle.begins(b"0")
    assert watched.oracle.problems == []
    watched.oracle.disturbed_at = time.monotonic() - DISTURBED_S - 1
    watched.oracle.begins(b"0")
    assert len(watched.oracle.problems) == 1


def test_a_silent_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody handles anything, and nobody says so."""
    monkeypatch.setattr("tests.sim_consumer.worlds.WAIT_S", 0.05)
    run = Run("assigned", 0)
    run.send(1)
    with pytest.raises(StuckError, match="all is handled"):
        run.all_done()
