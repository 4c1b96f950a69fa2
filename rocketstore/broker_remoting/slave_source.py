"""The tables that RocketMQ's slaves fetch besides topics and groups: offsets of groups, progress of delay levels."""

from __future__ import annotations

from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker_remoting.administration import Administration
from rocketstore.message.delay import DelayLevels
from rocketstore.remoting.bodies.groups import ConsumerOffsetTable, DelayOffsetTable

_BEGIN, _END = b'{"offsetTable":{', b"}}"


class SlaveSource:
    """On the loop."""

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
