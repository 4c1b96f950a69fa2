"""What the message store needs from a commit log: the plain one and the replicated one both implement it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dledger.errors import DLedgerError
from dledger.types import ProducerBatch
from rocketstore.message.message import Message
from rocketstore.types import PutResult, QueueKey, ScannedRecords

PutDone = Callable[[Sequence[PutResult]], None]
"""Called once, with one result per message, on any thread, also within ``submit``; must not block."""
SequenceDone = Callable[[int | DLedgerError], None]
"""Called once, on any thread, also within ``submit_producer``; must not block."""
NumberingEncoder = Callable[[int, Mapping[QueueKey, int], int], Sequence[bytes]]
"""From the log's end, the next offsets there and the bytes that a body may have to the bodies that say so."""


class CommitLog(Protocol):
    """All messages of a broker in one sequence of records.

    Life: ``load`` (open what is there and cut a torn tail), ``start``, ``shutdown``. Queue offsets are given out by the
    log under its put lock from ``queue_offsets``, which the store fills from the consume queues before it takes writes.
    """

    @property
    def min_offset(self) -> int:
        """The first kept record's physical offset; ``max_offset`` if there is none."""

    @property
    def max_offset(self) -> int:
        """The end of what may be dispatched and read: what a crash does not take back, as far as the log promises that.

        In a replicated log what is committed, in a plain one what is flushed (SYNC_FLUSH) or everything (ASYNC_FLUSH).
        """

    @property
    def end_offset(self) -> int:
        """The end of everything kept, also of what may not be read yet.

        Consume queues are cut here after a restart, never at ``max_offset``: a
        restarted member may know less of the commit position than its queues already hold.
        """

    def listen(self, advanced: Callable[[], None]) -> None:
        """Have ``advanced`` called after ``max_offset`` has grown; on any thread, it is cheap. Before ``start``."""

    @property
    def queue_offsets(self) -> dict[tuple[str, int], int]:
        """(topic, queue id) to the next queue offset. Replaced as a whole by ``set_queue_offsets``."""

    def set_queue_offsets(self, offsets: dict[tuple[str, int], int]) -> None:
        """Replace the table, under the put lock."""

    def load(
        self, *, clean_stop: bool, from_timestamp_ms: int | None = None, durable_offset: int | None = None
    ) -> None:
        """Open the files and recover the log itself. Raises ``CorruptLogError``, ``DiskError``, ``ConfigError``.

        What the store's checkpoint knows, for a log that keeps no evidence of its own: all before ``durable_offset``
        was durable once, and so was what was stored up to ``from_timestamp_ms``; None if that is not known.
        """

    def start(self) -> None:
        """Start flushing (plain) or take part in the group (replicated)."""

    def shutdown(self) -> None:
        """Flush and close. Idempotent."""

    def submit(
        self,
        messages: Sequence[Message],
        done: PutDone,
        *,
        wait: bool = True,
        producer: ProducerBatch | None = None,
    ) -> None:
        """Store messages in this order, with consecutive queue offsets per queue.

        In a replicated log all of them or none; in a plain one a prefix may be stored if the disk fails in between, and
        the results say which. ``wait=False``: do not wait for the flush. The messages were checked.
        Fields of a message that storing changes (store timestamp, delayed topic) are written into it.

        ``producer`` numbers the messages: those that it had stored before are answered with their places and not
        stored again, and a batch that does not follow its last one, or of which one message is refused, is refused
        wholly. ``producer.count`` is how many messages there are.
        """

    def submit_producer(self, name: str, done: SequenceDone) -> None:
        """The number of a producer's next message, 0 if it is not known, once all that it counts is stored for good."""

    def submit_numbering(self, encode: NumberingEncoder, done: PutDone) -> None:
        """Store the next offsets of all queues as messages of ``QUEUE_NUMBERS_TOPIC``, if puts are taken.

        The table is as it was at some end of the log before them, and theirs as long as they are in the log: in a group
        they are refused in another term than that in which it was read.
        """

    def keep_from(self, wanted: Callable[[], int | None], held_back: Callable[[int], None] = lambda _end: None) -> None:
        """Remove nothing from the offset on that ``wanted`` gives (None: no limit); before ``start``.

        A log that removes files by itself, as a replicated one does, tells ``held_back`` up to where it would have
        removed more; it must be fast. The others are asked (``is_held_back``).
        """

    def read(self, offset: int, size: int) -> bytes | None:
        """The record at ``offset``; None if it is gone or not wholly readable."""

    def read_together(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """The records at these offsets, of these sizes, as far as they are sound and cheap to read at once.

        None for each other one: ``read`` gives it, or says what is wrong.
        """

    def read_record(self, offset: int) -> bytes | None:
        """The record that starts at ``offset``, its length taken from its first field; None if none does."""

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        """Heads of the records from ``offset`` on, up to ``bytes_max`` bytes of log, never beyond ``max_offset``.

        Blanks and entries that are no message are skipped. ``offset`` must be where a record, blank or entry begins, a
        value given by an earlier ``scan``, or less than ``min_offset`` (then it begins there). Raises
        ``CorruptLogError``.
        """

    def next_file_offset(self, offset: int) -> int:
        """The start of the file after the one ``offset`` lies in."""

    @property
    def flushed_offset(self) -> int:
        """Up to here everything is durable on this node."""

    def flush(self) -> int:
        """Make everything written durable; gives the offset up to which it is."""

    def delete_expired(self, *, now_ms: int, immediately: bool) -> int:
        """Remove files that have expired (or the oldest, ``immediately``); gives how many. A replicated log: 0."""

    def is_held_back(self, *, now_ms: int, immediately: bool) -> bool:
        """Whether ``delete_expired`` would remove more but for ``keep_from``. A replicated log: False."""

    @property
    def is_replicated(self) -> bool:
        """Whether a quorum decides what is stored."""

    @property
    def is_repaired(self) -> bool:
        """Whether damage is mended while the log runs, with what other members have."""

    @property
    def put_lock_ms(self) -> int:
        """How long the put lock has been held by whoever holds it now; 0 if nobody does."""

    def earliest_message_time(self) -> int:
        """Store timestamp of the first kept message; -1 if there is none."""

    def directories(self) -> Sequence[str]:
        """Where the log's files are, for disk usage."""

    def remaining_to_flush(self) -> int:
        """Bytes written and not yet durable."""
