"""Pipelined appends of remoting connections: submitted as they arrive, answered as they complete.

A client over its quota is not refused: its requests wait here in their order, count as under way, and so stop the
reading of its connection (``REQUESTS_MAX``, ``REQUEST_BYTES_MAX``).

``LogAccess`` authenticates and authorizes every request on remoting connections to a log, before anything else. Each is
checked anew, by the current rules. Remembered are only who asked last on a connection, until the rules change, and whom
to hang up on when its key is revoked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Final, NamedTuple

from dledger.access.guard import AccessGuard, Caller, quota_of
from dledger.access.quota import Quota
from dledger.access.rules import AccessRules
from dledger.errors import DLedgerError, EarlierRequestFailedError
from dledger.remoting.connection import Place, RemotingConnection
from dledger.remoting.frame import ACCESS_KEY, Frame, is_signed
from dledger.remoting.log_codec import (
    UNORDERED,
    StreamAppend,
    decode_append,
    encode_appended,
    error_answer,
    stream_of,
    success_bytes,
)
from dledger.rpc.clients.log_requests import AppendOutcome, LogOperation, LogRequests


class Admitted(NamedTuple):
    """An admitted request: of whom (None without access control), and what that client may occupy."""

    caller: Caller | None
    quota: Quota


class _Known(NamedTuple):
    """The account that asked last on a connection, and the rules that applied."""

    rules: AccessRules
    key: str
    caller: Caller
    secret: str


class LogAccess:
    """On the loop. Without a guard, everybody may do everything."""

    def __init__(self, requests: LogRequests) -> None:
        self._requests = requests
        self._guard = requests.guard
        self._known: dict[RemotingConnection, _Known] = {}
        self._callers: dict[RemotingConnection, dict[str, Caller]] = {}  # by access key

    def admit(self, connection: RemotingConnection, frame: Frame, operation: LogOperation) -> Admitted:
        """Raises ``AccessDeniedError`` unless the caller may do this."""
        guard, host = self._guard, connection.counted_as
        if guard is None:
            return Admitted(None, self._requests.quotas.of(f"@{host}", host, str(connection.place)))
        caller = self._caller(guard, connection, frame, operation)
        self._requests.require(guard, caller, operation, operation)
        self._stand(guard, connection, caller)
        # The caller is remembered, but a quota is forgotten while it counts nothing: one of its account's connections
        # would have limits of its own.
        return Admitted(caller, quota_of(caller.account, caller.grpc_peer, self._requests.quotas))

    def admit_again(self, admitted: Admitted, operation: LogOperation) -> None:
        """The same for a request that has waited."""
        guard, caller = self._guard, admitted.caller
        if guard is not None and caller is not None:
            guard.renew(caller, operation)
            self._requests.require(guard, caller, operation, operation)

    def closed(self, connection: RemotingConnection) -> None:
        """A client is gone."""
        self._known.pop(connection, None)
        for caller in self._callers.pop(connection, {}).values():
            if self._guard is not None:
                self._guard.leave(caller)

    def _caller(
        self, guard: AccessGuard, connection: RemotingConnection, frame: Frame, operation: LogOperation
    ) -> Caller:
        """Each signature is verified; addresses once per connection, as long as the rules are the same."""
        fields, rules = frame.fields, guard.rules
        key = fields.get(ACCESS_KEY, "")
        known = self._known.get(connection)
        if (
            known is not None
            and known.rules is rules
            and known.key == key
            and (not known.caller.signed or is_signed(known.secret, fields, frame.body))
        ):
            return known.caller

        def is_genuine(secret: bytes) -> bool:
            return is_signed(secret.decode(), fields, frame.body)

        peers = (peer_of(connection.place),)
        caller = guard.admit_signed(operation, key, peers, is_genuine, self._requests.quotas)
        if not connection.is_closed:
            self._known[connection] = _Known(rules, key, caller, caller.account.secret.decode())
        return caller

    def _stand(self, guard: AccessGuard, connection: RemotingConnection, caller: Caller) -> None:
        """Remember whom to hang up on."""
        if connection.is_closed:
            return
        here = self._callers.setdefault(connection, {})
        key = caller.account.access_key
        if key not in here:
            here[key] = caller
            guard.enter(caller, partial(self._end, guard, connection, caller), lambda: True)

    def _end(self, guard: AccessGuard, connection: RemotingConnection, caller: Caller, why: str) -> None:
        connection.close(str(guard.ended(caller, why)))


def peer_of(place: Place) -> str:
    """A client's address as gRPC names it, and so the rules and the audit log."""
    return f"ipv6:[{place.host}]:{place.port}" if ":" in place.host else f"ipv4:{place.host}:{place.port}"


_FAILED_STREAMS_MAX: Final = 1024
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
            if len(client.failed) > _FAILED_STREAMS_MAX:
                del client.failed[next(iter(client.failed))]
        connection.done(frame, error_answer(frame, error))
