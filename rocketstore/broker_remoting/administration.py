"""Common to the requests of administrators: reads on few threads, changes only on the master, responses of limited
size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from dledger.access.quota import HostQuota
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from dledger.remoting.server import LITTLE, Answer, Handler
from rocketstore.broker.broker import Broker
from rocketstore.message.message import DelayLevels
from rocketstore.remoting.bodies.groups import ConsumerOffsetTable, DelayOffsetTable

READS_WAITING_MAX: Final = 256
"""Maximum reads of administrators waiting for a thread."""
REQUESTS_MAX: Final = 4 * READS_WAITING_MAX
"""Maximum requests of administrators in progress; some wait for clients for up to 10 s."""
_P = ParamSpec("_P")
_T = TypeVar("_T")
_BEGIN, _END = b'{"offsetTable":{', b"}}"


class Administration:
    """On the loop. It uses at most half of the read threads, so that pulls always find one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._room = asyncio.Semaphore(max(1, broker.config.read_threads // 2))
        self.waiting = 0
        """Reads that wait for a thread."""
        percent = broker.config.access.account_share_percent
        self._quota = HostQuota(REQUESTS_MAX, max(1, READS_WAITING_MAX * percent // 100))

    def shared(self, handler: Handler) -> Handler:
        """``handler``, for at most a host's share of these requests at once: other administrators also have some."""

        async def handle(connection: RemotingConnection, frame: Frame) -> Answer:
            host = connection.counted_as
            if not self._quota.has_room(host, little=connection.under_way <= LITTLE):
                reason = f"[OVERLOAD] {self._quota.of(host)} such requests of {host} are in progress, try again later"
                raise RequestError(reason, AnswerCode.SYSTEM_BUSY)
            self._quota.change(host, 1)
            try:
                return await handler(connection, frame)
            finally:
                self._quota.change(host, -1)

        return handle

    async def read(self, read: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The result of ``read``, which may be slow or wait for a disk. Raises ``RequestError`` if too many are
        waiting.
        """
        if self.waiting >= READS_WAITING_MAX:
            reason = f"[OVERLOAD] {self.waiting} requests of administrators wait already, try again later"
            raise RequestError(reason, AnswerCode.SYSTEM_BUSY)
        self.waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.waiting -= 1
        reading = asyncio.ensure_future(self._broker.loop.readers.run(read, *args, **kwargs))
        reading.add_done_callback(self._has_read)  # not sooner, even if nobody waits any more: the thread is busy
        return await asyncio.shield(reading)

    def _has_read(self, reading: asyncio.Future[_T]) -> None:
        self._room.release()
        if not reading.cancelled():
            reading.exception()  # taken note of, if nobody waits any more


class SlaveSource:
    """The tables that RocketMQ's slaves fetch besides topics and groups: offsets of groups, progress of delay levels.

    On the loop.
    """

    def __init__(self, broker: Broker, admin: Administration) -> None:
        self._broker = broker
        self._admin = admin

    async def offsets(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_CONSUMER_OFFSET."""
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._offsets))

    async def delays(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_DELAY_OFFSET."""
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._delays))

    def _offsets(self) -> bytes:
        """Group by group: to encode half a million offsets at once would hold up every other thread for a second."""
        pieces = [self._offsets_of(group) for group in self._broker.state.groups()]
        return _BEGIN + b",".join(piece for piece in pieces if piece) + _END

    def _offsets_of(self, group: str) -> bytes:
        table: dict[str, dict[int, int]] = {}
        for one in self._broker.state.offsets(group):
            table.setdefault(f"{one.topic}@{group}", {})[one.queue_id] = one.offset
        return ConsumerOffsetTable(table).encode().removeprefix(_BEGIN).removesuffix(_END)

    def _delays(self) -> bytes:
        levels = DelayLevels.parse(self._broker.config.store.message_delay_level).level_max
        delivered = {level: self._broker.state.delay_offset(level) for level in range(1, levels + 1)}
        return DelayOffsetTable({level: offset for level, offset in delivered.items() if offset}).encode()
