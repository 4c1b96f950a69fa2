"""Many clients of a broker, good and bad: ``python -m benchmarks.children.crowd PORT``, commands as JSON on stdin.

Each command starts clients that go on until ``leave``; the answer says how many there are. All of them come from
another address than the benchmark's own client.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from dledger.remoting.frame import LENGTH_BYTES, Frame, cut, encode
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumerData, HeartbeatData, ProducerData, SubscriptionData

HOST: Final = "127.0.0.2"
BEAT_S: Final = 30.0
"""Between the heartbeats of a client, as in RocketMQ."""
OPENING_MAX: Final = 200
"""Connections that are being opened at the same time."""
PULLS: Final = 500
"""Pulls of a client that reads no answers."""
MESSAGES_MOST: Final = 32
TAGS: Final = 3


class _Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._opaque = 0

    def send(self, code: int, fields: dict[str, str] | None = None, body: bytes = b"") -> None:
        self._opaque += 1
        self.writer.write(encode(Frame(code, self._opaque, fields or {}, body)))

    async def receive(self) -> Frame:
        head = await self._reader.readexactly(LENGTH_BYTES)
        rest = await self._reader.readexactly(int.from_bytes(head, "big"))
        return cut(head + rest)[0][0]


class Crowd:
    """All clients."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Semaphore(OPENING_MAX)
        self.counted = 0
        """Answers that count: heartbeats of a storm, or member lists."""
        self.known = 0
        """The most members that a client was told of."""

    async def connect(self, count: int) -> int:
        """Producers that do nothing but their heartbeats."""
        return await self._start(count, self._idle)

    async def consume(self, count: int) -> int:
        """Members of one group, which ask for the others whenever these change."""
        return await self._start(count, self._member)

    async def ignore(self, count: int) -> int:
        """Clients that pull and never read."""
        return await self._start(count, self._deaf)

    async def beat(self, count: int, subscriptions: int) -> int:
        """Clients that send heartbeats, one after the other, each of so many subscriptions."""
        return await self._start(count, lambda one, number: self._storm(one, _heartbeat(number, subscriptions)))

    async def leave(self) -> int:
        """End all of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        return 0

    async def _start(self, count: int, live: Callable[[_Client, int], Coroutine[Any, Any, None]]) -> int:
        began = [asyncio.get_running_loop().create_future() for _ in range(count)]
        self._tasks.update(asyncio.create_task(self._run(live, number, one)) for number, one in enumerate(began))
        await asyncio.gather(*began)
        return count

    async def _run(
        self, live: Callable[[_Client, int], Coroutine[Any, Any, None]], number: int, began: asyncio.Future[None]
    ) -> None:
        client = None
        try:
            async with self._opening:
                link = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(HOST, 0))
                client = _Client(*link)
                client.send(RequestCode.HEART_BEAT, body=_producer(number))
                answer = await client.receive()
            if answer.code:
                raise ConnectionError(f"heartbeat refused: {answer.remark}")
            began.set_result(None)
        except (OSError, EOFError) as error:
            if client is not None:
                client.writer.transport.abort()
            began.set_exception(error)
            return
        try:
            with suppress(OSError, EOFError):  # hung up on, which is the broker's right
                await live(client, number)
        finally:
            client.writer.transport.abort()

    async def _idle(self, client: _Client, number: int) -> None:
        await asyncio.sleep(BEAT_S * (number % 1000) / 1000)
        while True:
            client.send(RequestCode.HEART_BEAT, body=_producer(number))
            await client.receive()
            await asyncio.sleep(BEAT_S)

    async def _member(self, client: _Client, number: int) -> None:
        client.send(RequestCode.HEART_BEAT, body=_heartbeat(number, 1))
        while True:
            frame = await client.receive()
            if frame.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED and not frame.is_response:
                client.send(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "crowd"})
            elif frame.body:
                self.counted += 1
                self.known = max(self.known, len(json.loads(frame.body)["consumerIdList"]))

    async def _deaf(self, client: _Client, number: int) -> None:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # which a stream's transport has
        fields = {
            "consumerGroup": f"deaf-{number}",
            "topic": "bench",
            "queueId": "0",
            "queueOffset": "0",
            "maxMsgNums": str(MESSAGES_MOST),
            "sysFlag": "4",
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": "*",
            "subVersion": "0",
        }
        for _ in range(PULLS):
            client.send(RequestCode.PULL_MESSAGE, fields)
        await asyncio.Event().wait()

    async def _storm(self, client: _Client, body: bytes) -> None:
        client.send(RequestCode.HEART_BEAT, body=body)
        while True:  # always one that the broker has not seen yet
            client.send(RequestCode.HEART_BEAT, body=body)
            await client.receive()
            self.counted += 1


def _producer(number: int) -> bytes:
    return HeartbeatData(f"127.0.0.2@{number}", (ProducerData("crowd"),)).encode()


def _heartbeat(number: int, subscriptions: int) -> bytes:
    tags = tuple(f"Tag{one}" for one in range(TAGS))
    data = tuple(
        SubscriptionData(f"a-topic-of-usual-length-{one:05}", " || ".join(tags), tags, tuple(range(TAGS)), 1)
        for one in range(subscriptions)
    )
    group = "crowd" if subscriptions == 1 else f"crowd-{number}"
    return HeartbeatData(f"127.0.0.2@{number}", (), (ConsumerData(group, subscription_data_set=data),)).encode()


async def _serve() -> None:
    crowd = Crowd(int(sys.argv[1]))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        do: str = command.pop("do")
        crowd.counted = 0 if do == "count" and command.pop("anew") else crowd.counted
        clients = await getattr(crowd, do)(**command) if do != "count" else 0
        sys.stdout.write(json.dumps({"clients": clients, "counted": crowd.counted, "known": crowd.known}) + "\n")
        sys.stdout.flush()
    await crowd.leave()


def main() -> None:
    """Serve until stdin closes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
