"""A group of three brokers of ours, and the official clients: what the tests of this directory share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin, GroupInfo, NotFoundError, TopicInfo
from tests.interop.official.clients import ClientError, Fields, Language, OfficialClient
from tests.support.waiting import wait_until

TIMEOUT_S: Final = 90
QUEUES: Final = 3
_NUMBERS: Final = itertools.count()


class World:
    """The brokers, and names that no other test has."""

    def __init__(self, brokers: LocalBrokers, directory: Path) -> None:
        self.brokers = brokers
        self.directory = directory
        self.admin: Admin = brokers.admin(20.0)

    def endpoints(self, language: Language) -> str:
        """All members; for a client that cannot take several, a member that need not lead."""
        addresses = [f"127.0.0.1:{one.grpc_port}" for one in self.brokers.nodes.values()]
        return language.separator.join(addresses) if language.has("addresses") else addresses[0]

    def topic(self, client: OfficialClient, kind: str = "", queues: int = QUEUES) -> str:
        """A new topic, of this type of messages."""
        name = f"T-{client.language.name}-{next(_NUMBERS)}"
        self.admin.put_topic(TopicInfo(name, queues, queues, message_type=kind))
        return name

    def group(self, client: OfficialClient, topic: str, *, is_ordered: bool = False, retries_max: int = 16) -> str:
        """A new consumer group, which begins with the first message of the topic."""
        name = f"G-{client.language.name}-{next(_NUMBERS)}"
        self.admin.put_group(GroupInfo(name, retries_max, is_ordered=is_ordered))
        self.admin.reset_offsets(name, topic, "first")
        return name

    def lag(self, group: str, topic: str) -> int:
        """How many messages the group has not consumed."""
        found = [one for one in self.admin.progress(group) if one.queue.topic == topic]
        if not found:
            raise NotFoundError(f"{group} has no progress in {topic}")
        return sum(one.lag for one in found)

    def wait_until_consumed(self, group: str, topic: str) -> None:
        """Until nothing is left to consume."""

        def nothing_left() -> bool:
            try:
                return self.lag(group, topic) == 0
            except NotFoundError:
                return False

        wait_until(nothing_left, f"{group} has consumed {topic}", TIMEOUT_S)


class Users:
    """A driver's producers and consumers at the brokers of a world, with names of their own."""

    def __init__(self, world: World, client: OfficialClient, **options: object) -> None:
        self.world, self.client = world, client
        self._options = {"endpoints": world.endpoints(client.language), **options}

    def producer(self, topic: str, **options: object) -> str:
        """Start one; gives its name."""
        name = f"p{next(_NUMBERS)}"
        self.client.ask("producer", name=name, topics=[topic], **{**self._options, **options})
        return name

    def simple(self, topic: str, group: str, expression: str = "*", **options: object) -> str:
        """Start a simple consumer; gives its name."""
        name = f"c{next(_NUMBERS)}"
        given = {**self._options, **options}
        self.client.ask("simple", name=name, group=group, subscriptions={topic: expression}, **given)
        return name

    def push(self, topic: str, group: str, expression: str = "*", **options: object) -> str:
        """Start a push consumer; gives its name."""
        name = f"c{next(_NUMBERS)}"
        given = {**self._options, **options}
        self.client.ask("push", name=name, group=group, subscriptions={topic: expression}, **given)
        return name

    def send(self, producer: str, topic: str, body: str, **fields: object) -> Fields:
        """The receipt."""
        return self.client.ask("send", client=producer, topic=topic, body=body, **fields)

    def receive(self, consumer: str, **fields: object) -> list[Fields]:
        """One call."""
        found: list[Fields] = self.client.ask("receive", client=consumer, **fields)["messages"]
        return found

    def receive_all(self, consumer: str, count: int, *, ack: bool = True, **fields: object) -> list[Fields]:
        """Receive until there are so many."""
        found: list[Fields] = []

        def are_enough() -> bool:
            got = self.receive(consumer, **fields)
            for one in got if ack else ():
                self.client.ask("ack", client=consumer, message=one["n"])
            found.extend(got)
            return len(found) >= count

        wait_until(are_enough, f"{count} messages", TIMEOUT_S)
        assert len(found) == count
        return found

    def refusal(self, op: str, **fields: object) -> str:
        """Why the client says that it failed."""
        try:
            done = self.client.ask(op, **{**self._options, **fields})
        except ClientError as error:
            return str(error)
        raise AssertionError(f"{op} of {fields} gave {done}")


def delivered(consumers: Sequence[tuple[OfficialClient, str]]) -> list[Fields]:
    """What push consumers told, in the order in which they got it."""
    told = [event for client, name in consumers for event in client.events("message", name)]
    return sorted(told, key=lambda event: event["at_ms"])  # stable: the order of each consumer's events stays


def bodies(messages: list[Fields] | list[Mapping[str, Any]]) -> list[str]:  # Any: of JSON
    """Of messages, or of events about them."""
    return [one.get("message", one)["body"] for one in messages]
