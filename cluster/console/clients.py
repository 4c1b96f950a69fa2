"""Who is connected to a group of brokers: producers, the members of consumer groups, and their queues.

The master is asked by RocketMQ's protocol, in which clients of both kinds are listed. Nobody tells which queues a
member has: they are computed by the rule that all members follow unless they were configured otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from cluster.console.browse import QUEUES_MAX, ranges_of, safe_text
from dledger.access.permissions import RETRY_PREFIX
from dledger.errors import AccessDeniedError, InvalidRequestError, UnavailableError
from dledger.remoting.client import UnreachableError
from dledger.remoting.codes import AnswerCode, Language
from dledger.remoting.connection import DisconnectedError
from dledger.remoting.errors import FrameError, RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.allocation import owners, queues_in_java_order
from rocketstore.client.frames import open_frames
from rocketstore.client.name_server_tls import check_plaintext
from rocketstore.client.runtime import body_of, sign
from rocketstore.client.shares import QueueName
from rocketstore.message.checks import check_topic
from rocketstore.nameserver.groups import shares_of
from rocketstore.nameserver.lookups import NameServers
from rocketstore.remoting.bodies.clients import ConsumerConnectionList, ProducersByGroup
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import GroupHeader, write_header
from rocketstore.types import MessageModel

if TYPE_CHECKING:
    from cluster.broker_target import BrokerTarget
    from rocketstore.client.admin import Admin, QueueRange

GROUPS_PER_PAGE: Final = 50
CLIENTS_MAX: Final = 500
"""In one list."""
TOPICS_SHOWN_MAX: Final = 64
_T = TypeVar("_T")
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

    def __init__(self, brokers: BrokerTarget, admin: Admin, name_servers: Sequence[str] = ()) -> None:
        """``name_servers`` know the other groups that have queues of a topic, if there are any."""
        self._admin = admin
        self._security = brokers.security.for_client()
        self._timeout_s = brokers.timeout_s
        self._frames = open_frames([*brokers.addresses, *name_servers], self._security)
        self._learned = bool(name_servers)  # the addresses of a group are then a name server's word
        self._names = NameServers(name_servers, self._frames, timeout_s=self._timeout_s) if name_servers else None

    def close(self) -> None:
        """Requests under way fail."""
        self._frames.close()

    # --- who is connected --------------------------------------------------------------------------------------------

    def consumers(self, group: str, address: str = "") -> ConnectedGroup | None:
        """The connected members of a group; None if there are none. ``address``: of the master, if known."""
        asked = Frame(RequestCode.GET_CONSUMER_CONNECTION_LIST, 0, write_header(GroupHeader(group)))
        decode, none = ConsumerConnectionList.decode, AnswerCode.CONSUMER_NOT_ONLINE
        found = self._ask(address or self._master(), asked, decode, none=none)
        if found is None:
            return None
        members = tuple(
            _client(one.client_id, one.client_addr, one.language, one.version)
            for one in sorted(found.connection_set, key=lambda one: one.client_id)
        )
        subscriptions = {
            topic: found.subscription_table[topic].sub_string for topic in sorted(found.subscription_table)
        }
        return ConnectedGroup(members, subscriptions, found.message_model is MessageModel.BROADCASTING)

    def everybody(self, wanted: str, first: int) -> dict[str, object]:
        """Producers, and the consumers of a page of groups from ``first`` on, if their names contain ``wanted``."""
        address = self._master()
        everybody = Frame(RequestCode.GET_ALL_PRODUCER_INFO, 0)
        found = self._ask(address, everybody, ProducersByGroup.decode) or ProducersByGroup()
        producers = [
            {"group": safe_text(group), **_client(one.client_id, one.remote_ip.lstrip("/"), one.language, one.version)}
            for group, ones in sorted(found.data.items())
            for one in ones
            if wanted in group
        ]
        groups = [one for one in self._admin.groups() if wanted in one]
        known: dict[str, ConnectedGroup | None] = {}
        if wanted and wanted not in groups and not check_topic(wanted):
            known[wanted] = self.consumers(wanted, address)
            if known[wanted] is not None:  # it has committed nothing yet
                groups.insert(0, wanted)
        consumers: list[dict[str, object]] = []
        for group in groups[first : first + GROUPS_PER_PAGE]:
            connected = known[group] if group in known else self.consumers(group, address)
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
        status = self._admin.status()
        connected = self.consumers(group, status.address)
        offsets = self._admin.offsets(group)
        subscribed = set(connected.subscriptions) if connected is not None else set()
        read_queues = {one.name: one.read_queues for one in self._admin.topics()}
        topics = {topic for topic, _ in offsets} | subscribed | {RETRY_PREFIX + group}
        ranges = ranges_of(self._admin, sorted(topics & read_queues.keys()))  # others are deleted, or not there yet
        rows: list[dict[str, object]] = []
        count = 0
        for topic in sorted(ranges):
            count += len(ranges[topic])
            shared = read_queues[topic]
            having = self._owners(connected, topic, status.broker_name, shared) if len(rows) < QUEUES_MAX else {}
            for one in ranges[topic][: QUEUES_MAX - len(rows)]:
                committed = offsets.get((topic, one.queue_id), -1)
                rows.append(_row(topic, one, committed, having.get(one.queue_id, "")))
        return {
            "group": group,
            "members": list(connected.members[:CLIENTS_MAX]) if connected else [],
            "all_members": len(connected.members) if connected else 0,
            "subscriptions": [_subscription(*one) for one in connected.subscriptions.items()] if connected else [],
            "broadcast": connected is not None and connected.broadcast,
            "rows": rows,
            "all_rows": count,
        }

    def _owners(self, connected: ConnectedGroup | None, topic: str, name: str, queues: int) -> dict[int, str]:
        """Who has each queue here, if the members share them; nobody has those of a topic that none subscribes to."""
        if connected is None or connected.broadcast or topic not in connected.subscriptions:
            return {}
        shares = {name: queues, **self._elsewhere(topic)}
        everything = [QueueName(topic, number, broker) for broker, count in shares.items() for number in range(count)]
        ordered = queues_in_java_order(everything)
        divided = owners(ordered, connected.ids)
        return {one.queue_id: safe_text(member) for one, member in divided.items() if one.broker_name == name}

    def _elsewhere(self, topic: str) -> dict[str, int]:
        """How many queues of a topic each group of brokers has, as name servers tell; empty without them."""
        route = self._names.route(topic) if self._names is not None else None
        return {} if route is None else {one.group.name: one.read_queues for one in shares_of(route) if one.is_readable}

    # --- asking ------------------------------------------------------------------------------------------------------

    def _master(self) -> str:
        """The master's address; while there is none, that of another broker."""
        return self._admin.status().address

    def _ask(
        self, address: str, request: Frame, decode: Callable[[bytes], _T], *, none: int | None = None
    ) -> _T | None:
        """The answer of this broker; None if its code is ``none``."""
        try:
            check_plaintext([address], self._security)
            signed = sign(request, self._security, learned=self._learned)
            answer = self._frames.call(address, signed, self._timeout_s)
        except TimeoutError:
            raise UnavailableError(f"{address} did not answer within {self._timeout_s:g} s") from None
        except (UnreachableError, DisconnectedError, FrameError) as error:
            raise UnavailableError(str(error)) from error
        if answer.code == none:
            return None
        try:
            return decode(body_of(answer, self._security, learned=self._learned))
        except RequestError as error:
            kind = AccessDeniedError if answer.code == AnswerCode.NO_PERMISSION else InvalidRequestError
            raise kind(f"{address}: {error}") from None


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


def _row(topic: str, one: QueueRange, committed: int, member: str) -> dict[str, object]:
    low = max(one.min_offset, 0)
    return {
        "topic": topic,
        "queue": one.queue_id,
        "committed": committed,
        "max_offset": one.max_offset,
        "lag": max(one.max_offset - max(committed, low), 0),
        "member": member,
    }
