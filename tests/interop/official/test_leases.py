"""What a simple consumer of each official client holds when a leader is killed: P3 and P5 of the design."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from typing import Final

import pytest

from rocketstore.message.message import Message
from tests.interop.official.clients import ClientError, Fields, OfficialClient
from tests.interop.official.failovers import TIMEOUT_S, Failovers
from tests.interop.official.world import Users, bodies
from tests.support.waiting import wait_until

pytestmark = pytest.mark.interop

MESSAGES: Final = 1_200
SETTLED_BEFORE: Final = 100
SETTLED_AFTER: Final = 100
AT_ONCE: Final = 25
"""Acknowledgements under way."""
TRIES: Final = 20
INVISIBLE_MS: Final = 30_000
LONG_MS: Final = 300_000
REFUSED: Final = r"40013|(?i:invalid.?receipt.?handle)"


@pytest.fixture(scope="module")
def failovers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failovers]:
    with Failovers.of_three(tmp_path_factory.mktemp("leases")) as found:
        yield found


class Leases:
    """A simple consumer's. ``first``, ``second``: by body, each message as it came, with the call's times."""

    def __init__(self, users: Users, consumer: str) -> None:
        self._users, self._consumer = users, consumer
        self.failed_calls = 0

    def receive(self, invisible_ms: int) -> list[tuple[float, float, Fields]]:
        """One call's messages, with its begin and end. An error is counted, and is no message."""
        began = time.monotonic()
        try:
            found = self._users.receive(self._consumer, invisible_ms=invisible_ms)
        except ClientError:
            self.failed_calls += 1
            return []
        return [(began, time.monotonic(), one) for one in found]

    def ack(self, messages: Sequence[Fields]) -> None:
        """All of them; again if a client that repeats no call itself meets a member that is gone."""
        for begin in range(0, len(messages), AT_ONCE):
            asked = [self._begin_ack(one) for one in messages[begin : begin + AT_ONCE]]
            for message, number in zip(messages[begin:], asked, strict=False):
                self._end_ack(message, number)

    def _begin_ack(self, message: Fields) -> int:
        return self._users.client.begin("ack", client=self._consumer, message=message["n"])

    def _end_ack(self, message: Fields, number: int) -> None:
        repeats_itself = self._users.client.language.has("retries")
        for tries in itertools.count(1):
            try:
                self._users.client.answer(number)
            except ClientError as error:
                if repeats_itself or tries == TRIES or re.search(REFUSED, str(error)):
                    raise
                number = self._begin_ack(message)
            else:
                return


def test_no_lease_ends_with_the_leader(failovers: Failovers, client: OfficialClient) -> None:
    """1,000 messages in a consumer's hands: none comes again within its time, all do once after it.

    Acknowledgements of what the old leader gave out are taken; once a message came again they are refused.
    """
    users, world = failovers.users(client), failovers.world
    topic = world.topic(client)
    group = world.group(client, topic)
    with world.brokers.producer(60.0) as producer:
        for sent in [producer.submit(Message(topic, str(number).encode())) for number in range(MESSAGES)]:
            sent.result()
    leases = Leases(users, users.simple(topic, group, await_s=2))
    first: dict[str, tuple[float, float, Fields]] = {}

    def have_all() -> bool:
        first.update({one[2]["body"]: one for one in leases.receive(INVISIBLE_MS)})
        return len(first) == MESSAGES

    wait_until(have_all, "all are leased", TIMEOUT_S)
    held = [one for _, _, one in first.values()]
    leases.ack(held[:SETTLED_BEFORE])
    with failovers.killed_leader():
        killed = time.monotonic()
        assert killed - min(began for began, _, _ in first.values()) < INVISIBLE_MS / 1000, "the machine is too slow"
        leases.ack(held[SETTLED_BEFORE : SETTLED_BEFORE + SETTLED_AFTER])
        still_held = set(bodies(held[SETTLED_BEFORE + SETTLED_AFTER :]))
        again: list[tuple[float, float, Fields]] = []

        def are_back() -> bool:
            again.extend(leases.receive(LONG_MS))
            return {one["body"] for _, _, one in again} >= still_held

        wait_until(are_back, "all come again", 2 * TIMEOUT_S)
        assert leases.receive(LONG_MS) == []

    print(f"{len(still_held)} leases, back after", _spread(first, again), "s")  # noqa: T201
    assert sorted(one["body"] for _, _, one in again) == sorted(still_held)
    assert {one["attempt"] for _, _, one in again} == {2}
    for _, ended, one in again:
        assert ended - first[one["body"]][0] >= INVISIBLE_MS / 1000, one
    stale, fresh = first[again[0][2]["body"]][2], [one for _, _, one in again]
    if client.language.name != "go":  # it tells no refusal
        with pytest.raises(ClientError, match=REFUSED):
            leases.ack([stale])
    leases.ack(fresh)
    world.wait_until_consumed(group, topic)
    if client.language.has("retries"):
        assert leases.failed_calls == 0


def _spread(
    first: dict[str, tuple[float, float, Fields]], again: Sequence[tuple[float, float, Fields]]
) -> tuple[float, float]:
    """The shortest and the longest time from a message's first delivery to its second."""
    spans = [ended - first[one["body"]][0] for _, ended, one in again]
    return round(min(spans), 1), round(max(spans), 1)
