"""The encoding of a configuration: the payload of the NOOP that puts it in force, and its form on disk and wire."""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from struct import error as StructError  # noqa: N812  # it is an exception
from typing import Final

from dledger.core.noop_payload import PayloadKind, UnreadablePayloadError, find_payload, kind_in, with_head
from dledger.core.ports import Log
from dledger.errors import InvalidRequestError
from dledger.members import ClusterMember, Configuration, MemberRole
from dledger.types import LogIndex, NodeId

CONFIGURATION_BYTES_MAX: Final = 4096

_TABLE: Final = Struct(">BQIH")
_MEMBER: Final = Struct(">QIBBHBBB")
_TEXT_BYTES_MAX: Final = 255
_PROMOTE: Final = 1


def encode_configuration(configuration: Configuration) -> bytes:
    """The payload of a configuration, without its index and term, which are those of its entry.

    Raises ``InvalidRequestError`` if it is too long.
    """
    members = configuration.members
    parts = [_TABLE.pack(0, configuration.change_id, configuration.next_number, len(members))]
    for one in members:
        texts = [text.encode() for text in (one.node_id, one.host, one.replaces)]
        lengths = [len(text) for text in texts]
        if max(lengths) > _TEXT_BYTES_MAX:
            raise InvalidRequestError(f"a name or an address of {max(lengths)} bytes; the limit is {_TEXT_BYTES_MAX}")
        flags = _PROMOTE if one.promote else 0
        parts.append(_MEMBER.pack(one.uid, one.number, one.role, flags, one.port, *lengths))
        parts += texts
    payload = with_head(PayloadKind.CONFIGURATION, b"".join(parts))
    if len(payload) > CONFIGURATION_BYTES_MAX:
        raise InvalidRequestError(
            f"the members' names and addresses take {len(payload)} bytes; the limit is {CONFIGURATION_BYTES_MAX}"
        )
    return payload


def decode_configuration(body: bytes) -> Configuration | None:
    """The configuration in a NOOP's body, without index and term; None if it holds none.

    Raises ``UnreadablePayloadError`` for one of a later version or a damaged one; other payloads may be unreadable.
    """
    found = find_payload(body) if kind_in(body) == PayloadKind.CONFIGURATION else None
    if found is None:
        return None
    try:
        return _decode(found[1])
    except (StructError, ValueError, InvalidRequestError) as error:
        raise UnreadablePayloadError(f"damaged configuration in the log: {error}") from error


def read_configuration(log: Log, index: LogIndex) -> Configuration | None:
    """The configuration that the entry at ``index`` puts in force, if it does.

    Raises ``UnreadablePayloadError`` and the errors of ``Log.read``.
    """
    entry = log.read(index)
    found = decode_configuration(entry.body)
    return None if found is None else replace(found, index=entry.index, term=entry.term)


def describe_configuration(configuration: Configuration) -> str:
    """The members, for people."""
    told = [
        f"{one.node_id} (learner)" if one.role is MemberRole.LEARNER else one.node_id for one in configuration.members
    ]
    return f"members: {', '.join(told)}"


def _decode(rest: bytes) -> Configuration:
    _, change_id, next_number, count = _TABLE.unpack_from(rest)
    at = _TABLE.size
    members = []
    for _ in range(count):
        uid, number, role, flags, port, *lengths = _MEMBER.unpack_from(rest, at)
        at += _MEMBER.size
        texts = []
        for length in lengths:
            texts.append(rest[at : at + length].decode())
            at += length
        name, host, replaces = texts
        promote = bool(flags & _PROMOTE)
        members.append(ClusterMember(NodeId(name), host, port, MemberRole(role), number, uid, promote, replaces))
    if at != len(rest) or len({one.node_id for one in members}) != count or not count:
        raise InvalidRequestError(f"{count} members, {at} of {len(rest)} bytes")
    return Configuration(tuple(members), next_number=next_number, change_id=change_id)
