"""Futures of messages that other threads have submitted, made and settled many at a time.

A ``concurrent.futures.Future`` costs a lock and two lists when it is made, and a notification when it has its outcome.
Here those that are handed over together share the lock, and the lists are made for anyone who asks for them. The
documented behaviour of futures holds, and ``concurrent.futures.wait`` and ``as_completed`` take them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from typing import Any, Protocol, TypeAlias, TypeVar

from rocketstore.client.aio.results import SendResult

_DONE = frozenset({CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED})


class BatchedFuture(Future[SendResult]):
    """``condition`` guards the outcome, and is notified of those of all futures that share it."""

    _state = PENDING
    _result: SendResult | None = None
    _exception: BaseException | None = None
    _waiters: list[Any]
    _done_callbacks: list[Callable[[Future[Any]], object]]
    _invoke_callbacks: Callable[[], None]
    _is_watched = False
    """Whether somebody has asked for one of the lists."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition

    def __getattr__(self, name: str) -> list[Any]:
        if name not in ("_waiters", "_done_callbacks"):
            raise AttributeError(name)
        self._waiters, self._done_callbacks = [], []
        self._is_watched = True
        return self._waiters if name == "_waiters" else self._done_callbacks

    def done(self) -> bool:
        return self._state in _DONE

    def result(self, timeout: float | None = None) -> SendResult:
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # which the error's traceback refers to
        assert self._result is not None, "it has an outcome, and no error"
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state != FINISHED:
            self._wait(None if timeout is None else time.monotonic() + timeout)
        return self._exception

    def _wait(self, until: float | None) -> None:
        with self._condition:
            while self._state != FINISHED:
                if self._state in (CANCELLED, CANCELLED_AND_NOTIFIED):
                    raise CancelledError
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._condition.wait(left)


AnyFuture: TypeAlias = asyncio.Future[SendResult] | BatchedFuture | None


class WithFuture(Protocol):
    """A message, for a caller."""

    future: AnyFuture


_Message = TypeVar("_Message", bound=WithFuture)


def begin(messages: Sequence[_Message]) -> list[_Message]:
    """Those whose futures, all of this kind, were not cancelled: from now on they cannot be."""
    begun: list[_Message] = []
    condition: threading.Condition | None = None
    try:
        for message in messages:
            future = message.future
            assert isinstance(future, BatchedFuture), "another thread waits for it"
            if future._condition is not condition:
                _release(condition)
                condition = future._condition
                condition.acquire()
            if future._state == PENDING:
                future._state = RUNNING
                begun.append(message)
            else:
                future.set_running_or_notify_cancel()
    finally:
        _release(condition)
    return begun


def settle(futures: Sequence[AnyFuture], outcomes: Sequence[SendResult | BaseException]) -> None:
    """Give futures their outcomes, each lock being taken once for all that follow each other and share it.

    Those that were cancelled, and None, have nobody who waits.
    """
    watched: list[BatchedFuture] = []
    condition: threading.Condition | None = None
    try:
        for future, outcome in zip(futures, outcomes, strict=True):
            if not isinstance(future, BatchedFuture):
                _settle(future, outcome)
                continue
            if future._condition is not condition:
                _release(condition)
                condition = future._condition
                condition.acquire()
            if future._state != RUNNING:
                continue
            if isinstance(outcome, SendResult):
                future._result = outcome
            else:
                future._exception = outcome
            future._state = FINISHED
            if future._is_watched:
                watched.append(future)
                for waiter in future._waiters:
                    if future._exception is None:
                        waiter.add_result(future)
                    else:
                        waiter.add_exception(future)
    finally:
        _release(condition)
    for future in watched:
        future._invoke_callbacks()


def leave_behind(messages: Iterable[WithFuture], error: BaseException) -> None:
    """In a forked child, on its only thread: nobody else would ever give these their outcomes. Takes no lock, since a
    thread of the parent may hold any of them.
    """
    condition = threading.Condition()
    for message in messages:
        future = message.future
        if isinstance(future, BatchedFuture) and not future.done():
            future._condition, future._exception, future._state = condition, error, FINISHED


def _release(condition: threading.Condition | None) -> None:
    if condition is not None:
        condition.notify_all()
        condition.release()


def _settle(future: asyncio.Future[SendResult] | None, outcome: SendResult | BaseException) -> None:
    if future is None or future.done():
        return
    if isinstance(outcome, SendResult):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
