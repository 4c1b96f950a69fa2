"""Connections to brokers and name servers: one per address, signed requests, answers or errors of this client.

Plaintext leaves this machine only if that is safe: without TLS only loopback addresses are dialled, unless
``ClientSecurity.insecure`` is set; that holds for addresses that brokers and name servers tell, too. Nor does a
signature go to such an address without TLS (``dledger.client.shared.signed_for``).

A group's brokers have the addresses that a client was given, and those that brokers tell (``GroupAddresses``). A broker
tells the address that is right inside its own network. Outside, behind published ports, nobody may know it: there the
given addresses are the ones to use. So each of them is asked who answers there, once for each connection, because
another broker may answer at the next one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from dledger.client.shared import NOT_SIGNED_FOR, ClientSecurity, signed_for
from dledger.errors import ConfigError
from dledger.records import record
from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import TLS_REQUIRED, AnswerCode, FrameError, RequestError
from dledger.remoting.connection import DisconnectedError, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import Frame, signed
from dledger.rpc import tls
from dledger.values import plaintext_problems
from rocketstore.client.aio.errors import (
    BrokerBusyError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    ConnectionEndedError,
    ForbiddenError,
    MessageRefusedError,
    TimedOutError,
    refusal_of,
)
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import write_header
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import BrokerData

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ATTEMPT_S_MAX: Final = 3.0
"""RocketMQ's ``sendMsgTimeout``: how long one server may take, of the time that a call has in all."""
HEARD_MAX: Final = 1024
"""Addresses of which it is remembered that they have answered."""
_USE_TLS: Final = "use TLS (--tls-ca; in Python security=ClientSecurity(tls=TlsFiles(…)))"
_INSIST: Final = "pass --insecure (in Python security=ClientSecurity(insecure=True))"
_CA_HINT: Final = ": give the CA of its certificate (--tls-ca; in Python security=ClientSecurity(tls=TlsFiles(…)))"
_PORT_HINT: Final = "; is it a listenPort? gRPC and peers have other ports"
_TLS_HINT: Final = f"{_PORT_HINT}; if it requires TLS{_CA_HINT}"

_CERTIFICATE_HINT: Final = "; if it requires certificates of its clients, give one: cert=… and key=… of TlsFiles"


class Deadline:
    """The end of one call, by the loop's clock."""

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = asyncio.get_running_loop().time() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(self._at - asyncio.get_running_loop().time(), 0.0)

    @property
    def expired(self) -> bool:
        """Whether it has passed."""
        return not self.remaining_s


class BrokerConnections:
    """Opens connections on demand, up to 256, and closes those used least.

    ``requests`` receives what servers ask of this client; ``lost`` is called with the address of each connection that
    ends by itself. Raises ``ConfigError`` for TLS files that cannot be used, and for ``given`` addresses that plaintext
    must not be sent to.
    """

    def __init__(
        self,
        given: Sequence[str],
        security: ClientSecurity | None = None,
        *,
        requests: Callable[[RemotingConnection, Frame], None] | None = None,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self._access_key = security.access_key if security is not None else ""
        self._secret_key = security.secret_key if security is not None else ""
        self._signed_for = signed_for(security, given)
        self._may_be_plain = security is not None and (security.tls is not None or security.insecure)
        self._contexts = None if security is None or security.tls is None else tls.ContextSource(security.tls)
        self._hint = _TLS_HINT if self._contexts is None else _PORT_HINT
        if security is not None and security.tls is not None and security.tls.cert is None:
            self._hint = _CERTIFICATE_HINT
        if problems := self._plaintext_problems(given):
            raise ConfigError(problems)
        self._client = RemotingClient(requests=requests, tls=self._contexts, lost=lost)
        self._heard: set[str] = set()  # addresses that have ever answered
        self._is_closed = False

    async def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        """The answer, whatever its code. Requests to one address are sent in the order of the calls.

        Raises ``BrokerUnreachableError``, ``ConnectionEndedError``, ``TimedOutError``, ``BrokerBusyError``,
        ``ForbiddenError`` (it accepts only TLS) and ``MessageRefusedError`` (it fits into no frame).
        """
        self._check(address)
        if self._access_key:
            request = request._replace(fields=self._signed(request.fields, request.body))
        try:
            answer = await self._client.call(address, request, timeout_s)
        except UnreachableError as error:
            raise self._unreachable(error, address) from error
        except DisconnectedError as error:
            hint = "" if address in self._heard else self._hint
            raise ConnectionEndedError(f"{error}{hint}") from error
        except TimeoutError as error:
            raise TimedOutError(f"{address} did not answer within {timeout_s:.3g} s") from error
        except TooManyCallsError as error:
            raise BrokerBusyError(str(error), address=address) from error
        except FrameError as error:
            raise MessageRefusedError(f"the request fits into no frame: {error}") from error
        if answer.code == AnswerCode.NO_PERMISSION and answer.fields.items() >= TLS_REQUIRED.items():
            raise ForbiddenError(f"{address} accepts only TLS{_CA_HINT}", answer_code=answer.code, address=address)
        if len(self._heard) < HEARD_MAX:
            self._heard.add(address)
        return answer

    async def connect(self, address: str, timeout_s: float) -> int:
        """Open a connection, if there is none; returns its number. Raises ``BrokerUnreachableError``."""
        self._check(address)
        try:
            await self._client.connection(address, timeout_s)
        except UnreachableError as error:
            raise self._unreachable(error, address) from error
        return self.connection_number(address)

    async def ask(
        self,
        address: str,
        code: int,
        header: DataclassInstance | None = None,
        body: bytes = b"",
        *,
        timeout_s: float,
    ) -> Frame:
        """A successful answer. Raises ``RefusedError`` for any other one, and what ``call`` does."""
        fields = {} if header is None else write_header(header)
        answer = await self.call(address, Frame(code, 0, fields, body), timeout_s)
        if answer.code != AnswerCode.SUCCESS:
            raise refusal_of(answer, address)
        return answer

    async def tell(self, address: str, request: Frame) -> None:
        """Send a request that is not answered. Raises ``BrokerUnreachableError``: it was not sent."""
        self._check(address)
        if self._access_key:
            request = request._replace(fields=self._signed(request.fields, request.body))
        try:
            await self._client.tell(address, request)
        except UnreachableError as error:
            raise self._unreachable(error, address) from error
        except FrameError as error:
            raise MessageRefusedError(f"the request fits into no frame: {error}") from error

    async def ask_over(
        self, connection: RemotingConnection, code: int, header: DataclassInstance, *, timeout_s: float
    ) -> Frame:
        """As ``ask``, over the connection on which a server has asked something."""
        fields = write_header(header)
        request = Frame(code, 0, self._signed(fields, b"") if self._access_key else fields)
        address = str(connection.place)
        try:
            answer = await connection.call(request, timeout_s)
        except DisconnectedError as error:
            raise ConnectionEndedError(str(error)) from error
        except TimeoutError as error:
            raise TimedOutError(f"{address} did not answer within {timeout_s:.3g} s") from error
        except TooManyCallsError as error:
            raise BrokerBusyError(str(error), address=address) from error
        if answer.code != AnswerCode.SUCCESS:
            raise refusal_of(answer, address)
        return answer

    async def knows_ours(self, address: str, request: Frame, timeout_s: float) -> bool:
        """Whether a server knows this project's own requests. Its first answer says so: to ``request``, if there was
        none. Raises what ``call`` does.
        """
        if not self.is_open(address):
            await self.call(address, request, timeout_s)
        version = self._client.protocol(address)
        if version is None:  # nothing is known of who listens there now
            raise ConnectionEndedError(f"{address} hung up after its first answer", outcome="not_applied")
        return version > 0

    def protocol_version(self, address: str) -> int:
        """The version of this project's own requests that the server has announced; 0: none, or not connected yet."""
        return self._client.protocol(address) or 0

    def connection_number(self, address: str) -> int:
        """The number of the open connection to a server, another one for each; 0 if there is none."""
        return self._client.number(address)

    def is_open(self, address: str) -> bool:
        """Whether the server has answered over a connection that has not ended."""
        return self._client.protocol(address) is not None

    async def close(self, *, at_once: bool = False) -> None:
        """Close all connections; calls in progress fail. Idempotent. ``at_once``: without an orderly end."""
        self._is_closed = True
        await self._client.close(at_once=at_once)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check(self, address: str) -> None:
        if self._is_closed:
            raise ClientClosedError("this client is closed")
        if not self._may_be_plain and (problems := self._plaintext_problems([address])):
            raise BrokerUnreachableError(f"a server named {address} as another server, but {problems[0]}")
        if self._signed_for is not None and address not in self._signed_for:
            raise ForbiddenError(f"{address} {NOT_SIGNED_FOR}", address=address)

    def _plaintext_problems(self, addresses: Sequence[str]) -> list[str]:
        return [] if self._may_be_plain else plaintext_problems(addresses, _USE_TLS, _INSIST)

    def _signed(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        return signed(fields, body, self._access_key, self._secret_key)

    def _unreachable(self, error: UnreachableError, address: str) -> BrokerUnreachableError | ClientClosedError:
        if self._is_closed:
            return ClientClosedError("this client is closed")
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError):
            return BrokerUnreachableError(tls.explain(cause, address))
        if self._contexts is not None and isinstance(cause, ConnectionResetError):
            hint = "" if address in self._heard else self._hint
            return BrokerUnreachableError(f"{tls.explain(cause, address)}{hint}")
        return BrokerUnreachableError(str(error))


WAIT_S: Final = 2.0
"""How long a route waits at most for brokers to identify themselves; later answers count for the next route."""
KNOWN_WAIT_S: Final = 0.2
"""The same if all have done so before, over other connections: a silent one was probably there."""
LEARNT_MAX: Final = 32
"""Addresses of other brokers that are asked for routes, besides those given."""


@record(frozen=True, slots=True)
class _Answer:
    """The answer at an address over one connection: the address that the broker there tells, or nothing."""

    told: str
    connection: int


class GroupAddresses:
    """On the loop of its first use."""

    def __init__(self, connections: BrokerConnections, given: Sequence[str]) -> None:
        self._connections = connections
        self._given = tuple(given)
        self._learnt: tuple[str, ...] = ()
        self._answers: dict[str, _Answer] = {}  # by given address
        self._asking: dict[str, asyncio.Task[None]] = {}  # by given address

    @property
    def known(self) -> tuple[str, ...]:
        """All addresses to ask for routes, those that were given first."""
        return tuple(dict.fromkeys((*self._given, *self._learnt)))

    async def reachable(self, brokers: Sequence[BrokerData]) -> tuple[BrokerData, ...]:
        """The brokers of a route at the addresses to use: the given one of each that answers at one, else its own.

        A broker alone in its group, as long as no other is known, is the one at the only given address.
        """
        told = dict.fromkeys(address for one in brokers for address in one.broker_addrs.values() if address)
        unknown = [one for one in told if one not in self._given]
        spare = [one for one in self._given if one not in told]
        found: Mapping[str, str] = {}
        if len(told) == len(self._given) == len(unknown) == 1 and not self._learnt:
            found = {unknown[0]: self._given[0]}
        elif unknown and spare:
            found = await self._found(spare, unknown)
        used = [found.get(one, one) for one in told]
        if len(told) > 1:  # one that knows only itself may have been cut off from its group
            self._learnt = tuple(sorted(used))[:LEARNT_MAX]
        return tuple(
            BrokerData(
                one.cluster,
                one.broker_name,
                {number: found.get(address, address) for number, address in one.broker_addrs.items()},
            )
            for one in brokers
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _found(self, spare: Sequence[str], unknown: Sequence[str]) -> dict[str, str]:
        """By the address that a broker tells, the given one at which it answers."""
        await self._ask(spare, unknown)
        said = {one: self._answers[one].told for one in spare if one in self._answers}
        found = {told: given for given, told in said.items() if told in unknown}
        mute = [given for given, told in said.items() if not told]
        return found | _by_port(mute, [one for one in unknown if one not in found])

    async def _ask(self, addresses: Sequence[str], unknown: Collection[str]) -> None:
        """Ask those that have not said yet who they are, until all that are ``unknown`` are found, or time is up."""
        loop = asyncio.get_running_loop()
        for address in addresses:
            if address not in self._asking and not self._is_known(address):
                self._asking[address] = loop.create_task(self._ask_one(address))
        until = loop.time() + (KNOWN_WAIT_S if all(one in self._answers for one in addresses) else WAIT_S)
        while asked := [self._asking[one] for one in addresses if one in self._asking]:
            found = {self._answers[one].told for one in addresses if one in self._answers and one not in self._asking}
            if found.issuperset(unknown) or loop.time() >= until:
                return
            await asyncio.wait(asked, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)

    def _is_known(self, address: str) -> bool:
        known = self._answers.get(address)
        return known is not None and known.connection == self._connections.connection_number(address)

    async def _ask_one(self, address: str) -> None:
        try:
            code = RequestCode.GET_BROKER_RUNTIME_INFO
            answer = await self._connections.ask(address, code, timeout_s=ATTEMPT_S_MAX)
            info = RuntimeInfo.decode(answer.body)
            told = dict(info.members).get(info.node, "")
            self._answers[address] = _Answer(told, self._connections.connection_number(address))
        except (ClientError, RequestError):  # the broker that was there before may be there again
            pass
        finally:
            del self._asking[address]


def _by_port(given: Collection[str], told: Collection[str]) -> dict[str, str]:
    """By each address told, the given one with the same port, if no two have the same."""
    by_port = {one.rpartition(":")[2]: one for one in given}
    needed = {one.rpartition(":")[2] for one in told}
    if len(by_port) < len(given) or len(needed) < len(told):
        return {}
    return {one: by_port[port] for one in told if (port := one.rpartition(":")[2]) in by_port}
