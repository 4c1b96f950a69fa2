"""The commit log of a group that continues a plain broker's: the plain log's files, then the replicated log.

Offsets below ``divided`` are in the old files, which nothing is appended to; all others in the replicated log, whose
first entry is at ``divided``. Blanks fill the old log's last file, so that ``scan`` crosses the boundary as it crosses
any other end of a file. Only entries are replicated and repaired: of the old files each member has its own, equal to
the others' (``dledger.types``).

The old files expire first. While one of them is left, no segment of the replicated log is removed, because the log has
no gaps; they expire by the plain log's rules, the last one included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from dledger.types import BaseLog, ProducerBatch
from rocketstore.commit_log.base_log import ExpiredFiles
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.port import NumberingEncoder, PutDone, SequenceDone
from rocketstore.commit_log.replicated import ReplicatedCommitLog
from rocketstore.mapped.queue import OnForced, untold
from rocketstore.message.message import Message
from rocketstore.types import ScannedRecords

Places = Sequence[tuple[int, int]]


class MixedCommitLog:
    """Implements ``rocketstore.commit_log.port.CommitLog``, whose docstrings define each method.

    ``old`` is not loaded yet; ``record`` says what it held when the group took it over, ``expired`` what may have gone
    since then.
    """

    is_replicated = True

    def __init__(self, old: PlainCommitLog, new: ReplicatedCommitLog, record: BaseLog, expired: ExpiredFiles) -> None:
        self._old = old
        self._new = new
        self._begin = record.begin
        self._expired = expired
        self.divided: Final = record.end
        """Where the old log ends and the replicated one begins."""
        self._held_back: Callable[[int], None] = lambda _end: None

    # -- life ----------------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        self._old.check_files()
        self._new.check_files()

    def load(
        self, *, clean_stop: bool, from_timestamp_ms: int | None = None, durable_offset: int | None = None
    ) -> None:
        """Open both. How the store was stopped does not matter to the old log, which was durable when it was sealed."""
        self._old.load_sealed(self.divided, max(self._begin, self._expired.end()), self._expired.note)
        self._new.load(clean_stop=clean_stop, from_timestamp_ms=from_timestamp_ms, durable_offset=durable_offset)

    def start(self) -> None:
        self._new.start()

    def shutdown(self) -> None:
        try:
            self._new.shutdown()
        finally:
            self._old.shutdown()

    def listen(self, advanced: Callable[[], None]) -> None:
        self._new.listen(advanced)

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def has_old_files(self) -> bool:
        """Whether files of the old log are left."""
        return self._old.min_offset < self.divided

    @property
    def is_repaired(self) -> bool:
        return self._new.is_repaired

    @property
    def min_offset(self) -> int:
        return self._old.min_offset if self.has_old_files else self._new.min_offset

    @property
    def max_offset(self) -> int:
        return self._new.max_offset

    @property
    def end_offset(self) -> int:
        return self._new.end_offset

    @property
    def flushed_offset(self) -> int:
        return self._new.flushed_offset

    @property
    def put_lock_ms(self) -> int:
        return self._new.put_lock_ms

    def next_file_offset(self, offset: int) -> int:
        return self._of(offset).next_file_offset(offset)

    def directories(self) -> Sequence[str]:
        return self._new.directories()  # the old files' disk does not fill up any further

    def flush(self) -> int:
        return self._new.flush()

    def remaining_to_flush(self) -> int:
        return self._new.remaining_to_flush()

    def earliest_message_time(self) -> int:
        old = self._old.earliest_message_time() if self.has_old_files else -1
        return old if old >= 0 else self._new.earliest_message_time()

    # -- retention -----------------------------------------------------------------------------------------------

    def keep_from(self, wanted: Callable[[], int | None], held_back: Callable[[int], None] = lambda _end: None) -> None:
        self._held_back = held_back
        self._old.keep_from(wanted)
        self._new.keep_from(lambda: self.divided if self.has_old_files else wanted(), held_back)

    def delete_expired(self, *, now_ms: int, immediately: bool, on_forced: OnForced = untold) -> int:
        if not self.has_old_files:
            return 0
        if self._old.is_held_back(now_ms=now_ms, immediately=immediately):
            self._held_back(self.divided)
        return self._old.delete_expired(now_ms=now_ms, immediately=immediately, on_forced=on_forced)

    def is_held_back(self, *, now_ms: int, immediately: bool) -> bool:  # noqa: ARG002  # as the port has it
        return False  # as in a replicated log: ``held_back`` was called

    # -- puts ----------------------------------------------------------------------------------------------------

    @property
    def queue_offsets(self) -> dict[tuple[str, int], int]:
        return self._new.queue_offsets

    def set_queue_offsets(self, offsets: dict[tuple[str, int], int]) -> None:
        self._new.set_queue_offsets(offsets)

    def submit(
        self,
        messages: Sequence[Message],
        done: PutDone,
        *,
        wait: bool = True,
        producer: ProducerBatch | None = None,
    ) -> None:
        self._new.submit(messages, done, wait=wait, producer=producer)

    def submit_producer(self, name: str, done: SequenceDone) -> None:
        self._new.submit_producer(name, done)

    def submit_numbering(self, encode: NumberingEncoder, done: PutDone) -> None:
        self._new.submit_numbering(encode, done)

    # -- reads ---------------------------------------------------------------------------------------------------

    def _of(self, offset: int) -> PlainCommitLog | ReplicatedCommitLog:
        return self._old if offset < self.divided else self._new

    def read(self, offset: int, size: int) -> bytes | None:
        return self._of(offset).read(offset, size)

    def read_together(self, places: Places) -> list[bytes | None]:
        return self._split(places, lambda log, some: log.read_together(some))

    def read_at_once(self, places: Places) -> list[bytes | None]:
        return self._split(places, lambda log, some: log.read_at_once(some))

    def _split(
        self, places: Places, read: Callable[[PlainCommitLog | ReplicatedCommitLog, Places], list[bytes | None]]
    ) -> list[bytes | None]:
        """Read each record from the log it is in; the order stays."""
        older = [place for place in places if place[0] < self.divided]
        if not older or len(older) == len(places):
            return read(self._old if older else self._new, places)
        old = iter(read(self._old, older))
        new = iter(read(self._new, [place for place in places if place[0] >= self.divided]))
        return [next(old if place[0] < self.divided else new) for place in places]

    def read_record(self, offset: int) -> bytes | None:
        return self._of(offset).read_record(offset)

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        if offset < self.divided and self.has_old_files:
            return self._old.scan(offset, bytes_max)
        return self._new.scan(offset, bytes_max)
