"""The peer port of a process: one listener and one event loop for the members of all its groups."""

from __future__ import annotations

import socket
from collections.abc import Collection
from functools import partial
from typing import Final

from dledger.config import ServerConfig
from dledger.errors import InvariantError
from dledger.rpc.bridge import LoopBridge, LoopThread, Report, log_failure
from dledger.rpc.peers import coalescing
from dledger.rpc.peers.acceptor import PeerAcceptor, PeerGroup, listen_for_peers
from dledger.rpc.peers.coalescing import HeartbeatCoalescer
from dledger.rpc.tls_keeper import TlsKeeper


class PeerPort:
    """Listens from ``open`` to ``close``, and takes connections from ``accept`` on.

    ``report``: of the end of its event loop, without which no group goes on.
    """

    def __init__(
        self,
        config: ServerConfig,
        groups: Collection[str],
        tls_keeper: TlsKeeper | None = None,
        report: Report = log_failure,
    ) -> None:
        """``config``: of any of the groups; they agree on what concerns the port."""
        self._config = config
        self._loop = LoopThread(f"dledger-peers-{config.node_id}", report)
        self._acceptor: Final = PeerAcceptor(config.node_id, groups, tls_keeper)
        self.reasons: Final = self._acceptor.reasons
        """Logs why connections are refused."""
        self.coalescer: Final = HeartbeatCoalescer() if len(groups) > 1 else None
        """Sends the groups' heartbeats together; None: there is one group."""
        self._listening: list[socket.socket] = []
        self.port = 0
        """The port listened on, once open."""

    def open(self) -> None:
        """Listen; connections wait for ``accept``. Raises ``ConfigError`` if it cannot."""
        self._loop.start()
        try:
            self._listening = listen_for_peers(self._config)
        except BaseException:
            self._loop.stop()
            raise
        self.port = self._listening[0].getsockname()[1]

    def accept(self) -> None:
        """Take connections for the groups added."""
        listening, self._listening = self._listening, []
        self.bridge.post(partial(self._acceptor.open, listening))

    @property
    def bridge(self) -> LoopBridge:
        """The bridge to its event loop, once open. Raises ``InvariantError``."""
        if (bridge := self._loop.bridge) is None:
            raise InvariantError("the peer port is not open")
        return bridge

    def add(self, name: str, group: PeerGroup) -> None:
        """Accept connections for a group soon."""
        self.bridge.post(partial(self._acceptor.add, name, group))

    def remove(self, name: str) -> None:
        """Accept no more for a group, from the return on. From other threads than the loop's."""
        if (bridge := self._loop.bridge) is not None and self._loop.is_alive:
            bridge.run(self._remove(name))

    async def _remove(self, name: str) -> None:
        self._acceptor.remove(name)

    def answer_heartbeats(self, payload: bytes | memoryview, names: tuple[str, ...] | None) -> bytes:
        """See ``coalescing.answer``. On any thread."""
        return coalescing.answer(payload, names, self._acceptor.answerer)

    def close(self) -> None:
        """Stop listening, and end the event loop, on which no group may have links any more. Idempotent."""
        if (bridge := self._loop.bridge) is not None and self._loop.is_alive:
            bridge.run(self._acceptor.close())
        self._loop.stop()
        for one in self._listening:
            one.close()
        self._listening = []
