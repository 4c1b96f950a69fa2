"""One client call: its caller, its connection, and its quota."""

from __future__ import annotations

from typing import Any

import grpc

from dledger.access.guard import Caller
from dledger.access.quota import Quota
from dledger.records import record
from dledger.rpc.clients.answers import SMALL_BYTES, AnswerRoom, Leases
from dledger.rpc.clients.connections import Connection


@record(frozen=True, slots=True)
class Call:
    """The context of a request, for its handler. ``caller`` is None without access control."""

    context: grpc.aio.ServicerContext[Any, Any]  # Any: of any messages
    connection: Connection
    quota: Quota
    caller: Caller | None
    room: AnswerRoom

    def leases(self) -> Leases:
        """Room for this call's answers, one at a time."""
        return Leases(self.room, self.quota, self.connection)

    def until_done(self, leases: Leases) -> Leases:
        """Keep the room of the call's only answer until gRPC has finished the call."""
        self.context.add_done_callback(lambda _: leases.end())  # type: ignore[arg-type]  # grpc-stubs: of their own type
        return leases

    def check_answer(self, size: int) -> None:
        """Take room for an answer made without it. Raises ``TooManyWaitsError``: the answer must then be dropped."""
        if size > SMALL_BYTES:
            self.until_done(self.leases()).take_now(size)
