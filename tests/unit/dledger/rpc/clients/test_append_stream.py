"""One stream of appends, without a network: its two tasks depend on each other."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from dledger.pb import client_pb2 as pb
from dledger.rpc import loops
from dledger.rpc.clients.connections import AnswerRoom
from dledger.rpc.clients.log_service import AppendStream, Call
from dledger.rpc.loops import LoopBridge
from dledger.types import AppendedBatch, LogIndex, Term
from tests.support.on_loop import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Quota:
    is_full = False

    def __init__(self) -> None:
        self.occupied = (0, 0)

    def take(self, entries: int, size: int) -> None:
        self.occupied = self.occupied[0] + entries, self.occupied[1] + size

    def give(self, entries: int, size: int) -> None:
        self.take(-entries, -size)


class _Connection:
    @contextmanager
    def writing(self) -> Iterator[None]:
        yield


class _Context:
    """A client that sends requests, waits for their answers, and cannot be answered."""

    def __init__(self, requests: int = 1) -> None:
        request = pb.AppendRequest(group="g", bodies=[b"x"], request_id=1)
        self.requests = [request.SerializeToString() for _ in range(requests)]

    async def send_initial_metadata(self, _metadata: object) -> None: ...

    async def read(self) -> bytes:
        if not self.requests:
            await asyncio.Event().wait()
        return self.requests.pop()

    async def write(self, _data: bytes) -> None:
        raise RuntimeError("a bug")


def test_a_stream_whose_answers_cannot_be_written_ends() -> None:
    """Else its client waits for answers, and it for the client: neither hears of the failure."""

    async def serve() -> None:
        done = AppendedBatch(Term(1), LogIndex(1), LogIndex(1), (0,))
        fakes: tuple[Any, Any, Any] = (_Context(), _Quota(), _Connection())  # only what the stream uses of them
        context, quota, connection = fakes
        call = Call(context, connection, quota, None, AnswerRoom())
        stream = AppendStream(
            call, LoopBridge(), lambda _append, answered: answered(done), lambda _error: None, 1 << 20
        )
        await asyncio.wait_for(stream.run(), 10)

    with pytest.raises(RuntimeError, match="a bug"):
        loops.run(serve())


def test_a_stream_that_ends_occupies_nothing_any_more() -> None:
    """Answers that were not written, or come afterwards, would count against the client for ever."""

    async def serve() -> None:
        answered: list[Callable[[AppendedBatch], None]] = []
        quota = _Quota()
        fakes: tuple[Any, Any, Any] = (_Context(3), quota, _Connection())
        context, its_quota, connection = fakes
        call = Call(context, connection, its_quota, None, AnswerRoom())
        bridge = LoopBridge()
        stream = AppendStream(call, bridge, lambda _append, done: answered.append(done), lambda _error: None, 1 << 20)
        running = asyncio.create_task(stream.run())
        await until(lambda: len(answered) == 3, "all are under way")
        assert quota.occupied[0] == 3
        done = AppendedBatch(Term(1), LogIndex(1), LogIndex(1), (0,))
        answered[0](done)
        answered[1](done)
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(running, 10)
        assert quota.occupied[0] == 1
        answered[2](done)
        await until(lambda: quota.occupied == (0, 0), "nothing is occupied")

    loops.run(serve())
