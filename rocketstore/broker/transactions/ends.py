"""Requests to end a transaction, whichever protocol they came by."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Final

from dledger.rpc.bridge import LoopBridge, LoopCallback
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.readers import ReadThreads
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.types import PutResult

READY_S_MAX: Final = 2.0
"""How long an end waits for a new master to read which transactions are open."""


class TransactionEnds:
    """On the loop."""

    def __init__(
        self,
        transactions: TransactionService,
        readers: ReadThreads,
        bridge: LoopBridge,
        mastership: Mastership,
    ) -> None:
        self._transactions = transactions
        self._readers = readers
        self._bridge = bridge
        self._mastership = mastership
        self._ready = asyncio.Event()
        transactions.add_ready_listener(lambda: bridge.post(self._ready.set))

    async def end(self, queue_offset: int, offset: int, group: str, *, commit: bool) -> None:
        """Commit or roll back the transaction of ``group`` whose half message is there; returns when the log has it.

        Raises ``Refusal``, of which ``EndRefusedError`` and ``NotReadyError`` mean that nothing was done.
        """
        self._mastership.require()
        await self._wait_ready()
        ended: LoopCallback[PutResult] = LoopCallback(self._bridge)
        request = partial(self._transactions.end, queue_offset, offset, group, commit=commit, done=ended.done)
        await self._readers.run(request)
        result = await ended.future
        if not result.ok:
            raise Refusal.of(result, self._mastership.leader_address)

    async def _wait_ready(self) -> None:
        """A new master soon knows which transactions are open."""
        if not self._transactions.is_ready:
            self._ready.clear()
            if not self._transactions.is_ready:  # else it was told just before
                with suppress(TimeoutError):
                    async with asyncio.timeout(READY_S_MAX):
                        await self._ready.wait()
