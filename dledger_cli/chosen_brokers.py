"""Which brokers a command is about: all of one cluster, those that have a topic, or those of ``--broker-name``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from rocketstore.client.aio.admin_records import TopicInfo
    from rocketstore.client.aio.routes import RoutedBroker
    from rocketstore.client.blocking import Admin


class ChosenBrokers:
    """The brokers that ``admin`` finds; ``name``: only those of this name. Brokers are called by their names."""

    def __init__(self, admin: Admin, name: str = "") -> None:
        self.admin = admin
        self.name = name

    def every(self) -> list[str]:
        """All of them, by name. Raises ``UsageError`` if they are of several clusters."""
        found = self.found()
        if len({one.cluster for one in found}) > 1:
            raise click.UsageError(f"there are several clusters: {_names(found)}; choose one group with --broker-name")
        return [one.name for one in found]

    def only_one(self) -> str:
        """The only name. Raises ``UsageError`` if there are several."""
        found = self.found()
        if len(found) > 1:
            _refuse_several([one.name for one in found])
        return found[0].name

    def addresses(self) -> tuple[str, ...]:
        """Those of the only name, the master's first. Raises ``UsageError`` if there are several."""
        name = self.only_one()
        return next(one.readable for one in self.found() if one.name == name)

    def with_topic(self, topic: str) -> list[TopicInfo]:
        """The topic as it is at each. Raises ``NotFoundError`` if none has it."""
        from rocketstore.client.aio.errors import NotFoundError  # here, so that --help does not load it

        if self.name:
            self.found()
        found = [one for one in self.admin.topic(topic) if self.name in ("", one.broker)]
        if not found:
            raise NotFoundError(f"topic {topic} does not exist at the brokers {self.name}")
        return found

    def only_one_with(self, topic: str) -> TopicInfo:
        """The topic at the only name that has it. Raises ``UsageError`` if there are several."""
        found = self.with_topic(topic)
        if len(found) > 1:
            _refuse_several([one.broker for one in found])
        return found[0]

    def found(self) -> Sequence[RoutedBroker]:
        """At least one. Raises ``NotFoundError`` for an unknown name, with those that exist."""
        from rocketstore.client.aio.errors import NotFoundError

        known = self.admin.brokers()
        found = [one for one in known if self.name in ("", one.name)]
        if not found:
            names = ", ".join(one.name for one in known)
            raise NotFoundError(f"no brokers named {self.name} have registered, only {names}")
        return found


def _refuse_several(names: Collection[str]) -> NoReturn:
    raise click.UsageError(
        f"there are several groups of brokers: {', '.join(sorted(names))}; choose one with --broker-name"
    )


def _names(brokers: Sequence[RoutedBroker]) -> str:
    return ", ".join(f"{one.name} (cluster {one.cluster})" for one in brokers)
