"""Calls that are the leader's, on their way there from the member at which they came in, and commands on the way back.

Clients know no leader: any member takes every call. One that is not the leader passes the call on over remoting, to the
port that all members have for clients, in a request of our own: method, metadata, where the client is, and the bytes of
the request. The answer's bytes come back. While no leader is known, or the one that is known does not answer, the call
waits: a client repeats a refused call at once, three times, and gives up.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Final, NamedTuple

from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import AnswerCode, FrameError, RequestError
from dledger.remoting.connection import DisconnectedError, Place, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import Frame
from dledger.remoting.server import Handler
from dledger.values import address_text, parse_address
from rocketstore.broker.broker import Broker
from rocketstore.broker.mastership import GroupView
from rocketstore.grpc.calls import CallHeaders, GatewayCall, RejectedError, Via
from rocketstore.pb import definition_pb2 as pb
from rocketstore.remoting.codes import MemberCode

VIEW_S_MAX: Final = 0.02
"""How old the view of the group may be by which calls are passed on."""
LOOK_INTERVAL_S: Final = 0.025
"""How often a call that waits looks whether there is a leader, or another one."""
COMMAND_S_MAX: Final = 2.0
"""How long a member may take to have a command written."""
_LENGTH: Final = struct.Struct(">I")
_METHOD, _ORIGIN, _REMAINING, _MEMBER, _STREAM, _NUMBER, _AGAIN = (
    "method",
    "origin",
    "remainingMs",
    "member",
    "stream",
    "number",
    "again",
)
_CLIENT: Final = "clientId"


class MovedError(Exception):
    """Raised when the leader did not carry out a call, because it is none, or none any more: ask again, elsewhere.

    ``may_be_done``: it may have, before it was lost.
    """

    def __init__(self, sentence: str, *, may_be_done: bool) -> None:
        super().__init__(sentence)
        self.may_be_done = may_be_done


class PassedCall(NamedTuple):
    """A call that a member has passed on."""

    method: str
    headers: CallHeaders
    origin: Place
    """Where the client is, if the sender is believed."""
    peers: tuple[str, ...]
    """gRPC's names of that place, and of the member's."""
    remaining_s: float
    via: Via
    may_be_repeated: bool


Serve = Callable[[PassedCall, bytes], Awaitable[Sequence[bytes]]]
"""Carry out a call; returns the encoded answers. Raises ``MovedError``."""
Unwanted = Callable[[Sequence[bytes]], None]
"""Takes answers that nobody waits for."""
Tell = Callable[[str, bytes], bool]
"""Write a command to a client's stream that ends here; returns whether it will be written."""


class Relay:
    """On the loop. ``client`` checks the names of those it dials, if it uses TLS."""

    def __init__(self, broker: Broker, client: RemotingClient, serve: Serve, tell: Tell) -> None:
        self._broker = broker
        self._client = client
        self._serve = serve
        self._tell = tell
        self._view: GroupView | None = None
        self._viewed_at = 0.0
        self._asked: dict[asyncio.Future[Sequence[bytes]], str] = {}  # what is under way, and at which leader
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = count(1)
        self._running: dict[tuple[str, str], asyncio.Task[Sequence[bytes]]] = {}  # by member and number
        if broker.store.log.is_replicated:
            broker.member_hosts.start()

    def handlers(self) -> Mapping[int, Handler]:
        """For the broker's remoting, by request code: they check for themselves who may do what."""
        return {
            MemberCode.GATEWAY_CALL: self._called,
            MemberCode.GATEWAY_CANCEL: self._cancelled,
            MemberCode.GATEWAY_COMMAND: self._commanded,
        }

    @property
    def under_way(self) -> int:
        """How many calls wait for the leader's answer."""
        return len(self._asked)

    async def close(self) -> None:
        """Give up on what is under way."""
        tasks = [*self._tasks, *([] if self._watch is None else [self._watch])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- asking the leader ---------------------------------------------------------------------------------------------

    def leader(self) -> str:
        """The address of another member that is taken for the leader; empty: none, or it is this one."""
        view = self._seen()
        return view.leader_address if view.leader != self._broker.config.node_id else ""

    def _seen(self) -> GroupView:
        now = asyncio.get_running_loop().time()
        if self._view is None or now - self._viewed_at > VIEW_S_MAX:
            self._view, self._viewed_at = self._broker.mastership.view(), now
        return self._view

    async def ask(
        self, leader: str, call: GatewayCall, data: bytes, *, has_stream: bool, unwanted: Unwanted | None = None
    ) -> Sequence[bytes]:
        """The leader's answers. Raises ``MovedError``, ``RejectedError``.

        ``unwanted`` gets answers that come when nobody waits for them any more, if they do within ``COMMAND_S_MAX``.
        """
        number = str(next(self._numbers))
        fields = call.headers.fields() | {
            _METHOD: call.method,
            _ORIGIN: address_text(call.host, call.port),
            _REMAINING: str(max(0, int(call.remaining_s() * 1000))),
            _MEMBER: self._broker.config.node_id,
            _NUMBER: number,
        }
        if has_stream:
            fields[_STREAM] = "1"
        if call.may_be_repeated:
            fields[_AGAIN] = "1"
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[bytes]] = loop.create_future()
        task = loop.create_task(
            self._ask(leader, Frame(MemberCode.GATEWAY_CALL, 0, fields, data), call, found, unwanted)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._asked[found] = leader
        if self._watch is None:
            self._watch = loop.create_task(self._watch_leader())
        try:
            return await found
        except asyncio.CancelledError:
            if unwanted is not None and found.done() and not found.cancelled() and found.exception() is None:
                unwanted(found.result())
                raise
            cancel = Frame(MemberCode.GATEWAY_CANCEL, 0, {_MEMBER: fields[_MEMBER], _NUMBER: number})
            with suppress(UnreachableError, FrameError, DisconnectedError, TooManyCallsError):
                await self._client.tell(leader, cancel)
            raise
        finally:
            del self._asked[found]
            if unwanted is None:
                task.cancel()
            elif not task.done():
                loop.call_later(COMMAND_S_MAX, task.cancel)

    async def _ask(
        self,
        leader: str,
        request: Frame,
        call: GatewayCall,
        found: asyncio.Future[Sequence[bytes]],
        unwanted: Unwanted | None,
    ) -> None:
        outcome: Sequence[bytes] | Exception
        try:
            answer = await self._client.call(leader, request, max(0.01, call.remaining_s()))
            outcome = _outcome(leader, answer)
        except (UnreachableError, TooManyCallsError, FrameError) as error:
            outcome = MovedError(f"the leader at {leader}: {error}", may_be_done=False)
        except DisconnectedError as error:
            outcome = MovedError(f"the leader at {leader}: {error}", may_be_done=True)
        except TimeoutError:
            sentence = f"the leader at {leader} has not answered in time: it may have carried out the call, or may yet"
            outcome = RejectedError(pb.SLAVE_PERSISTENCE_TIMEOUT, sentence)
        if found.done():
            if unwanted is not None and not isinstance(outcome, Exception):
                unwanted(outcome)
            return
        if isinstance(outcome, Exception):
            found.set_exception(outcome)
        else:
            found.set_result(outcome)

    async def _watch_leader(self) -> None:
        """Give up on a leader that is none any more: it may have gone without hanging up."""
        while self._asked:
            await asyncio.sleep(LOOK_INTERVAL_S)
            leader = self.leader()
            if not leader and not self._broker.mastership.is_master:
                continue  # there is none yet; the old one may still answer
            for found, asked in tuple(self._asked.items()):
                if asked != leader and not found.done():
                    found.set_exception(MovedError(f"{asked} does not lead any more", may_be_done=True))
        self._watch = None

    # -- from the leader -----------------------------------------------------------------------------------------------

    async def tell_member(self, member: str, client_id: str, command: bytes) -> bool:
        """Have a member write a command to the stream of a client that ends there; returns whether it does."""
        address = self._seen().members.get(member, "")
        if not address:
            return False
        request = Frame(MemberCode.GATEWAY_COMMAND, 0, {_CLIENT: client_id}, command)
        try:
            answer = await self._client.call(address, request, COMMAND_S_MAX)
        except (UnreachableError, DisconnectedError, TooManyCallsError, FrameError, TimeoutError):
            return False
        return answer.code == AnswerCode.SUCCESS

    # -- at the leader, and at members for its commands ----------------------------------------------------------------

    async def _called(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """GATEWAY_CALL."""
        passed = self._passed(connection, frame)
        key = (passed.via.member, frame.fields.get(_NUMBER, ""))
        task = asyncio.ensure_future(self._serve(passed, frame.body))
        self._running[key] = task
        try:
            answers = await task
        except MovedError as error:
            fields = {_AGAIN: "1"} if error.may_be_done else {}
            return frame.answer(AnswerCode.SERVICE_NOT_AVAILABLE, str(error), fields)
        except asyncio.CancelledError:
            if task.cancelled() and key not in self._running:
                return frame.answer(AnswerCode.SYSTEM_ERROR, "the client is gone")
            task.cancel()
            raise
        finally:
            self._running.pop(key, None)
        return frame.answer(body=join(answers))

    async def _cancelled(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """GATEWAY_CANCEL: nobody waits for the answer of a call any more."""
        if connection.place.host in self._broker.member_hosts.known:
            task = self._running.pop((frame.fields.get(_MEMBER, ""), frame.fields.get(_NUMBER, "")), None)
            if task is not None:
                task.cancel()
        return frame.answer()

    async def _commanded(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """GATEWAY_COMMAND."""
        if connection.place.host not in self._broker.member_hosts.known:
            raise RequestError("only a member of the group may give commands to the clients of another one")
        if not self._tell(frame.fields.get(_CLIENT, ""), frame.body):
            return frame.answer(AnswerCode.SYSTEM_ERROR, "the client's stream does not end here, or takes no more")
        return frame.answer()

    def _passed(self, connection: RemotingConnection, frame: Frame) -> PassedCall:
        fields, place = frame.fields, connection.place
        try:
            origin = Place(*parse_address(fields[_ORIGIN]))
            remaining_s = int(fields[_REMAINING]) / 1000
            method = fields[_METHOD]
        except (KeyError, ValueError) as error:
            raise RequestError(f"a call that was passed on lacks something: {error}") from None
        is_member = place.host in self._broker.member_hosts.known
        via = Via(fields.get(_MEMBER, ""), _STREAM in fields) if is_member else Via(f"@{place.host}")
        peers = (peer_of(origin), peer_of(place)) if is_member else (peer_of(place),)
        origin = origin if is_member else place
        return PassedCall(method, CallHeaders.of_fields(fields), origin, peers, remaining_s, via, _AGAIN in fields)


def _outcome(leader: str, answer: Frame) -> Sequence[bytes] | Exception:
    """Of a call. Raises ``FrameError``."""
    if answer.code == AnswerCode.SUCCESS:
        return split(answer.body)
    if answer.code == AnswerCode.SERVICE_NOT_AVAILABLE:
        return MovedError(answer.remark, may_be_done=_AGAIN in answer.fields)
    return RejectedError(pb.INTERNAL_SERVER_ERROR, f"the leader at {leader}: {answer.remark}")


def peer_of(place: Place) -> str:
    """A place as gRPC names it."""
    return f"ipv6:[{place.host}]:{place.port}" if ":" in place.host else f"ipv4:{place.host}:{place.port}"


def join(answers: Sequence[bytes]) -> bytes:
    """Several answers as one body: each with its length before it."""
    return b"".join([part for one in answers for part in (_LENGTH.pack(len(one)), one)])


def split(body: bytes) -> list[bytes]:
    """The answers in a body. Raises ``FrameError``."""
    found, at = [], 0
    while at < len(body):
        if len(body) - at < _LENGTH.size:
            raise FrameError("the answers of a call end too early")
        (size,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if size > len(body) - at:
            raise FrameError("an answer of a call ends too early")
        found.append(body[at : at + size])
        at += size
    return found
