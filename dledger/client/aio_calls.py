"""The calls common to both clients of the log. ``make unasync`` generates ``calls.py`` from ``aio_calls.py``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Generic, Self, TypeVar

from dledger.backoff import Backoff
from dledger.client.aio_channels import Answer, AsyncChannels, AsyncSeeker, retry
from dledger.client.channel_maker import ChannelMaker
from dledger.client.channels import Service
from dledger.client.discovery import (
    DISCOVERY_TIMEOUT_S,
    Directory,
    most_telling,
    nobody_answers,
    parse_addresses,
    report_of_node,
)
from dledger.client.rpc_failures import rpc_failure
from dledger.client.security import ClientSecurity
from dledger.client.shared import (
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    Deadline,
    is_elsewhere,
    is_retried,
    is_retried_read,
    members_by_id,
)
from dledger.errors import (
    DLedgerError,
    LeaderHint,
    RequestTimeoutError,
    TlsError,
    UnavailableError,
)
from dledger.records import record
from dledger.rpc import options
from dledger.rpc.clients import codec
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.ports import NodeStatus, RoleEvent
from dledger.types import Entry, LogIndex, NodeId

_T = TypeVar("_T")


@record(frozen=True, slots=True)
class _Call(Generic[_T]):
    """A unary call: its target and the decoding of its answer."""

    name: str
    request: bytes
    decode: Callable[[bytes], _T]
    of_leader: bool = False
    changes: bool = False
    """If set, the call is not retried once it may have taken effect."""
    attempt_s: float = float("inf")
    """How long to wait for one node before asking others."""


class AsyncCalls:
    """Connects when needed; see ``DLedgerClient``."""

    def __init__(
        self,
        addresses: Sequence[str] | str,
        *,
        group: str = "default",
        timeout_s: float = 5.0,
        security: ClientSecurity | None = None,
    ) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self._directory = Directory(parse_addresses(addresses))
        self._maker = ChannelMaker(security, self._directory.addresses)
        self._channels = AsyncChannels(self._maker, Service(options.LOG_SERVICE, rpc_failure))
        self._seeker = AsyncSeeker(self._directory, self._ask_all, report_of_node)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; calls in progress fail, open iterators end with an error. Idempotent."""
        self._channels.stop()
        await self._channels.close()

    # --- read -------------------------------------------------------------------------------------------------------

    async def read(
        self,
        first_index: int,
        *,
        count: int = 0,
        max_bytes: int = 0,
        mode: ReadMode = ReadMode.COMMITTED,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Entry]:
        """Read entries from ``first_index`` on: at least one, then as many as ``count`` and ``max_bytes`` (1 MiB)
        permit.

        Empty when ``first_index`` is the next index to be written. Any node may answer in mode COMMITTED and LOCAL,
        only the leader in mode LINEARIZABLE; ``address`` picks one.
        """
        request = codec.encode_read(codec.Read(self.group, LogIndex(first_index), count, max_bytes, mode))
        call = _Call("Read", request, codec.decode_read_answer, of_leader=mode is ReadMode.LINEARIZABLE)
        return (await self._perform(call, self._deadline(timeout_s), address)).entries

    async def follow(
        self, first_index: int, *, mode: ReadMode = ReadMode.COMMITTED, address: str | None = None
    ) -> AsyncGenerator[Entry, None]:
        """Yield every committed entry from ``first_index`` on, endlessly; switches to another node when one fails.

        Raises ``UnavailableError`` when no node answers for ``timeout_s``. Close the iterator (or the client) to stop.
        """
        next_index = LogIndex(first_index)
        request = lambda: codec.encode_follow(codec.Read(self.group, next_index, mode=mode))  # noqa: E731
        async with aclosing(self._stream("Follow", request, address)) as answers:
            async for data in answers:
                for entry in codec.decode_read_answer(data).entries:
                    yield entry
                    next_index = LogIndex(entry.index + 1)

    async def producer_sequence(self, producer: str, *, timeout_s: float | None = None) -> int:
        """The number of a producer's next entry; 0 if the group does not know it. All entries before it are committed.

        An append in flight may still be stored after the answer: call this when none is.
        """
        request = codec.encode_producer_request(self.group, producer)
        call = _Call("Producer", request, codec.decode_producer_answer, of_leader=True)
        return await self._perform(call, self._deadline(timeout_s))

    # --- the group --------------------------------------------------------------------------------------------------

    async def metadata(self, address: str | None = None, *, timeout_s: float | None = None) -> NodeStatus:
        """The metadata of the node at ``address``; without it, of the leader if it is known and answers, or of any."""
        request = codec.encode_metadata_request(self.group)
        call = _Call("Metadata", request, codec.decode_metadata, attempt_s=self.timeout_s)
        status, answering = await self._perform_at(call, self._deadline(timeout_s), address)
        self._directory.learn(answering, report_of_node(status))
        return status

    async def members_status(
        self, *, timeout_s: float = DISCOVERY_TIMEOUT_S
    ) -> Mapping[NodeId, NodeStatus | DLedgerError]:
        """The status of every member, or the error that prevented it. Raises ``UnavailableError`` if none answers."""
        deadline = self._deadline(timeout_s)
        asked: set[str] = set()
        statuses: list[NodeStatus] = []
        failures: dict[str, DLedgerError] = {}
        while addresses := [one for one in self._directory.addresses if one not in asked]:
            asked.update(addresses)
            async for address, answer in self._ask_all(addresses, deadline):
                if isinstance(answer, DLedgerError):
                    failures[address] = answer
                    self._directory.note_tried(address)
                else:
                    self._directory.learn(address, report_of_node(answer))
                    statuses.append(answer)
        if not statuses:
            raise nobody_answers(failures.values())
        return members_by_id(statuses, failures)

    async def watch_role(self, address: str | None = None) -> AsyncGenerator[RoleEvent, None]:
        """Yield a node's current role, then every change, endlessly; switches nodes unless ``address`` is given."""
        request = codec.encode_watch_role(self.group)
        async with aclosing(self._stream("WatchRole", lambda: request, address)) as events:
            async for data in events:
                yield codec.decode_role_event(data)

    async def transfer_leadership(self, target: NodeId | None = None, *, timeout_s: float | None = None) -> LeaderHint:
        """Transfer leadership to ``target``, or to the most up-to-date member; returns the new leader."""
        request = codec.encode_transfer(self.group, target)
        call = _Call("TransferLeadership", request, codec.decode_transferred, of_leader=True, changes=True)
        leader = await self._perform(call, self._deadline(timeout_s))
        if (address := self._directory.resolve(leader)) is not None:
            self._directory.set_leader(address)
        return leader

    # --- internals --------------------------------------------------------------------------------------------------

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s(timeout_s))

    async def _perform(self, call: _Call[_T], deadline: Deadline, address: str | None = None) -> _T:
        return (await self._perform_at(call, deadline, address))[0]

    async def _perform_at(self, call: _Call[_T], deadline: Deadline, address: str | None) -> tuple[_T, str]:
        """Send the call to its target, retrying until the deadline; returns the answer and the address that gave it."""
        said: DLedgerError | None = None

        async def attempt() -> tuple[_T, str]:
            nonlocal said
            try:
                if address is not None:
                    return await self._ask(call, address, deadline), address
                if call.of_leader:
                    return await self._ask_leader(call, deadline)
                return await self._ask_any(call, deadline)
            except RequestTimeoutError as error:
                if said is not None and deadline.expired and not call.changes:
                    raise said from error  # the last attempt was cut short: the error before it says more
                raise
            except DLedgerError as error:
                said = error
                raise

        return await self._retry(deadline, attempt, is_retried if call.changes else is_retried_read)

    async def _retry(
        self, deadline: Deadline, attempt: Callable[[], Answer[_T]], retried: Callable[[BaseException], bool]
    ) -> _T:
        def goes_on(error: BaseException) -> bool:
            return not self._channels.closed and retried(error)

        try:
            return await attempt()  # the usual case skips the machinery below
        except DLedgerError as error:
            if deadline.expired or not goes_on(error):
                raise
            followed_hint = error.leader is not None and self._directory.leader is not None
        if followed_hint:
            try:
                return await attempt()
            except DLedgerError as error:
                if not goes_on(error):
                    raise
        return await retry(deadline, attempt, goes_on)

    async def _ask(self, call: _Call[_T], address: str, deadline: Deadline) -> _T:
        if call.attempt_s < deadline.remaining_s:
            deadline = Deadline(call.attempt_s)
        return call.decode(await self._channels.call(call.name, address, call.request, deadline, changes=call.changes))

    async def _ask_leader(self, call: _Call[_T], deadline: Deadline) -> tuple[_T, str]:
        address = await self._seeker.leader(deadline)
        try:
            return await self._ask(call, address, deadline), address
        except DLedgerError as error:
            self._directory.note_failure(address, error)
            raise

    async def _ask_any(self, call: _Call[_T], deadline: Deadline) -> tuple[_T, str]:
        failures: list[DLedgerError] = []
        addresses = self._directory.candidates()
        for address in addresses:
            # A silent node must leave the others time to answer.
            until = deadline if address == addresses[-1] else Deadline(deadline.remaining_s / 2)
            try:
                return await self._ask(call, address, until), address
            except DLedgerError as error:
                self._directory.note_failure(address, error)
                if not is_elsewhere(error):
                    raise
                failures.append(error)
        raise _failure_of_all(failures)

    def _ask_all(
        self, addresses: Collection[str], deadline: Deadline
    ) -> AsyncGenerator[tuple[str, NodeStatus | DLedgerError], None]:
        request = codec.encode_metadata_request(self.group)
        return self._channels.ask_all("Metadata", request, _decode_metadata, addresses, deadline)

    async def _stream(
        self, name: str, request: Callable[[], bytes], address: str | None
    ) -> AsyncGenerator[bytes, None]:
        """The messages of a server stream, resumed at another node (or at ``address`` again) when it breaks."""
        broken, backoff = Deadline(self.timeout_s), Backoff(RETRY_WAIT_S_MIN, RETRY_WAIT_S_MAX)
        while True:
            # A unary call first: it has a deadline, which the wait for a stream's first message cannot have.
            node = (await self.metadata(address, timeout_s=broken.remaining_s)).node_id
            chosen = address or self._directory.resolve(LeaderHint(node))
            if chosen is None:
                raise UnavailableError(f"unknown address of {node}")
            failure: DLedgerError = UnavailableError(f"{chosen} ended the stream")
            try:
                async with aclosing(self._channels.stream(name, chosen, request())) as answers:
                    async for data in answers:
                        yield data
                        broken = Deadline(self.timeout_s)
                        backoff.succeeded()
            except DLedgerError as error:
                failure = error
            self._directory.note_failure(chosen, failure)
            if self._channels.closed or broken.expired or not is_retried_read(failure):
                raise failure
            await self._channels.pause(min(backoff.pause(), broken.remaining_s))


def _decode_metadata(data: bytes, _address: str) -> NodeStatus:
    return codec.decode_metadata(data)


def _failure_of_all(failures: Sequence[DLedgerError]) -> DLedgerError:
    """The last failure, for later attempts may succeed; a TLS error of another node is told along with it."""
    last, telling = failures[-1], most_telling(failures)
    if isinstance(last, TlsError) or not isinstance(telling, TlsError):
        return last
    return UnavailableError(f"{last}; {telling}")
