"""The official clients while leaders are killed: their applications see no error, and nothing acknowledged is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.interop.official.clients import LANGUAGES, Fields, OfficialClient, running
from tests.interop.official.failovers import TIMEOUT_S, Failovers, gaps_ms, sent, slowest_ms
from tests.interop.official.world import Users, bodies, delivered
from tests.support.waiting import wait_until

pytestmark = pytest.mark.interop

KILLS: Final = 10
BETWEEN_KILLS: Final = 100
"""Messages of each client."""
THREADS: Final = 2
GAP_MS_MAX: Final = 5_000
"""Of a consumer, at a kill."""
PUSHING: Final = tuple(name for name, one in LANGUAGES.items() if one.has("push"))
MESSAGE_GROUPS: Final = "abc"


class Rig:
    """A group whose leaders are killed, and a driver of each language with a producer and a topic."""

    def __init__(self, failovers: Failovers, stack: ExitStack, directory: Path) -> None:
        self.failovers, self.world = failovers, failovers.world
        self.directory = directory
        self.users: dict[str, Users] = {}
        self._stack = stack

    def driver(self, name: str, directory: str = "producer") -> OfficialClient:
        """One more of a language."""
        LANGUAGES[name].install()
        return self._stack.enter_context(running(LANGUAGES[name], self.directory / directory / name))

    def start(self, *names: str, message_type: str = "") -> dict[str, str]:
        """A driver of each language; gives the topics."""
        topics = {}
        for name in names:
            self.users[name] = self.failovers.users(self.driver(name))
            topics[name] = self.world.topic(self.users[name].client, message_type)
        return topics

    def load(self, name: str, topic: str, number: str = "", **fields: object) -> None:
        """Let a producer of its own send without end."""
        users = self.users[name]
        producer = users.producer(topic)
        users.client.ask("load", name=f"{name}{number}", client=producer, topic=topic, **fields)

    def loaded(self, name: str, number: str = "") -> Fields:
        """End it."""
        return self.users[name].client.ask("loaded", name=f"{name}{number}")

    def wait_until_more(self, topics: dict[str, str], count: int) -> None:
        """Until every client has sent so many more."""
        enough = {topic: self.failovers.stored(topic) + count for topic in topics.values()}
        wait_until(
            lambda: all(self.failovers.stored(one) >= enough[one] for one in enough), "every client goes on", TIMEOUT_S
        )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Failovers.of_three(tmp_path) as failovers, ExitStack() as stack:
        yield Rig(failovers, stack, tmp_path)


def test_no_client_sees_that_leaders_are_killed(rig: Rig) -> None:
    """Each sends without a pause to speak of; every acknowledged id is found, twice only what got no answer.

    The client for Rust repeats nothing, and calls members that are gone: its application has to.
    """
    topics = rig.start(*LANGUAGES)
    for name, topic in topics.items():
        rig.load(name, topic, threads=THREADS, pause_ms=10)
    rig.wait_until_more(topics, 1)

    for _ in range(KILLS):
        with rig.failovers.killed_leader():
            pass
        rig.wait_until_more(topics, BETWEEN_KILLS)

    loads = {name: rig.loaded(name) for name in topics}
    kills = rig.failovers.kills
    for name, load in loads.items():
        told = f"{len(load['sent'])} sent, {len(load['errors'])} failed, slowest {slowest_ms(load)} ms"
        found = _all_in(rig, topics[name])
        twice = [body for body, count in Counter(body for body, _ in found).items() if count > 1]
        print(f"{name}: {told}, {len(twice)} stored twice")  # noqa: T201
        acknowledged = sent(load)
        if LANGUAGES[name].has("retries"):
            assert load["errors"] == [], name
        assert {(one.body, one.message_id) for one in acknowledged} <= set(found), name
        answered_at_once = {one.body for one in acknowledged if not one.was_repeated(kills)}
        assert answered_at_once.isdisjoint(twice), name
    print("elections", [one.over_ms - one.at_ms for one in kills], "ms")  # noqa: T201


def _all_in(rig: Rig, topic: str) -> list[tuple[str, str]]:
    """The bodies and ids of all that is stored."""
    count, found = rig.failovers.stored(topic), list[tuple[str, str]]()
    with rig.world.brokers.consumer("check", topic) as consumer:
        while len(found) < count:
            found += [(one.body.decode(), one.message_id) for one in consumer.poll()]
    return found


def test_a_consumer_goes_on_within_seconds(rig: Rig) -> None:
    """Everything is consumed, and what is sent after a kill soon after it."""
    topics, consumers = rig.start(*PUSHING), {}
    for name, topic in topics.items():
        users = rig.users[name]
        consumers[name] = users.push(topic, rig.world.group(users.client, topic), hold_ms=20)
        rig.load(name, topic, threads=1, pause_ms=20)
    rig.wait_until_more(topics, BETWEEN_KILLS)

    for _ in range(KILLS):
        with rig.failovers.killed_leader():
            pass
        rig.wait_until_more(topics, BETWEEN_KILLS)

    loads = {name: rig.loaded(name) for name in topics}
    for name, load in loads.items():
        client = rig.users[name].client
        assert load["errors"] == []
        wanted = {one.body for one in sent(load)}
        got = client.wait_for("message", consumers[name], partial(_has, wanted), TIMEOUT_S)
        gaps = gaps_ms(rig.failovers.kills, sent(load), got)
        again = len(got) - len(set(bodies(got)))
        print(f"{name}: {len(wanted)} sent, {len(got)} delivered, {again} of them again, gaps {gaps} ms")  # noqa: T201
        assert max(gaps) <= GAP_MS_MAX, name


def _has(wanted: set[str], found: list[Fields]) -> bool:
    return wanted <= set(bodies(found))


@pytest.mark.parametrize("crash_every", [0, 3])
def test_a_message_group_keeps_its_order(rig: Rig, crash_every: int) -> None:
    """FIFO: nothing is delivered before what was sent before it, though leaders are killed, and consumers, too."""
    topics = rig.start(*PUSHING, message_type="FIFO")
    groups = {name: rig.world.group(rig.users[name].client, topic, is_ordered=True) for name, topic in topics.items()}
    consumers: dict[str, list[tuple[OfficialClient, str]]] = {name: [] for name in topics}

    def start_consumer(name: str) -> None:
        client = rig.driver(name, f"consumer{len(consumers[name])}")
        consumers[name].append((client, rig.failovers.users(client).push(topics[name], groups[name], hold_ms=50)))

    for name, topic in topics.items():
        start_consumer(name)
        for one in MESSAGE_GROUPS:
            rig.load(name, topic, one, threads=1, pause_ms=300, group=one)
    rig.wait_until_more(topics, 10)

    for number in range(1, KILLS + 1):
        with rig.failovers.killed_leader():
            if crash_every and number % crash_every == 0:
                for name in topics:
                    consumers[name][-1][0].kill()
                    start_consumer(name)
        rig.wait_until_more(topics, BETWEEN_KILLS // 10)

    ended = {name: [rig.loaded(name, one) for one in MESSAGE_GROUPS] for name in topics}
    for name, loads in ended.items():
        assert [load["errors"] for load in loads] == [[], [], []]
        wanted = {one.body for load in loads for one in sent(load)}

        got = _delivered_in_order(consumers[name], wanted)
        print(f"{name}: {len(wanted)} sent, {len(got)} delivered, {len(got) - len(set(got))} of them again")  # noqa: T201
        for one in MESSAGE_GROUPS:
            numbers = [int(body.rpartition("-")[2]) for body in got if body.startswith(f"{name}{one}-")]
            assert list(dict.fromkeys(numbers)) == sorted(set(numbers)), f"{name}: {one}"


def _delivered_in_order(consumers: list[tuple[OfficialClient, str]], wanted: set[str]) -> list[str]:
    """The bodies as they came to any of the consumers, once all that are wanted did.

    In an ordered queue each waits for the acknowledgement of the one before: a busy machine delivers five a second.
    """
    wait_until(lambda: _has(wanted, delivered(consumers)), "all is delivered", 4 * TIMEOUT_S)
    return bodies(delivered(consumers))
