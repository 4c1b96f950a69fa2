"""Makes half messages of messages that begin a transaction, before the store sees them, whatever their protocol."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from dledger.rpc.bridge import LoopBridge, LoopCallback
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.transactions.messages import make_half
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.message.checks import check_body, check_client_topic, check_keys, check_message
from rocketstore.message.message import PROPERTY_CHECK_TIMES, PROPERTY_PRODUCER_GROUP, PROPERTY_TRANSACTION, Message
from rocketstore.message.properties import decode_properties
from rocketstore.message.timed import asks_for_delay
from rocketstore.types import PutMessageStatus, PutResult

_CHECKS: Final = f"\x02{PROPERTY_CHECK_TIMES}\x011000".encode()
READY_S_MAX: Final = 2.0
"""How long an end waits for a new master to read which transactions are open."""


class Begun(NamedTuple):
    """A half message on its way to the store: its place in the request, its group, and the queue it is for."""

    place: int
    group: str
    queue_id: int


class HalfMessages:
    """On the loop."""

    def __init__(self, live: LiveConfig, transactions: TransactionService) -> None:
        self._live = live
        self._transactions = transactions
        self._on_their_way: Counter[str] = Counter()  # by group

    def begin(self, message: Message, place: int = 0, *, is_alone: bool = True) -> Begun | PutResult:
        """Turn a message whose queue is chosen into a half message, which counts as open until the store has answered;
        or the reason for a refusal. ``is_alone``: it is not of a batch.
        """
        properties = message.properties or decode_properties(message.property_string)
        if properties.get(PROPERTY_TRANSACTION, "").lower() != "true":
            return _illegal(f"a message that begins a transaction needs the property {PROPERTY_TRANSACTION}=true")
        group = properties.get(PROPERTY_PRODUCER_GROUP, "")
        if problem := self._problem(message):
            return _illegal(problem)
        refusal = self._refusal(group, is_plain=is_alone and not asks_for_delay(properties))
        if refusal is not None:
            return refusal
        begun = Begun(place, group, message.queue_id)
        make_half(message)
        self._on_their_way[group] += 1
        return begun

    def _refusal(self, group: str, *, is_plain: bool) -> PutResult | None:
        """Why ``group`` may begin no transaction, or not now. ``is_plain``: neither delayed nor of a batch."""
        if self._live.now.reject_transaction_message:
            reason = "this broker takes no transactional messages (rejectTransactionMessage)"
            return PutResult(PutMessageStatus.NO_PERMISSION, outcome="not_applied", reason=reason)
        if not group:
            return _illegal("a transaction needs a producer group")
        if not is_plain:
            return _illegal("a transaction is of one message, without delay")
        if not self._transactions.is_running:
            reason = "this broker is not quite the master yet"
            return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reason)
        waiting = self._on_their_way
        problem = self._transactions.refusal(group, waiting.total(), waiting[group])
        if problem:
            return PutResult(PutMessageStatus.FLOW_CONTROL, outcome="not_applied", reason=problem)
        return None

    def _problem(self, message: Message) -> str:
        """Why a half message does not do. Its later forms must fit into a record, too: its commit, whose topic may
        be longer, and what producers are asked about, with the number of checks.
        """
        probe = replace(message, queue_id=max(message.queue_id, 0))
        make_half(probe)
        probe.property_string += _CHECKS
        probe.topic = max(message.topic, probe.topic, key=len)
        config = self._live.now.store
        refusal = check_message(probe, config)
        problem = (
            check_client_topic(message.topic)
            or check_body(message, config)
            or check_keys(message, config.message_keys_max)
        )
        return problem or ("" if refusal is None else refusal.reason)

    def all_stored(self, begun: Sequence[Begun], results: Sequence[PutResult]) -> Sequence[PutResult]:
        """The store has answered a request: its results, which name the queues that the messages are for."""
        found = list(results)
        for one in begun:
            self._on_their_way[one.group] -= 1
            if not self._on_their_way[one.group]:
                del self._on_their_way[one.group]
            stored = found[one.place].stored
            if stored is not None:
                found[one.place] = found[one.place]._replace(stored=stored._replace(queue_id=one.queue_id))
        return found


def _illegal(reason: str) -> PutResult:
    return PutResult(PutMessageStatus.MESSAGE_ILLEGAL, outcome="not_applied", reason=reason)


class TransactionEnds:
    """Requests to end a transaction, whichever protocol they came by.

    On the loop.
    """

    def __init__(
        self,
        transactions: TransactionService,
        readers: ReadThreads,
        bridge: LoopBridge,
        mastership: Mastership,
    ) -> None:
        self._transactions = transactions
        self._readers = readers
        self._bridge = bridge
        self._mastership = mastership
        self._ready = asyncio.Event()
        transactions.add_ready_listener(lambda: bridge.post(self._ready.set))

    async def end(self, queue_offset: int, offset: int, group: str, *, commit: bool) -> None:
        """Commit or roll back the transaction of ``group`` whose half message is there; returns when the log has it.

        Raises ``Refusal``, of which ``EndRefusedError`` and ``NotReadyError`` mean that nothing was done.
        """
        self._mastership.require()
        await self._wait_ready()
        ended: LoopCallback[PutResult] = LoopCallback(self._bridge)
        request = partial(self._transactions.end, queue_offset, offset, group, commit=commit, done=ended.done)
        await self._readers.run(request)
        result = await ended.future
        if not result.ok:
            raise Refusal.of(result, self._mastership.leader_address)

    async def _wait_ready(self) -> None:
        """A new master soon knows which transactions are open."""
        if not self._transactions.is_ready:
            self._ready.clear()
            if not self._transactions.is_ready:  # else it was told just before
                with suppress(TimeoutError):
                    async with asyncio.timeout(READY_S_MAX):
                        await self._ready.wait()
