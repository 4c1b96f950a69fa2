"""What answers as a running broker to RocketMQ's tools, and is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from dledger.monitoring import Condition
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from dledger.remoting.server import Handlers, RemotingServer, ServerLimits
from dledger.rpc.listening import stop_serving
from dledger.rpc.loops import LoopThread
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import TopicOffset, TopicStatsTable
from rocketstore.remoting.headers import TopicHeader, read_header
from rocketstore.remoting.runtime import own_table
from rocketstore.remoting.topics import KVTable, MessageQueue

JAVA: Mapping[str, str] = {"brokerVersionDesc": "V4_9_7", "putTps": "1.5 2.5 3.5", "getTransferedTps": "7.25 0.0 0.0"}


def ours(node: str, role: str, term: int, members: Mapping[str, str], *conditions: str) -> dict[str, str]:
    """What a broker of ours says of itself."""
    problems = [Condition(kind, "", 0) for kind in conditions]
    return {**JAVA, "brokerVersionDesc": "V4_9_8", **own_table("1.0", node, role, term, members, problems)}


class RuntimeBroker:
    """``table`` is its answer; empty: it refuses. While ``silent``, it answers nothing."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self.table = table
        self.silent = False
        self.asked = 0
        self.fields: Mapping[str, str] = {}
        """Those of the last request."""
        self.queues = 2
        """Of every topic."""
        self.address = ""

    def runtime(self, connection: RemotingConnection, frame: Frame) -> None:
        """GET_BROKER_RUNTIME_INFO."""
        self.asked, self.fields = self.asked + 1, frame.fields
        self._answer(connection, frame, KVTable(self.table).encode())

    def stats(self, connection: RemotingConnection, frame: Frame) -> None:
        """GET_TOPIC_STATS_INFO."""
        topic = read_header(TopicHeader, frame.fields).topic
        table = {
            MessageQueue(topic, "g", number): TopicOffset(1, 10 + number, 1_700_000_000_000)
            for number in range(self.queues)
        }
        self._answer(connection, frame, TopicStatsTable(table).encode())

    def _answer(self, connection: RemotingConnection, frame: Frame, body: bytes) -> None:
        if not self.silent:
            connection.done(
                frame, frame.answer(body=body) if self.table else frame.answer(AnswerCode.SYSTEM_ERROR, "no")
            )


@contextmanager
def runtime_broker(table: Mapping[str, str] = JAVA) -> Iterator[RuntimeBroker]:
    """One, listening."""
    broker = RuntimeBroker(table)
    requests: dict[int, Callable[[RemotingConnection, Frame], None]] = {
        RequestCode.GET_BROKER_RUNTIME_INFO: broker.runtime,
        RequestCode.GET_TOPIC_STATS_INFO: broker.stats,
    }
    remoting = RemotingServer(
        "broker", Handlers(requests, {}, lambda _: None, lambda _: None), ServerLimits(9, 9, 9, 9, 9, *[1 << 20] * 4)
    )
    loop = LoopThread("broker")
    bridge = loop.start()

    async def serve() -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(remoting.protocol, "127.0.0.1", 0)

    async def end() -> None:
        await stop_serving(listening)
        await remoting.close(0)

    listening = bridge.run(serve())
    broker.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield broker
    finally:
        bridge.run(end())
        loop.stop()
