"""Connections to the console that ask nothing: uvicorn waits for their requests for ever, and counts them as busy.

A request must come in within ``REQUEST_TIMEOUT_S``, however little of it comes at once; and when there is no room for
another connection, the one that has been without a request for longest is hung up on. Uvicorn's ``limit_concurrency``
would refuse the newcomer instead, and ``timeout_keep_alive`` counts between requests only.
"""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX: Final = 256
REQUEST_TIMEOUT_S: Final = 10.0
_LOOK_INTERVAL_S: Final = 1.0


class PatientForAWhile(H11Protocol):
    """Uvicorn's protocol, for so long."""

    _begun_at = 0.0
    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base has it
        """Begin to wait."""
        super().connection_made(transport)
        self._begun_at = self.loop.time()
        self._look()
        if len(self.connections) >= CONNECTIONS_MAX:
            silent = [one for one in self.connections if isinstance(one, PatientForAWhile) and one.asks_nothing]
            silent.remove(self)
            if silent:
                min(silent, key=lambda one: one._begun_at).transport.abort()  # our own kind

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        if self._looking is not None:
            self._looking.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._begun_at = self.loop.time()
        super().on_response_complete()

    @property
    def asks_nothing(self) -> bool:
        """Whether no whole request is there."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def _look(self) -> None:
        if self.asks_nothing and self.loop.time() - self._begun_at > REQUEST_TIMEOUT_S:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._looking = self.loop.call_later(_LOOK_INTERVAL_S, self._look)
