"""One call of a client: who calls, over which connection, and what share of the server is its."""

from __future__ import annotations

from typing import Any

import grpc

from dledger.access.guard import Caller
from dledger.access.quota import Quota
from dledger.records import record
from dledger.rpc.answers import SMALL_BYTES, AnswerRoom, Lease
from dledger.rpc.connections import Connection


@record(frozen=True, slots=True)
class Call:
    """What a handler needs to know besides the request. ``caller`` is None without access control."""

    context: grpc.aio.ServicerContext[Any, Any]  # Any: of whatever it carries
    connection: Connection
    quota: Quota
    caller: Caller | None
    room: AnswerRoom

    async def lease(self, size: int) -> Lease:
        """Room for an answer of about ``size`` bytes, until the call has ended for the client."""
        return self._until_done(await self.room.lease(self.quota, size))

    def lease_made(self, size: int) -> None:
        """The same for an answer that is there. Raises ``TooManyWaitsError``: then it must be dropped."""
        if size > SMALL_BYTES:
            self._until_done(self.room.lease_made(self.quota, size))

    def _until_done(self, lease: Lease) -> Lease:
        self.context.add_done_callback(lambda _: lease.end())  # type: ignore[arg-type]  # grpc-stubs: of their own type
        return lease
