"""The replicated commit log: every message is the body of one entry of a ``dledger`` log.

Positions and offsets. A *record offset* (in results, consume queues, message ids) is the start of a record, 48 bytes
after the start of its entry. ``min_offset``, ``max_offset`` and the values passed to and returned by ``scan`` are
*entry positions*: a record's end is the start of the next entry (or blank), so both kinds are comparable, and every
kept record's offset is in ``[min_offset + 48, max_offset)``. ``scan`` also accepts record offsets.

Reading ends at the committed position: uncommitted entries may still be replaced.

Queue offsets are assigned under the node's lock, in the same critical section that writes the entries, and only in the
term for which the table was made (``open_term``):

1. A leader of term 3 assigns offset 7 and loses leadership before the entry is committed; another leader replaces it.
2. The node is elected in term 5 before anybody has learned of the end of term 3.
3. A put that waited through all this would get offset 8 from term 3's table, and one of two messages would be lost.

So a put in a term that is not open is refused without effect. A refused batch takes no offsets, and a batch is written
as a whole or not at all, so offsets have neither gaps nor repeats.

Locks: the node's, then ``_put_lock``, which guards the table, the open term and the newest timestamp.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.errors import (
    ConfigError,
    CorruptLogError,
    DLedgerError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    LeaderHint,
    LeaderNotReadyError,
    ResponseCode,
    ShutdownError,
)
from dledger.records import ENTRY_HEADER_BYTES
from dledger.rpc.ports import CommitEvent, NodeEvent
from dledger.server import BodyFormat, DLedgerServer
from dledger.types import AppendedBatch, Body, Magic, Position, ProducerBatch, StoredRun, Term
from rocketstore.commit_log.port import (
    NUMBERING_BYTES_MAX,
    PRODUCER_STATUSES,
    NumberingEncoder,
    PutDone,
    QueueOffsets,
    SequenceDone,
    numbering_messages,
    prepare,
    refused,
)
from rocketstore.config import MessageStoreConfig
from rocketstore.mapped.queue import OnForced, untold
from rocketstore.message.columns import read_entries
from rocketstore.message.message import SYS_FLAG_BORN_HOST_V6, DelayLevels, Message
from rocketstore.message.record import (
    BLANK,
    MESSAGE_MAGICS,
    OVERHEAD,
    PHYSICAL_OFFSET,
    PHYSICAL_OFFSET_AT,
    QUEUE_OFFSET,
    QUEUE_OFFSET_AT,
    STORE_TIMESTAMP_AT,
    STORE_TIMESTAMP_AT_V6,
    TIMESTAMP,
    encode_record,
    encode_record_buffer,
    place_of,
    stored_at,
)
from rocketstore.types import TERM_START_TOPIC, PutMessageStatus, PutResult, ScannedRecords, StoredPlace

_PUT_OK: Final = PutMessageStatus.PUT_OK
_make: Final = tuple.__new__
"""Creates named tuples without the overhead of their constructors: one per message."""
_TIMESTAMP_AT: Final = {0: STORE_TIMESTAMP_AT, SYS_FLAG_BORN_HOST_V6: STORE_TIMESTAMP_AT_V6}
_FIRST_SCAN_BYTES: Final = 64 * 1024
_ADVICE: Final = "Stop the node and start it with --repair: it fetches the log again from the other members"

_STATUSES: Final = {
    ResponseCode.NOT_LEADER: PutMessageStatus.SERVICE_NOT_AVAILABLE,
    ResponseCode.INCONSISTENT_LEADER: PutMessageStatus.SERVICE_NOT_AVAILABLE,
    ResponseCode.LEADER_NOT_READY: PutMessageStatus.SERVICE_NOT_AVAILABLE,
    ResponseCode.DISK_FULL: PutMessageStatus.SERVICE_NOT_AVAILABLE,
    ResponseCode.LEADER_TRANSFERRING: PutMessageStatus.SERVICE_NOT_AVAILABLE,
    ResponseCode.LEADER_PENDING_FULL: PutMessageStatus.OS_PAGECACHE_BUSY,
    ResponseCode.WAIT_QUORUM_ACK_TIMEOUT: PutMessageStatus.OS_PAGECACHE_BUSY,
} | PRODUCER_STATUSES


def for_broker(config: ServerConfig) -> ServerConfig:
    """The node's configuration adapted to a log of messages: no other writers, and NOOPs that are records."""
    replication = replace(config.replication, noop_body=_noop_record(b""), noop_compatible=True)
    return replace(config, replication=replication, client_appends=False)


def _noop_record(payload: bytes) -> bytes:
    """The record in a NOOP of a message log, with a topic that nobody subscribes to. ``payload`` belongs to the log."""
    return encode_record(Message(TERM_START_TOPIC, payload))


MESSAGES: Final = BodyFormat(_noop_record, stored_at)
"""For a node whose log is a broker's."""


def status_of(error: DLedgerError) -> PutMessageStatus:
    """RocketMQ's status for an error of the log: an unknown outcome never becomes one that producers treat as sent."""
    stopping = isinstance(error, ShutdownError) or error.code is ResponseCode.ILLEGAL_MEMBER_STATE
    if stopping and error.outcome == "not_applied":
        return PutMessageStatus.SERVICE_NOT_AVAILABLE
    if isinstance(error, InvalidRequestError):
        return PutMessageStatus.MESSAGE_ILLEGAL
    return _STATUSES.get(error.code, PutMessageStatus.UNKNOWN_ERROR)


class ReplicatedCommitLog:
    """Implements ``rocketstore.commit_log.port.CommitLog`` over a ``DLedgerServer``, which it starts and stops.

    The server must be configured by ``for_broker``, created with ``MESSAGES`` and not started yet; otherwise raises
    ``ConfigError``. ``address_of`` converts the log's leader hint to the ``leader`` of a refused put.
    """

    def __init__(
        self,
        server: DLedgerServer,
        config: MessageStoreConfig,
        *,
        clock: Clock | None = None,
        address_of: Callable[[LeaderHint], str] = lambda hint: hint.address,
    ) -> None:
        node = server.config
        if node.client_appends or not node.replication.noop_compatible or server.bodies is not MESSAGES:
            raise ConfigError(["a broker's log must hold only messages: make its node with for_broker() and MESSAGES"])
        self._server = server
        self._log = server.log
        self._clock = clock or Clock()
        self._address_of = address_of
        self._delay_levels = DelayLevels.parse(config.message_delay_level)
        self._record_bytes_max = node.store.entry_bytes_limit - ENTRY_HEADER_BYTES
        self._segment_bytes = node.store.segment_bytes
        self._put_lock = threading.Lock()  # guards the fields up to the blank line; taken inside the node's lock
        self._offsets = QueueOffsets()
        self._open_term: Term | None = None
        self._locked_since_ms: int | None = None

        self._newest_ms = 0
        """Store timestamp of the last record written here; later ones are not lower. Guarded by the node's lock."""

        self._listeners: tuple[Callable[[], None], ...] = ()
        self._earliest = (-1, -1)  # a begin position, and the time of the first message after it
        server.add_batch_hook(self._place_records)  # not given to the server when it is made: it needs the server's log
        server.subscribe(self._on_event)

    # -- life ----------------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Does nothing: the server has compared the sizes with those that its directory was made with."""

    def load(
        self,
        *,
        clean_stop: bool,
        from_timestamp_ms: int | None = None,
        durable_offset: int | None = None,
    ) -> None:
        """Does nothing: the server has opened and recovered the log, which records by itself how it was stopped."""

    def start(self) -> None:
        """Join the group. Raises ``ConfigError`` if a port is in use."""
        self._server.start()

    def shutdown(self) -> None:
        """Transfer leadership, flush and close. Idempotent."""
        self._server.stop()

    def listen(self, advanced: Callable[[], None]) -> None:
        self._listeners = (*self._listeners, advanced)

    def _on_event(self, event: NodeEvent) -> None:
        if isinstance(event, CommitEvent):
            for listener in self._listeners:
                listener()

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def is_replicated(self) -> bool:
        return True

    @property
    def is_repaired(self) -> bool:
        return self._server.has_peers and self._server.config.store.auto_repair

    @property
    def min_offset(self) -> int:
        """The position of the first kept entry; ``max_offset`` if there is none."""
        return int(self._log.begin.position)

    @property
    def max_offset(self) -> int:
        """The committed position."""
        return int(self._log.committed_position)

    @property
    def end_offset(self) -> int:
        """The end of the log on this node, committed or not."""
        return int(self._log.end_position)

    def next_file_offset(self, offset: int) -> int:
        """The start of the next segment."""
        return offset - offset % self._segment_bytes + self._segment_bytes

    def directories(self) -> Sequence[str]:
        """Where the segments are."""
        return [str(path) for path in self._log.data_directories]

    @property
    def flushed_offset(self) -> int:
        return int(self._log.flushed_position)

    def flush(self) -> int:
        """See ``CommitLog.flush``. Raises ``DiskError``."""
        try:
            self._log.flush()
        except ShutdownError:  # a server that could not start has stopped itself, which flushed its log
            if self._server.fatal is not None:
                raise
        return self.flushed_offset

    def remaining_to_flush(self) -> int:
        """Bytes written and not yet durable on this node."""
        return max(0, self._log.end_position - self._log.flushed_position)

    def delete_expired(self, *, now_ms: int, immediately: bool, on_forced: OnForced = untold) -> int:  # noqa: ARG002  # as the port has it
        """Always 0: the node's own cleaner removes segments that have expired here and that no follower needs."""
        return 0

    def is_held_back(self, *, now_ms: int, immediately: bool) -> bool:  # noqa: ARG002  # as the port has it
        """False: see ``delete_expired``."""
        return False

    @property
    def put_lock_ms(self) -> int:
        since = self._locked_since_ms
        return 0 if since is None else max(0, self._clock.monotonic_ms() - since)

    # -- queue offsets -------------------------------------------------------------------------------------------

    @property
    def queue_offsets(self) -> dict[tuple[str, int], int]:
        return self._offsets.table

    def set_queue_offsets(self, offsets: dict[tuple[str, int], int]) -> None:
        """See ``CommitLog.set_queue_offsets``; puts use it only once ``open_term`` has said for which term it is."""
        with self._put_lock:
            self._offsets.replace(offsets)

    def open_term(self, term: Term) -> None:
        """Accept puts as leader of ``term``: the table counts everything before it in the log."""
        with self._put_lock:
            self._open_term = term

    def close_term(self) -> None:
        """Refuse puts until the next ``open_term``."""
        with self._put_lock:
            self._open_term = None

    # -- puts ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        messages: Sequence[Message],
        done: PutDone,
        *,
        wait: bool = True,  # noqa: ARG002  # as the port has it
        producer: ProducerBatch | None = None,
    ) -> None:
        """See ``CommitLog.submit``. ``wait`` has no effect, as in RocketMQ: only a quorum makes a message stored."""
        if not messages:
            done([])
            return
        if len(set(map(id, messages))) < len(messages):  # each needs its own fields for its position
            messages = [replace(message) for message in messages]
        records: list[bytearray] = []
        for message in messages:
            try:
                if message.properties:
                    prepare(message, self._delay_levels)
                record = encode_record_buffer(message)
            except InvalidRequestError as error:
                done(_illegal(messages, len(records), str(error)))
                return
            if len(record) > self._record_bytes_max:
                reason = f"a record of {len(record)} bytes is too large: at most {self._record_bytes_max} fit an entry"
                done(_illegal(messages, len(records), reason))
                return
            records.append(record)
        put = _Put(self, messages, records, done)
        self._server.submit_prepared(put, put.finish, producer)

    def submit_numbering(self, encode: NumberingEncoder, done: PutDone) -> None:
        """See ``CommitLog.submit_numbering``: in a later term, the table might count entries lost since."""
        with self._put_lock:
            term, end, offsets = self._open_term, int(self._log.end_position), dict(self._offsets.table)
        bodies = encode(end, offsets, min(NUMBERING_BYTES_MAX, self._record_bytes_max // 2))
        messages = numbering_messages(bodies, self._clock.wall_ms())
        put = _Put(self, messages, [encode_record_buffer(message) for message in messages], done, only_in=term)
        self._server.submit_prepared(put, put.finish, None)

    def keep_from(self, wanted: Callable[[], int | None], held_back: Callable[[int], None] = lambda _end: None) -> None:
        self._server.keep_from(wanted, held_back)

    def submit_producer(self, name: str, done: SequenceDone) -> None:
        self._server.submit_producer(name, done)

    def give_out(self, put: _Put, term: Term) -> DLedgerError | None:
        """Write queue offsets and store timestamps into the records, under the node's lock; acquires the put lock.

        ``settle`` follows unless this refuses. Until then, the table is unchanged.
        """
        self._put_lock.acquire()
        self._locked_since_ms = self._clock.monotonic_ms()
        if term != self._open_term or put.only_in not in (None, term):
            self._release()
            return LeaderNotReadyError(f"the new leader of term {term} is not ready yet: retry shortly")
        now_ms = self._newest_ms = max(self._newest_ms, self._clock.wall_ms())
        put.following = self._offsets.assign(put.messages)
        put.store_timestamp = now_ms
        pack_offset, pack_time, add = QUEUE_OFFSET.pack_into, TIMESTAMP.pack_into, put.queue_offsets.append
        for message, record in zip(put.messages, put.records, strict=True):
            message.store_timestamp = now_ms
            offset = message.queue_offset
            pack_offset(record, QUEUE_OFFSET_AT, offset)
            pack_time(record, _TIMESTAMP_AT[message.sys_flag & SYS_FLAG_BORN_HOST_V6], now_ms)
            add(offset)
        return None

    def settle(self, put: _Put) -> None:
        """The put was written (its offsets are taken) or refused; releases the put lock."""
        if put.positions:
            self._offsets.keep(put.following)
        self._release()

    def _release(self) -> None:
        self._locked_since_ms = None
        self._put_lock.release()

    def _place_records(self, positions: Sequence[int], bodies: Sequence[Body]) -> Sequence[Body]:
        """The append hook: sets every record's position, and a NOOP's store timestamp, because nobody submitted it.

        A term starts with a NOOP, which takes over the newest timestamp of the log, so timestamps do not decrease if
        the leader's clock is behind. Requires the node's lock.
        """
        placed: list[Body] = []
        add, pack = placed.append, PHYSICAL_OFFSET.pack_into
        for position, body in zip(positions, bodies, strict=True):
            if type(body) is bytearray:
                record = body
            else:
                record = bytearray(body)
                self._newest_ms = max(self._newest_ms, self._clock.wall_ms(), self._last_stored_ms())
                TIMESTAMP.pack_into(record, STORE_TIMESTAMP_AT, self._newest_ms)
            pack(record, PHYSICAL_OFFSET_AT, position + ENTRY_HEADER_BYTES)
            add(record)
        return placed

    def _last_stored_ms(self) -> int:
        """The store timestamp of the log's last entry; 0 if there is none. Requires the node's lock."""
        last = self._log.last.index
        if last <= self._log.begin.index:
            return 0
        return stored_at(self._log.read(last).body) or 0

    def result_of(self, error: DLedgerError) -> tuple[PutMessageStatus, str]:
        """The status of an unconfirmed put, and the leader, if known."""
        return status_of(error), "" if error.leader is None else self._address_of(error.leader)

    def places_of(self, run: StoredRun) -> list[PutResult]:
        """The results of messages stored before: their positions, according to their records.

        A record that is gone, or not yet known here to be committed, also counts as stored.
        """
        found: list[PutResult] = []
        for position in run.positions:
            offset = position + ENTRY_HEADER_BYTES
            head = self._log.copy_committed(offset, OVERHEAD)
            record = None if head is None else self.read(offset, BLANK.unpack_from(head)[0])
            stored = None if record is None else place_of(record, offset)
            found.append(PutResult(_PUT_OK, stored))
        return found if len(found) == run.count else [PutResult(_PUT_OK)] * run.count

    # -- reads ---------------------------------------------------------------------------------------------------

    def read(self, offset: int, size: int) -> bytes | None:
        """See ``CommitLog.read``; uncommitted records are not returned."""
        return self._log.read_body(offset, size)

    def read_together(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        return self._log.read_bodies(places)

    def read_at_once(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        return self._log.read_bodies_at_once(places)

    def read_record(self, offset: int) -> bytes | None:
        """See ``CommitLog.read_record``. ``offset`` is untrusted, so it must be that of a committed message:

        record-like bytes within a body do not count, nor do entries that may still be replaced.
        """
        if offset < ENTRY_HEADER_BYTES:
            return None
        try:
            entry = self._log.read_at(Position(offset - ENTRY_HEADER_BYTES))
        except (IndexOutOfRangeError, IndexBeforeBeginError):
            return None
        if entry.magic is not Magic.NORMAL or entry.index > self._log.committed_index:
            return None
        return entry.body

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        """See ``CommitLog.scan``: ``offset`` is that of an entry, blank or record."""
        try:
            found = self._log.read_committed(Position(self._entry_position(offset)), bytes_max)
        except IndexOutOfRangeError as error:
            raise self._corrupt(offset, str(error)) from error
        outcome = read_entries(found.data, found.position, delay_levels=self._delay_levels)
        if outcome.end == "damaged" or (found.data and not outcome.consumed):
            raise self._corrupt(found.position + outcome.consumed, outcome.reason)
        return ScannedRecords(outcome.heads, found.position + outcome.consumed)

    def _entry_position(self, offset: int) -> int:
        """The position of the entry whose record starts at ``offset``; any other ``offset`` is returned unchanged.

        An entry's second field is its size, a blank's its length; both are positive, unlike a record's magic number.
        """
        head = self._log.copy_committed(offset, BLANK.size)
        is_record = head is not None and BLANK.unpack(head)[1] in MESSAGE_MAGICS
        return offset - ENTRY_HEADER_BYTES if is_record else offset

    def _corrupt(self, position: int, reason: str) -> CorruptLogError:
        """Damage at an entry: as the node finds it, which also starts the repair, otherwise as seen in the record."""
        try:
            self._log.read_at(Position(position))
        except CorruptLogError as found:
            return found
        except (IndexOutOfRangeError, IndexBeforeBeginError):
            pass
        base = position - position % self._segment_bytes
        paths = [directory / f"{base:020d}" for directory in self._log.data_directories]
        path = next((one for one in paths if one.exists()), paths[0] if paths else Path(f"{base:020d}"))
        return CorruptLogError(path, position - base, reason, _ADVICE)

    def earliest_message_time(self) -> int:
        """See ``CommitLog.earliest_message_time``: of the first message, ignoring NOOPs before it."""
        begin = self.min_offset
        if self._earliest[0] != begin:
            position, scanned = begin, self.scan(begin, _FIRST_SCAN_BYTES)
            while not scanned.heads and scanned.next_offset != position:
                position = scanned.next_offset
                scanned = self.scan(position, _FIRST_SCAN_BYTES)
            if not scanned.heads:
                return -1
            self._earliest = (begin, scanned.heads[0].store_timestamp)
        return self._earliest[1]


class _Put:
    """One batch in progress: a ``PreparedAppend`` and the data for its results."""

    def __init__(
        self,
        log: ReplicatedCommitLog,
        messages: Sequence[Message],
        records: list[bytearray],
        done: PutDone,
        *,
        only_in: Term | None = None,
    ) -> None:
        self._log = log
        self.only_in: Final = only_in
        """The term it was made for; None: any."""
        self._done = done
        self._count = len(messages)
        self.messages = messages
        self.records = records
        """Records of the messages; both without those already stored."""
        self.following: dict[tuple[str, int], int] = {}
        """The next offset of each queue after this batch."""
        self.queue_offsets: list[int] = []
        self.store_timestamp = 0
        self.positions: Sequence[int] = ()
        """Positions of the entries; empty until they are written."""

    def bodies(self, term: Term, stored: int = 0) -> Sequence[Body] | DLedgerError:
        if stored:
            self.messages, self.records = self.messages[stored:], self.records[stored:]
        return self._log.give_out(self, term) or self.records

    def placed(self, batch: AppendedBatch | None) -> None:
        if batch is not None:
            self.positions = batch.positions
        self._log.settle(self)

    def finish(self, result: AppendedBatch | DLedgerError) -> None:
        """Report the result to the submitter; without holding a lock."""
        if isinstance(result, AppendedBatch):
            results: list[PutResult] = []
            for run in result.duplicates:
                results += self._log.places_of(run)
            if self.positions:
                results += [_make(PutResult, (_PUT_OK, stored, "stored", "", "", "")) for stored in self._stored()]
            self._done(results)
            return
        status, leader = self._log.result_of(result)
        reason, outcome = str(result), result.outcome
        written: Sequence[StoredPlace] = self._stored() if self.positions else ()
        # The outcome of those stored before is also unknown.
        places: list[StoredPlace | None] = [*([None] * (self._count - len(written))), *written]
        self._done([PutResult(status, place, outcome, reason, leader) for place in places])

    def _stored(self) -> list[StoredPlace]:
        """The positions of the messages, also set in them; from our own copies, because a message may be submitted
        twice.
        """
        found: list[StoredPlace] = []
        add, timestamp = found.append, self.store_timestamp
        places = zip(self.messages, self.records, self.positions, self.queue_offsets, strict=True)
        for message, record, position, queue_offset in places:
            message.offset = offset = position + ENTRY_HEADER_BYTES
            add(_make(StoredPlace, (offset, len(record), message.queue_id, queue_offset, timestamp)))
        return found


def _illegal(messages: Sequence[Message], at: int, reason: str) -> list[PutResult]:
    """The results of a batch whose message ``at`` cannot be stored: none of it is."""
    results = [refused(PutMessageStatus.MESSAGE_ILLEGAL, f"message {at} of the batch: {reason}")] * len(messages)
    results[at] = refused(PutMessageStatus.MESSAGE_ILLEGAL, reason)
    return results
