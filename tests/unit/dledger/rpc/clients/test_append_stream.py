"""One stream of appends, without a network: its two tasks depend on each other."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from dledger.pb import client_pb2 as pb
from dledger.rpc import loops
from dledger.rpc.bridge import LoopBridge
from dledger.rpc.clients.answers import AnswerRoom
from dledger.rpc.clients.append_stream import AppendStream
from dledger.rpc.clients.calls import Call
from dledger.types import AppendedBatch, LogIndex, Term

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Quota:
    is_full = False

    def take(self, _entries: int, _size: int) -> None: ...

    def give(self, _entries: int, _size: int) -> None: ...


class _Connection:
    @contextmanager
    def writing(self) -> Iterator[None]:
        yield


class _Context:
    """A client that sends one request, waits for its answer, and cannot be answered."""

    def __init__(self) -> None:
        self.requests = [pb.AppendRequest(group="g", bodies=[b"x"], request_id=1).SerializeToString()]

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
