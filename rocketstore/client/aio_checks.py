"""The tasks that ask the application about open transactions; its membership has threads, as ``checks`` has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from dledger.client.discovery import Directory
from dledger.client.security import ClientSecurity
from dledger.sending.aio_stream import is_being_cancelled
from rocketstore.client.transactions import CheckMember
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger(__name__)
WORKERS: Final = 1


class AsyncCheckWorkers:
    """As ``CheckWorkers``. Used on one loop."""

    def __init__(
        self,
        directory: Directory,
        group: str,
        handle: Callable[[pb.TransactionCheck], Awaitable[None]],
        *,
        timeout_s: float,
        security: ClientSecurity | None,
        workers: int = WORKERS,
    ) -> None:
        self._member = CheckMember(directory, group, self._news, timeout_s=timeout_s, security=security)
        self.new_transaction_id: Final = self._member.ids.next
        self._handle = handle
        self._count = workers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._joined = False  # once
        self._closed = False

    async def start(self) -> None:
        """Begin, and wait until the master knows this member. Raises what keeps it from joining."""
        self.begin()
        if not self._joined:
            await asyncio.to_thread(self._member.wait_joined)
            self._joined = True

    def begin(self) -> None:
        """Begin to join, and to answer. Raises ``UnavailableError`` when closed. May be called again."""
        if self._workers and not self._closed:
            return
        self._loop = asyncio.get_running_loop()
        self._member.begin()
        while len(self._workers) < self._count and not self._closed:
            self._workers.append(self._loop.create_task(self._work()))

    async def close(self) -> None:
        """Wait for what the application is doing, then leave the group. Idempotent."""
        self._closed = True
        self._changed.set()
        others = [one for one in self._workers if one is not asyncio.current_task()]
        if others:
            await asyncio.wait(others)
        await asyncio.to_thread(self._member.close)

    def _news(self) -> None:
        """On any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._changed.set)

    async def _next(self) -> pb.TransactionCheck | None:
        while not self._closed:
            check = self._member.pending.pop()
            if check is not None:
                return check
            self._changed.clear()
            await self._changed.wait()
        return None

    async def _work(self) -> None:
        while (check := await self._next()) is not None:
            try:
                await self._handle(check)
            except BaseException as error:  # also SystemExit: whatever it is, the group is asked again
                if isinstance(error, GeneratorExit | KeyboardInterrupt) or is_being_cancelled():  # the program ends
                    raise
                _log.warning("producer group %s: a check failed", self._member.group, exc_info=error)
            finally:
                self._member.pending.done(check)
