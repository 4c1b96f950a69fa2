"""Takes over a RocketMQ master's topics, groups, offsets and delay progress, which are not in its log.

Like RocketMQ's slaves, soon after the start and then every ten seconds; but all four together or nothing, and offsets
never go back. A single value that means nothing here, such as an offset of -1, is left out with a warning. A master of
ours has them in the log: it is not asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from dledger.errors import InvalidRequestError
from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import RequestError
from dledger.remoting.connection import DisconnectedError, TooManyCallsError
from dledger.remoting.frame import Frame
from dledger.rpc.loops import Report, supervise
from rocketstore.ha.slave import MasterView
from rocketstore.remoting.codes import RequestCode
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import Change
from rocketstore.state.rocketmq_files import CONSUMER_OFFSETS, DELAY_OFFSETS, GROUPS, TOPICS, changes_in

_LOG: Final = logging.getLogger("rocketstore")
FIRST_S: Final = 3.0
INTERVAL_S: Final = 10.0
TIMEOUT_S: Final = 5.0
REMARK_CHARS_MAX: Final = 200
_ASKED: Final = {
    TOPICS: RequestCode.GET_ALL_TOPIC_CONFIG,
    GROUPS: RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    CONSUMER_OFFSETS: RequestCode.GET_ALL_CONSUMER_OFFSET,
    DELAY_OFFSETS: RequestCode.GET_ALL_DELAY_OFFSET,
}
"""The file in which RocketMQ keeps each, and the request that a master answers with the same contents."""
_FAILURES: Final = (
    UnreachableError, DisconnectedError, TooManyCallsError, TimeoutError, RequestError, InvalidRequestError,
)  # fmt: skip


class SlaveSync:
    """On the event loop of the broker's clients, from ``start`` to ``close``."""

    def __init__(
        self,
        state: BrokerState,
        client: RemotingClient,
        master: Callable[[], MasterView | None],
        address: Callable[[], str],
    ) -> None:
        """``address``: the master's for clients, empty while unknown."""
        self._state = state
        self._client = client
        self._master = master
        self._address = address
        self._task: asyncio.Task[None] | None = None
        self.failure = ""
        """Why the last round took nothing over; empty if it did, or was not needed."""
        self.skipped: dict[str, str] = {}
        """The entries that the last round left out, by file."""

    def start(self, report: Report) -> None:
        """Begin; ``report`` is told if it ends by itself."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        supervise(self._task, report)

    async def close(self) -> None:
        """End. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        await asyncio.sleep(FIRST_S)
        while True:
            await self.step()
            await asyncio.sleep(INTERVAL_S)

    async def step(self) -> None:
        """One round."""
        view, address = self._master(), self._address()
        if view is None or not view.is_connected or view.is_ours:
            self._note("")
        elif not address:
            self._note("its address for clients is not known: set namesrvAddr")
        else:
            try:
                changes = [change for name in _ASKED for change in await self._asked(address, name)]
                await asyncio.to_thread(self._state.mirror, changes)
            except _FAILURES as error:
                self._note(str(error) or f"no answer within {TIMEOUT_S:g} s")
            else:
                self._note("")

    async def _asked(self, address: str, name: str) -> tuple[Change, ...]:
        answer = await self._client.call(address, Frame(_ASKED[name], 0), TIMEOUT_S)
        if not answer.body and name in (CONSUMER_OFFSETS, DELAY_OFFSETS):
            return ()  # nothing was ever consumed, or delivered late
        if answer.code:
            raise InvalidRequestError(f"{name}: it answered {answer.code}: {answer.remark[:REMARK_CHARS_MAX]!r}")
        found = await asyncio.to_thread(changes_in, name, answer.body)
        if found.skipped and found.skipped != self.skipped.get(name):
            _LOG.warning("%s: taken over from the master, except: %s", name, found.skipped)
        self.skipped[name] = found.skipped
        return found.changes

    def _note(self, failure: str) -> None:
        if failure and failure != self.failure:
            _LOG.warning("topics, groups and offsets are not taken over from the master: %s", failure)
        self.failure = failure
