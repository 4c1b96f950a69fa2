"""The commands that a client sends to a state machine: numbered, in batches, one request at a time. On the loop.

A producer's commands are applied in order, and a request is repeated under the same numbers until it is answered, so
each is applied once. Commands that are given while a request is on its way go together in the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from dledger.client.aio.calls import Calls
from dledger.client.aio.connections import NodeConnections
from dledger.client.shared import REQUEST_BYTES_MAX, TimeLimit
from dledger.errors import (
    DLedgerError,
    PendingFullError,
    RequestTimeoutError,
    ResultForgottenError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.remoting.log.codec import LogCode
from dledger.rpc.clients import machine_codec
from dledger.rpc.clients.machine_codec import NUMBERED_COMMANDS_MAX, Commands
from dledger.sending.numbering import new_producer_name
from dledger.types import ProducerBatch
from dledger.values import MIB

WAITING_MAX: Final = 1024
WAITING_BYTES_MAX: Final = 8 * MIB


class _Waiting:
    """A command, and who waits for its result."""

    def __init__(self, command: bytes, deadline: TimeLimit, future: asyncio.Future[bytes]) -> None:
        self.command = command
        self.deadline = deadline
        self.future = future


class CommandSender:
    """One client's."""

    def __init__(self, connections: NodeConnections, calls: Calls, group: str) -> None:
        self._connections = connections
        self._calls = calls
        self._group = group
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._sending: asyncio.Task[None] | None = None
        self._producer = new_producer_name()
        self._sequence = 0

    async def send(self, command: bytes, timeout_s: float) -> bytes:
        """The result of one command. Raises ``DLedgerError``."""
        if self._connections.is_closed:
            raise UnavailableError("the client is closed")
        if self._waiting and (len(self._waiting) >= WAITING_MAX or self._bytes + len(command) > WAITING_BYTES_MAX):
            raise PendingFullError(f"{len(self._waiting)} commands already wait in this client: wait for their results")
        waiting = _Waiting(command, TimeLimit(timeout_s), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._bytes += len(command)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting.future
        except TimeoutError:
            error = RequestTimeoutError(f"no result within {timeout_s:g} s: the command may be applied")
            if waiting in self._waiting:  # it was never sent
                self._waiting.remove(waiting)
                self._bytes -= len(command)
                error.outcome = "not_applied"
            raise error from None

    async def close(self) -> None:
        """Unanswered commands fail, with an unknown outcome if they were sent."""
        while taken := self._taken(len(self._waiting)):  # as much as one request holds
            for one in taken:
                _fail(one, UnavailableError("the client was closed before the command was sent"))
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait((self._sending,))

    def _taken(self, count_max: int) -> list[_Waiting]:
        taken: list[_Waiting] = []
        size = 0
        while self._waiting and len(taken) < count_max:
            size += len(self._waiting[0].command)
            if taken and size > REQUEST_BYTES_MAX:
                break
            one = self._waiting.popleft()
            self._bytes -= len(one.command)
            if not one.future.done():  # its caller may have been cancelled
                taken.append(one)
        return taken

    async def _send_all(self) -> None:
        try:
            while batch := self._taken(NUMBERED_COMMANDS_MAX):
                await self._send(batch)
        finally:
            self._sending = None

    async def _send(self, batch: list[_Waiting]) -> None:
        try:
            results = await self._results(batch)
        except DLedgerError as error:
            if error.outcome == "unknown":  # these numbers may be used
                self._begin_anew()
            for one in batch:
                _fail(one, error)
        except asyncio.CancelledError:
            for one in batch:
                _fail(one, RequestTimeoutError("the client was closed: the command may be applied"))
            raise
        else:
            self._sequence += len(batch)
            for one, result in zip(batch, results, strict=True):
                if not one.future.done():
                    one.future.set_result(result)

    async def _results(self, batch: list[_Waiting]) -> tuple[bytes, ...]:
        deadline = max((one.deadline for one in batch), key=lambda one: one.remaining_s)
        commands = [one.command for one in batch]
        try:
            return await self._asked(commands, deadline)
        except UnknownProducerError as error:
            if error.outcome == "unknown":
                raise
        self._begin_anew()  # it was idle for so long that it was forgotten
        return await self._asked(commands, deadline)

    async def _asked(self, commands: list[bytes], deadline: TimeLimit) -> tuple[bytes, ...]:
        """Ask until there is an answer. The last error is about the last attempt, which may not have come as far as an
        earlier one: the outcome is unknown if that of any attempt is.
        """
        may_be_applied = False
        producer = ProducerBatch(self._producer, self._sequence)
        request = machine_codec.encode_commands(Commands(self._group, commands, producer))

        async def ask(address: str, until: TimeLimit) -> tuple[bytes, ...]:
            nonlocal may_be_applied
            try:
                answer = await self._connections.call(address, LogCode.COMMAND, request, until, changes=True)
                return machine_codec.decode_results(answer)
            except ResultForgottenError:
                raise
            except DLedgerError as error:
                if error.outcome == "unknown":  # repeated under the same numbers, it is applied once
                    may_be_applied = True
                    raise RequestTimeoutError(str(error)) from error
                raise

        try:
            return await self._calls.at_leader(ask, deadline)
        except DLedgerError as error:
            if may_be_applied:
                error.outcome = "unknown"
            raise

    def _begin_anew(self) -> None:
        self._producer, self._sequence = new_producer_name(), 0


def _fail(one: _Waiting, error: DLedgerError) -> None:
    if not one.future.done():
        one.future.set_exception(error)
