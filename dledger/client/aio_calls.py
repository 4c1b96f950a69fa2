"""The calls common to both clients of the log. ``make unasync`` generates ``calls.py`` from ``aio_calls.py``."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

from dledger.backoff import Backoff
from dledger.client.aio_channels import Answer, AsyncChannels, AsyncSeeker, retry
from dledger.client.appender import AppenderOptions, AsyncAppender
from dledger.client.appends import DIRECT, RULES, too_large, wire_of
from dledger.client.channels import Service
from dledger.client.discovery import DISCOVERY_TIMEOUT_S, Directory, parse_addresses, report_of_node
from dledger.client.security import ChannelMaker, ClientSecurity
from dledger.client.shared import (
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    AppendResult,
    Deadline,
    is_elsewhere,
    is_retried,
    is_retried_read,
    members_by_id,
    partly_appended,
    rpc_failure,
    split,
)
from dledger.errors import (
    DLedgerError,
    EmptyBatchError,
    InvariantError,
    LeaderHint,
    RequestTimeoutError,
    UnavailableError,
)
from dledger.records import record
from dledger.rpc import options
from dledger.rpc.clients import codec
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.ports import NodeStatus, RoleEvent
from dledger.sending.aio import AsyncLinks, AsyncSender, OnAnswer, OnEnd
from dledger.sending.aio_futures import AsyncSentItem, wait_for_batch
from dledger.sending.aio_stream import AsyncStream
from dledger.sending.numbering import ProducerNumbering
from dledger.sending.window import Window
from dledger.types import Entry, LogIndex, NodeId
from dledger.values import MIB

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
        enable_idempotence: bool = True,
    ) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self._idempotent = enable_idempotence
        self._directory = Directory(parse_addresses(addresses))
        self._maker = ChannelMaker(security, self._directory.addresses)
        self._channels = AsyncChannels(self._maker, Service(options.LOG_SERVICE, rpc_failure))
        self._seeker = AsyncSeeker(self._directory, self._ask_all, report_of_node)
        self._wire = wire_of(group)
        self._request_bytes_max = 0
        """The leader's last stated limit of a request's bytes; 0: none."""
        self._links = AsyncLinks(self._open_stream, self._seeker.look, self._directory.note_failure)
        self._lock = threading.Lock()  # guards the fields below
        self._direct: AsyncSender[None, AppendResult] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; calls in progress fail, open iterators end with an error. Idempotent."""
        self._channels.stop()
        with self._lock:
            self._closed = True
            direct, self._direct = self._direct, None
        if direct is not None:
            await direct.abandon(UnavailableError("the client is closed"))
        await self._channels.close()

    # --- append -----------------------------------------------------------------------------------------------------

    async def append(self, body: bytes, *, timeout_s: float | None = None) -> AppendResult:
        """Append one entry; returns when a quorum has stored it, exactly once."""
        batch, place = await self._direct_sender().add(body, timeout_s=self._timeout_s(timeout_s))
        await wait_for_batch(batch)
        return AsyncSentItem(batch, place).result()

    async def append_many(self, bodies: Sequence[bytes], *, timeout_s: float | None = None) -> list[AppendResult]:
        """Append entries in order, in consecutive requests of up to 1 MiB; each request is all or nothing.

        When a request fails, the ones before it are in the log (the error then has ``outcome="unknown"`` and a note),
        and the ones after it were not sent.
        """
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        return await self._append_parts(self._direct_sender(), bodies, self._deadline(timeout_s))

    async def append_as(
        self, producer: str, sequence: int, bodies: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[AppendResult]:
        """Append entries under your own producer name, numbered from ``sequence``.

        Entries that the log already holds are not appended again, whoever repeats them and however often: a second
        attempt, another process, the next day (until the producer has been idle for ``producer_expiry_ms``). Only one
        caller at a time per producer. Split like ``append_many``; after an error, too, ``producer_sequence`` returns
        how far it got. Raises ``OutOfOrderSequenceError`` and ``UnknownProducerError``, besides what ``append`` raises.
        """
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        deadline = self._deadline(timeout_s)
        sender = self._sender(ProducerNumbering(producer))
        try:
            return await self._append_parts(sender, bodies, deadline, sequence)
        finally:  # a cancelled caller does not wait for the deadline of what is in flight
            await sender.abandon(UnavailableError("cancelled: nobody is waiting for it"))

    async def _append_parts(
        self,
        sender: AsyncSender[None, AppendResult],
        bodies: Sequence[bytes],
        deadline: Deadline,
        sequence: int | None = None,
    ) -> list[AppendResult]:
        results: list[AppendResult] = []
        await self._check_sizes(bodies, deadline)
        for part in split(bodies):
            number = None if sequence is None else sequence + len(results)
            try:
                batch = await sender.add_whole(part, sequence=number, timeout_s=deadline.remaining_s)
                await wait_for_batch(batch)
                results += [AsyncSentItem(batch, place).result() for place in range(len(part))]
            except DLedgerError as error:
                raise partly_appended(error, len(results)) from None
        return results

    async def _check_sizes(self, bodies: Sequence[bytes], deadline: Deadline) -> None:
        """Refuse a body too large for any request before the parts in front of it are stored."""
        largest = max(map(len, bodies))
        if largest + options.FRAMING_BYTES <= max(options.REQUEST_BYTES_MAX, self._request_bytes_max):
            return  # every server accepts the first ones
        stream = await self._open_stream(deadline.remaining_s, _unasked, lambda _stream: None)
        await stream.close()
        fits = self._request_bytes_max - options.FRAMING_BYTES
        if largest > fits > 0:
            raise too_large(f"an entry has {largest} bytes, and {stream.address} takes at most {fits} in a request")

    def _direct_sender(self) -> AsyncSender[None, AppendResult]:
        sender = self._direct
        if sender is None:
            with self._lock:
                if self._closed:
                    raise UnavailableError("the client is closed")
                sender = self._direct
                if sender is None:
                    sender = self._direct = self._sender(ProducerNumbering() if self._idempotent else None)
        return sender

    def _sender(self, numbering: ProducerNumbering | None) -> AsyncSender[None, AppendResult]:
        options = replace(DIRECT, timeout_ms=self.timeout_s * 1000.0)
        return AsyncSender(self._links, Window(options, RULES, numbering), "dledger-appends")

    async def producer_sequence(self, producer: str, *, timeout_s: float | None = None) -> int:
        """The number of a producer's next entry; 0 if the group does not know it. All entries before it are committed.

        An append in flight may still be stored after the answer: call this when none is.
        """
        request = codec.encode_producer_request(self.group, producer)
        call = _Call("Producer", request, codec.decode_producer_answer, of_leader=True)
        return await self._perform(call, self._deadline(timeout_s))

    def appender(
        self,
        *,
        linger_ms: float = 2,
        batch_bytes: int = MIB // 2,
        batch_entries: int = 1024,
        pending_bytes_max: int = 8 * MIB,
        inflight_entries_max: int = 4096,
        timeout_s: float | None = None,
        retry_unknown: bool = False,
    ) -> AsyncAppender:
        """A pipelining appender: many cheap ``append`` calls, few requests, order kept. See ``Appender``."""
        settings = AppenderOptions(
            linger_s=linger_ms / 1000,
            batch_bytes=batch_bytes,
            batch_entries=batch_entries,
            pending_bytes_max=pending_bytes_max,
            inflight_entries_max=inflight_entries_max,
            timeout_s=self._timeout_s(timeout_s),
            retry_unknown=retry_unknown,
            idempotent=self._idempotent,
        )
        return AsyncAppender(self._links, settings)

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
            raise next(iter(failures.values()))
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
        failure: DLedgerError | None = None
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
                failure = error
        raise failure or UnavailableError("no known nodes: give the address of at least one")

    def _ask_all(
        self, addresses: Collection[str], deadline: Deadline
    ) -> AsyncGenerator[tuple[str, NodeStatus | DLedgerError], None]:
        request = codec.encode_metadata_request(self.group)
        return self._channels.ask_all("Metadata", request, _decode_metadata, addresses, deadline)

    async def _open_stream(
        self, timeout_s: float, on_answer: OnAnswer[None, AppendResult], on_end: OnEnd[None, AppendResult]
    ) -> AsyncStream[None, AppendResult]:
        deadline = Deadline(timeout_s)

        async def attempt() -> AsyncStream[None, AppendResult]:
            address = await self._seeker.leader(deadline)
            open_call = partial(self._channels.open_stream, "AppendStream", address)
            stream = AsyncStream(open_call, address, self._wire, on_answer, on_end)
            try:
                await stream.open(deadline.remaining_s)
            except DLedgerError as error:
                self._directory.note_failure(address, error)
                raise
            self._request_bytes_max = stream.request_bytes_max or 0
            return stream

        return await self._retry(deadline, attempt, is_retried)

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


def _unasked(*_told: object) -> NoReturn:
    raise InvariantError("an answer to a request that was never sent")


def _decode_metadata(data: bytes, _address: str) -> NodeStatus:
    return codec.decode_metadata(data)
