"""Finds out whether a leader whose push connection broke is gone (the core's side: ``dledger.core.suspicion``).

A killed process's sockets are closed by its kernel, and its port refuses connections at once. So one connection to the
leader's own address tells a killed leader from a replaced or lost connection; nobody else can give that answer. A power
cut, a cut cable or a firewall looks like silence, and is left to the election timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from dledger.config import Member
from dledger.errors import DLedgerError
from dledger.rpc import loops
from dledger.rpc.bridge import Report, log_failure, supervise
from dledger.rpc.ports import Receiver
from dledger.types import NodeId, Term

LOOK_S_MAX: Final = 0.1
"""How long a look may take, connecting included."""
PAUSE_S: Final = 0.1
"""The least time from one look to the next: connections that break again and again must not become a load."""


class LeaderWatch:
    """Looks after leaders whose connections broke, one at a time. On one event loop."""

    def __init__(self, peers: Iterable[Member], receiver: Receiver, report: Report = log_failure) -> None:
        self._peers = {peer.node_id: peer for peer in peers}
        self._receiver = receiver
        self._report = report
        self._task: asyncio.Task[None] | None = None
        self._next_s = 0.0
        self._closed = False

    def broke(self, peer: NodeId) -> None:
        """The push connection of ``peer`` broke; if this member follows it, look whether it is there.

        While one look lasts, another loss is left to the election timeout.
        """
        if self._closed or self._task is not None or peer not in self._peers:
            return
        try:
            term = self._receiver.follows(peer)
        except DLedgerError:  # the node stops
            return
        if term is not None:
            self._task = asyncio.create_task(self._look(self._peers[peer], term), name=f"dledger-leader-watch-{peer}")
            supervise(self._task, self._report)

    async def close(self) -> None:
        """Give up. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # a failure has been reported already
                await self._task

    async def _look(self, leader: Member, term: Term) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, self._next_s - loop.time()))
            self._next_s = loop.time() + PAUSE_S
            await self._dial(leader, term)
        except DLedgerError:  # the node stops
            return
        finally:
            self._task = None

    async def _dial(self, leader: Member, term: Term) -> None:
        """Refused or reset: its process is gone. Accepted: something is there, and is asked. Else nothing is known."""
        peer = leader.node_id
        try:
            async with asyncio.timeout(LOOK_S_MAX):
                transport, quiet = await loops.connect(_Quiet, leader.host, leader.port)
                try:
                    self._receiver.leader_lost(peer, term, gone=False)
                    await quiet.ended  # a dying process may still have accepted it
                finally:
                    transport.abort()
        except (ConnectionRefusedError, ConnectionResetError):
            self._receiver.leader_lost(peer, term, gone=True)
        except OSError:  # a time-out or an unreachable host
            return


class _Quiet(asyncio.Protocol):
    """A connection on which nothing is said. ``ended`` raises if the other side's process does."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        """A closed connection, without an error, tells nothing: a live member may be at its limit."""
        if self.ended.done():
            return
        if isinstance(error, ConnectionResetError):
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
