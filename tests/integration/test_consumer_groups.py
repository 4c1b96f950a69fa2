"""Members of a consumer group share the queues of a real group of brokers, whatever happens to members and master."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import pytest

from rocketstore.client import Message
from rocketstore.client.aio.consumer_options import ConsumerSettings
from tests.integration.broker_harness import QUEUES, BrokerGroup
from tests.support.running_consumer import RunningConsumer
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Quick:
    """Brokers that all tests here use, and what is this test's own: a topic and a consumer group of the same name."""

    brokers: BrokerGroup
    name: str

    def lag(self) -> int:
        """Messages not committed yet."""
        with self.brokers.admin(20.0) as admin:
            return admin.lag(self.name, self.name)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerGroup]:
    """Three brokers whose retries come after a second each."""
    directory = tmp_path_factory.mktemp("brokers")
    with BrokerGroup(directory, settings={"messageDelayLevel": "1s 1s 1s 1s 1s 1s"}) as brokers:
        yield brokers


@pytest.fixture
def quick(running: BrokerGroup, request: pytest.FixtureRequest) -> Quick:
    """All three run again, whatever the test before did to them."""
    for node in running.nodes:
        if not running.is_running(node):
            running.start(node)
    running.master()
    name = request.node.name.removeprefix("test_")
    running.create_topic(name)
    return Quick(running, name)


class Member(RunningConsumer):
    """One of this test's group; ``mine``: the numbers of its queues."""

    def __init__(self, quick: Quick, *, fails: str = "", **options: Unpack[ConsumerSettings]) -> None:
        super().__init__(quick.brokers.addresses, quick.name, quick.name, fails=fails, **options)

    @property
    def mine(self) -> list[int]:
        return [number for _, number in self.queues]


def put(quick: Quick, what: str, count: int = 40) -> set[str]:
    bodies = [f"{what}-{number:03}" for number in range(count)]
    with quick.brokers.producer(20.0) as producer:
        for number, body in enumerate(bodies):
            producer.send(Message(quick.name, body.encode()), queue=number % QUEUES)
    return set(bodies)


def shared(*members: Member) -> bool:
    return sorted(queue for one in members for queue in one.mine) == list(range(QUEUES)) and all(
        len(one.mine) >= QUEUES // len(members) for one in members
    )


def test_queues_are_shared_and_taken_over_and_nothing_is_missing(quick: Quick) -> None:
    """A second and a third member join, one leaves, one is cut off; then the master is killed."""
    one = Member(quick)
    sent = put(quick, "alone")
    wait_until(lambda: set(one.bodies) == sent, "all came to the only member")
    assert Counter(one.bodies) == Counter(sent)
    two, three = Member(quick), Member(quick)
    members = [one, two, three]
    try:
        wait_until(lambda: shared(*members), "all three have queues")
        before = len(one.got)
        sent |= put(quick, "three")
        wait_until(lambda: set(one.bodies + two.bodies + three.bodies) == sent, "all came to one of three")
        assert not {queue for queue, _ in one.got[before:]} & {queue for queue, _ in two.got + three.got}

        three.close()
        wait_until(lambda: shared(one, two), "the others took over")
        sent |= put(quick, "two")
        wait_until(lambda: set(one.bodies + two.bodies + three.bodies) == sent, "all came to one of two")

        master = quick.brokers.master()
        quick.brokers.kill(master)
        quick.brokers.master(other_than=master)
        sent |= put(quick, "later")
        wait_until(lambda: set(one.bodies + two.bodies + three.bodies) == sent, "all came after the failover")
        wait_until(lambda: shared(one, two), "and the new master knows both")
        wait_until(lambda: quick.lag() == 0, "all is committed")
    finally:
        for member in members:
            member.close()


def test_a_failing_message_comes_again_and_is_dead_in_the_end(quick: Quick) -> None:
    """To any member; the others are not held up by it. Then it can be read as a dead letter."""
    with Member(quick, fails="bad", retries_max=2) as one, Member(quick, fails="bad", retries_max=2) as two:
        wait_until(lambda: shared(one, two), "they share")
        good = put(quick, "good")
        put(quick, "bad", 2)
        wait_until(lambda: (one.bodies + two.bodies).count("bad-001") == 3, "it was tried three times")
        wait_until(lambda: (one.bodies + two.bodies).count("bad-000") == 3, "and the other, too")
        assert good <= set(one.bodies + two.bodies)
        dead = f"%DLQ%{quick.name}"
        with quick.brokers.admin(20.0) as admin:
            wait_until(lambda: any(topic.name == dead for topic in admin.topics()), "there are dead letters")
            wait_until(lambda: admin.queue_ranges(dead)[0].max_offset == 2, "both")
            letters, _ = admin.messages(admin.queue_ranges(dead)[0].queue, 0)
        assert {one.body for one in letters} == {b"bad-000", b"bad-001"}
        assert {one.properties.get("RETRY_TOPIC") for one in letters} == {quick.name}
        wait_until(lambda: quick.lag() == 0, "all is committed")


def test_ordered_members_keep_the_order_of_each_queue(quick: Quick) -> None:
    """Also while queues change hands, and while the master does."""
    one, two = Member(quick, ordered=True), Member(quick, ordered=True)
    members = [one, two]
    try:
        wait_until(lambda: shared(one, two), "they share")
        sent = put(quick, "a")
        two.close()
        sent |= put(quick, "b")
        master = quick.brokers.master()
        quick.brokers.kill(master)
        quick.brokers.master(other_than=master)
        sent |= put(quick, "c")
        wait_until(lambda: set(one.bodies + two.bodies) == sent, "all came")
    finally:
        for member in members:
            member.close()
    for queue in range(QUEUES):
        for member in members:
            mine = [text for at, text in member.got if at == queue]
            assert mine == sorted(mine)
    assert Counter(one.bodies + two.bodies) == Counter(sent)


def consume(quick: Quick, file: Path) -> subprocess.Popen[bytes]:
    words = ["message", "consume", "-t", quick.name, "-g", quick.name, "--follow", "--from", "first"]
    command = [sys.executable, "-m", "dledger_cli.entry", *words, "-b", ",".join(quick.brokers.addresses)]
    with file.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream)


def test_two_commands_share_a_group(quick: Quick, tmp_path: Path) -> None:
    """Each message is printed by one of them; when one gets Ctrl-C, the other goes on with all."""
    files = [tmp_path / "one", tmp_path / "two"]
    commands = [consume(quick, file) for file in files]

    def printed() -> list[list[str]]:
        return [file.read_text().split() for file in files]

    try:
        sent: set[str] = set()

        def both_print() -> bool:
            sent.update(put(quick, f"round{len(sent):05}", QUEUES))
            return all(printed())

        wait_until(both_print, "both have queues", poll_s=0.5)
        wait_until(lambda: set().union(*printed()) == sent, "each message is printed")
        before = [len(one) for one in printed()]
        sent |= put(quick, "shared")
        wait_until(lambda: set().union(*printed()) == sent, "each message is printed")
        assert sum(len(one) for one in printed()) - sum(before) == 40

        commands[0].send_signal(signal.SIGINT)
        assert commands[0].wait(30) == 130
        sent |= put(quick, "left")
        wait_until(lambda: set().union(*printed()) == sent, "the other prints all")
        assert set(printed()[1]) >= {f"left-{number:03}" for number in range(40)}
    finally:
        for command in commands:
            command.kill()
            command.wait()


def test_what_a_killed_member_had_in_use_comes_to_another(quick: Quick, tmp_path: Path) -> None:
    """Its connection ends with it, so the others hear of it at once."""
    command = consume(quick, tmp_path / "killed")
    with quick.brokers.admin(20.0) as admin:
        wait_until(lambda: any(one.name == f"%RETRY%{quick.name}" for one in admin.topics()), "it has joined")
    with Member(quick) as one:
        wait_until(lambda: len(one.mine) == QUEUES // 2, "they share")
        command.kill()
        command.wait()
        wait_until(lambda: len(one.mine) == QUEUES, "it takes over")
        sent = put(quick, "after")
        wait_until(lambda: set(one.bodies) == sent, "all came")
