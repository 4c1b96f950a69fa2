"""Term and vote, durable before any message carries them.

A slot file of two pairs of slots. ``save`` writes the state into both slots of one pair, the pairs taking turns, with
one sync, because a vote waits for it. So:

- while one pair is being written, the other one holds the state before, durably: no torn write loses that;
- once ``save`` has returned, two slots hold the state: one bad slot cannot bring back an older vote;
- a pair without a readable slot may have held a newer state: the other one is then in doubt, and the member
  has no vote until it has regained its standing. (Or a power cut tore both sectors of one save: then the doubt costs no
  more than that.)

A file without a readable slot refuses to load; defaults would be a forgotten vote.

``currterm`` is a mirror in DLedger's format for people and Java tools. Nothing here reads it, unless Java has used the
directory: it is written now and then, and at a stop, and a failure to write it (a full disk) stops nothing.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from dledger.errors import CorruptLogError, DiskError, invariant
from dledger.store.fs import FileSystem, replace_durably
from dledger.store.slots import PAYLOAD_BYTES_MAX, SlotFile, create_slots, read_slots
from dledger.types import HardState, NodeId, Standing, Term

HARD_STATE_FILE: Final = "hard_state"
MIRROR_FILE: Final = "currterm"
_SLOTS: Final = 4
_PAIR: Final = 2
_HEAD: Final = Struct(">q?h")
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
    room = PAYLOAD_BYTES_MAX - _HEAD.size - len(vote) - 1
    invariant(room >= 0, "node id too long to store", vote=state.vote)
    head = _HEAD.pack(state.term, state.voter, len(vote) if state.vote is not None else -1)
    if state.standing in (Standing.FULL, Standing.BLANK) and not state.lost:
        return head + vote
    doubt = state.doubt.encode()[:room].decode(errors="ignore").encode()
    kind = _FENCED if state.fenced else _LOST if state.lost else state.standing
    return head + vote + bytes([kind]) + doubt


def decode_hard_state(payload: bytes) -> HardState:
    """Read a slot's payload."""
    term, counts, length = _HEAD.unpack_from(payload)
    end = _HEAD.size + max(length, 0)
    vote = NodeId(payload[_HEAD.size : end].decode()) if length >= 0 else None
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
    create_slots(fs, directory / HARD_STATE_FILE, _SLOTS, encode_hard_state(state))


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
    slots = read_slots(path, _SLOTS)
    if not slots:
        raise CorruptLogError(path, 0, "all slots of term and vote are unreadable", _ADVICE)
    newest = slots[0]
    state, pair = decode_hard_state(newest.payload), newest.number // _PAIR
    copies = sum(slot.number // _PAIR == pair and slot.sequence == newest.sequence for slot in slots)
    pair_lost = len({slot.number // _PAIR for slot in slots}) < _SLOTS // _PAIR
    if pair_lost:
        state = state.doubted(_PAIR_LOST)
    return _Found(state, newest.sequence, pair, pair_lost, copies == _PAIR and len(slots) == _SLOTS)


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
        self._file = SlotFile(fs, directory / HARD_STATE_FILE)
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
