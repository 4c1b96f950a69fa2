"""A node's durable state beside its log: hard state, checkpoint, and the record of its last start.

The first two are slot files: small files of fixed slots, each with a sequence number and a CRC, of which the newest
readable one counts. Each slot has a page of its own:

    0        4         8            16     20
    +--------+---------+------------+------+---------+
    | "DLS1" | length  | sequence   | crc  | payload |
    +--------+---------+------------+------+---------+

``crc`` is the CRC32C of the other header bytes and the payload.

**Hard state**: term and vote, durable before any message carries them. Two pairs of slots. ``save`` writes the state
into both slots of one pair, the pairs taking turns, with one sync, because a vote waits for it. So:

- while one pair is being written, the other one holds the state before, durably: no torn write loses that;
- once ``save`` has returned, two slots hold the state: one bad slot cannot bring back an older vote;
- a pair without a readable slot may have held a newer state: the other one is then in doubt, and the member
  has no vote until it has regained its standing. (Or a power cut tore both sectors of one save: then the doubt costs no
  more than that.)

A file without a readable slot refuses to load; defaults would be a forgotten vote.

``currterm`` is a mirror in DLedger's format for people and Java tools. Nothing here reads it, unless Java has used the
directory: it is written now and then, and at a stop, and a failure to write it (a full disk) stops nothing.

**Checkpoint**: the marks on which recovery may rely. Three slots. ``write`` follows every flush, without a sync, before
the flush is reported (so a killed process loses nothing); ``write_durably`` comes now and then (so a power cut loses at
most the time since). Neither the last durable slot nor the one being synced is ever overwritten: hence three.

**Boot record**: the boot of the machine, the flush mode, and the files' identity, for the next start. The file
``traces`` is written at every start. A directory that was copied, or restored file by file, has files with
other inodes than those recorded: it lacks what its member said since the copy was made. Inodes are compared with their
generation where the file system has one (ext4, xfs, btrfs), since a copy may get an inode of the same number. Devices
are not compared: their numbers change with the next boot.

Resetting the whole volume (to a snapshot, or a virtual machine's) leaves no trace here; the other members remember.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from dledger.config import FlushMode
from dledger.errors import CorruptLogError, DiskError, invariant
from dledger.records import record
from dledger.store.fs import FileSystem, create_durably, read_whole, replace_durably
from dledger.types import GENESIS, NO_INDEX, Boundary, HardState, LogIndex, NodeId, Position, Standing, Term

SLOT_BYTES: Final = 4096
_HEAD: Final = Struct(">4sIQ")
_CRC: Final = Struct(">I")
_MAGIC: Final = b"DLS1"
PAYLOAD_BYTES_MAX: Final = 512 - _HEAD.size - _CRC.size
"""A slot stays within one 512 byte sector."""


@dataclass(frozen=True, slots=True)
class Slot:
    number: int
    sequence: int
    payload: bytes


def encode_slot(sequence: int, payload: bytes) -> bytes:
    invariant(len(payload) <= PAYLOAD_BYTES_MAX, "slot payload too long", length=len(payload))
    head = _HEAD.pack(_MAGIC, len(payload), sequence)
    return head + _CRC.pack(crc32c(payload, crc32c(head))) + payload


def decode_slot(number: int, raw: bytes) -> Slot | None:
    """The slot in ``raw``, or ``None`` if it is invalid."""
    start = _HEAD.size + _CRC.size
    if len(raw) < start:
        return None
    magic, length, sequence = _HEAD.unpack_from(raw)
    payload = raw[start : start + length]
    if magic != _MAGIC or len(payload) != length:
        return None
    if crc32c(payload, crc32c(raw[: _HEAD.size])) != _CRC.unpack_from(raw, _HEAD.size)[0]:
        return None
    return Slot(number, sequence, payload)


def _read_slots(path: Path, count: int) -> list[Slot]:
    """The readable slots, newest first."""
    with path.open("rb") as file:
        raw = file.read(count * SLOT_BYTES)
    slots = (decode_slot(number, raw[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]) for number in range(count))
    return sorted((slot for slot in slots if slot), key=lambda slot: slot.sequence, reverse=True)


def _create_slots(fs: FileSystem, path: Path, count: int, payload: bytes) -> None:
    """Create or replace the file with every slot holding ``payload``, durably."""
    page = encode_slot(1, payload).ljust(SLOT_BYTES, b"\0")
    create_durably(fs, path, lambda fd: fs.write(fd, page * count, 0))


class _SlotFile:
    """The open file. The caller serialises writers and decides what a failed write means."""

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self._fs = fs
        self._fd = fs.open(path)
        self._open = True

    def write(self, number: int, sequence: int, payload: bytes) -> None:
        """Write one slot; not yet durable. Raises ``OSError``."""
        self._fs.write(self._fd, encode_slot(sequence, payload), number * SLOT_BYTES)

    def sync(self) -> None:
        """Make what was written durable. Raises ``OSError``."""
        self._fs.sync(self._fd)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._open:
            self._open = False
            self._fs.close(self._fd)


HARD_STATE_FILE: Final = "hard_state"
MIRROR_FILE: Final = "currterm"
_HARD_STATE_SLOTS: Final = 4
_PAIR: Final = 2
_STATE: Final = Struct(">q?h")
_FENCED: Final = 3
"""Stored after the vote of a member that is doubtful because it is fenced."""
_LOST: Final = 4
"""Stored after the vote of a member that is blank because it lost flushed entries."""
_PAIR_LOST: Final = "both copies of a term and vote, perhaps the newest ones, are unreadable"
_ADVICE: Final = (
    "Earlier votes may be lost, so this node must not vote: `dledger serve --repair` sets its log aside and "
    "lets it rejoin without a vote until it has caught up"
)


def encode_hard_state(state: HardState) -> bytes:
    """The slot's payload: term, whether the vote counts, length of the vote (-1 for none), vote, standing, doubt.

    The last two are omitted if the second implies them. Earlier versions, which do not know them, never read a state
    whose vote counts and should not; one that lost entries is doubtful to those that do not know ``_LOST``.
    """
    vote = state.vote.encode() if state.vote is not None else b""
    room = PAYLOAD_BYTES_MAX - _STATE.size - len(vote) - 1
    invariant(room >= 0, "node id too long to store", vote=state.vote)
    head = _STATE.pack(state.term, state.voter, len(vote) if state.vote is not None else -1)
    if state.standing in (Standing.FULL, Standing.BLANK) and not state.lost:
        return head + vote
    doubt = state.doubt.encode()[:room].decode(errors="ignore").encode()
    kind = _FENCED if state.fenced else _LOST if state.lost else state.standing
    return head + vote + bytes([kind]) + doubt


def decode_hard_state(payload: bytes) -> HardState:
    """Read a slot's payload."""
    term, counts, length = _STATE.unpack_from(payload)
    end = _STATE.size + max(length, 0)
    vote = NodeId(payload[_STATE.size : end].decode()) if length >= 0 else None
    if len(payload) <= end:
        return HardState(Term(term), vote, Standing.FULL if counts else Standing.BLANK)
    doubt, kind = payload[end + 1 :].decode(errors="replace"), payload[end]
    if counts:
        return HardState(Term(term), vote, Standing.FOUNDER, doubt)
    if kind == _LOST:
        return HardState(Term(term), vote, Standing.BLANK, doubt, lost=True)
    return HardState(Term(term), vote, Standing.DOUBTFUL, doubt, fenced=kind == _FENCED)


def create_hard_state(fs: FileSystem, directory: Path, state: HardState) -> None:
    """Create or replace the file durably with both slots holding ``state``."""
    _create_slots(fs, directory / HARD_STATE_FILE, _HARD_STATE_SLOTS, encode_hard_state(state))


def read_hard_state(directory: Path) -> HardState:
    """The saved state, in doubt if a newer one may be unreadable. Raises ``CorruptLogError`` if no slot is readable."""
    return _find(directory).state


def check_hard_state(directory: Path) -> None:
    """Raise ``CorruptLogError`` unless the newest state is readable for certain."""
    if _find(directory).pair_lost:
        raise CorruptLogError(directory / HARD_STATE_FILE, 0, _PAIR_LOST, _ADVICE)


class _Found(NamedTuple):
    state: HardState
    sequence: int
    pair: int
    pair_lost: bool
    """Whether a pair has no readable slot."""
    whole: bool
    """Whether both slots of the pair hold this state, and the others are readable, too."""


def _find(directory: Path) -> _Found:
    path = directory / HARD_STATE_FILE
    if not path.exists():
        raise CorruptLogError(path, 0, "the file with term and vote is missing", _ADVICE)
    slots = _read_slots(path, _HARD_STATE_SLOTS)
    if not slots:
        raise CorruptLogError(path, 0, "all slots of term and vote are unreadable", _ADVICE)
    newest = slots[0]
    state, pair = decode_hard_state(newest.payload), newest.number // _PAIR
    copies = sum(slot.number // _PAIR == pair and slot.sequence == newest.sequence for slot in slots)
    pair_lost = len({slot.number // _PAIR for slot in slots}) < _HARD_STATE_SLOTS // _PAIR
    if pair_lost:
        state = state.doubted(_PAIR_LOST)
    return _Found(state, newest.sequence, pair, pair_lost, copies == _PAIR and len(slots) == _HARD_STATE_SLOTS)


class FileHardState:
    """The durable term and vote; ``_lock`` guards all of it. A failed save poisons the node: it must stay silent.

    Opening makes what was read durable, in all slots if not in two: an earlier process may have been killed within a
    save. Raises ``CorruptLogError`` as ``read_hard_state`` does, and ``DiskError``.
    """

    def __init__(self, fs: FileSystem, directory: Path) -> None:
        self._fs = fs
        self._directory = directory
        self._lock = threading.Lock()
        found = _find(directory)
        self._state = found.state
        self._sequence = found.sequence
        self._pair = found.pair
        self._mirrored: HardState | None = None
        self._file = _SlotFile(fs, directory / HARD_STATE_FILE)
        self._poison: str | None = None
        try:
            if found.whole:
                self._file.sync()
            else:
                self.save(found.state)
                self.save(found.state)
        except (OSError, DiskError) as error:
            self._file.close()
            raise DiskError(f"cannot make term and vote in {directory} durable: {error}") from error

    def load(self) -> HardState:
        """The last saved state."""
        return self._state

    def save(self, state: HardState) -> None:
        """Return only when ``state`` is durable in two slots. Raises ``DiskError``, always again after one failure."""
        with self._lock:
            if self._poison:
                raise DiskError(self._poison)
            pair, sequence = 1 - self._pair, self._sequence + 1
            payload = encode_hard_state(state)
            try:
                for number in range(_PAIR * pair, _PAIR * (pair + 1)):
                    self._file.write(number, sequence, payload)
                self._file.sync()
            except OSError as error:
                self._poison = f"cannot save term and vote in {self._directory}: {error}"
                raise DiskError(self._poison) from error
            self._state, self._pair, self._sequence = state, pair, sequence

    def doubt(self, reason: str) -> None:
        """Take the member's standing away, durably, because it may have forgotten statements. Raises ``DiskError``.

        For findings before the node runs: in the running node the core decides.
        """
        self._save_if_other(self._state.doubted(reason))

    def lose(self, reason: str) -> None:
        """Note, durably, that flushed entries are about to be set aside; see ``doubt``. Raises ``DiskError``."""
        self._save_if_other(self._state.after_loss(reason))

    def _save_if_other(self, state: HardState) -> None:
        if state != self._state:
            self.save(state)

    def mirror(self) -> None:
        """Write the mirror, unless it is up to date. By one thread at a time; no save waits for it."""
        state = self._state
        if state != self._mirrored:
            text = f"voteLeader={state.vote or ''}\ncurrTerm={state.term}\n"
            with suppress(OSError):
                replace_durably(self._fs, self._directory / MIRROR_FILE, text.encode())
                self._mirrored = state

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._poison = self._poison or "the store is closed"
            self._file.close()


_CHECKPOINT_SLOTS: Final = 3
_RECORD: Final = Struct(">qqIqqqqqI?")
REPAIR_ADVICE: Final = (
    "Keep the files. If the group's other members hold the log, set this copy aside and fetch the log again: "
    "`dledger serve --repair`; otherwise restore the directory from a backup"
)


@record(frozen=True, slots=True, order=True)
class Mark:
    """An entry (or a boundary) up to which a property holds, with its end and chain CRC."""

    index: int
    position: int
    chain_crc: int


def mark_of(boundary: Boundary) -> Mark:
    """The mark of a log without entries after ``boundary``."""
    return Mark(boundary.index, boundary.position, boundary.chain_crc)


_GENESIS_MARK: Final = mark_of(GENESIS)


@record(frozen=True, slots=True)
class LogCheckpoint:
    """The recorded facts. ``indexed`` is the last entry whose index unit is durable."""

    flushed: Mark = _GENESIS_MARK
    indexed: LogIndex = NO_INDEX
    committed: LogIndex = NO_INDEX
    begin: Boundary = GENESIS
    clean_stop: bool = False

    def encode(self) -> bytes:
        return _RECORD.pack(
            self.flushed.index,
            self.flushed.position,
            self.flushed.chain_crc,
            self.indexed,
            self.committed,
            self.begin.index,
            self.begin.term,
            self.begin.position,
            self.begin.chain_crc,
            self.clean_stop,
        )


def decode_checkpoint(payload: bytes) -> LogCheckpoint:
    """Decode a slot's payload. Raises ``struct.error`` for a wrong length."""
    index, position, chain, indexed, committed, begin_index, term, begin_position, crc, clean = _RECORD.unpack(payload)
    begin = Boundary(LogIndex(begin_index), Term(term), Position(begin_position), crc)
    return LogCheckpoint(Mark(index, position, chain), LogIndex(indexed), LogIndex(committed), begin, clean)


def read_checkpoint(path: Path) -> LogCheckpoint:
    """The newest readable checkpoint. Raises ``CorruptLogError`` if there is none."""
    if not path.exists():
        raise CorruptLogError(path, 0, "the checkpoint is missing", REPAIR_ADVICE)
    for slot in _read_slots(path, _CHECKPOINT_SLOTS):
        if len(slot.payload) == _RECORD.size:
            return decode_checkpoint(slot.payload)
    raise CorruptLogError(path, 0, "no slot of the checkpoint is readable", REPAIR_ADVICE)


def create_checkpoint(fs: FileSystem, path: Path, checkpoint: LogCheckpoint) -> None:
    """Create or replace the file durably."""
    _create_slots(fs, path, _CHECKPOINT_SLOTS, checkpoint.encode())


class LogCheckpointFile:
    """The open checkpoint. Thread-safe: ``_lock`` guards the slot choice, ``_sync_lock`` admits one sync at a time.

    ``current`` is called under ``_lock``, so of two writes the later one never records older facts.
    """

    def __init__(self, fs: FileSystem, path: Path) -> None:
        slots = _read_slots(path, _CHECKPOINT_SLOTS)
        self._file = _SlotFile(fs, path)
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._sequence = slots[0].sequence if slots else 0
        self._durable = slots[0].number if slots else 0
        self._syncing: int | None = None
        self._durable_checkpoint: LogCheckpoint | None = None
        self._latest: LogCheckpoint | None = None

    def write(self, current: Callable[[], LogCheckpoint]) -> None:
        """Record the facts; they survive the process, but not yet a power cut. Raises ``OSError``."""
        with self._lock:
            self._write(current())

    def write_durably(self, current: Callable[[], LogCheckpoint]) -> None:
        """Record the facts and return when they are durable; does nothing if they already are. Raises ``OSError``."""
        with self._sync_lock:
            with self._lock:
                checkpoint = current()
                if checkpoint == self._durable_checkpoint == self._latest:
                    return
                slot = self._write(checkpoint)
                self._syncing = slot
            self._file.sync()
            with self._lock:
                self._durable, self._syncing = slot, None
                self._durable_checkpoint = checkpoint

    def _write(self, checkpoint: LogCheckpoint) -> int:
        slot = next(one for one in range(_CHECKPOINT_SLOTS) if one not in (self._durable, self._syncing))
        self._sequence += 1
        self._file.write(slot, self._sequence, checkpoint.encode())
        self._latest = checkpoint
        return slot

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


BOOT_RECORD_FILE: Final = "traces"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_GET_GENERATION: Final = 0x80087601
"""``FS_IOC_GETVERSION`` of 64-bit machines."""
_UNREADABLE: Final = "the record of its last start is unreadable"


@dataclass(frozen=True, slots=True)
class Inode:
    """The identity of a file; ``generation`` is 0 where the file system has none."""

    number: int
    generation: int

    def is_another_than(self, other: Inode) -> bool:
        """Whether they are certainly different files."""
        generations = {self.generation, other.generation}
        return self.number != other.number or (0 not in generations and len(generations) > 1)


@dataclass(frozen=True, slots=True)
class BootRecord:
    """The record of a start."""

    boot_id: str
    flush_mode: str
    inodes: Mapping[str, Inode]


@dataclass(frozen=True, slots=True)
class LastLife:
    """Recovery's knowledge of the previous run: none if it left no traces."""

    same_boot: bool = True
    """Whether the machine has not been restarted since, so that the page cache has everything written."""
    flushed_late: bool = False
    """Whether it acknowledged before flushing (``flush_mode=async``)."""
    replaced: str = ""
    """Why its files are not those that it left; empty if they are."""


def kernel_boot_id() -> str:
    """The kernel's id of this boot; empty if there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def boot_record_of(directory: Path, names: tuple[str, ...], flush_mode: FlushMode) -> BootRecord:
    """The traces of this start. Raises ``OSError``."""
    return BootRecord(kernel_boot_id(), flush_mode.value, {name: _inode(directory / name) for name in names})


def write_boot_record(fs: FileSystem, directory: Path, traces: BootRecord) -> None:
    """Write them durably, unless they are already there. Raises ``OSError``."""
    if _read(directory) == traces:
        return
    inodes = {name: [inode.number, inode.generation] for name, inode in traces.inodes.items()}
    text = json.dumps({"boot_id": traces.boot_id, "flush_mode": traces.flush_mode, "inodes": inodes}, indent=2)
    replace_durably(fs, directory / BOOT_RECORD_FILE, f"{text}\n".encode())


def last_life(directory: Path) -> LastLife:
    """Compare a directory with its traces. Raises ``OSError``."""
    if not (directory / BOOT_RECORD_FILE).exists():
        return LastLife()
    left = _read(directory)
    if left is None:
        return LastLife(same_boot=False, flushed_late=True, replaced=_UNREADABLE)
    replaced = [
        name
        for name, inode in left.inodes.items()
        if not (directory / name).exists() or _inode(directory / name).is_another_than(inode)
    ]
    names = ", ".join(sorted(replaced))
    return LastLife(
        same_boot=left.boot_id == kernel_boot_id(),
        flushed_late=left.flush_mode == FlushMode.ASYNC,
        replaced=f"the directory was copied or restored ({names} changed since its last start)" if replaced else "",
    )


def _read(directory: Path) -> BootRecord | None:
    try:
        found = json.loads(read_whole(directory / BOOT_RECORD_FILE))
        inodes = {str(name): Inode(int(number), int(age)) for name, (number, age) in found["inodes"].items()}
        return BootRecord(str(found["boot_id"]), str(found["flush_mode"]), inodes)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _inode(path: Path) -> Inode:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        generation = array.array("Q", [0])
        with suppress(OSError):  # most in-memory and network file systems have none
            fcntl.ioctl(fd, _GET_GENERATION, generation)
        return Inode(os.fstat(fd).st_ino, generation[0] & 0xFFFFFFFF)
    finally:
        os.close(fd)
