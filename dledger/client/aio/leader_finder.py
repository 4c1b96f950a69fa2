"""Finds the leader by asking all servers for their status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing, suppress
from typing import Generic, TypeVar

from dledger.client.discovery import DISCOVERY_TIMEOUT_S, LOOK_TIMEOUT_S, Directory, Search, ServerReport
from dledger.client.shared import TimeLimit
from dledger.errors import DLedgerError, UnavailableError

_StatusT = TypeVar("_StatusT")


class LeaderFinder(Generic[_StatusT]):
    """Searches for the leader, one search at a time, whose result all waiting callers share."""

    def __init__(
        self,
        directory: Directory,
        ask_all: Callable[[Collection[str], TimeLimit], AsyncGenerator[tuple[str, _StatusT | DLedgerError], None]],
        report_of: Callable[[_StatusT], ServerReport],
    ) -> None:
        self._directory = directory
        self._ask_all = ask_all
        self._report_of = report_of
        self._seeking: asyncio.Task[tuple[str | None, Search]] | None = None
        self._failure: DLedgerError | None = None
        """Why the last search found nobody, for those who have no time for another one."""

    def close(self) -> None:
        """Cancel a search in progress."""
        if self._seeking is not None:
            self._seeking.cancel()

    async def leader(self, deadline: TimeLimit) -> str:
        """The leader's address, known or searched for. Raises ``DLedgerError``, at the latest at the deadline."""
        found = self._directory.leader
        if found is None:
            found, search = await self._sought(deadline)
            if found is None:
                self._failure = search.failure("no leader at present")
                raise self._failure
        self._failure = None
        return found

    async def look(self) -> str | None:
        """Look whether another node leads, because the present leader is silent; None if nobody is known to lead."""
        search = Search(self._directory, doubting=True)
        with suppress(DLedgerError):  # no server answers, or the client is closed
            if not await self._ask(search, TimeLimit(LOOK_TIMEOUT_S)):
                search.conclude()
        return self._directory.leader

    async def _sought(self, deadline: TimeLimit) -> tuple[str | None, Search]:
        if self._seeking is None or self._seeking.done():
            self._seeking = asyncio.create_task(self._seek())
            # All waiting callers may have given up: then nobody reads the exception, and the loop would log it.
            self._seeking.add_done_callback(lambda done: done.cancelled() or done.exception())
        seeking = self._seeking  # shared by all waiting callers, such as thousands of appends
        await asyncio.wait((seeking,), timeout=deadline.remaining_s)
        if not seeking.done() or seeking.cancelled():
            nobody = f"no {self._directory.leader_is} found"
            why = "" if self._failure is None else f": {str(self._failure).removeprefix(f'{nobody}: ')}"
            raise UnavailableError(f"{nobody} within {deadline.timeout_s:.3g} s{why}")
        try:
            return seeking.result()
        except DLedgerError as error:
            self._failure = error
            raise

    async def _seek(self) -> tuple[str | None, Search]:
        search = Search(self._directory)
        settled = await self._ask(search, TimeLimit(DISCOVERY_TIMEOUT_S))
        return self._directory.leader if settled else search.conclude(), search

    async def _ask(self, search: Search, deadline: TimeLimit) -> bool:
        while addresses := search.whom_to_ask():
            async with aclosing(self._ask_all(addresses, deadline)) as answers:
                async for address, answer in answers:
                    if search.take(address, answer if isinstance(answer, DLedgerError) else self._report_of(answer)):
                        return True
                    if search.only_the_doubted_is_silent:
                        break
        return False
