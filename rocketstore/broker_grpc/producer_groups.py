"""Members of producer groups that use gRPC: in the same tables as RocketMQ's producers, and asked in turn with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from dledger.access.guard import ResourceKind
from dledger.access.permissions import Permission
from dledger.access.quota import TooManyWaitsError
from dledger.errors import InvalidRequestError
from dledger.rpc.clients.answers import Leases
from dledger.rpc.clients.calls import Call
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import HalfCheck, Heartbeat
from rocketstore.broker.groups import Groups
from rocketstore.broker.transactions.run import EndedBeforeError, EndingError
from rocketstore.broker_grpc.codec import check_client_id, parse
from rocketstore.broker_grpc.memberships import PYTHON, VERSION, StreamLink
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import check_name

_STATES: Final = ("COMMIT", "ROLLBACK", "UNKNOWN")
CHECKS_WAITING_MAX: Final = 64
"""Checks that a member has not read yet: further ones go to others of its group."""


async def end_transaction(broker: Broker, data: bytes, check: Callable[[bytes | None], None] | None) -> bytes:
    """``EndTransaction``. ``check`` gets the half message's record, and raises ``AccessDeniedError``."""
    request = parse(pb.EndTransactionRequest, data)
    if request.state not in _STATES:
        raise InvalidRequestError(f"a transaction cannot end with {request.state[:64]!r}: {', '.join(_STATES)}")
    broker.mastership.require()
    if check is not None:
        check(await broker.records.at(request.offset))
    result = "OPEN"
    if request.state != "UNKNOWN":
        try:
            commit = request.state == "COMMIT"
            await broker.ends.end(request.queue_offset, request.offset, request.group, commit=commit)
            result = "ENDED"
        except EndedBeforeError:
            result = "ENDED_BEFORE"
        except EndingError:
            result = "ENDING"
    return pb.EndTransactionResponse(result=result).SerializeToString()


class _Waiting(NamedTuple):
    """A check to be written, and the room it takes."""

    data: bytes
    leases: Leases


class ProducerLink(StreamLink):
    """A member's stream in the tables of clients. It passes on only checks of transactions."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.connection.place)
        self._call = call
        self.is_open = True
        self.waiting: deque[_Waiting] = deque()

    def may_send(self, topic: str) -> bool:
        """Whether its account may send to a topic, and so be asked about transactions there."""
        caller = self._call.caller
        return caller is None or caller.may(ResourceKind.TOPIC, topic, Permission.PUB)

    def check_half(self, check: HalfCheck) -> bool:
        """Returns whether the member will hear of it: not while it, or its account, has too much to read."""
        if not self.is_open:
            return False
        wire = pb.TransactionCheck(record=check.record, offset=check.offset, queue_offset=check.queue_offset)
        data = pb.ProducerMembershipResponse(check=wire).SerializeToString()
        leases = self._call.leases()
        try:
            if len(self.waiting) >= CHECKS_WAITING_MAX:
                return False
            leases.take_now(len(data))
        except TooManyWaitsError:
            return False
        self.waiting.append(_Waiting(data, leases))
        self.news.set()
        return True

    def end(self) -> None:
        """The stream has ended: what it has not read is for others, in the next round."""
        self.is_open = False
        for one in self.waiting:
            one.leases.end()
        self.waiting.clear()


class ProducerStream:
    """One member's stream: reads heartbeats, writes checks."""

    def __init__(self, call: Call, link: ProducerLink, groups: Groups) -> None:
        self._call = call
        self._link = link
        self._groups = groups
        self._identity = ("", "")
        self._beats = 0  # not yet answered

    async def read(self) -> None:
        """Until the client ends the stream."""
        while isinstance(data := await self._call.context.read(), bytes):
            request = parse(pb.ProducerMembershipRequest, data)
            check_name(request.group, "group")
            check_client_id(request.client_id)
            identity = (request.group, request.client_id)
            if self._identity not in (("", ""), identity):
                raise InvalidRequestError(f"a stream is of one member of one group, {' '.join(self._identity)}")
            self._identity = identity
            beat = Heartbeat(request.client_id, (request.group,), (), PYTHON, VERSION)
            await self._groups.join(self._link, self._call.quota.owner, beat)
            self._beats = 1  # several at once have one answer
            self._link.news.set()

    async def write(self) -> None:
        """Until the link is closed."""
        link = self._link
        try:
            while not link.closed_because:
                await link.news.wait()
                link.news.clear()
                if self._beats:
                    self._beats = 0
                    await self._tell(pb.ProducerMembershipResponse().SerializeToString())
                while link.waiting and not link.closed_because:
                    await self._tell(link.waiting[0].data)
                    link.waiting.popleft().leases.end()
        finally:
            link.end()

    async def _tell(self, data: bytes) -> None:
        with self._call.connection.writing():
            await self._call.context.write(data)
