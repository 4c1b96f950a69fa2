"""The clients of a group of brokers: producers, the members of consumer groups, and their queues.

Nobody tells which queues a member has: they are computed by the rule that all members follow unless they were
configured otherwise.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dledger.access.rules import RETRY_PREFIX
from dledger.remoting.codes import Language
from dledger_cli.console.browse import QUEUES_MAX, rows_of, safe_text
from rocketstore.client import MessageQueue, NotFoundError
from rocketstore.client.aio.rebalancer import in_java_order_of_queues, owners
from rocketstore.client.aio.routes import PERMISSION_READ
from rocketstore.message.checks import check_topic
from rocketstore.types import MessageModel

if TYPE_CHECKING:
    from rocketstore.client import Admin, QueueProgress

GROUPS_PER_PAGE: Final = 50
CLIENTS_MAX: Final = 500
"""In one list."""
TOPICS_SHOWN_MAX: Final = 64
_VERSION_4_9_0: Final = 393
_VERSION_5_0_0: Final = 413
"""RocketMQ counts its versions, with a snapshot before each."""


@dataclass(frozen=True, slots=True)
class ConnectedGroup:
    """The members of a consumer group that are connected."""

    members: tuple[dict[str, object], ...]
    subscriptions: dict[str, str]
    """Expressions of tags by topic."""
    broadcast: bool

    @property
    def ids(self) -> list[str]:
        """The client ids of the members."""
        return [str(one["id"]) for one in self.members]


class ClientLists:
    """Of one group of brokers. Thread-safe; raises ``DLedgerError``."""

    def __init__(self, admin: Admin, everywhere: Admin | None = None) -> None:
        """``everywhere``: of all groups that may have queues of the same topics, if there are others."""
        self._admin = admin
        self._everywhere = everywhere

    # --- who is connected --------------------------------------------------------------------------------------------

    def consumers(self, group: str) -> ConnectedGroup | None:
        """The connected members of a group; None if there are none."""
        try:
            found = self._admin.members(group)
        except NotFoundError:
            return None
        members = tuple(_client(one.client_id, one.client_addr, one.language, one.version) for one in found.clients)
        return ConnectedGroup(members, dict(found.topics), found.model is MessageModel.BROADCASTING)

    def everybody(self, wanted: str, first: int) -> dict[str, object]:
        """Producers, and the consumers of a page of groups from ``first`` on, if their names contain ``wanted``."""
        producers = [
            {"group": safe_text(group), **_client(one.client_id, one.remote_ip.lstrip("/"), one.language, one.version)}
            for group, ones in self._admin.all_producers().items()
            for one in ones
            if wanted in group
        ]
        groups = [one.name for one in self._admin.groups() if wanted in one.name]
        known: dict[str, ConnectedGroup | None] = {}
        if wanted and wanted not in groups and not check_topic(wanted):
            known[wanted] = self.consumers(wanted)
            if known[wanted] is not None:  # it has committed nothing yet
                groups.insert(0, wanted)
        consumers: list[dict[str, object]] = []
        for group in groups[first : first + GROUPS_PER_PAGE]:
            connected = known[group] if group in known else self.consumers(group)
            if connected is not None:
                topics = [
                    _subscription(*one) for one in connected.subscriptions.items() if one[0] != RETRY_PREFIX + group
                ]
                about = {"group": group, "topics": topics[:TOPICS_SHOWN_MAX], "broadcast": connected.broadcast}
                consumers += [{**about, **one} for one in connected.members]
        return {
            "producers": producers[:CLIENTS_MAX],
            "all_producers": len(producers),
            "consumers": consumers[:CLIENTS_MAX],
            "all_consumers": len(consumers),
            "first": first,
            "groups": len(groups),
            "per_page": GROUPS_PER_PAGE,
        }

    # --- who has which queue -----------------------------------------------------------------------------------------

    def members(self, group: str) -> dict[str, object]:
        """A group's members, and its progress in every queue with the member that has it."""
        connected = self.consumers(group)
        progress: list[QueueProgress] = []
        with suppress(NotFoundError):  # it has no offsets
            progress = self._admin.progress(group)
        subscribed = set(connected.subscriptions) if connected is not None else set()
        topics = {one.queue.topic for one in progress} | subscribed | {RETRY_PREFIX + group}
        rows = rows_of(self._admin, progress, topics)
        shown = rows[:QUEUES_MAX]
        having: dict[tuple[str, int], str] = {}
        for topic in {str(row["topic"]) for row in shown} & subscribed:
            if connected is not None and not connected.broadcast:
                having |= self._owners(connected, topic)
        for row in shown:
            row["member"] = having.get((str(row["topic"]), int(str(row["queue"]))), "")
        return {
            "group": group,
            "members": list(connected.members[:CLIENTS_MAX]) if connected else [],
            "all_members": len(connected.members) if connected else 0,
            "subscriptions": [_subscription(*one) for one in connected.subscriptions.items()] if connected else [],
            "broadcast": connected is not None and connected.broadcast,
            "rows": shown,
            "all_rows": len(rows),
        }

    def _owners(self, connected: ConnectedGroup, topic: str) -> dict[tuple[str, int], str]:
        """The owner of each of a topic's queues here: the members divide those of all groups of brokers."""
        here = self._admin.topic(topic)[0]
        places = {here.broker: here}
        if self._everywhere is not None:
            with suppress(NotFoundError):  # name servers do not know it yet
                places |= {one.broker: one for one in self._everywhere.topic(topic)}
        queues = [
            MessageQueue(topic, one.broker, number)
            for one in places.values()
            if one.permission & PERMISSION_READ
            for number in range(one.read_queues)
        ]
        divided = owners(in_java_order_of_queues(queues), connected.ids)
        return {
            (topic, one.queue_id): safe_text(member)
            for one, member in divided.items()
            if one.broker_name == here.broker
        }


def _client(client_id: str, address: str, language: Language, version: int) -> dict[str, object]:
    return {
        "id": safe_text(client_id),
        "address": safe_text(address),
        "language": language.name.lower(),
        "version": _version_text(version) if language is Language.JAVA else "",
    }


def _version_text(version: int) -> str:
    """RocketMQ's 4.9 by name; others by RocketMQ's number."""
    if _VERSION_4_9_0 <= version < _VERSION_5_0_0:
        return f"4.9.{(version - _VERSION_4_9_0) // 2}"
    return f"number {version}"


def _subscription(topic: str, tags: str) -> str:
    return safe_text(topic if tags == "*" else f"{topic} ({tags})")
