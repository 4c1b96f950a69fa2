"""Decodes what clients send of themselves: small bodies at once, large ones on a thread, one after the other.

A heartbeat of a thousand subscriptions takes five milliseconds, and a hostile one of the same size thirty times that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from dledger.access.quota import TooManyWaitsError
from dledger.errors import DLedgerError
from dledger.errors import Outcome as TheirOutcome
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from dledger.remoting.server import Answer, Handler, Refused
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.types import Outcome

AT_ONCE_BYTES_MAX: Final = 16 * 1024
"""Larger bodies are decoded by a thread: about eighty subscriptions."""
REST: Final = 3
"""A host's next large body waits this many times the processor time of the last one: threads share the interpreter."""
REST_S_MAX: Final = 1.0
_P = ParamSpec("_P")
_T = TypeVar("_T")
CODES: Final = {  # the broker's refusals as RocketMQ's response codes
    RefusalKind.INVALID: AnswerCode.SYSTEM_ERROR,
    RefusalKind.ILLEGAL_MESSAGE: AnswerCode.MESSAGE_ILLEGAL,
    RefusalKind.WRONG_MESSAGE_TYPE: AnswerCode.MESSAGE_ILLEGAL,
    RefusalKind.WRONG_FILTER: AnswerCode.SUBSCRIPTION_PARSE_FAILED,
    RefusalKind.NO_TOPIC: AnswerCode.TOPIC_NOT_EXIST,
    RefusalKind.NO_QUEUE: AnswerCode.SYSTEM_ERROR,
    RefusalKind.NO_GROUP: AnswerCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    RefusalKind.NO_MESSAGE: AnswerCode.SYSTEM_ERROR,
    RefusalKind.NO_OFFSET: AnswerCode.QUERY_NOT_FOUND,
    RefusalKind.NO_CLIENT: AnswerCode.CONSUMER_NOT_ONLINE,
    RefusalKind.NOT_PERMITTED: AnswerCode.NO_PERMISSION,
    RefusalKind.TOO_MANY: AnswerCode.SYSTEM_BUSY,
    RefusalKind.BUSY: AnswerCode.SYSTEM_ERROR,
    RefusalKind.UNAVAILABLE: AnswerCode.SERVICE_NOT_AVAILABLE,
    RefusalKind.TOO_LATE: AnswerCode.SYSTEM_ERROR,
    RefusalKind.FAILED: AnswerCode.SYSTEM_ERROR,
}
"""By kind. Java's clients try another broker for 1, 14, 16 and 17, and none for 2 and 13."""


class BodyDecoder:
    """On the loop."""

    def __init__(self, readers: ReadThreads) -> None:
        self._readers = readers
        self._turns: WeakKeyDictionary[RemotingConnection, asyncio.Lock] = WeakKeyDictionary()
        self._hosts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._thread = asyncio.Lock()

    def in_turn(self, handler: Handler) -> Handler:
        """``handler``, for one such request of a connection at a time: small ones must not overtake large ones."""

        async def handle(connection: RemotingConnection, frame: Frame) -> Answer:
            turn = self._turns.get(connection)
            if turn is None:
                turn = self._turns[connection] = asyncio.Lock()
            async with turn:
                return await handler(connection, frame)

        return handle

    async def run(
        self,
        connection: RemotingConnection,
        frame: Frame,
        decode: Callable[_P, _T],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """The result of ``decode``, which works on the frame's body. Raises what it raises."""
        if len(frame.body) <= AT_ONCE_BYTES_MAX:
            return decode(*args, **kwargs)
        host = self._hosts.get(connection.counted_as)
        if host is None:
            host = self._hosts[connection.counted_as] = asyncio.Lock()
        await host.acquire()
        spent_s: list[float] = []
        try:
            async with self._thread:
                return await self._readers.run(_timed, spent_s, partial(decode, *args, **kwargs))
        finally:
            asyncio.get_running_loop().call_later(min(REST * sum(spent_s), REST_S_MAX), host.release)


def _timed(spent_s: list[float], decode: Callable[[], _T]) -> _T:
    """Decode, and note the thread's processor time."""
    began = time.thread_time()
    try:
        return decode()
    finally:
        spent_s.append(time.thread_time() - began)


def told_outcome(outcome: Outcome) -> TheirOutcome:
    """The outcome as callers are told it."""
    return "not_applied" if outcome == "not_applied" else "unknown"


def refusal_of(error: Exception) -> Refused | None:
    """The answer to what the broker refuses; None: it is no refusal."""
    if isinstance(error, Refusal):
        return Refused(CODES[error.kind], told_outcome(error.outcome))
    if isinstance(error, TooManyWaitsError):
        return Refused(AnswerCode.SYSTEM_BUSY, error.outcome)
    return Refused(AnswerCode.SYSTEM_ERROR, error.outcome) if isinstance(error, DLedgerError) else None
