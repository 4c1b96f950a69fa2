"""The client for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TypeVar

import grpc
import tenacity

from dledger.client.appender import Appender, AppenderOptions
from dledger.client.appends import DIRECT, RULES, wire_of
from dledger.client.bulk import BulkReads, ClientContext, ReadFrom, Target
from dledger.client.channels import Channels, Service
from dledger.client.discovery import DISCOVERY_TIMEOUT_S, Directory, Seeker, parse_addresses, report_of_node
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
    retry_options,
    rpc_failure,
    split,
)
from dledger.config import MIB
from dledger.errors import DLedgerError, EmptyBatchError, LeaderHint, UnavailableError
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
from dledger.types import BlockDigest, Entry, LogChunk, LogIndex, NodeId, Position

_T = TypeVar("_T")


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
        maker = ChannelMaker(security, self._directory.addresses)
        self._channels = Channels(maker, Service(options.LOG_SERVICE, rpc_failure))
        self._seeker = Seeker(self._directory, self._ask_all, report_of_node)
        self._lock = threading.Lock()  # guards _direct
        self._wire = wire_of(group)
        self._links = Links(self._open_stream, self._seeker.look, self._directory.note_failure)
        self._direct: Sender[None, AppendResult] | None = None
        self._bulk = BulkReads(
            ClientContext(group, self._directory, self._channels, self._seeker, self._ask_all, maker.diagnose)
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
            self._channels.closing.set()
            direct, self._direct = self._direct, None
        if direct is not None:
            direct.abandon(UnavailableError("the client is closed"))
        self._channels.close()

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
            batch = sender.add_whole(part, sequence=number, timeout_s=deadline.remaining_s)
            wait_for(batch, None)
            try:
                results += [SentItem(batch, place).result() for place in range(len(part))]
            except DLedgerError as error:
                raise partly_appended(error, len(results)) from None
        return results

    def _direct_sender(self) -> Sender[None, AppendResult]:
        sender = self._direct
        if sender is None:
            with self._lock:
                if self._channels.closing.is_set():
                    raise UnavailableError("the client is closed")
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
            return codec.decode_producer_answer(self._channels.call("Producer", node, request, deadline))

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
            return codec.decode_read_answer(self._channels.call("Read", node, request, deadline)).entries

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
        address = self._seeker.leader(deadline)
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
                    self._directory.learn(address, report_of_node(answer))
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
            answer = self._channels.call("TransferLeadership", node, request, deadline, changes=True)
            return codec.decode_transferred(answer)

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
            if self._channels.closing.is_set() or deadline.expired or not retried(error):
                raise
            followed_hint = error.leader is not None and self._directory.leader is not None
        if followed_hint:
            try:
                return attempt()
            except DLedgerError as error:
                if self._channels.closing.is_set() or not retried(error):
                    raise
        goes_on = lambda error: not self._channels.closing.is_set() and retried(error)  # noqa: E731
        return tenacity.Retrying(**retry_options(deadline, goes_on))(attempt)

    def _open_stream(
        self, timeout_s: float, on_answer: OnAnswer[None, AppendResult], on_end: OnEnd[None, AppendResult]
    ) -> Stream[None, AppendResult]:
        deadline = Deadline(timeout_s)

        def attempt() -> Stream[None, AppendResult]:
            address = self._seeker.leader(deadline)
            open_call = partial(self._channels.open_stream, "AppendStream", address)
            try:
                return Stream(open_call, address, self._wire, on_answer, on_end, deadline.remaining_s)
            except DLedgerError as error:
                self._directory.note_failure(address, error)
                raise

        return self._retry(deadline, attempt)

    def _ask_all(
        self, addresses: Collection[str], deadline: Deadline
    ) -> Iterator[tuple[str, NodeStatus | DLedgerError]]:
        request = codec.encode_metadata_request(self.group)
        return self._channels.ask_all("Metadata", request, _decode_metadata, addresses, deadline)

    def _status_of(self, address: str, timeout_s: float) -> NodeStatus:
        request = codec.encode_metadata_request(self.group)
        status = codec.decode_metadata(self._channels.call("Metadata", address, request, Deadline(timeout_s)))
        self._directory.learn(address, report_of_node(status))
        return status

    def _stream(self, name: str, request: Callable[[], bytes], address: str | None) -> Iterator[bytes]:
        """The messages of a server stream, going on elsewhere (or at ``address`` again) when it breaks."""
        broken, backoff_s = Deadline(self.timeout_s), RETRY_WAIT_S_MIN
        while True:
            # A unary call first: it has a deadline, which the wait for a stream's first message cannot have.
            node = self.metadata(address, timeout_s=broken.remaining_s).node_id
            chosen = address or self._directory.resolve(LeaderHint(node))
            if chosen is None:
                raise UnavailableError(f"the address of {node} is not known")
            stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channels.channel(chosen).unary_stream(
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
            if self._channels.closing.is_set() or broken.expired or not is_retried_read(failure):
                raise failure
            self._channels.closing.wait(min(backoff_s, broken.remaining_s))
            backoff_s = min(2 * backoff_s, RETRY_WAIT_S_MAX)


def _decode_metadata(data: bytes, _address: str) -> NodeStatus:
    return codec.decode_metadata(data)
