"""The encoding of pushes and of the answers to them. Every append needs both, so they are fixed structures.

An append's structure is followed by raw log bytes: whole entry records as stored, verified by ``Log.check_run`` alone.
Otherwise decoding is as strict as in ``dledger.rpc.peers.codec``.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from struct import Struct
from typing import Final

from dledger.core.membership import CONFIGURATION_BYTES_MAX, decode_configuration, encode_configuration
from dledger.core.messages import (
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushKind,
    PushRequest,
    PushResponse,
    PushTruncate,
)
from dledger.core.noop_payload import UnreadablePayloadError
from dledger.errors import InvalidRequestError, ResponseCode
from dledger.layout import RecordLayout
from dledger.members import MEMBERS_MAX, Configuration
from dledger.rpc.fields import NUMBER_LIMIT
from dledger.types import EntryId, EntryRun, LogIndex, Position, Standing, Term

_HEAD: Final = (("kind", "u1"), ("term", "i8"), ("epoch", "i8"))
_PREVIOUS: Final = (("previous_term", "i8"), ("previous_index", "i8"), ("previous_chain_crc", "u4"))
LAYOUTS: Final = {
    PushKind.COMPARE: RecordLayout((*_HEAD, *_PREVIOUS, ("flushed_only", "u1"))),
    PushKind.TRUNCATE: RecordLayout(
        (*_HEAD, ("conflict_term", "i8"), ("conflict_index", "i8"), ("conflict_chain_crc", "u4"))
    ),
    PushKind.APPEND: RecordLayout(
        (*_HEAD, *_PREVIOUS, ("commit_index", "i8"), ("first_index", "i8"), ("last_index", "i8"), ("position", "i8"))
    ),
    PushKind.COMMIT: RecordLayout((*_HEAD, ("commit_index", "i8"))),
    PushKind.INSTALL: RecordLayout((*_HEAD, *_PREVIOUS, ("position", "i8"))),
}
ANSWER_LAYOUT: Final = RecordLayout(
    (
        *_HEAD,
        ("code", "i2"),
        ("standing", "u1"),
        ("verified_index", "i8"),
        ("flushed_index", "i8"),
        ("end_index", "i8"),
        ("conflict_term", "i8"),
        ("conflict_index", "i8"),
        ("boot_id", "i8"),
    )
)
_NEVER_NONE: Final = frozenset({"kind", "term", "epoch", "position", "boot_id"})
"""Numbers that are not -1; other signed ones may be, for "none"."""
_ENTRY: Final = Struct(">qq")
BYTES_MAX: Final = _ENTRY.size + CONFIGURATION_BYTES_MAX


class _Form:
    """Reads and writes one structure."""

    def __init__(self, layout: RecordLayout) -> None:
        struct = layout.struct()
        self.size: Final = struct.size
        self.pack: Final = struct.pack
        self._unpack = struct.unpack_from
        self._names = tuple(name for name, _ in layout.fields)
        self._never_none = itemgetter(*(at for at, name in enumerate(self._names) if name in _NEVER_NONE))

    def read(self, data: bytes | memoryview, *, is_whole: bool = True) -> tuple[int, ...]:
        """The numbers that ``data`` begins with, or is. Raises ``InvalidRequestError``."""
        if len(data) < self.size or (is_whole and len(data) > self.size):
            raise InvalidRequestError(f"a push or an answer of {len(data)} bytes: its kind has {self.size}")
        numbers = self._unpack(data)
        if min(numbers) < -1 or max(numbers) >= NUMBER_LIMIT or min(self._never_none(numbers)) < 0:
            said = ", ".join(f"{name}={number}" for name, number in zip(self._names, numbers, strict=True))
            raise InvalidRequestError(f"a push or an answer with a number out of range: {said}")
        return numbers


_FORMS: Final = {kind: _Form(layout) for kind, layout in LAYOUTS.items()}
_APPEND: Final = _FORMS[PushKind.APPEND]
_WITH_MORE: Final = frozenset({PushKind.APPEND, PushKind.COMPARE, PushKind.INSTALL})
"""Their numbers are followed by a part of the log, or perhaps by a configuration."""
_ANSWER: Final = _Form(ANSWER_LAYOUT)
_KINDS: Final = {kind.value: kind for kind in PushKind}
_CODES: Final = {code.value: code for code in ResponseCode}
_STANDINGS: Final = {standing.value: standing for standing in Standing}


def encode_push(push: PushRequest) -> tuple[bytes, ...]:
    """A push, in pieces: the log bytes of an append are not copied."""
    term, epoch = push.term, push.epoch
    numbers: tuple[int, ...]
    match push:
        case PushAppend(commit_index=commit_index, run=run):
            head = _APPEND.pack(
                PushKind.APPEND,
                term,
                epoch,
                run.previous.term,
                run.previous.index,
                run.previous_chain_crc,
                commit_index,
                run.first_index,
                run.last_index,
                run.position,
            )
            return head, run.data
        case PushCommit():
            numbers = (PushKind.COMMIT, term, epoch, push.commit_index)
        case PushCompare(previous=previous):
            known = (previous.term, previous.index, push.previous_chain_crc)
            numbers = (PushKind.COMPARE, term, epoch, *known, push.flushed_only)
            return _FORMS[PushKind.COMPARE].pack(*numbers), encode_configuration_entry(push.configuration)
        case PushTruncate(conflict=conflict):
            numbers = (PushKind.TRUNCATE, term, epoch, conflict.term, conflict.index, push.chain_crc)
        case PushInstall(before_begin=before):
            numbers = (PushKind.INSTALL, term, epoch, before.term, before.index, push.chain_crc, push.position)
            return _FORMS[PushKind.INSTALL].pack(*numbers), encode_configuration_entry(push.configuration)
    return (_FORMS[numbers[0]].pack(*numbers),)


def decode_push(data: bytes | memoryview) -> PushRequest:
    """A push. Raises ``InvalidRequestError``."""
    kind = _KINDS.get(data[0]) if data else None
    if kind is None:
        raise InvalidRequestError(f"a push of {len(data)} bytes and of no known kind")
    _, term, epoch, *numbers = _FORMS[kind].read(data, is_whole=kind not in _WITH_MORE)
    attempt = Term(term), epoch
    match kind:
        case PushKind.APPEND:
            *known, commit_index, first, last, position = numbers
            run = _run(known, first, last, position, bytes(data[_APPEND.size :]))
            return PushAppend(*attempt, LogIndex(commit_index), run)
        case PushKind.COMMIT:
            return PushCommit(*attempt, LogIndex(numbers[0]))
        case PushKind.COMPARE:
            known_term, known_index, crc, flushed_only = numbers
            before = EntryId(Term(known_term), LogIndex(known_index))
            members = decode_configuration_entry(data[_FORMS[kind].size :])
            return PushCompare(*attempt, before, crc, bool(flushed_only), members)
        case PushKind.TRUNCATE:
            known_term, known_index, crc = numbers
            return PushTruncate(*attempt, EntryId(Term(known_term), LogIndex(known_index)), crc)
        case PushKind.INSTALL:
            known_term, known_index, crc, position = numbers
            before = EntryId(Term(known_term), LogIndex(known_index))
            members = decode_configuration_entry(data[_FORMS[kind].size :])
            return PushInstall(*attempt, before, crc, Position(position), members)


def _run(known: list[int], first: int, last: int, position: int, data: bytes) -> EntryRun:
    term, index, crc = known
    if first < 0 or last < first or index != first - 1:
        raise InvalidRequestError(f"append of entries {first}..{last} after {index} is not contiguous")
    if not data:
        raise InvalidRequestError(f"append of entries {first}..{last} carries no data")
    previous = EntryId(Term(term), LogIndex(index))
    return EntryRun(previous, crc, LogIndex(first), LogIndex(last), Position(position), data)


def encode_answer(answer: PushResponse) -> bytes:
    """The answer to pushes."""
    return _ANSWER.pack(
        answer.kind,
        answer.term,
        answer.epoch,
        answer.code,
        answer.standing,
        answer.verified_index,
        answer.flushed_index,
        answer.end_index,
        answer.conflict.term,
        answer.conflict.index,
        answer.boot_id,
    )


def decode_answer(data: bytes | memoryview) -> PushResponse:
    """The answer to pushes. Raises ``InvalidRequestError``."""
    numbers = _ANSWER.read(data)
    kind, term, epoch, code, standing, verified, flushed, end, conflict_term, conflict_index, boot_id = numbers
    if kind not in _KINDS or standing not in _STANDINGS:
        raise InvalidRequestError(f"push kind {kind} or standing {standing} is unknown")
    return PushResponse(
        Term(term),
        epoch,
        _KINDS[kind],
        _CODES.get(code, ResponseCode.UNKNOWN),
        LogIndex(verified),
        LogIndex(flushed),
        LogIndex(end),
        EntryId(Term(conflict_term), LogIndex(conflict_index)),
        boot_id,
        _STANDINGS[standing],
    )


def encode_configuration_entry(configuration: Configuration | None) -> bytes:
    """A configuration between members: its entry's index, term and payload; empty for None."""
    if configuration is None:
        return b""
    return _ENTRY.pack(configuration.index, configuration.term) + encode_configuration(configuration)


def decode_configuration_entry(data: bytes | memoryview) -> Configuration | None:
    """The reverse. Raises ``InvalidRequestError``."""
    if not data:
        return None
    if not _ENTRY.size < len(data) <= BYTES_MAX:
        raise InvalidRequestError(f"a configuration of {len(data)} bytes")
    index, term = _ENTRY.unpack_from(data)
    payload = bytes(data[_ENTRY.size :])
    try:
        found = decode_configuration(payload)
    except UnreadablePayloadError as error:
        raise InvalidRequestError(str(error)) from error
    if found is None or encode_configuration(found) != payload:
        raise InvalidRequestError(f"malformed configuration of {len(payload)} bytes")
    if len(found.members) > MEMBERS_MAX:
        raise InvalidRequestError(f"a configuration of {len(found.members)} members; the limit is {MEMBERS_MAX}")
    if not (0 <= index < NUMBER_LIMIT and 0 <= term < NUMBER_LIMIT):
        raise InvalidRequestError(f"a configuration at entry {index} of term {term} is impossible")
    return replace(found, index=LogIndex(index), term=Term(term))
