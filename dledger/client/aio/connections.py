"""A client's remoting connections to nodes: one for each address, opened when it is needed. On the loop.

A connection begins with DLedger's METADATA: its answer says whether the node knows our request codes, and how large an
append may be. Plaintext leaves this machine only if that is safe: without TLS only loopback addresses are dialled,
unless ``ClientSecurity.insecure`` is set, also those that other nodes name. Nor does a signature go to such an address
without TLS (``dledger.client.shared.signed_for``).

``Calls`` sends requests to a node that can answer them, and repeats them until their deadline where that is safe.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from dledger.client.discovery import Directory, LeaderFinder, most_telling, report_of_node
from dledger.client.shared import (
    NOT_SIGNED_FOR,
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    TimeLimit,
    is_elsewhere,
    is_retried,
    is_retried_read,
    signed_for,
)
from dledger.clock import Backoff
from dledger.errors import (
    AccessDeniedError,
    ConfigError,
    DLedgerError,
    InvalidRequestError,
    PendingFullError,
    RequestTimeoutError,
    RequestTooLargeError,
    TlsError,
    UnavailableError,
)
from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import ANNOUNCED, TLS_REQUIRED, AnswerCode, FrameError
from dledger.remoting.connection import DisconnectedError, RemotingConnection, TooManyCallsError
from dledger.remoting.fastjson import dumps_plain
from dledger.remoting.frame import FRAME_BYTES_MAX, Frame, encode
from dledger.remoting.log_codec import REQUEST_BYTES_MAX_FIELD, JavaCode, LogCode, error_of
from dledger.rpc import tls
from dledger.rpc.clients import codec
from dledger.rpc.ports import NodeStatus
from dledger.values import CLIENT_PORT_OFFSET, MIB, plaintext_problems

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity

ROLE_CHANGES_MAX: Final = 256
"""How many role changes wait for a watcher; of more, the oldest are dropped."""
_REQUEST_BYTES_DEFAULT: Final = 8 * MIB
_OPAQUE: Final = 2_000_000_001
"""Stands for the opaque in a template."""
_BY_TLS: Final = "security=ClientSecurity(tls=TlsFiles(…))"
_USE_TLS: Final = f"use TLS (--tls-ca, --tls-cert, --tls-key; in Python {_BY_TLS})"
_BEFORE_AN_ANSWER: Final = (
    "hung up before it answered: is this a port of peers, or of gRPC? Clients connect to the client port, by default "
    f"the peer port + {CLIENT_PORT_OFFSET}. Or has the node connections_max connections already? Its log says so"
)
_TLS_HINT: Final = "; if it requires TLS, give the CA of its certificate (--tls-ca)"
_INSIST: Final = "pass --insecure (in Python ClientSecurity(insecure=True))"


class NodeLink:
    """A connection to a node that has announced our codes."""

    def __init__(self, address: str, connection: RemotingConnection, request_bytes_max: int) -> None:
        self.address = address
        self.connection = connection
        self.request_bytes_max = request_bytes_max
        """How large the body of an append may be."""
        self.watchers: set[asyncio.Queue[bytes | None]] = set()
        """Each gets the node's role changes; None at the end of the connection."""

    def tell_watchers(self, change: bytes | None) -> None:
        """Hand out a role change; a watcher that is slow misses older ones, never the last."""
        for watcher in self.watchers:
            if watcher.full():
                watcher.get_nowait()
            watcher.put_nowait(change)


class NodeConnections:
    """Raises ``ConfigError`` for TLS files that cannot be used, and for addresses that plaintext must not go to."""

    def __init__(self, addresses: Sequence[str], group: str, security: ClientSecurity | None = None) -> None:
        self._group = group
        self._key = security.access_key if security is not None else ""
        self._secret = security.secret_key if security is not None else ""
        self._signed_for = signed_for(security, addresses)
        self._may_be_plain = security is not None and (security.tls is not None or security.insecure)
        self._files = None if security is None else security.tls
        self._contexts = None if self._files is None else tls.ContextSource(self._files)
        if problems := self._plaintext_problems(addresses):
            raise ConfigError(problems)
        self._client = RemotingClient(requests=self._requested, tls=self._contexts, lost=self._lost)
        self._links: dict[str, NodeLink] = {}  # by address
        self._greetings: dict[RemotingConnection, asyncio.Task[NodeLink]] = {}
        self.is_closed = False

    async def link(self, address: str, deadline: TimeLimit) -> NodeLink:
        """The connection to a node, opened if there is none.

        Raises ``UnavailableError``, ``TlsError`` and ``InvalidRequestError`` (something else answers there), each
        before anything was asked.
        """
        self._check(address)
        try:
            connection = await self._client.connection(address, deadline.remaining_s)
        except UnreachableError as error:
            raise self._unreachable(error, address) from error
        known = self._links.get(address)
        if known is not None and known.connection is connection:
            return known
        greeting = self._greetings.get(connection)
        if greeting is None:
            greeting = asyncio.get_running_loop().create_task(self._greet(address, connection))
            self._greetings[connection] = greeting
            greeting.add_done_callback(lambda done: self._greeted(connection, done))
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await asyncio.shield(greeting)
        except TimeoutError as error:
            raise UnavailableError(f"{address} did not answer in time") from error

    async def call(self, address: str, code: int, body: bytes, deadline: TimeLimit, *, changes: bool = False) -> bytes:
        """The body of a node's answer, or its error, raised. ``changes``: whether the request changes anything there;
        one that may have done so is ``unknown``.
        """
        link = await self.link(address, deadline)
        try:
            answer = await link.connection.call(Frame(code, 0, self._fields(body), body), deadline.remaining_s)
        except DisconnectedError as error:
            kind = RequestTimeoutError if changes else UnavailableError
            raise kind(f"the connection to {address} broke before the answer came: {error}") from error
        except TimeoutError as error:
            late = RequestTimeoutError(f"no answer from {address} in time")
            late.outcome = "unknown" if changes else "not_applied"
            raise late from error
        except TooManyCallsError as error:
            raise PendingFullError(str(error)) from error
        except FrameError as error:
            raise RequestTooLargeError(f"the request fits into no frame: {error}") from error
        if answer.code:
            raise error_of(answer, address)
        return answer.body

    def frame_maker(self, code: int) -> Callable[[int, bytes], bytes]:
        """Encodes requests with this code from their ``opaque`` and body: many, so without the general machinery."""
        if self._key:
            return lambda opaque, body: encode(Frame(code, opaque, self._fields(body), body))
        header = encode(Frame(code, _OPAQUE))[8:].replace(str(_OPAQUE).encode(), b"%d")

        def make(opaque: int, body: bytes) -> bytes:
            head = header % opaque
            length = 4 + len(head) + len(body)
            return b"".join((length.to_bytes(4, "big"), len(head).to_bytes(4, "big"), head, body))

        return make

    async def close(self) -> None:
        """Close every connection; calls in progress fail. Idempotent."""
        self.is_closed = True
        greetings = tuple(self._greetings.values())
        for greeting in greetings:
            greeting.cancel()
        await asyncio.gather(*greetings, return_exceptions=True)
        await self._client.close(at_once=True)
        for link in tuple(self._links.values()):
            link.tell_watchers(None)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check(self, address: str) -> None:
        if self.is_closed:
            raise UnavailableError("the client is closed")
        if not self._may_be_plain and (problems := self._plaintext_problems([address])):
            raise TlsError(f"a server named {address} as another server, but {problems[0]}")
        if self._signed_for is not None and address not in self._signed_for:
            raise AccessDeniedError(f"{address} {NOT_SIGNED_FOR}")

    def _plaintext_problems(self, addresses: Sequence[str]) -> list[str]:
        return [] if self._may_be_plain else plaintext_problems(addresses, _USE_TLS, _INSIST)

    def _fields(self, body: bytes) -> Mapping[str, str]:
        if not self._key:
            return {}
        from dledger.remoting.frame import signed  # here: who has no account need not load it

        return signed({}, body, self._key, self._secret)

    async def _greet(self, address: str, connection: RemotingConnection) -> NodeLink:
        body = dumps_plain({"group": self._group})
        try:
            answer = await connection.ask(Frame(JavaCode.METADATA, 0, self._fields(body), body))
        except (DisconnectedError, TooManyCallsError) as error:
            raise self._hung_up(address, f"{address} {_BEFORE_AN_ANSWER}") from error
        if answer.code == AnswerCode.NO_PERMISSION and answer.fields.items() >= TLS_REQUIRED.items():
            raise TlsError(
                f"{address} accepts only TLS: give the CA of its certificate (--tls-ca; in Python {_BY_TLS})"
            )
        if any(answer.fields.get(name) != value for name, value in ANNOUNCED.items()):
            raise InvalidRequestError(
                f"{address} answers, but is not a node of this project's present version: give the addresses of "
                "nodes of the group (that of a name server is for --namesrv, which commands about brokers have)"
            )
        if answer.code == AnswerCode.REQUEST_CODE_NOT_SUPPORTED:
            raise InvalidRequestError(f"{address} is a broker without a replicated log: there is no group to talk to")
        stated = answer.fields.get(REQUEST_BYTES_MAX_FIELD, "")
        is_number = stated.isascii() and stated.isdigit() and len(stated) < 10
        link = NodeLink(address, connection, min(int(stated), FRAME_BYTES_MAX) if is_number else _REQUEST_BYTES_DEFAULT)
        if not connection.is_closed:
            self._links[address] = link
        return link

    def _hung_up(self, address: str, what: str) -> DLedgerError:
        """Why a server may have hung up without a word, as it refuses a client's certificate: after the handshake, or
        if the client is slow, during it.
        """
        files = self._files
        if files is not None and files.cert is not None and (why := tls.client_problem(tls.read(files))):
            return TlsError(f"{address} rejected our certificate {files.cert}: {why}")
        if files is None:
            hint = _TLS_HINT
        elif files.cert is None:
            hint = "; perhaps it requires a client certificate: give one (--tls-cert and --tls-key)"
        else:
            hint = f"; or it does not trust the CA of our certificate {files.cert}"
        return UnavailableError(f"{what}{hint}")

    def _greeted(self, connection: RemotingConnection, done: asyncio.Task[NodeLink]) -> None:
        self._greetings.pop(connection, None)
        if done.cancelled() or done.exception() is not None:
            connection.close("it cannot be used as a node")

    def _lost(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            link.tell_watchers(None)

    def _requested(self, connection: RemotingConnection, request: Frame) -> None:
        """Take a request that a node sends by itself."""
        if request.code == LogCode.ROLE_CHANGED:
            for link in self._links.values():
                if link.connection is connection:
                    link.tell_watchers(request.body)
        connection.done(request, request.answer(3, f" request type {request.code} not supported"))

    def _unreachable(self, error: UnreachableError, address: str) -> DLedgerError:
        if self.is_closed:
            return UnavailableError("the client is closed")
        if isinstance(error.__cause__, ssl.SSLError):
            return TlsError(tls.explain(error.__cause__, address))
        if self._contexts is not None and isinstance(error.__cause__, ConnectionResetError):
            return self._hung_up(address, tls.explain(error.__cause__, address))
        reason = str(error).removeprefix(f"cannot connect to {address}: ")
        return UnavailableError(f"{address} is unreachable: {reason}")


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
