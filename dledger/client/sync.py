"""The client for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
import tenacity

from dledger.client.appender import Appender, AppenderOptions
from dledger.client.appends import DIRECT, RULES, wire_of
from dledger.client.bulk import BulkReads, ReadFrom, Target, Ways
from dledger.client.security import ChannelMaker, ClientSecurity
from dledger.client.shared import (
    DISCOVERY_TIMEOUT_S,
    LOOK_TIMEOUT_S,
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    AppendResult,
    Deadline,
    Directory,
    Search,
    is_elsewhere,
    is_retried,
    is_retried_read,
    members_by_id,
    parse_addresses,
    partly_appended,
    retry_options,
    rpc_failure,
    split,
)
from dledger.client.signing import is_challenge
from dledger.config import MIB
from dledger.errors import DLedgerError, EmptyBatchError, LeaderHint, RequestTimeoutError, UnavailableError
from dledger.rpc import client_codec as codec
from dledger.rpc import options
from dledger.rpc.bulk_codec import BlockDigests, FetchLog, Locate, Located
from dledger.rpc.client_codec import ReadMode
from dledger.rpc.ports import NodeStatus, RoleEvent
from dledger.sending.futures import SentItem, wait_for
from dledger.sending.numbering import Numbering
from dledger.sending.stream import Stream
from dledger.sending.threads import Links, OnAnswer, OnEnd, Sender
from dledger.sending.window import Window
from dledger.types import BlockDigest, Entry, LogChunk, LogIndex, NodeId, Position, Role

_T = TypeVar("_T")
_UNARY_METHODS: Final = ("Read", "Metadata", "TransferLeadership")
if TYPE_CHECKING:  # these names exist only in the stubs, or are not generic at run time
    _Answers = SimpleQueue[tuple[str, grpc.CallFuture[bytes]]]
    _Unary = grpc.UnaryUnaryMultiCallable[bytes, bytes]


class DLedgerClient:
    """Talks to a group. Thread-safe; every call has a deadline (``timeout_s``), retries until then what is safe to.

    ``addresses``: client addresses of one or more nodes; the others are learnt. Errors are ``DLedgerError`` subclasses;
    their ``outcome`` says whether a failed append may still be in the log (``"unknown"``) or not (``"not_applied"``).
    """

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
        self._channel_maker = ChannelMaker(security, self._directory.addresses)
        self._lock = threading.Lock()  # guards the fields below
        self._channels: dict[str, grpc.Channel] = {}
        self._old_channels: list[grpc.Channel] = []  # made with certificates that were replaced since
        self._tls_version = 0
        self._methods: dict[tuple[str, str], _Unary] = {}
        self._closing = threading.Event()
        self._wire = wire_of(group)
        self._links = Links(self._open_stream, self._find_leader, self._directory.note_failure)
        self._direct: Sender[None, AppendResult] | None = None
        self._bulk = BulkReads(
            Ways(
                group,
                self._directory,
                self._closing,
                self._channel,
                self._leader,
                self._ask_all,
                self._call,
                self._channel_maker.diagnose,
            )
        )

    def __enter__(self) -> DLedgerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection; calls under way fail, open iterators end with an error. Idempotent."""
        with self._lock:
            self._closing.set()
            direct, self._direct = self._direct, None
            channels = [*self._channels.values(), *self._old_channels]
            self._channels.clear()
            self._old_channels.clear()
            self._methods.clear()
        if direct is not None:
            direct.abandon(_closed_error())
        for channel in channels:
            channel.close()

    # --- append -----------------------------------------------------------------------------------------------------

    def append(self, body: bytes, *, timeout_s: float | None = None) -> AppendResult:
        """Append one entry; returns when a quorum has stored it, once."""
        return SentItem(*self._direct_sender().add(body, timeout_s=self._timeout_s(timeout_s))).result()

    def append_many(self, bodies: Sequence[bytes], *, timeout_s: float | None = None) -> list[AppendResult]:
        """Append entries in order, in requests of up to 1 MiB one after the other; each request is all or nothing.

        When a request fails, those before it are in the log (the error then has ``outcome="unknown"`` and a note),
        those after it were not sent.
        """
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        return self._append_parts(self._direct_sender(), bodies, self._deadline(timeout_s))

    def append_as(
        self, producer: str, sequence: int, bodies: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[AppendResult]:
        """Append entries as a producer with a name of your own, whose entry number ``sequence`` is the first of them.

        What the log holds of them already is not appended again, however often and by whom it is repeated: by a second
        attempt, another process, the next day (until the producer was idle for ``producer_expiry_ms``). For one
        producer, one caller at a time. Split as ``append_many``; also after an error, ``producer_sequence`` tells how
        far it came. Raises ``OutOfOrderSequenceError`` and ``UnknownProducerError``, besides what ``append`` raises.
        """
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        deadline = self._deadline(timeout_s)
        with self._sender(Numbering(producer)) as sender:
            return self._append_parts(sender, bodies, deadline, sequence)

    def _append_parts(
        self,
        sender: Sender[None, AppendResult],
        bodies: Sequence[bytes],
        deadline: Deadline,
        sequence: int | None = None,
    ) -> list[AppendResult]:
        results: list[AppendResult] = []
        for part in split(bodies):
            number = None if sequence is None else sequence + len(results)
            try:
                batch = sender.add_whole(part, sequence=number, timeout_s=deadline.remaining_s)
                wait_for(batch, None)
                results += [SentItem(batch, place).result() for place in range(len(part))]
            except DLedgerError as error:
                raise partly_appended(error, len(results)) from None
        return results

    def _direct_sender(self) -> Sender[None, AppendResult]:
        sender = self._direct
        if sender is None:
            with self._lock:
                if self._closing.is_set():
                    raise _closed_error()
                sender = self._direct
                if sender is None:
                    sender = self._direct = self._sender(Numbering() if self._idempotent else None)
        return sender

    def _sender(self, numbering: Numbering | None) -> Sender[None, AppendResult]:
        options = replace(DIRECT, timeout_ms=self.timeout_s * 1000.0)
        return Sender(self._links, Window(options, RULES, numbering), "dledger-appends")

    def producer_sequence(self, producer: str, *, timeout_s: float | None = None) -> int:
        """The number of the next entry of a producer; 0 if the group does not know it. All before it is committed.

        An append under way may still come after the answer: ask when none is.
        """
        deadline = self._deadline(timeout_s)
        request = codec.encode_producer_request(self.group, producer)

        def ask(node: str) -> int:
            return codec.decode_producer_answer(self._call("Producer", node, request, deadline))

        return self._retry(deadline, lambda: self._ask_leader(deadline, ask), is_retried_read)

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
    ) -> Appender:
        """A pipelining appender: many cheap ``append`` calls, few requests, order kept. See ``Appender``."""
        settings = AppenderOptions(
            linger_s=linger_ms / 1000,
            batch_bytes=batch_bytes,
            batch_entries=batch_entries,
            pending_bytes_max=pending_bytes_max,
            inflight_entries_max=inflight_entries_max,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            retry_unknown=retry_unknown,
            idempotent=self._idempotent,
        )
        return Appender(self._links, settings)

    # --- read -------------------------------------------------------------------------------------------------------

    def read(
        self,
        first_index: int,
        *,
        count: int = 0,
        max_bytes: int = 0,
        mode: ReadMode = ReadMode.COMMITTED,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Entry]:
        """Entries from ``first_index`` on: at least one, then as many as ``count`` and ``max_bytes`` (1 MiB) allow.

        Empty when ``first_index`` is where the next entry will be. ``mode`` COMMITTED and LOCAL may be answered by any
        node, LINEARIZABLE only by the leader; ``address`` picks one.
        """
        deadline = self._deadline(timeout_s)
        request = codec.encode_read(codec.Read(self.group, LogIndex(first_index), count, max_bytes, mode))

        def ask(node: str) -> list[Entry]:
            return codec.decode_read_answer(self._call("Read", node, request, deadline)).entries

        if address is not None:
            return self._retry(deadline, lambda: ask(address), is_retried_read)
        if mode is ReadMode.LINEARIZABLE:
            return self._retry(deadline, lambda: self._ask_leader(deadline, ask), is_retried_read)
        return self._retry(deadline, lambda: self._ask_any(ask), is_retried_read)

    def follow(
        self, first_index: int, *, mode: ReadMode = ReadMode.COMMITTED, address: str | None = None
    ) -> Iterator[Entry]:
        """Every committed entry from ``first_index`` on, for ever; goes on at another node when one is lost.

        Raises ``UnavailableError`` when no node answers for ``timeout_s``. Close the iterator (or the client) to end.
        """
        next_index = LogIndex(first_index)
        request = lambda: codec.encode_follow(codec.Read(self.group, next_index, mode=mode))  # noqa: E731
        for data in self._stream("Follow", request, address):
            for entry in codec.decode_read_answer(data).entries:
                yield entry
                next_index = LogIndex(entry.index + 1)

    def _ask_leader(self, deadline: Deadline, ask: Callable[[str], _T]) -> _T:
        address = self._leader(deadline)
        try:
            return ask(address)
        except DLedgerError as error:
            self._directory.note_failure(address, error)
            raise

    def _ask_any(self, ask: Callable[[str], _T]) -> _T:
        failure: DLedgerError | None = None
        for address in self._directory.candidates():
            try:
                return ask(address)
            except DLedgerError as error:
                self._directory.note_failure(address, error)
                if not is_elsewhere(error):
                    raise
                failure = error
        raise failure or UnavailableError("no node is known")

    # --- large reads --------------------------------------------------------------------------------------------------

    def fetch_log(
        self,
        first_index: int,
        end_index: int | None = None,
        *,
        max_bytes: int = 0,
        chunk_bytes: int = 0,
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[LogChunk]:
        """Committed entries as they are stored, from ``first_index`` to before ``end_index``.

        None: all that the asked member knows to be committed. That may be less than was acknowledged, also of a leader
        that was just elected; for all of it, append an entry or read one linearizably, and give its index as the end.
        In order, each once, in chunks of about ``chunk_bytes`` (0: 1 MiB; one entry may be larger); with ``max_bytes``
        it ends with the chunk that brings more than that. Goes on at another member when one is lost, behind, damaged
        or keeps less, and raises when nothing new comes for ``timeout_s``. ``address`` picks one node and no other.

        Raises ``IndexBeforeBeginError`` (no member keeps all of it any more), ``IndexOutOfRangeError`` (it begins
        beyond the committed end, also after a while), ``CorruptLogError`` and ``DiskError`` (naming file and offset),
        ``PendingFullError`` (too many readers).
        """
        end = LogIndex(0 if end_index is None else end_index)
        if end_index is not None and end_index <= first_index:
            return iter(())
        request = FetchLog(self.group, LogIndex(first_index), end, max_bytes, chunk_bytes)
        return self._bulk.fetch(request, self._target(read_from, address, timeout_s))

    def block_digests(
        self,
        from_position: int = 0,
        end_position: int | None = None,
        *,
        block_bytes: int = 0,
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[BlockDigest]:
        """Checksums of the blocks of a member's committed log up to ``end_position`` (None: all that it knows of).

        ``block_bytes`` 0: 4 MiB. The member computes them, at most ``digest_rate_bytes_max`` per second. Begins where
        its log begins if ``from_position`` is below that. Raises as ``fetch_log`` does.
        """
        end = Position(0 if end_position is None else end_position)
        if end_position is not None and end_position <= from_position:
            return iter(())
        request = BlockDigests(self.group, Position(from_position), end, block_bytes)
        return self._bulk.digests(request, self._target(read_from, address, timeout_s))

    def locate(
        self,
        *,
        indexes: Sequence[int] = (),
        positions: Sequence[int] = (),
        store_times_ms: Sequence[int] = (),
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> Located:
        """Where these entries begin, which entries begin at or after these positions, and which were stored then.

        One place per question: first for ``indexes``, then ``positions``, then ``store_times_ms`` (brokers' logs only,
        ``UntimedLogError`` otherwise); and what the member has. The committed log's end stands for what is beyond it.
        """
        request = Locate(self.group, indexes, positions, store_times_ms)
        return self._bulk.locate(request, self._target(read_from, address, timeout_s))

    def index_by_time(
        self, store_time_ms: int, *, read_from: ReadFrom = ReadFrom.LEADER, address: str | None = None
    ) -> LogIndex:
        """The first committed message stored at ``store_time_ms`` (since 1970) or later; the log's end if none was."""
        located = self.locate(store_times_ms=(store_time_ms,), read_from=read_from, address=address)
        return located.places[0].index

    def _target(self, read_from: ReadFrom, address: str | None, timeout_s: float | None) -> Target:
        return Target(ReadFrom(read_from), address, self.timeout_s if timeout_s is None else timeout_s)

    # --- the group --------------------------------------------------------------------------------------------------

    def metadata(self, address: str | None = None, *, timeout_s: float | None = None) -> NodeStatus:
        """What a node says of itself: the one at ``address``, or the leader if it is known and answers, or any."""
        deadline = self._deadline(timeout_s)

        def ask(node: str) -> NodeStatus:
            return self._status_of(node, min(deadline.remaining_s, self.timeout_s))

        if address is not None:
            return self._retry(deadline, lambda: ask(address), is_retried_read)
        return self._retry(deadline, lambda: self._ask_any(ask), is_retried_read)

    def members_status(self, *, timeout_s: float = DISCOVERY_TIMEOUT_S) -> Mapping[NodeId, NodeStatus | DLedgerError]:
        """Every member's own word, or why there is none. Raises ``UnavailableError`` if nobody answers."""
        deadline = self._deadline(timeout_s)
        asked: set[str] = set()
        statuses: list[NodeStatus] = []
        failures: dict[str, DLedgerError] = {}
        while addresses := [one for one in self._directory.addresses if one not in asked]:
            asked.update(addresses)
            for address, answer in self._ask_all(addresses, deadline):
                if isinstance(answer, DLedgerError):
                    failures[address] = answer
                    self._directory.note_tried(address)
                else:
                    self._directory.learn(address, answer)
                    statuses.append(answer)
        if not statuses:
            raise next(iter(failures.values()))
        return members_by_id(statuses, failures)

    def watch_role(self, address: str | None = None) -> Iterator[RoleEvent]:
        """The present role of a node, then every change, for ever; without ``address`` goes on at another node."""
        request = codec.encode_watch_role(self.group)
        for data in self._stream("WatchRole", lambda: request, address):
            yield codec.decode_role_event(data)

    def transfer_leadership(self, target: NodeId | None = None, *, timeout_s: float | None = None) -> LeaderHint:
        """Hand leadership to ``target``, or to the most caught-up member; returns the new leader."""
        deadline = self._deadline(timeout_s)
        request = codec.encode_transfer(self.group, target)

        def ask(node: str) -> LeaderHint:
            return codec.decode_transferred(self._call("TransferLeadership", node, request, deadline, changes=True))

        leader = self._retry(deadline, lambda: self._ask_leader(deadline, ask))
        if (address := self._directory.resolve(leader)) is not None:
            self._directory.set_leader(address)
        return leader

    # --- machinery --------------------------------------------------------------------------------------------------

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s(timeout_s))

    def _retry(
        self, deadline: Deadline, attempt: Callable[[], _T], retried: Callable[[BaseException], bool] = is_retried
    ) -> _T:
        try:
            return attempt()  # the usual case pays nothing for the machinery below
        except DLedgerError as error:
            if self._closing.is_set() or deadline.expired or not retried(error):
                raise
            followed_hint = error.leader is not None and self._directory.leader is not None
        if followed_hint:
            try:
                return attempt()
            except DLedgerError as error:
                if self._closing.is_set() or not retried(error):
                    raise
        return tenacity.Retrying(**retry_options(deadline, lambda e: not self._closing.is_set() and retried(e)))(
            attempt
        )

    def _find_leader(self) -> str | None:
        """Ask everybody who leads: the node that does so far may be frozen, or cut off."""
        present = self._directory.leader
        for address, answer in self._ask_all(self._directory.addresses, Deadline(LOOK_TIMEOUT_S)):
            if address != present and not isinstance(answer, DLedgerError) and answer.role is Role.LEADER:
                self._directory.learn(address, answer)
                break
        return self._directory.leader

    def _open_stream(
        self, timeout_s: float, on_answer: OnAnswer[None, AppendResult], on_end: OnEnd[None, AppendResult]
    ) -> Stream[None, AppendResult]:
        deadline = Deadline(timeout_s)

        def attempt() -> Stream[None, AppendResult]:
            address = self._leader(deadline)
            method: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel(address).stream_stream(
                options.method(options.LOG_SERVICE, "AppendStream"), request_serializer=None, response_deserializer=None
            )
            try:
                return Stream(method, address, self._wire, on_answer, on_end, deadline.remaining_s)
            except DLedgerError as error:
                self._directory.note_failure(address, error)
                raise

        return self._retry(deadline, attempt)

    def _leader(self, deadline: Deadline) -> str:
        leader = self._directory.leader
        if leader is not None:
            return leader
        search = Search(self._directory)
        round_deadline = Deadline(min(DISCOVERY_TIMEOUT_S, deadline.remaining_s))
        for address, answer in self._ask_all(self._directory.addresses, round_deadline):
            if (found := search.take(address, answer)) is not None:
                return found
        return search.conclude()

    def _ask_all(self, addresses: Sequence[str], deadline: Deadline) -> Iterator[tuple[str, NodeStatus | DLedgerError]]:
        """Metadata of several nodes at once, answers as they come; the rest is cancelled when the caller stops."""
        request = codec.encode_metadata_request(self.group)
        answers: _Answers = SimpleQueue()
        calls: dict[str, grpc.CallFuture[bytes]] = {}
        twice: set[str] = set()

        def ask(address: str) -> None:
            call = calls[address] = self._method("Metadata", address).future(request, timeout=deadline.remaining_s)
            call.add_done_callback(partial(_put_answer, answers, address))

        try:
            for address in addresses:
                ask(address)
            while calls:
                try:
                    address, call = answers.get(timeout=deadline.remaining_s + 0.1)
                except Empty:
                    for late in calls:
                        yield late, RequestTimeoutError(f"no answer of {late} in time")
                    return
                del calls[address]
                if address not in twice and call.done() and is_challenge(call):
                    twice.add(address)
                    ask(address)
                    continue
                answer = _status_or_error(address, call)
                if isinstance(answer, DLedgerError):
                    answer = self._channel_maker.diagnose(answer, address)
                yield address, answer
        finally:
            for call in calls.values():
                call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped

    def _status_of(self, address: str, timeout_s: float) -> NodeStatus:
        request = codec.encode_metadata_request(self.group)
        status = codec.decode_metadata(self._call("Metadata", address, request, Deadline(timeout_s)))
        self._directory.learn(address, status)
        return status

    def _call(self, name: str, address: str, request: bytes, deadline: Deadline, *, changes: bool = False) -> bytes:
        try:
            answer: bytes = self._method(name, address)(request, timeout=max(deadline.remaining_s, 0.001))
        except grpc.RpcError as error:
            raise self._channel_maker.diagnose(rpc_failure(error, address, sent=changes), address) from error
        return answer

    def _stream(self, name: str, request: Callable[[], bytes], address: str | None) -> Iterator[bytes]:
        """The messages of a server stream, going on elsewhere (or at ``address`` again) when it breaks."""
        broken, backoff_s = Deadline(self.timeout_s), RETRY_WAIT_S_MIN
        while True:
            # A unary call first: it has a deadline, which the wait for a stream's first message cannot have.
            node = self.metadata(address, timeout_s=broken.remaining_s).node_id
            chosen = address or self._directory.resolve(LeaderHint(node))
            if chosen is None:
                raise UnavailableError(f"the address of {node} is not known")
            stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel(chosen).unary_stream(
                options.method(options.LOG_SERVICE, name), request_serializer=None, response_deserializer=None
            )
            call = stream(request())
            try:
                for data in call:
                    yield data
                    broken, backoff_s = Deadline(self.timeout_s), RETRY_WAIT_S_MIN
                failure: DLedgerError = UnavailableError(f"{chosen} ended the stream")
            except grpc.RpcError as error:
                failure = rpc_failure(error, chosen, sent=False)
            finally:
                call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
            self._directory.note_failure(chosen, failure)
            if self._closing.is_set() or broken.expired or not is_retried_read(failure):
                raise failure
            self._closing.wait(min(backoff_s, broken.remaining_s))
            backoff_s = min(2 * backoff_s, RETRY_WAIT_S_MAX)

    def _channel(self, address: str) -> grpc.Channel:
        tls_version = self._channel_maker.version
        with self._lock:
            if self._closing.is_set():
                raise _closed_error()
            if tls_version != self._tls_version:  # what runs on the old channels goes on
                self._tls_version = tls_version
                self._old_channels += self._channels.values()
                self._channels.clear()
                self._methods.clear()
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = self._channel_maker.open(address)
            return channel

    def _method(self, name: str, address: str) -> _Unary:
        method = self._methods.get((name, address))
        if method is None or self._channel_maker.version != self._tls_version:
            method = self._channel(address).unary_unary(
                options.method(options.LOG_SERVICE, name), request_serializer=None, response_deserializer=None
            )
            with self._lock:
                self._methods[name, address] = method
        return method


def _put_answer(answers: _Answers, address: str, call: grpc.CallFuture[bytes]) -> None:
    answers.put((address, call))


def _status_or_error(address: str, call: grpc.CallFuture[bytes]) -> NodeStatus | DLedgerError:
    try:
        return codec.decode_metadata(call.result())
    except grpc.RpcError as error:
        return rpc_failure(error, address, sent=False)
    except grpc.FutureCancelledError:
        return UnavailableError(f"the request to {address} was cancelled")
    except DLedgerError as error:
        return error


def _closed_error() -> UnavailableError:
    return UnavailableError("the client is closed")
