"""Applies the messages of the state topic to the tables, in order. Runs on one thread; ``lock`` guards shared data.

Unusable messages:

* malformed, of a known version: skipped and counted, and the first one is logged. All nodes skip it alike, and
  stopping would stop the whole group forever;
* of a newer version: this node stops applying (``blocked``) and does not become master until it is upgraded;
* missing or damaged on this disk (for example expired): its contents are unknown here, so the state is not
  ``complete`` until a published full state arrives; every master writes one when it becomes master and long before
  the last one expires.

A full state written while nothing else was in progress (it describes the state right before itself) replaces the tables
of *every* node: should they ever differ, they do not differ for long.

``config/brokerState.json`` holds the tables as they were before one queue offset of the state topic. It only shortens
the replay of that topic, so a missing or damaged one is never an error. The file is one JSON object
``{"checksum": CRC32C, "state": {...}}``, formatted by Python's ``json``, because the checksum is that of the bytes of
``state``; it is replaced atomically.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from crc32c import crc32c

from dledger.errors import CorruptLogError, InvalidRequestError
from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.state.changes import (
    Change,
    FullPart,
    MalformedStateError,
    NewerStateError,
    changes_from_json,
    decode_state,
    encode_change,
)
from rocketstore.state.tables import Tables
from rocketstore.types import BROKER_STATE_TOPIC, GetMessageStatus, GetResult

SNAPSHOT_FILE: Final = "brokerState.json"
SNAPSHOT_VERSION: Final = 1
_CHANGES_MAX: Final = 4_000_000
_FORMAT: Final = b'{"checksum":%d,"state":%b}\n'


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """One node's snapshot of broker state.

    ``next_offset`` is the first message of the state topic not in it; ``last_record`` the physical offset and body CRC
    of the previous one, to recognise a different log (None: there was none). ``complete`` is false if changes are known
    to be missing. ``imported``: the SHA-256 of those of RocketMQ's files beside it whose contents are in it, by name.
    """

    changes: tuple[Change, ...] = ()
    next_offset: int = 0
    last_record: tuple[int, int] | None = None
    complete: bool = True
    imported: Mapping[str, str] = field(default_factory=dict)


def write_snapshot(fs: FileSystem, directory: Path, snapshot: BrokerSnapshot) -> None:
    """Replace the file. Raises ``OSError``."""
    value: dict[str, object] = {
        "version": SNAPSHOT_VERSION,
        "next": snapshot.next_offset,
        "last": snapshot.last_record,
        "complete": snapshot.complete,
    }
    if snapshot.imported:
        value["imported"] = dict(snapshot.imported)
    head = json.dumps(value, separators=(",", ":")).encode()[:-1]
    changes = b",".join(
        encode_change(change).data for change in snapshot.changes
    )  # each by itself: json holds the interpreter until it ends
    state = b'%b,"changes":[%b]}' % (head, changes)
    make_dirs_durably(fs, directory) if not directory.exists() else None
    replace_durably(fs, directory / SNAPSHOT_FILE, _FORMAT % (crc32c(state), state))


def read_snapshot(directory: Path) -> BrokerSnapshot | None:
    """The file's contents; None, with a log line, if it is unusable."""
    path = directory / SNAPSHOT_FILE
    try:
        return decode_snapshot(read_whole(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MalformedStateError) as error:
        _log.warning("%s: unusable, replaying broker state from the log: %s", path, error)
        return None


def decode_snapshot(content: bytes) -> BrokerSnapshot:
    """Parse the file. Raises ``MalformedStateError``, or what Python raises for other malformed values."""
    start = content.index(b'"state":') + len(b'"state":')
    state = content[start:].rstrip()[:-1]
    checksum = json.loads(content)["checksum"]
    if crc32c(state) != checksum:
        raise MalformedStateError("its checksum is wrong")
    value = json.loads(state)
    if value["version"] != SNAPSHOT_VERSION:
        raise MalformedStateError(f"its version is {value['version']!r}")
    last = value["last"]
    return BrokerSnapshot(
        changes=changes_from_json(value["changes"], count_max=_CHANGES_MAX),
        next_offset=int(value["next"]),
        last_record=None if last is None else (int(last[0]), int(last[1])),
        complete=bool(value["complete"]),
        imported=_texts(value.get("imported", {})),
    )


def _texts(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise MalformedStateError("what it says of imported files is unusable")
    return value


_READ_COUNT: Final = 32
"""Messages read at once."""
_TOLD_MAX: Final = 20

_GONE: Final = frozenset({GetMessageStatus.MESSAGE_WAS_REMOVING, GetMessageStatus.NO_MATCHED_MESSAGE})

_log = logging.getLogger("rocketstore")


class StateLog(Protocol):
    """The messages of the state topic: a store's, or a stopped broker's."""

    @property
    def numbers_known(self) -> bool:
        """Whether the log would show that there were messages before its begin."""

    def min_offset(self, topic: str, queue_id: int, /) -> int:
        """The first offset of a queue; negative if it is unknown."""

    def max_offset(self, topic: str, queue_id: int, /) -> int:
        """The next offset of a queue."""

    def get(self, topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        """Messages from ``offset`` on."""


class _Parts:
    """The parts of a full state received so far."""

    def __init__(self, first: FullPart, offset: int) -> None:
        self.full_id = first.full_id
        self.parts = first.parts
        self.upto = first.upto
        self.offset = offset
        self.changes: list[Change] = []
        self.count = 0

    def take(self, part: FullPart, changes: Iterable[Change]) -> bool:
        """Add the next part; False if it is a different one."""
        if (part.full_id, part.part, part.parts, part.upto) != (self.full_id, self.count, self.parts, self.upto):
            return False
        self.changes.extend(changes)
        self.count += 1
        return True


class StateApplier:
    """The tables, and how far the state topic is applied to them."""

    def __init__(self, store: StateLog) -> None:
        self.lock = threading.Lock()  # guards the tables and the numbers below, written by the applying thread
        self.tables = Tables()
        self.next_offset = 0
        self.complete = True
        self.blocked = ""
        """Why nothing more is applied; empty if messages are being applied."""
        self.malformed = 0
        self.changed = 0
        """How many messages were processed, so that callers can notice changes."""
        self.applied_to = 0
        """The log offset after the last applied message."""
        self.full_offset = -1
        """The first message of the newest complete full state seen; -1: none."""
        self._store = store
        self._last_record: tuple[int, int] | None = None
        self._verified = True
        self._parts: _Parts | None = None
        self._went_back_for = ""
        self._accepted = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing is known to be missing; if no state was ever seen, whether the log would show any."""
        if not self.complete or self._accepted or self.next_offset or self.end_offset:
            return self.complete
        return self._store.numbers_known

    def restore(self, snapshot: BrokerSnapshot) -> None:
        """Start with a snapshot; only before the first ``step``."""
        self.tables = Tables(snapshot.changes)
        self.next_offset = snapshot.next_offset
        self.complete = snapshot.complete
        self._last_record = snapshot.last_record
        self._verified = snapshot.last_record is None

    def snapshot(self) -> BrokerSnapshot:
        """A snapshot for a restart; on the applying thread."""
        with self.lock:
            tables = self.tables.copy()
            next_offset, last_record, complete = self.next_offset, self._last_record, self.complete
        return BrokerSnapshot(tuple(tables.as_changes()), next_offset, last_record, complete)

    @property
    def end_offset(self) -> int:
        """The state topic's next queue offset, as far as it is dispatched."""
        return self._store.max_offset(BROKER_STATE_TOPIC, 0)

    def step(self) -> bool:
        """Apply some messages; returns whether there may be more."""
        if self.blocked or (not self._verified and not self._verify()):
            return False
        before = self.next_offset
        try:
            result = self._read(before)
        except CorruptLogError as error:
            self._skip_to(before + 1, str(error))
            return True
        if result.status is GetMessageStatus.FOUND:
            for record in result.records:
                if not self._apply_record(record):
                    break
            return not self.blocked
        if before < result.min_offset:
            self._skip_to(result.min_offset, "they expired")
        elif result.status in _GONE and result.next_offset > before:
            self._skip_to(result.next_offset, "they are not in the log")
        return self.next_offset > before

    def settle_end(self) -> None:
        """Called when everything in the log is dispatched: a snapshot beyond its end comes from a lost tail.

        The tables stay: clients were already told that the lost changes were done.
        """
        end = self.end_offset
        if self.next_offset > end:
            _log.error(
                "broker state: applied up to %d, but the log ends at %d: it lost its tail", self.next_offset, end
            )
            with self.lock:
                self.next_offset, self._last_record, self._verified = end, None, True

    def forget_what_is_not_there(self, end_of: Callable[[str, int], int]) -> None:
        """Lower offsets beyond the ends of their queues, after a power cut truncated the log: otherwise the next
        messages there would be skipped. Called when everything in the log is dispatched and applied.
        """
        with self.lock:
            put_back = self.tables.put_back(end_of)
            self.changed += bool(put_back)
        for one in put_back[:_TOLD_MAX]:
            _log.warning("broker state: the log lost its tail and ends before it: %s", one)
        if len(put_back) > _TOLD_MAX:
            _log.warning("broker state: the same for %d more", len(put_back) - _TOLD_MAX)

    def mirror(self, changes: Iterable[Change]) -> None:
        """Take over what a master says that keeps its state elsewhere than in the log."""
        with self.lock:
            self.tables = self.tables.mirror(changes)
            self.changed += 1

    def accept_incomplete(self) -> None:
        """Regard the state as complete, although changes are missing."""
        with self.lock:
            self.complete = self._accepted = True

    def _verify(self) -> bool:
        """Whether the snapshot was verified to belong to this log; if it does not, start over from the log alone."""
        minimum, end = self._store.min_offset(BROKER_STATE_TOPIC, 0), self.end_offset
        if self.next_offset > end:
            return False  # dispatch has not come this far yet
        if self.next_offset <= minimum:
            self._verified = True
            return True
        message = self._message_at(BROKER_STATE_TOPIC, 0, self.next_offset - 1)
        if message is None:
            return True  # it may become readable once it is committed: retry with the next step
        self._verified = True
        if (message.offset, message.body_crc) == self._last_record:
            return True
        _log.error("broker state: the snapshot belongs to another log; replaying the state from this one")
        with self.lock:
            self.tables = Tables()
            self.next_offset = max(minimum, 0)
            self.complete = minimum <= 0
            self._last_record = None
        return True

    def _apply_record(self, record: bytes) -> bool:
        """Whether the next record read follows this one."""
        message = _decode(record)
        if message is None:
            self._skip_to(self.next_offset + 1, "a record is damaged")
            return True
        if message.queue_offset < self.next_offset:
            return True
        if message.queue_offset > self.next_offset:
            self._skip_to(message.queue_offset, "they are not in the queue")
        try:
            state = decode_state(message.body)
        except NewerStateError as error:
            _log.error("broker state: stopped at message %d, so this node must not lead: %s",
                       self.next_offset, error)  # fmt: skip
            self.blocked = str(error)
            return False
        except MalformedStateError as error:
            if not self.malformed:
                _log.error("broker state: message %d is skipped, as on all nodes: %s", self.next_offset, error)
            self.malformed += 1
            self._parts = None
        else:
            self._apply(message, state.changes, state.full)
            if self.next_offset < message.queue_offset:
                return False  # a full state took us back to an earlier offset
        with self.lock:
            self.next_offset = message.queue_offset + 1
            self._last_record = (message.offset, message.body_crc)
            self.applied_to = message.offset + len(record)
            self.changed += 1
        return True

    def _apply(self, message: Message, changes: tuple[Change, ...], full: FullPart | None) -> None:
        if full is not None:
            self._take_part(full, changes, message.queue_offset)
            return
        self._parts = None
        with self.lock:
            for change in changes:
                self.tables.apply(change)

    def _take_part(self, full: FullPart, changes: tuple[Change, ...], offset: int) -> None:
        if full.part == 0:
            self._parts = _Parts(full, offset)
        if self._parts is None or not self._parts.take(full, changes):
            self._parts = None  # parts must be consecutive
            return
        if self._parts.count < self._parts.parts:
            return
        whole, self._parts = self._parts, None
        minimum = self._store.min_offset(BROKER_STATE_TOPIC, 0)
        with self.lock:
            self.full_offset = whole.offset
            if whole.upto == whole.offset:
                self.tables, self.complete = Tables(whole.changes), True
            elif not self.complete and whole.full_id != self._went_back_for and minimum <= whole.upto < whole.offset:
                # Messages between the state and its publication are not in it: go back to them. Once: if one of them is
                # not readable here, the next full state must help.
                self._went_back_for = whole.full_id
                self.tables, self.complete, self.next_offset = Tables(whole.changes), True, whole.upto

    def _skip_to(self, offset: int, why: str) -> None:
        _log.error("broker state: messages %d to %d are missing: %s; waiting for a full state",
                   self.next_offset, offset - 1, why)  # fmt: skip
        self._parts = None
        with self.lock:
            self.complete = False
            self.next_offset = offset
            self._last_record, self._verified = None, True
            self.changed += 1

    def _read(self, offset: int) -> GetResult:
        try:
            return self._store.get(BROKER_STATE_TOPIC, 0, offset, max_count=_READ_COUNT)
        except CorruptLogError:
            return self._store.get(BROKER_STATE_TOPIC, 0, offset, max_count=1)  # only a later one may be damaged

    def _message_at(self, topic: str, queue_id: int, offset: int) -> Message | None:
        try:
            result = self._store.get(topic, queue_id, offset, max_count=1)
        except CorruptLogError:
            return None
        return _decode(result.records[0]) if result.records else None


def _decode(record: bytes) -> Message | None:
    try:
        return decode_record(record)
    except InvalidRequestError:
        return None
