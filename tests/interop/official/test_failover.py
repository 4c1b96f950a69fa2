"""The official clients while leaders are killed: their applications see no error, and nothing acknowledged is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from cluster.local.brokers import LocalBrokers
from rocketstore.client import TopicInfo
from tests.interop.official.balancer import balancer
from tests.interop.official.clients import LANGUAGES, Fields, Language, running
from tests.interop.official.conftest import SETTINGS
from tests.interop.official.world import Users, World, bodies
from tests.support.waiting import wait_until

pytestmark = pytest.mark.interop

KILLS: Final = 10
BETWEEN_KILLS: Final = 100
"""Messages of each client."""
THREADS: Final = 2
TIMEOUT_S: Final = 120


class Rig:
    """A group whose leaders are killed, and a driver of each language with a producer and a topic."""

    def __init__(self, world: World, stack: ExitStack, directory: Path) -> None:
        self.world = world
        self.users: dict[str, Users] = {}
        self.producers: dict[str, str] = {}
        ports = [one.grpc_port for one in world.brokers.nodes.values()]
        one_address = stack.enter_context(balancer(ports))
        for language in LANGUAGES.values():
            language.install()
            client = stack.enter_context(running(language, directory / language.name))
            options = {} if language.has("addresses") else {"endpoints": one_address}
            users = self.users[language.name] = Users(world, client, **options)
            world.admin.put_topic(TopicInfo(self.topic(language), 3, 3))
            self.producers[language.name] = users.producer(self.topic(language))

    @staticmethod
    def topic(language: Language) -> str:
        return f"Failover-{language.name}"

    def stored(self, language: Language) -> int:
        return sum(one.max_offset for one in self.world.admin.queue_ranges(self.topic(language)))

    def kill_the_leader(self, languages: Collection[Language] = tuple(LANGUAGES.values())) -> None:
        """And start it again, once another one leads; until every client has gone on and the group is whole."""
        brokers = self.world.brokers
        killed = brokers.master()
        brokers.kill(killed)
        brokers.master(other_than=killed)
        brokers.start(killed)
        enough = {language.name: self.stored(language) + BETWEEN_KILLS for language in languages}
        wait_until(
            lambda: all(self.stored(one) >= enough[one.name] for one in languages),
            "every client goes on",
            TIMEOUT_S,
        )
        wait_until(self._is_whole, "who was killed follows again", TIMEOUT_S)

    def _is_whole(self) -> bool:
        """Whether every member has what was committed a moment ago."""
        before = max((one.committed_index for one in self.world.brokers.statuses().values()), default=0)
        now = self.world.brokers.statuses()
        return len(now) == len(self.world.brokers.nodes) and all(one.committed_index >= before for one in now.values())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with LocalBrokers(tmp_path / "brokers", settings=SETTINGS) as brokers, ExitStack() as stack:
        brokers.master()
        world = World(brokers, tmp_path)
        stack.callback(world.admin.close)
        yield Rig(world, stack, tmp_path)


def test_no_client_sees_that_leaders_are_killed(rig: Rig) -> None:
    """Each sends without a pause to speak of; every id that was acknowledged is found, and few messages twice.

    The client for Rust repeats nothing, and calls members that are gone: its application has to.
    """
    for name, users in rig.users.items():
        users.client.ask(
            "load", name=name, client=rig.producers[name], topic=f"Failover-{name}", threads=THREADS, pause_ms=10
        )
    everybody = tuple(LANGUAGES.values())
    wait_until(lambda: all(rig.stored(one) > 0 for one in everybody), "messages are stored", TIMEOUT_S)

    for _ in range(KILLS):
        rig.kill_the_leader()

    loads = {name: users.client.ask("loaded", name=name) for name, users in rig.users.items()}
    for name, load in loads.items():
        print(f"{name}: {len(load['sent'])} sent, {len(load['errors'])} failed, slowest {load['slowest_ms']} ms")  # noqa: T201
    for name, load in loads.items():
        if LANGUAGES[name].has("retries"):
            assert load["errors"] == [], name
        topic = f"Failover-{name}"
        count = rig.stored(LANGUAGES[name])
        found: list[tuple[str, str]] = []
        with rig.world.brokers.consumer(f"check-{name}", topic) as consumer:
            while len(found) < count:
                found += [(one.body.decode(), one.message_id) for one in consumer.poll()]
        assert {tuple(one) for one in load["sent"]} <= set(found), name
        twice = sum(count - 1 for count in Counter(body for body, _ in found).values())
        assert twice <= KILLS * THREADS, f"{name}: {twice} messages are there twice"


def test_a_consumer_goes_on_within_seconds(rig: Rig) -> None:
    """P3: everything is consumed; of what was leased when a leader was killed nothing comes twice within its time."""
    pushing = [one for one in LANGUAGES.values() if one.has("push")]
    names = {}
    for language in pushing:
        users, topic = rig.users[language.name], rig.topic(language)
        names[language.name] = users.push(topic, rig.world.group(users.client, topic), hold_ms=50)
        users.client.ask(
            "load", name=language.name, client=rig.producers[language.name], topic=topic, threads=1, pause_ms=20
        )
    for _ in range(3):
        rig.kill_the_leader(pushing)
    for language in pushing:
        users = rig.users[language.name]
        load = users.client.ask("loaded", name=language.name)
        assert load["errors"] == []
        sent = {body for body, _ in load["sent"]}
        got = users.client.wait_for("message", names[language.name], partial(_has, sent), TIMEOUT_S)
        twice = len(bodies(got)) - len(set(bodies(got)))
        print(f"{language.name}: {len(sent)} sent, {len(got)} delivered, {twice} of them again")  # noqa: T201


def _has(sent: set[str], found: list[Fields]) -> bool:
    return sent <= set(bodies(found))
