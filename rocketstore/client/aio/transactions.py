"""Transactions: a message that is delivered if, and only if, a local transaction has succeeded.

The message is stored first, where no consumer sees it (the *half* message). Then the local transaction is carried out,
and the broker is told its outcome. If it does not hear of it, it asks a member of the producer group (``check``).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeAlias

from dledger.errors import DLedgerError
from dledger.remoting.codes import RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.connections import ATTEMPT_S_MAX
from rocketstore.client.aio.errors import (
    ClientError,
    PreparedMessage,
    SendResult,
    SendStatus,
    TransactionResult,
    TransactionState,
)
from rocketstore.client.aio.received import decompress
from rocketstore.client.aio.tracing import EndTraces, host_of
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import (
    COMPRESSION_FLAGS,
    PROPERTY_CHECK_TIMES,
    PROPERTY_UNIQUE_KEY,
    SYS_FLAG_COMPRESSED,
    Message,
)
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import CheckTransactionHeader, EndTransactionHeader, read_header

_log = logging.getLogger(__name__)
CHECKS_PENDING_MAX: Final = 1000
"""Checks that wait for the application; further ones are dropped, and come again in the broker's next round."""
CHECKS_PENDING_BYTES_MAX: Final = 16 * 1024 * 1024
ENDED_S: Final = 60.0
"""For how long a broker is not told again of a transaction that it has ended.

RocketMQ 5 notes ends with a delay, asks in between, and would deliver the message twice.
"""
ENDED_MAX: Final = 10_000
_ENDS: Final = {TransactionState.UNKNOWN: 0, TransactionState.COMMIT: 8, TransactionState.ROLLBACK: 12}
"""RocketMQ's numbers of them."""
Check: TypeAlias = Callable[[PreparedMessage], TransactionState | Awaitable[TransactionState]]


class Transaction:
    """A transaction in progress: ``async with producer.transaction(message) as transaction:``.

    At the end of the block the message is committed. If the block raises, the transaction stays open and the broker
    asks ``check`` about it, because the local transaction may have succeeded before the error; call ``rollback`` in the
    block to say that it has not. ``id`` is the message's unique key: store it with what the transaction does.
    """

    def __init__(
        self,
        begin: Callable[[], Awaitable[SendResult]],
        transactions: Callable[[], Transactions],
        message: Message,
    ) -> None:
        """``begin`` stores the message; after that there are ``transactions``."""
        self._begin = begin
        self._transactions = transactions
        self._message = message
        self._half: SendResult | None = None
        self._result: TransactionResult | None = None
        self.state: TransactionState | None = None
        """The action at the end of the block; None: commit it, unless the block raises."""

    @property
    def id(self) -> str:
        """The message's unique key."""
        return self.half.message_id

    @property
    def half(self) -> SendResult:
        """Where the message waits."""
        assert self._half is not None, "the transaction has not begun: use it with async with"
        return self._half

    @property
    def prepared(self) -> PreparedMessage:
        """The message, and the transaction's id."""
        return PreparedMessage(_named(self._message, self.id), self.id)

    @property
    def result(self) -> TransactionResult:
        """Its outcome; after the block."""
        assert self._result is not None, "the transaction has not ended: look after the block"
        return self._result

    @property
    def is_safe(self) -> bool:
        """Whether the broker has the message as safely as it is set to; otherwise it is rolled back, as in RocketMQ."""
        return self.half.status is SendStatus.SEND_OK

    def commit(self) -> None:
        """Commit at the end of the block, also if it raises after this."""
        self.state = TransactionState.COMMIT

    def rollback(self) -> None:
        """Roll back at the end of the block: nobody will see the message."""
        self.state = TransactionState.ROLLBACK

    def leave_open(self) -> None:
        """Decide nothing at the end of the block: ``check`` will be asked."""
        self.state = TransactionState.UNKNOWN

    async def __aenter__(self) -> Self:
        if self._half is not None:
            raise RuntimeError("a transaction is used once: call Producer.transaction again")
        self._half = await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = self.state
        if not self.is_safe:
            state = TransactionState.ROLLBACK
        elif state is None:
            state = TransactionState.COMMIT if error is None else TransactionState.UNKNOWN
        self._result = await self._transactions().end(self.half, state, self._message)


class _PendingCheck(NamedTuple):
    connection: RemotingConnection
    header: CheckTransactionHeader
    prepared: PreparedMessage
    size: int


class Transactions:
    """Ends the transactions of one producer group, and answers what brokers ask about them.

    ``check`` is called for up to ``workers`` transactions at once: a coroutine function on the loop, any other function
    on a thread. If it raises, the broker asks again.
    """

    def __init__(
        self, cluster: Cluster, group: str, check: Check, *, workers: int, traces: EndTraces | None = None
    ) -> None:
        self._traces = traces
        self._cluster = cluster
        self._group = group
        self._check = check
        self._in_progress: Counter[str] = Counter()
        self._ended: dict[str, float] = {}  # by id, when, in that order
        self._pending: deque[_PendingCheck] = deque()
        self._known: dict[int, int] = {}  # by offset: waiting or being worked on, with their sizes
        self._wanted = asyncio.Event()
        self._is_closed = False
        loop = asyncio.get_running_loop()
        self._workers = [loop.create_task(self._work(), name="rocketmq-transaction-checks") for _ in range(workers)]

    async def close(self) -> None:
        """Wait for checks that the application is answering; the others come again, to another member. Idempotent."""
        self._is_closed = True
        self._pending.clear()
        self._wanted.set()
        others = [one for one in self._workers if one is not asyncio.current_task() and not one.done()]
        if others:
            await asyncio.wait(others)

    # -- this producer's own -------------------------------------------------------------------------------------------

    def begin(self, transaction_id: str) -> None:
        """It is in progress here: checks of it are not passed on."""
        self._in_progress[transaction_id] += 1

    def forget(self, transaction_id: str) -> None:
        """It is not in progress here any more."""
        self._in_progress[transaction_id] -= 1
        if not self._in_progress[transaction_id]:
            del self._in_progress[transaction_id]

    async def end(self, half: SendResult, state: TransactionState, message: Message) -> TransactionResult:
        """Tell the master; if that is not possible, ``problem`` says why, and a check will settle it."""
        problem: DLedgerError | None = None
        try:
            if state is not TransactionState.UNKNOWN:
                await self._tell_master(half, state)
                self._note_ended(half.message_id)
            if self._traces is not None:
                where = host_of(half.offset_id) if half.offset_id else half.broker
                self._traces.ended(message, half.message_id, state, where, from_check=False)
        except DLedgerError as error:
            problem = error
            _log.warning("transaction %s: %s is not told, a check will settle it: %s", half.message_id, state, error)
        finally:
            self.forget(half.message_id)
        return TransactionResult(half.message_id, state, half, problem)

    def _note_ended(self, transaction_id: str) -> None:
        self._ended[transaction_id] = asyncio.get_running_loop().time()
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _is_settled(self, transaction_id: str) -> bool:
        """Whether it is in progress here, or its broker has ended it a moment ago."""
        if transaction_id in self._in_progress:
            return True
        ended_at = self._ended.get(transaction_id, float("-inf"))
        return asyncio.get_running_loop().time() - ended_at < ENDED_S

    async def _tell_master(self, half: SendResult, state: TransactionState) -> None:
        offset = parse_offset_message_id(half.offset_id)[1]
        header = EndTransactionHeader(
            self._group, half.offset, offset, _ENDS[state], half.message_id, False, half.message_id
        )
        deadline = self._cluster.deadline()

        code = RequestCode.END_TRANSACTION
        await self._cluster.ask_master(half.broker, code, header, deadline=deadline)  # it ends once, however often told

    # -- checks --------------------------------------------------------------------------------------------------------

    def take(self, connection: RemotingConnection, frame: Frame) -> None:
        """CHECK_TRANSACTION_STATE: pass it on to the application, unless too many wait, or it does already."""
        try:
            header = read_header(CheckTransactionHeader, frame.fields)
            prepared = _checked(frame.body)
        except (RequestError, CorruptRecordError) as error:
            _log.warning("%s asks about a transaction that cannot be read: %s", connection.place, error)
            return
        size, offset = len(frame.body), header.commit_log_offset
        is_full = len(self._known) >= CHECKS_PENDING_MAX or sum(self._known.values()) + size > CHECKS_PENDING_BYTES_MAX
        if self._is_closed or offset in self._known or (is_full and self._known):
            return
        if self._is_settled(prepared.transaction_id):
            return
        self._known[offset] = size
        self._pending.append(_PendingCheck(connection, header, prepared, size))
        self._wanted.set()

    async def _work(self) -> None:
        while not self._is_closed:
            if not self._pending:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            check = self._pending.popleft()
            try:
                await self._answer(check)
            except BaseException as error:  # also SystemExit: whatever it is, the group is asked again
                task = asyncio.current_task()
                if isinstance(error, GeneratorExit | KeyboardInterrupt) or (task is not None and task.cancelling()):
                    raise
                _log.warning("producer group %s: a check failed", self._group, exc_info=error)
            finally:
                self._known.pop(check.header.commit_log_offset, None)

    async def _answer(self, check: _PendingCheck) -> None:
        prepared = check.prepared
        if prepared.message.sys_flag & SYS_FLAG_COMPRESSED:
            prepared = await asyncio.to_thread(_plain, prepared)
        if inspect.iscoroutinefunction(self._check):
            state = await self._check(prepared)
        else:
            found = await asyncio.to_thread(self._check, prepared)
            state = await found if inspect.isawaitable(found) else found
        if checked_state(state) is TransactionState.UNKNOWN:
            return
        asked, header = check.header, check.prepared.transaction_id
        end = EndTransactionHeader(
            self._group,
            asked.tran_state_table_offset,
            asked.commit_log_offset,
            _ENDS[state],
            asked.msg_id or header,
            True,
            asked.transaction_id,
        )
        connections, code = self._cluster.connections, RequestCode.END_TRANSACTION
        try:
            await connections.ask_over(check.connection, code, end, timeout_s=ATTEMPT_S_MAX)
            if self._traces is not None:
                where = str(check.connection.place)
                self._traces.ended(prepared.message, prepared.transaction_id, state, where, from_check=True)
        except ClientError as error:
            _log.warning("transaction %s: %s is not told, another check will: %s", header, state, error)


def checked_state(state: object) -> TransactionState:
    """Raises ``TypeError``: a callback that forgets to return something must decide nothing."""
    if not isinstance(state, TransactionState):
        raise TypeError(f"a transaction's callback must return a TransactionState, not {state!r}: it stays open")
    return state


def _named(message: Message, transaction_id: str) -> Message:
    return replace(message, properties={**message.properties, PROPERTY_UNIQUE_KEY: transaction_id})


def _plain(prepared: PreparedMessage) -> PreparedMessage:
    """With its body decompressed, once its turn has come: until then it is as small as it was sent."""
    message = prepared.message
    with suppress(DLedgerError):  # by a method that is not installed: the application gets it as it is
        body = decompress(message.body, message.sys_flag)
        message = replace(message, body=body, sys_flag=message.sys_flag & ~COMPRESSION_FLAGS)
    return replace(prepared, message=message)


def _checked(record: bytes) -> PreparedMessage:
    """The message of a check, as it was sent. Raises ``CorruptRecordError``."""
    message = decode_record(record)
    times = message.properties.get(PROPERTY_CHECK_TIMES, "")
    known = int(times) if times.isascii() and times.isdigit() and len(times) < 10 else 1
    return PreparedMessage(message, message.properties.get(PROPERTY_UNIQUE_KEY, ""), known)
