"""A group whose leaders are killed, and what the official clients' loads and consumers say about it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from dledger_cli.local.brokers import LocalBrokers
from tests.interop.official.balancer import balancer
from tests.interop.official.clients import Fields, OfficialClient
from tests.interop.official.conftest import SETTINGS
from tests.interop.official.world import Users, World
from tests.support.waiting import wait_until

TIMEOUT_S: Final = 120
CALL_DEADLINE_MS: Final = 3_000
"""After which the official clients repeat a call that was not answered."""


class Kill(NamedTuple):
    """From a leader's end until another one accepts messages: Unix milliseconds."""

    at_ms: int
    over_ms: int


class Failovers:
    """The group. ``kills``: those so far."""

    def __init__(self, world: World, one_address: str) -> None:
        self.world = world
        self.kills: list[Kill] = []
        self._one_address = one_address

    @classmethod
    @contextmanager
    def of_three(cls, directory: Path) -> Iterator[Self]:
        """A group of three meanwhile."""
        with LocalBrokers(directory / "brokers", settings=SETTINGS) as brokers, ExitStack() as stack:
            brokers.master()
            world = World(brokers, directory)
            stack.callback(world.admin.close)
            ports = [one.grpc_port for one in brokers.nodes.values()]
            yield cls(world, stack.enter_context(balancer(ports)))

    def users(self, client: OfficialClient) -> Users:
        """With an address that serves whoever is killed."""
        options = {} if client.language.has("addresses") else {"endpoints": self._one_address}
        return Users(self.world, client, **options)

    def stored(self, topic: str) -> int:
        """How many messages there are."""
        return sum(one.max_offset for one in self.world.admin.queue_ranges(topic))

    @contextmanager
    def killed_leader(self) -> Iterator[Kill]:
        """SIGKILL to the leader, which is started again at the end; until then another one leads."""
        brokers = self.world.brokers
        killed = brokers.master()
        at_ms = _now_ms()
        brokers.kill(killed)
        brokers.master(other_than=killed)
        kill = Kill(at_ms, _now_ms())
        self.kills.append(kill)
        try:
            yield kill
        finally:
            brokers.start(killed)
        wait_until(self._is_whole, "who was killed follows again", TIMEOUT_S)

    def _is_whole(self) -> bool:
        """Whether every member has what was committed a moment ago."""
        before = max((one.committed_index for one in self.world.brokers.statuses().values()), default=0)
        now = self.world.brokers.statuses()
        return len(now) == len(self.world.brokers.nodes) and all(one.committed_index >= before for one in now.values())


class Sent(NamedTuple):
    """An acknowledged message of a load; its call's times in Unix milliseconds."""

    body: str
    message_id: str
    began_ms: int
    ended_ms: int

    def was_repeated(self, kills: Sequence[Kill]) -> bool:
        """Whether an attempt may have got no answer: its connection ended with a leader, or its time was up."""
        met_a_kill = any(self.began_ms <= one.over_ms and self.ended_ms >= one.at_ms for one in kills)
        return met_a_kill or self.ended_ms - self.began_ms >= CALL_DEADLINE_MS


def sent(load: Fields) -> list[Sent]:
    """Of the answer that ended a load."""
    return [Sent(*one) for one in load["sent"]]


def slowest_ms(load: Fields) -> int:
    """The longest call that was acknowledged."""
    return max((one.ended_ms - one.began_ms for one in sent(load)), default=0)


def gaps_ms(kills: Sequence[Kill], acknowledged: Sequence[Sent], events: Sequence[dict[str, Any]]) -> list[int]:
    """Per kill, from then until the first message was consumed that the next leader had acknowledged."""
    ended_ms = {one.body: one.ended_ms for one in acknowledged}
    consumed = [
        (one["at_ms"], ended_ms[one["message"]["body"]]) for one in events if one["message"]["body"] in ended_ms
    ]
    return [min(at_ms for at_ms, its_ms in consumed if its_ms > kill.over_ms) - kill.at_ms for kill in kills]


def _now_ms() -> int:
    return int(1000 * time.time())
