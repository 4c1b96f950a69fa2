"""Requests to begin a transaction again that was given up because no producer answered for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from dledger.rpc.bridge import LoopBridge, LoopCallback
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.transactions.messages import resumed
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import PROPERTY_REAL_TOPIC, HostAddress, Message
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC, PutResult

RESUMED_MAX: Final = 10_000
"""How many are remembered, so that none is begun twice."""


class Resumptions:
    """Begins transactions again that were given up, each once for each master. On the loop."""

    def __init__(
        self,
        store: MessageStore,
        state: BrokerState,
        bridge: LoopBridge,
        readers: ReadThreads,
        mastership: Mastership,
        store_host: HostAddress,
    ) -> None:
        self._store = store
        self._state = state
        self._bridge = bridge
        self._readers = readers
        self._mastership = mastership
        self._store_host = store_host
        self._resumed: OrderedDict[int, None] = OrderedDict()

    async def resume(self, message_id: str) -> None:
        """Begin the transaction of a message of ``CHECKED_TOO_OFTEN_TOPIC`` again. Raises ``Refusal``."""
        self._mastership.require()
        offset = parse_offset_message_id(message_id)[1]
        self._check_new(offset)
        record = await self._readers.run(self._given_up, offset)
        self._check_new(offset)
        self._resumed[offset] = None  # whatever becomes of it: two would be two transactions
        if len(self._resumed) > RESUMED_MAX:
            self._resumed.popitem(last=False)
        stored: LoopCallback[Sequence[PutResult]] = LoopCallback(self._bridge)
        self._store.submit([resumed(record, self._store_host)], stored.done)
        (result,) = await stored.future
        if result.outcome == "not_applied":
            self._resumed.pop(offset, None)
        if not result.ok:
            why = f"Put message back to RMQ_SYS_TRANS_HALF_TOPIC failed. {result.reason}"
            raise Refusal(RefusalKind.FAILED, why, outcome=result.outcome, leader=result.leader)

    def _check_new(self, offset: int) -> None:
        if offset in self._resumed:
            raise Refusal(RefusalKind.INVALID, f"the message at {offset} is being checked again already")

    def _given_up(self, offset: int) -> bytes:
        """On a read thread. Raises ``Refusal``: there is no message that was given up."""
        store = self._store
        record = store.read_record(offset) if offset >= 0 else None
        if record is not None:
            message = decode_record(record)
            known = store.position_of(CHECKED_TOO_OFTEN_TOPIC, 0, message.queue_offset)
            if message.topic == CHECKED_TOO_OFTEN_TOPIC and known == offset:
                self._check_topic(message)
                return record
        why = f"there is no message of {CHECKED_TOO_OFTEN_TOPIC} at {offset}: only those can be checked again"
        raise Refusal(RefusalKind.NO_MESSAGE, why)

    def _check_topic(self, given_up: Message) -> None:
        name = given_up.properties.get(PROPERTY_REAL_TOPIC, "")
        waited = QueueOffset(CHECKED_TOO_OFTEN_TOPIC, 0, given_up.queue_offset)
        if self._state.place_for(name, 0, waited) is None:
            why = f"topic {name} was deleted since: its transactions cannot be checked again"
            raise Refusal(RefusalKind.INVALID, why)
