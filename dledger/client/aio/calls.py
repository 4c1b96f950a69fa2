"""Requests to whichever node can answer them, repeated until their deadline where that is safe. On the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from typing import Final, TypeVar

from dledger.backoff import Backoff
from dledger.client.aio.connections import NodeConnections
from dledger.client.aio.leader_finder import LeaderFinder
from dledger.client.discovery import Directory, most_telling, report_of_node
from dledger.client.shared import (
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    TimeLimit,
    is_elsewhere,
    is_retried,
    is_retried_read,
)
from dledger.errors import DLedgerError, RequestTimeoutError, TlsError, UnavailableError
from dledger.remoting.log.codec import LogCode
from dledger.rpc.clients import codec
from dledger.rpc.ports import NodeStatus

_T = TypeVar("_T")
Ask = Callable[[str, TimeLimit], Awaitable[_T]]
"""Asks the node at an address. Raises ``DLedgerError``."""


class Calls:
    """One client's; ``directory`` is what it knows of the group."""

    def __init__(self, connections: NodeConnections, directory: Directory, group: str) -> None:
        self.directory: Final = directory
        self.seeker: Final = LeaderFinder(directory, self.ask_all, report_of_node)
        self._connections = connections
        self._metadata = codec.encode_metadata_request(group)

    async def at_leader(self, ask: Ask[_T], deadline: TimeLimit, *, changes: bool = False) -> _T:
        """Ask the leader. ``changes``: do not ask again what may have taken effect."""

        async def attempt() -> _T:
            address = await self.seeker.leader(deadline)
            try:
                return await ask(address, deadline)
            except DLedgerError as error:
                self.directory.note_failure(address, error)
                raise

        return await self.repeated(attempt, deadline, changes=changes)

    async def at_any(self, ask: Ask[_T], deadline: TimeLimit, *, attempt_s: float = float("inf")) -> tuple[_T, str]:
        """Ask the leader if it is known, else the others in turn; also returns the address that answered.

        ``attempt_s``: how long to wait for one node before asking others.
        """

        async def attempt() -> tuple[_T, str]:
            failures: list[DLedgerError] = []
            addresses = self.directory.candidates()
            for address in addresses:
                # A silent node must leave the others time to answer.
                patience_s = deadline.remaining_s / (1 if address == addresses[-1] else 2)
                try:
                    return await ask(address, TimeLimit(min(patience_s, attempt_s))), address
                except DLedgerError as error:
                    self.directory.note_failure(address, error)
                    if not is_elsewhere(error):
                        raise
                    failures.append(error)
            raise _failure_of_all(failures)

        return await self.repeated(attempt, deadline)

    async def at_one(self, ask: Ask[_T], address: str, deadline: TimeLimit) -> _T:
        """Ask the node at this address and no other."""
        return await self.repeated(lambda: ask(address, deadline), deadline)

    async def repeated(self, attempt: Callable[[], Awaitable[_T]], deadline: TimeLimit, *, changes: bool = False) -> _T:
        """Attempt until the deadline; when a search is cut short, the error before it says more."""
        said: DLedgerError | None = None
        retried = is_retried if changes else is_retried_read

        def goes_on(error: BaseException) -> bool:
            return not self._connections.is_closed and retried(error)

        async def noted() -> _T:
            nonlocal said
            try:
                return await attempt()
            except DLedgerError as error:
                is_cut_short = isinstance(error, (RequestTimeoutError, UnavailableError)) and deadline.expired
                if said is not None and is_cut_short and not changes:
                    raise said from error
                said = error
                raise

        backoff, failures = Backoff(RETRY_WAIT_S_MIN, RETRY_WAIT_S_MAX), 0
        while True:
            try:
                return await noted()
            except DLedgerError as error:
                if deadline.remaining_s < RETRY_WAIT_S_MIN or not goes_on(error):
                    raise
                failures += 1
                is_hinted = failures == 1 and error.leader is not None and self.directory.leader is not None
            if not is_hinted:
                import random  # here: most programs never try again

                # Clients that fail together must not return together; nor right before the deadline: an attempt without
                # time to answer turns "not applied" into "unknown".
                pause_s = backoff.pause() + random.uniform(0, RETRY_WAIT_S_MIN)
                await asyncio.sleep(min(pause_s, deadline.remaining_s / 2))

    async def status(self, address: str, deadline: TimeLimit) -> NodeStatus:
        """The metadata of one node."""
        return codec.decode_metadata(await self._connections.call(address, LogCode.METADATA, self._metadata, deadline))

    async def survey(self, deadline: TimeLimit) -> list[tuple[str, NodeStatus | DLedgerError]]:
        """The metadata of every node, or the error that prevented it, by address; also of nodes that others name."""
        answers: list[tuple[str, NodeStatus | DLedgerError]] = []
        asked: set[str] = set()
        while addresses := [one for one in self.directory.addresses if one not in asked]:
            asked.update(addresses)
            async for address, answer in self.ask_all(addresses, deadline):
                answers.append((address, answer))
                if isinstance(answer, DLedgerError):
                    self.directory.record_tried(address)
                else:
                    self.directory.learn(address, report_of_node(answer))
        return answers

    async def ask_all(
        self, addresses: Collection[str], deadline: TimeLimit
    ) -> AsyncGenerator[tuple[str, NodeStatus | DLedgerError], None]:
        """The metadata of several nodes, as they arrive. Late ones are cancelled when the caller stops."""

        async def ask(address: str) -> tuple[str, NodeStatus | DLedgerError]:
            try:
                return address, await self.status(address, deadline)
            except DLedgerError as error:
                return address, error

        tasks = [asyncio.create_task(ask(address)) for address in addresses]
        try:
            for answered in asyncio.as_completed(tasks):
                yield await answered
        finally:
            for task in tasks:
                task.cancel()


def _failure_of_all(failures: Sequence[DLedgerError]) -> DLedgerError:
    """The last failure, for later attempts may succeed; a TLS error of another node is told along with it."""
    last, telling = failures[-1], most_telling(failures)
    if isinstance(last, TlsError) or not isinstance(telling, TlsError):
        return last
    return UnavailableError(f"{last}; {telling}")
