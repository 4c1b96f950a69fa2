"""A remoting server that answers as a test says, on the running event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeAlias

from dledger.remoting.codes import ANNOUNCED, AnswerCode
from dledger.remoting.connection import ByteRoom, Owner, RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.message.batch import decode_batch
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import NumberedSend, decode_name, encode_next, encode_stored
from rocketstore.remoting.topics import BrokerData, ClusterInfo, QueueData, TopicRouteData
from rocketstore.types import PutMessageStatus, PutResult, StoredPlace

Reply: TypeAlias = Frame | None
"""None: no answer."""
Script: TypeAlias = Callable[[Frame], Reply | Awaitable[Reply]]
_BYTES_MAX = 1 << 28


def silence(_frame: Frame) -> None:
    """A script that never answers."""


class ScriptedServer:
    """``scripts`` answer by request code; a code without one is answered as Apache's brokers do: not supported."""

    def __init__(self) -> None:
        self.scripts: dict[int, Script] = {}
        self.requests: list[Frame] = []
        """All that came, in order."""
        self.connections: list[RemotingConnection] = []
        """Those that are open."""
        self.address = ""
        self.accepted = 0
        self.announced: Mapping[str, str] = {}
        """Fields of the first answer on each connection."""
        room = ByteRoom(_BYTES_MAX, _BYTES_MAX)
        self._room = room
        self._owner = Owner(self._opened, self._take, self._closed)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        """Listen on a free port; with a context, for TLS."""
        factory = lambda: RemotingConnection(  # noqa: E731
            self._owner, self._room, self._room, announced=self.announced
        )
        self._server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0, ssl=context)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        self.hang_up()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hang_up(self) -> None:
        """End every connection; the port stays open."""
        for one in tuple(self.connections):
            one.close("the test says so")

    def codes(self) -> list[int]:
        """The codes of all requests, in order."""
        return [one.code for one in self.requests]

    def of(self, code: int) -> list[Frame]:
        """The requests of a code."""
        return [one for one in self.requests if one.code == code]

    def _opened(self, connection: RemotingConnection) -> None:
        self.accepted += 1
        self.connections.append(connection)

    def _closed(self, connection: RemotingConnection) -> None:
        if connection in self.connections:
            self.connections.remove(connection)

    def _take(self, connection: RemotingConnection, frame: Frame) -> None:
        self.requests.append(frame)
        script = self.scripts.get(frame.code)
        if script is None:
            connection.done(frame, frame.answer(AnswerCode.REQUEST_CODE_NOT_SUPPORTED, "request type not supported"))
            return
        reply = script(frame)
        if isinstance(reply, Frame):
            connection.done(frame, reply)
        elif reply is None:
            connection.let_go(frame)
        else:
            task = asyncio.get_running_loop().create_task(self._reply(connection, frame, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reply(self, connection: RemotingConnection, frame: Frame, reply: Awaitable[Reply]) -> None:
        answer = await reply
        if answer is None:
            connection.let_go(frame)
        else:
            connection.done(frame, answer)


class Topics:
    """Scripts for a server that tells routes: ``brokers`` by name and id, ``topics`` by name and broker."""

    def __init__(self, brokers: Mapping[str, Mapping[int, str]], topics: Mapping[str, Mapping[str, int]]) -> None:
        self.brokers = {name: dict(one) for name, one in brokers.items()}
        self.topics = {name: dict(one) for name, one in topics.items()}
        self.permission = 6
        self.clusters_of: dict[str, str] = {}
        """By broker; ``C`` for others."""

    def route(self, frame: Frame) -> Frame:
        """GET_ROUTEINFO_BY_TOPIC."""
        found = self.topics.get(frame.fields["topic"])
        if found is None:
            return frame.answer(AnswerCode.TOPIC_NOT_EXIST, "no route info")
        queues = tuple(QueueData(name, count, count, self.permission) for name, count in found.items())
        data = tuple(BrokerData("C", name, self.brokers[name]) for name in found)
        return frame.answer(body=TopicRouteData(queues, data).encode())

    def clusters(self, frame: Frame) -> Frame:
        """GET_BROKER_CLUSTER_INFO."""
        cluster_of = self.clusters_of.get
        table = {name: BrokerData(cluster_of(name, "C"), name, found) for name, found in self.brokers.items()}
        return frame.answer(body=ClusterInfo(table, {"C": tuple(table)}).encode())

    def serve(self, server: ScriptedServer) -> None:
        """Let a server tell this."""
        server.scripts[RequestCode.GET_ROUTEINFO_BY_TOPIC] = self.route
        server.scripts[RequestCode.GET_BROKER_CLUSTER_INFO] = self.clusters


@asynccontextmanager
async def scripted_server(context: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedServer]:
    """One, listening."""
    server = ScriptedServer()
    await server.start(context)
    try:
        yield server
    finally:
        await server.stop()


class Stored(NamedTuple):
    """A message that was sent to a scripted broker."""

    topic: str
    queue: int
    body: bytes
    properties: str


class MessageStore:
    """Scripts for a broker that keeps what it is sent; ``answers`` come first, one per request, before it stores."""

    def __init__(self) -> None:
        self.messages: list[Stored] = []
        self.answers: deque[Callable[[Frame], Reply]] = deque()
        """Refusals, or silence, instead of storing; a script that raises ``Stores`` has it stored, and not answered."""
        self.held: asyncio.Event | None = None
        """While set and not ready, nothing is stored or answered."""
        self.status = 0
        """The answer code of what is stored."""
        self.queues = 1 << 16
        """How many there are: a message for another one is refused, as by a broker."""
        self.next_numbers: dict[str, int] = {}
        """By producer, of those that number their messages."""
        self.memory = "m1"

    def bodies(self, queue: int | None = None) -> list[bytes]:
        """Of all messages, or of one queue's, in order."""
        return [one.body for one in self.messages if queue in (None, one.queue)]

    async def send(self, frame: Frame) -> Reply:
        """SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE."""
        if self.held is not None:
            await self.held.wait()
        if self.answers:
            answer = self.answers.popleft()
            try:
                return answer(frame)
            except StoresSilentlyError:
                self.store(frame)
                return None
        return self.store(frame)

    def store(self, frame: Frame) -> Frame:
        """Keep what a request sends, and answer."""
        if frame.code == OwnCode.SEND_NUMBERED:
            return self._store_numbered(frame)
        topic, queue = frame.fields["b"], int(frame.fields["e"])
        if queue >= self.queues:
            return frame.answer(AnswerCode.SYSTEM_ERROR, self.no_queue(queue))
        first = len(self.bodies(queue))
        if frame.code == RequestCode.SEND_BATCH_MESSAGE:
            items = decode_batch(frame.body)
            self.messages += [Stored(topic, queue, one.body, str(one.properties)) for one in items]
        else:
            self.messages.append(Stored(topic, queue, frame.body, frame.fields.get("i", "")))
        count = len(self.bodies(queue)) - first
        ids = ",".join(f"{7:032X}" for _ in range(count))
        fields = {"msgId": ids, "queueId": str(queue), "queueOffset": str(first)}
        return frame.answer(self.status, fields=fields)

    def serve(self, server: ScriptedServer) -> None:
        """Let a server keep messages here."""
        server.scripts[RequestCode.SEND_MESSAGE_V2] = self.send
        server.scripts[RequestCode.SEND_BATCH_MESSAGE] = self.send

    def serve_numbered(self, server: ScriptedServer) -> None:
        """The same, as a broker of this project, which recognizes numbered messages."""
        self.serve(server)
        server.announced = ANNOUNCED
        server.scripts[OwnCode.SEND_NUMBERED] = self.send
        server.scripts[OwnCode.NEXT_NUMBER] = lambda frame: frame.answer(
            body=encode_next(self.next_numbers.get(decode_name(frame.body), 0), self.memory)
        )

    def no_queue(self, queue: int) -> str:
        """What a broker says of a queue that it does not have."""
        return f"topic T has {self.queues} write queues, numbered from 0: there is no queue {queue}"

    def _store_numbered(self, frame: Frame) -> Frame:
        """All of a request's messages that are not here yet, if they follow what is here."""
        sent = NumberedSend.decode(frame.body)
        following = self.next_numbers.get(sent.producer, 0)
        if sent.sequence > following:
            status = "OUT_OF_ORDER_SEQUENCE" if following else "UNKNOWN_PRODUCER"
            return frame.answer(AnswerCode.SYSTEM_ERROR, status, {"status": status, "outcome": "not_applied"})
        for at, one in enumerate(sent.messages):
            if one.queue_id >= self.queues:
                fields = {"status": "QUEUE_NOT_FOUND", "outcome": "not_applied", "message": str(at)}
                return frame.answer(AnswerCode.SYSTEM_ERROR, self.no_queue(one.queue_id), fields)
        results: list[PutResult] = []
        for number, one in enumerate(sent.messages, sent.sequence):
            if number < following:
                results.append(PutResult(PutMessageStatus.PUT_OK, None))
                continue
            place = StoredPlace(len(self.messages), 0, one.queue_id, len(self.bodies(one.queue_id)), 1)
            self.messages.append(Stored(one.topic, one.queue_id, one.body, one.properties.decode()))
            results.append(PutResult(PutMessageStatus.PUT_OK, place))
        self.next_numbers[sent.producer] = max(following, sent.sequence + len(sent.messages))
        return frame.answer(self.status, body=encode_stored(bytes(4), 1, results))


class StoresSilentlyError(Exception):
    """Raised by a script: the message is stored, and nobody says so."""


def stores_silently(_frame: Frame) -> Frame:
    """A script for ``MessageStore.answers``."""
    raise StoresSilentlyError


def refuses(code: int, remark: str = "no") -> Callable[[Frame], Frame]:
    """A script that answers with an error."""
    return lambda frame: frame.answer(code, remark)
