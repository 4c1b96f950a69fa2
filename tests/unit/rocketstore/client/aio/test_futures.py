"""``BatchedFuture`` against ``concurrent.futures``: the same promises, although many share a lock."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from rocketstore.client.aio.errors import ClientError, SendResult, TimedOutError
from rocketstore.client.aio.outgoing import BatchedFuture, OutgoingMessage, begin, settle
from rocketstore.message.message import Message
from tests.support.on_loop import on_loop
from tests.support.waiting import wait_until


def made(count: int, *, begun: bool = True) -> list[BatchedFuture]:
    """Futures that share a lock."""
    condition = threading.Condition()
    futures = [BatchedFuture(condition) for _ in range(count)]
    if begun:
        begin(messages_of(futures))
    return futures


def messages_of(futures: list[BatchedFuture]) -> list[OutgoingMessage]:
    messages = [OutgoingMessage(Message("T", b""), "", 1) for _ in futures]
    for message, future in zip(messages, futures, strict=True):
        message.future = future
    return messages


def result(number: int) -> SendResult:
    return SendResult("T", "a", 0, number, str(number))


def test_each_has_its_own_outcome() -> None:
    first, second, third = made(2) + made(1)
    error = TimedOutError("late")
    settle([first, second, third], [result(0), error, result(2)])
    assert (first.result(), third.result(), first.exception()) == (result(0), result(2), None)
    assert second.exception() is error
    with pytest.raises(TimedOutError, match="late"):
        second.result()
    assert first.done()
    assert not first.running()


def test_the_outcome_of_another_one_ends_no_wait() -> None:
    """Those that share a lock are woken together: the others go on waiting."""
    first, second = made(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.result, 60)
        wait_until(lambda: bool(second._condition._waiters), "it waits")  # type: ignore[attr-defined]
        settle([first], [result(0)])
        wait_until(lambda: bool(second._condition._waiters) or waiting.done(), "it waits")  # type: ignore[attr-defined]
        assert not waiting.done()
        settle([second], [result(1)])
        assert waiting.result(60) == result(1)
    with pytest.raises(FutureTimeoutError):
        made(1)[0].result(0.001)


def test_wait_and_as_completed_take_them() -> None:
    """Together with those of other executors, and while they get their outcomes."""
    futures = made(100)
    other: Future[SendResult] = Future()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(wait, [*futures, other], 60)
        completed = pool.submit(lambda: [one.result() for one in as_completed(futures, 60)])
        wait_until(lambda: all(len(one._waiters) == 2 for one in futures), "both wait")
        settle(futures[:50], [result(one) for one in range(50)])
        settle(futures[50:], [result(one) for one in range(50, 100)])
        other.set_result(result(100))
        assert waiting.result(60).not_done == set()
        assert completed.result(60) == [result(one) for one in range(100)]
    assert wait(futures, 0).done == set(futures)


def test_callbacks_are_called_once_each_and_an_error_in_one_stops_no_other() -> None:
    first, second = made(2)
    called: list[object] = []

    def failing(future: object) -> None:
        called.append(future)
        raise ValueError("in a callback")

    first.add_done_callback(failing)
    first.add_done_callback(called.append)
    second.add_done_callback(called.append)
    settle([first, second], [result(0), result(1)])
    second.add_done_callback(called.append)
    assert called == [first, first, second, second]


def test_a_future_can_be_cancelled_until_its_message_is_taken() -> None:
    first, second = made(2, begun=False)
    assert first.cancel()
    messages = messages_of([first, second])
    assert begin(messages) == messages[1:]
    assert not second.cancel()
    settle([first, second], [result(0), result(1)])
    assert first.cancelled()
    with pytest.raises(CancelledError):
        first.result()
    assert second.result() == result(1)


@on_loop
async def test_asyncio_waits_for_them_too() -> None:
    first, second = made(2)
    waiting = [asyncio.wrap_future(one) for one in (first, second)]
    error: ClientError = TimedOutError("late")
    await asyncio.to_thread(settle, [first, second], [result(0), error])
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert found == [result(0), error]
