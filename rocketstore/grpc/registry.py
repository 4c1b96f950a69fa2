"""The clients of the gateway: their settings, what they publish, and where their streams of commands end.

A client's calls may come in at any member, and its stream of commands ends at one of them, or at none for a while: some
clients do not open it again for minutes after a connection is lost. So everything that a call needs is in the group's
replicated tables, and what is kept here only adds to it: whom to ask about a transaction, and whose messages are
released when a client is gone. The leader hears of the clients of other members with each heartbeat.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final

from dledger.access.guard import AccessGuard
from dledger.remoting.codes import Language
from rocketstore.broker.clients import CLIENT_ID_CHARS_MAX, ConsumingClient, HalfCheck, Heartbeat, Subscription
from rocketstore.broker.groups import Groups
from rocketstore.broker.permissions import PUB, topic_need
from rocketstore.broker.refusal import Refusal
from rocketstore.grpc.calls import GatewayCall, RejectedError, name_of
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.types import ConsumeType

CLIENTS_MAX: Final = 65_536
"""Known at once; of one owner, ``account_share_percent`` of them."""
SETTINGS_BYTES_MAX: Final = 128 << 20
"""Of all clients' settings, encoded; likewise of one owner. Thousands of clients take a kilobyte each, and one may need
a hundred times as much.
"""
TOPICS_MAX: Final = 1024
"""That one client publishes to; of those beyond, the one not sent to for longest is forgotten."""
COMMANDS_MAX: Final = 64
"""Commands that wait until a client's stream takes them; others are not sent."""
COMMANDS_BYTES_MAX: Final = 8 << 20
"""Of these: a question about a transaction holds a message. One is taken whatever its size."""
FIRST_LATE_S: Final = 0.1
REPEAT_LATE_S: Final = 0.2
LATE_TIMES: Final = 2
"""How long after a client has asked, how long after that again, and how often: for clients that do not listen yet when
they ask, and then wait for ever.
"""
FOREIGN_COMMANDS_MAX: Final = 1024
"""Commands on their way to streams that end at other members."""
_LANGUAGES: Final = {
    pb.JAVA: Language.JAVA,
    pb.CPP: Language.CPP,
    pb.DOT_NET: Language.DOTNET,
    pb.GOLANG: Language.GO,
    pb.RUST: Language.RUST,
    pb.PYTHON: Language.PYTHON,
    pb.PHP: Language.PHP,
}

TellMember = Callable[[str, str, bytes], Awaitable[bool]]
"""Have a member (by node id) write a command, as bytes, to a client's stream; returns whether it did."""
QuestionOf = Callable[[HalfCheck], bytes]
"""The command that asks a producer what became of a transaction."""


class CommandStream:
    """The commands for one open stream, in order."""

    def __init__(self, end: Callable[[str], None]) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(COMMANDS_MAX + 1)
        self._bytes = 0
        self._late, self._late_left = b"", 0  # of ``put_late``
        self.end: Final = end
        """Close it, with a reason."""

    def put(self, command: bytes) -> bool:
        """Returns whether there was room."""
        size = self._bytes + len(command)
        if self._queue.qsize() >= COMMANDS_MAX or (self._bytes and size > COMMANDS_BYTES_MAX):
            return False
        self._bytes = size
        self._queue.put_nowait(command)
        return True

    def put_late(self, command: bytes) -> None:
        """Put it after a pause, and again, for a client that may not listen yet; a newer one takes its place."""
        is_due = self._late_left > 0
        self._late, self._late_left = command, LATE_TIMES
        if not is_due:
            asyncio.get_running_loop().call_later(FIRST_LATE_S, self._put_late)

    def _put_late(self) -> None:
        self.put(self._late)
        self._late_left -= 1
        if self._late_left:
            asyncio.get_running_loop().call_later(REPEAT_LATE_S, self._put_late)
        else:
            self._late = b""

    async def write_all(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write what is put, until ``finish``."""
        while (command := await self._queue.get()) is not None:
            await write(command)
            self._bytes -= len(command)

    def finish(self) -> None:
        """Put nothing more; pending items are still written. Call it once."""
        self._queue.put_nowait(None)


class GatewayClient:
    """One client, by its id."""

    def __init__(self, client_id: str, owner: str) -> None:
        self.client_id: Final = client_id
        self.owner: Final = owner
        """Whose limits it counts for."""
        self.settings: pb.Settings | None = None
        """As it gave them last; None as long as it has given none here."""
        self.decided: pb.Settings | None = None
        """The leader's decision on these settings, as last reported here."""
        self.is_settled = True
        """Whether the leader has decided of the newest."""
        self.settings_bytes = 0
        """The room that these settings take."""
        self.topics: OrderedDict[str, None] = OrderedDict()
        """That it publishes to."""
        self.group = ""
        """In which it consumes."""
        self.subscribed: frozenset[tuple[str, str]] = frozenset()
        """Group and topics of its settings."""
        self.stream: CommandStream | None = None
        """If it ends here."""
        self.member = ""
        """The node id of the other member at which its stream ends, as far as known."""
        self.host, self.port = "", 0
        self.account = ""
        """Its access key, as of its last call; empty without access control."""
        self.is_member = False
        """Whether it is in a group, where its silence is noticed."""
        self.trusted = False
        """Whether its address may do everything."""

    @property
    def has_stream(self) -> bool:
        """Whether its stream of commands ends here, or at another member as far as known."""
        return self.stream is not None or bool(self.member)

    def publish(self, topics: Iterable[str]) -> bool:
        """Note that it publishes to these topics; returns whether one is new."""
        known = self.topics
        is_new = False
        for topic in topics:
            if topic in known:
                known.move_to_end(topic)
                continue
            is_new = True
            known[topic] = None
            if len(known) > TOPICS_MAX:
                known.popitem(last=False)
        return is_new


class GatewayLink:
    """A client of the gateway among those of groups. Links of one client are equal."""

    __slots__ = ("_client", "_registry")

    def __init__(self, registry: Registry, client: GatewayClient) -> None:
        self._registry = registry
        self._client = client

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GatewayLink) and other._client is self._client

    def __hash__(self) -> int:
        return hash(self._client)

    @property
    def host(self) -> str:
        """The client's IP address."""
        return self._client.host

    @property
    def address(self) -> str:
        """The client's address, of its last call."""
        return f"{self._client.host}:{self._client.port}"

    def may_send(self, topic: str) -> bool:
        """Whether its account may send to a topic, and it can be asked: it has a stream of commands somewhere. One that
        died has none; it is still known until it has been silent for long, and others are asked meanwhile.
        """
        return self._client.has_stream and self._registry.may_send(self._client, topic)

    def members_changed(self, group: str) -> bool:  # noqa: ARG002  # the port's
        """Clients of the gateway do not divide queues among themselves: nothing to tell."""
        return True

    def check_half(self, check: HalfCheck) -> bool:
        """Ask it what became of a transaction."""
        return self._registry.ask(self._client, check)

    def close(self, reason: str) -> None:
        """It has been silent for too long."""
        self._registry.fell_silent(self._client, reason)


class _Subscribers:
    """The consumers of one group that want one topic."""

    __slots__ = ("count", "since_ms")

    def __init__(self, since_ms: int) -> None:
        self.since_ms: Final = since_ms
        self.count = 0


class Registry:
    """On the loop."""

    def __init__(
        self,
        groups: Groups,
        guard: AccessGuard | None,
        share_percent: int,
        tell_member: TellMember,
        question_of: QuestionOf,
        wall_ms: Callable[[], int],
        leads: Callable[[], bool],
    ) -> None:
        self._groups = groups
        self._guard = guard
        self._share_percent = share_percent
        self._share = max(1, CLIENTS_MAX * share_percent // 100)
        self._tell_member = tell_member
        self._question_of = question_of
        self._wall_ms = wall_ms
        self._leads = leads
        self._subscribers: dict[tuple[str, str], _Subscribers] = {}  # by group and topic
        self._clients: dict[str, GatewayClient] = {}
        self._owners: Counter[str] = Counter()
        self._settings_bytes: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[bool]] = set()
        self._gone: tuple[Callable[[str, str], None], ...] = ()

    def __len__(self) -> int:
        """How many clients are known."""
        return len(self._clients)

    @property
    def streams(self) -> int:
        """How many streams of commands end here."""
        return sum(one.stream is not None for one in self._clients.values())

    def add_gone_listener(self, listener: Callable[[str, str], None]) -> None:
        """Call it with client id and owner when a client is gone."""
        self._gone = (*self._gone, listener)

    async def close(self) -> None:
        """Tell nobody anything any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what clients say ----------------------------------------------------------------------------------------------

    def find(self, client_id: str) -> GatewayClient | None:
        """A known client."""
        return self._clients.get(client_id)

    def heard(self, call: GatewayCall) -> GatewayClient:
        """The client that makes a call. Raises ``RejectedError`` if there is no room for another one."""
        found = self._clients.get(call.client_id)
        owner = call.quota.owner
        if found is None or found.owner != owner:
            if len(call.client_id) > CLIENT_ID_CHARS_MAX:
                raise RejectedError(pb.BAD_REQUEST, f"a client id has at most {CLIENT_ID_CHARS_MAX} characters")
            if len(self._clients) >= CLIENTS_MAX or self._owners[owner] >= self._share:
                why = "too many clients of this account or address (account_share_percent)"
                raise RejectedError(pb.TOO_MANY_REQUESTS, f"{why}, or of all: at most {CLIENTS_MAX}")
            if found is not None:
                if call.caller is not None:
                    why = f"the client id {call.client_id} is in use by another account: every client has its own"
                    raise RejectedError(pb.FORBIDDEN, why)
                self.forget(call.client_id, "another account or address uses its client id")
            found = self._clients[call.client_id] = GatewayClient(call.client_id, owner)
            self._owners[owner] += 1
        found.host, found.port = call.host, call.port
        if call.caller is not None:
            found.trusted = call.caller.account.admin
            found.account = call.caller.account.access_key
        return found

    def give_settings(self, client: GatewayClient, settings: pb.Settings) -> None:
        """Take a client's settings. Raises ``RejectedError`` for names in namespaces, and if there is no room."""
        topics = [name_of(one) for one in settings.publishing.topics[:TOPICS_MAX]]
        group = name_of(settings.subscription.group)
        self._take_room(client, settings.ByteSize())
        client.settings = settings
        client.publish(topics)
        if settings.HasField("subscription"):
            client.group = group
        entries = settings.subscription.subscriptions[:TOPICS_MAX]
        self._subscribe(client, frozenset((client.group, one.topic.name) for one in entries))

    def _take_room(self, client: GatewayClient, size: int) -> None:
        """For a client's settings, in the place of those before. Raises ``RejectedError``."""
        more, owned = size - client.settings_bytes, self._settings_bytes[client.owner]
        most = SETTINGS_BYTES_MAX * self._share_percent // 100
        if more > 0 and (owned + more > most or self._settings_bytes.total() + more > SETTINGS_BYTES_MAX):
            why = (
                f"the settings of the clients of {client.owner} take {owned} bytes (account_share_percent), or of all: "
            )
            raise RejectedError(pb.TOO_MANY_REQUESTS, f"{why}at most {SETTINGS_BYTES_MAX}")
        client.settings_bytes = size
        self._settings_bytes[client.owner] = owned + more
        if not owned + more:
            del self._settings_bytes[client.owner]

    def subscribed_since_ms(self, group: str, topic: str) -> int:
        """Since when (ms since 1970) a consumer of the group that is still known wants the topic; 0: there is none."""
        found = self._subscribers.get((group, topic))
        return 0 if found is None else found.since_ms

    def _subscribe(self, client: GatewayClient, wanted: frozenset[tuple[str, str]]) -> None:
        for one in wanted - client.subscribed:
            self._subscribers.setdefault(one, _Subscribers(self._wall_ms())).count += 1
        for one in client.subscribed - wanted:
            self._subscribers[one].count -= 1
            if not self._subscribers[one].count:
                del self._subscribers[one]
        client.subscribed = wanted

    async def published(self, call: GatewayCall, topic: str) -> None:
        """A client sends to a topic, so it may be asked about transactions there, whether or not it said so before."""
        client = self._clients.get(call.client_id)
        if client is None or client.owner != call.quota.owner:
            try:
                client = self.heard(call)
            except RejectedError:  # that there is no room to remember it is no reason to refuse its message
                return
        if call.via.has_stream:
            client.member = call.via.member
        if client.publish((topic,)):
            with suppress(Refusal):
                await self.join(client)
        self.let_go(client)

    async def join(self, client: GatewayClient) -> None:
        """Show a client among those of its groups; a producer's group is the topic it sends to. Raises ``Refusal``."""
        settings = client.settings
        consumers: tuple[ConsumingClient, ...] = ()
        language, version = Language.OTHER, 0
        if settings is not None:
            language = _LANGUAGES.get(settings.user_agent.language, Language.OTHER)
        if client.group:
            subscriptions = () if settings is None else tuple(map(_subscription, settings.subscription.subscriptions))
            kind = ConsumeType.CONSUME_PASSIVELY
            consumers = (ConsumingClient(client.group, kind, subscriptions=subscriptions),)
        beat = Heartbeat(client.client_id, tuple(client.topics), consumers, language, version)
        if consumers or client.topics:
            await self._groups.join(GatewayLink(self, client), client.owner, beat)
            client.is_member = True

    def let_go(self, client: GatewayClient) -> None:
        """Forget a client that is in no group, where its silence would be noticed, and has no stream here: client ids
        cost nothing, and nobody else would.
        """
        if not client.is_member and client.stream is None and self._clients.get(client.client_id) is client:
            self.forget(client.client_id, "it is in no group")

    def fell_silent(self, client: GatewayClient, reason: str) -> None:
        """No heartbeat came for too long: a client is gone, unless others get them, and its stream is open here.

        Some clients send each heartbeat to another member. All of them reach the leader, and a lost connection ends a
        stream anyway. Rust's client never stops reading a stream that we have ended.
        """
        if client.stream is not None and not self._leads():
            self._groups.clients.heard(GatewayLink(self, client))
            return
        self.forget(client.client_id, reason)

    def forget(self, client_id: str, reason: str) -> None:
        """A client is gone: its messages are released, its stream ends."""
        client = self._clients.pop(client_id, None)
        if client is None:
            return
        self._owners[client.owner] -= 1
        if not self._owners[client.owner]:
            del self._owners[client.owner]
        self._subscribe(client, frozenset())
        self._take_room(client, 0)
        self._groups.clients.closed(GatewayLink(self, client))
        if client.stream is not None:
            client.stream.end(reason)
        for listener in self._gone:
            listener(client_id, client.owner)

    # -- what clients are told -----------------------------------------------------------------------------------------

    def may_send(self, client: GatewayClient, topic: str) -> bool:
        """Whether a client's account may send to a topic now."""
        guard = self._guard
        if guard is None or client.trusted:
            return True
        account = guard.rules.accounts.get(client.account)
        return account is not None and (account.admin or bool(account.topic(topic) & topic_need(topic, PUB).permission))

    def tell(self, client_id: str, command: bytes) -> bool:
        """Write a command to a client's stream, if it ends here; returns whether it will be written."""
        client = self._clients.get(client_id)
        return client is not None and client.stream is not None and client.stream.put(command)

    def tell_all(self, command: pbs.TelemetryCommand) -> None:
        """Write a command to each Java client's stream here: others do not know all commands."""
        for client in self._clients.values():
            if client.stream is None or client.settings is None:
                continue
            if client.settings.user_agent.language == pb.JAVA:
                client.stream.put(command.SerializeToString())

    def ask(self, client: GatewayClient, check: HalfCheck) -> bool:
        """Ask a producer what became of a transaction, wherever its stream ends; whether it probably hears of it."""
        if not client.has_stream:
            return False
        command = self._question_of(check)
        if client.stream is not None:
            return client.stream.put(command)
        if len(self._tasks) >= FOREIGN_COMMANDS_MAX:
            return False
        task = asyncio.get_running_loop().create_task(self._tell_foreign(client, command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _tell_foreign(self, client: GatewayClient, command: bytes) -> bool:
        member = client.member
        told = await self._tell_member(member, client.client_id, command)
        if not told and client.member == member:
            client.member = ""
        return told


def _subscription(entry: pb.SubscriptionEntry) -> Subscription:
    expression = entry.expression.expression or "*"
    kind = "SQL92" if entry.expression.type == pb.SQL else "TAG"
    tags = tuple(part.strip() for part in expression.split("||") if part.strip()) if kind == "TAG" else ()
    return Subscription(entry.topic.name, expression, () if tags == ("*",) else tags, kind=kind)
