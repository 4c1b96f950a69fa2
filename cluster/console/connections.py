"""Limits connections that send no request: uvicorn waits for one forever, and counts them as busy.

A request must arrive within ``REQUEST_TIMEOUT_S``, however slowly it trickles in. If there is no room for another
connection, the one that has been without a request for longest is closed. Uvicorn's ``limit_concurrency`` would refuse
the newcomer instead, and ``timeout_keep_alive`` only applies between requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX: Final = 256
REQUEST_TIMEOUT_S: Final = 10.0
_LOOK_INTERVAL_S: Final = 1.0


class PatientForAWhile(H11Protocol):
    """Uvicorn's protocol with a time limit for requests."""

    _begun_at = 0.0
    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base has it
        """Start waiting for a request."""
        super().connection_made(transport)
        self._begun_at = self.loop.time()
        self._look()
        if len(self.connections) >= CONNECTIONS_MAX:
            silent = [one for one in self.connections if isinstance(one, PatientForAWhile) and one.asks_nothing]
            silent.remove(self)
            if silent:
                min(silent, key=lambda one: one._begun_at).transport.abort()  # always an instance of this class

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        if self._looking is not None:
            self._looking.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._begun_at = self.loop.time()
        super().on_response_complete()

    @property
    def asks_nothing(self) -> bool:
        """Whether no complete request has arrived."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def _look(self) -> None:
        if self.asks_nothing and self.loop.time() - self._begun_at > REQUEST_TIMEOUT_S:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._looking = self.loop.call_later(_LOOK_INTERVAL_S, self._look)


class CalmServer(uvicorn.Server):
    """Uvicorn's server, which does what it has to do now and then once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()

    async def main_loop(self) -> None:
        """Until it should exit."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _LOOK_INTERVAL_S)

    def end(self) -> None:
        """Exit now. On any thread."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._ending.set)
