"""Finds out whether a leader whose connections broke is gone (the core's side: ``dledger.core.suspicion``).

A killed process's sockets are closed by its kernel, and its port refuses connections at once. So one connection to the
leader's own address tells a killed leader from a replaced or lost connection; nobody else can give that answer. A power
cut, a cut cable or a firewall looks like silence, and is left to the election timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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

    def __init__(
        self, find: Callable[[NodeId], Member | None], receiver: Receiver, report: Report = log_failure
    ) -> None:
        """``find`` knows where a member is, if anybody does."""
        self._find = find
        self._receiver = receiver
        self._report = report
        self._task: asyncio.Task[None] | None = None
        self._lost: set[NodeId] = set()
        self._next_s = 0.0
        self._closed = False

    def broke(self, peer: NodeId) -> None:
        """The last connection of ``peer`` broke; if this member follows it, look whether it is there."""
        if self._closed or self._find(peer) is None or self._followed(peer) is None:
            return
        self._lost.add(peer)
        if self._task is None:
            self._task = asyncio.create_task(self._look(), name="dledger-leader-watch")
            supervise(self._task, self._report)

    def _followed(self, peer: NodeId) -> Term | None:
        try:
            return self._receiver.follows(peer)
        except DLedgerError:  # the node stops
            return None

    async def close(self) -> None:
        """Give up. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # a failure has been reported already
                await self._task

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._lost:
                await asyncio.sleep(max(0.0, self._next_s - loop.time()))
                peer = self._lost.pop()
                term, address = self._followed(peer), self._find(peer)
                if term is not None and address is not None:
                    self._next_s = loop.time() + PAUSE_S
                    await self._dial(address, term)
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
        except (OSError, RuntimeError):  # a time-out, an unreachable host, or no thread to resolve its name
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
