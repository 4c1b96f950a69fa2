"""Asks the members that are known where the others are: for one that is behind, or has yet to join.

The answer to a handshake has the group's members (``PeerIdentity.judge``). A member asks when it must speak to somebody
whose address it does not know, such as the leader of members that were added while it was down.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from dledger.rpc.bridge import Report, log_failure, supervise
from dledger.rpc.peers.dialling import PeerDialler
from dledger.rpc.peers.frames import Purpose
from dledger.rpc.peers.identity import Introduction, Reasons

PAUSE_S: Final = 0.5
"""The least time from one round to the next: anyone may send something under a name that is not known."""


class AddressSearch:
    """One round at a time. On one event loop."""

    def __init__(self, introduction: Introduction, report: Report = log_failure) -> None:
        self._introduction = introduction
        self._report = report
        self._reasons = Reasons(logging.WARNING, introduction.identity.group)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._next_s = 0.0

    def ask(self) -> None:
        """Ask soon, unless that is under way."""
        if self._closed or self._task is not None:
            return
        self._task = asyncio.create_task(self._ask(), name=f"dledger-search-{self._introduction.identity.node_id}")
        supervise(self._task, self._report)

    async def close(self) -> None:
        """Give up. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # a failure has been reported already
                await self._task

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, self._next_s - loop.time()))
            self._next_s = loop.time() + PAUSE_S
            known = self._introduction.identity.addresses.reachable.values()
            diallers = [PeerDialler(self._introduction, members, Purpose.LOG, self._reasons) for members in known]
            await asyncio.gather(*(dialler.greet() for dialler in diallers))
        finally:
            self._task = None
