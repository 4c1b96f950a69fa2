"""Pipelined appends of remoting connections: submitted as they arrive, answered as they complete.

A client over its quota is not refused: its requests wait here in their order, count as under way, and so stop the
reading of its connection (``REQUESTS_MAX``, ``REQUEST_BYTES_MAX``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Final, NamedTuple

from dledger.errors import DLedgerError, EarlierRequestFailedError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from dledger.remoting.log.access import Admitted, LogAccess
from dledger.remoting.log.codec import (
    UNORDERED,
    StreamAppend,
    decode_append,
    encode_appended,
    error_answer,
    stream_of,
    success_bytes,
)
from dledger.rpc.clients.log_requests import AppendOutcome, LogOperation, LogRequests

FAILED_STREAMS_MAX: Final = 1024
"""How many failed streams of a connection are remembered, the latest: a client begins another one after a failure."""


class _Waiting(NamedTuple):
    """A request that waits for room."""

    frame: Frame
    admitted: Admitted
    request: StreamAppend


class _Client:
    """The state of a connection while it lasts."""

    __slots__ = ("failed", "line", "task")

    def __init__(self) -> None:
        self.failed: dict[int, None] = {}  # streams, in the order in which they failed
        self.line: deque[_Waiting] = deque()
        self.task: asyncio.Task[None] | None = None  # submits the requests of the line


class Appends:
    """On the loop."""

    def __init__(self, requests: LogRequests, access: LogAccess) -> None:
        self._requests = requests
        self._access = access
        self._clients: dict[RemotingConnection, _Client] = {}

    def take(self, connection: RemotingConnection, frame: Frame) -> None:
        """Handle an append, now or once there is room; the handler of ``LogCode.APPEND``."""
        client = self._clients.get(connection)
        if client is None:
            client = self._clients[connection] = _Client()
        try:
            admitted = self._access.admit(connection, frame, LogOperation.APPEND)
            request = decode_append(frame.body)
        except DLedgerError as error:
            self._refuse(connection, frame, stream_of(frame.body), error)
            return
        if client.line or admitted.quota.is_full:
            client.line.append(_Waiting(frame, admitted, request))
            if client.task is None:
                client.task = asyncio.get_running_loop().create_task(self._submit_in_turn(connection, client))
        else:
            self._submit(connection, client, _Waiting(frame, admitted, request))

    def closed(self, connection: RemotingConnection) -> None:
        """Nothing of this client that waits is stored any more."""
        client = self._clients.pop(connection, None)
        if client is None:
            return
        if client.task is not None:
            client.task.cancel()
        connection.let_all_go([one.frame for one in client.line])
        client.line.clear()

    async def _submit_in_turn(self, connection: RemotingConnection, client: _Client) -> None:
        self._requests.note_waiting()
        room = asyncio.Event()
        while client.line:
            quota = client.line[0].admitted.quota
            while quota.is_full:
                await quota.wait_room(room)
            waiting = client.line.popleft()
            try:
                self._access.admit_again(waiting.admitted, LogOperation.APPEND)
            except DLedgerError as error:
                self._refuse(connection, waiting.frame, waiting.request.stream, error)
            else:
                self._submit(connection, client, waiting)
        client.task = None

    def _submit(self, connection: RemotingConnection, client: _Client, waiting: _Waiting) -> None:
        frame, admitted, (stream, append) = waiting
        if stream != UNORDERED and stream in client.failed:
            why = "an earlier append of this stream failed: open a new stream"
            connection.done(frame, error_answer(frame, EarlierRequestFailedError(why)))
            return
        admitted.quota.take(len(append.bodies), len(frame.body))
        done = partial(self._answered, connection, waiting)
        self._requests.submit_append(admitted.caller, append.group, append.bodies, append.producer, done)

    def _answered(self, connection: RemotingConnection, waiting: _Waiting, outcome: AppendOutcome) -> None:
        """On any thread."""
        self._requests.bridge.post(partial(self._on_done, connection, waiting, outcome))

    def _on_done(self, connection: RemotingConnection, waiting: _Waiting, outcome: AppendOutcome) -> None:
        frame, admitted, (stream, append) = waiting
        admitted.quota.give(len(append.bodies), len(frame.body))
        if isinstance(outcome, DLedgerError):
            self._requests.note_refusal(outcome)
            self._refuse(connection, frame, stream, outcome)
            return
        connection.let_go(frame)  # first: the last answer goes at once
        if not frame.is_oneway:
            connection.send(success_bytes(frame, encode_appended(outcome)))

    def _refuse(self, connection: RemotingConnection, frame: Frame, stream: int, error: DLedgerError) -> None:
        client = self._clients.get(connection)
        if client is not None and stream != UNORDERED:
            client.failed[stream] = None
            if len(client.failed) > FAILED_STREAMS_MAX:
                del client.failed[next(iter(client.failed))]
        connection.done(frame, error_answer(frame, error))
