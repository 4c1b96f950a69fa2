"""The encoding of requests that change the members, and of members in answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dledger.errors import DLedgerError, InvalidRequestError
from dledger.members import ANY_CONFIGURATION, ChangeKind, ClusterMember, Configuration, MemberChange
from dledger.pb import client_pb2 as pb
from dledger.rpc.clients.codec import SUCCESS, encode_member_role, member_role_of, raise_failure, status_of
from dledger.rpc.fields import index, name, parse
from dledger.types import LogIndex, NodeId, Term
from dledger.values import PORT_MAX, address_text, parse_address

CHANGE_ID_LIMIT: Final = 1 << 63
_SEPARATORS: Final = frozenset("-,;=/ ")


def encode_change(group: str, change: MemberChange) -> bytes:
    """Ask the leader for a change."""
    wire = pb.ChangeMembersRequest(group=group, change_id=change.change_id)
    if change.expected_index != ANY_CONFIGURATION:
        wire.expected_index = change.expected_index
    node_id = change.node_id
    match change.kind:
        case ChangeKind.ADD:
            wire.add.MergeFrom(
                pb.AddMember(
                    id=node_id,
                    host=change.host,
                    port=change.port,
                    learner=not change.promote,
                    replaces=change.replaces,
                )
            )
        case ChangeKind.PROMOTE:
            wire.promote = node_id
        case ChangeKind.DEMOTE:
            wire.demote = node_id
        case ChangeKind.REMOVE:
            wire.remove = node_id
        case ChangeKind.UPDATE:
            wire.update.MergeFrom(pb.UpdateMember(id=node_id, host=change.host, port=change.port))
    return wire.SerializeToString()


def decode_change(data: bytes) -> tuple[str, MemberChange]:
    """The group and the change, its fields in range. Raises ``InvalidRequestError``."""
    wire = parse(pb.ChangeMembersRequest, data)
    which = wire.WhichOneof("change")
    if which is None:
        raise InvalidRequestError("no change is named: add, promote, demote, remove or update a member")
    if not 0 < wire.change_id < CHANGE_ID_LIMIT:
        raise InvalidRequestError(f"change_id={wire.change_id} must be positive and below 2^63")
    expected = index(wire.expected_index, "expected_index") if wire.HasField("expected_index") else ANY_CONFIGURATION
    match which:
        case "add":
            added = wire.add
            change = MemberChange(
                ChangeKind.ADD,
                _node_id(added.id),
                wire.change_id,
                *_place(added.host, added.port),
                promote=not added.learner,
                replaces=name(added.replaces, "replaces"),
                expected_index=expected,
            )
        case "update":
            place = _place(wire.update.host, wire.update.port)
            node_id = _node_id(wire.update.id)
            change = MemberChange(ChangeKind.UPDATE, node_id, wire.change_id, *place, expected_index=expected)
        case _:
            node_id = _node_id(getattr(wire, which))
            change = MemberChange(ChangeKind(which), node_id, wire.change_id, expected_index=expected)
    return name(wire.group, "group"), change


def encode_changed(outcome: Configuration | DLedgerError) -> bytes:
    """The answer: the configuration that is committed now."""
    if isinstance(outcome, DLedgerError):
        return pb.ChangeMembersResponse(status=status_of(outcome)).SerializeToString()
    return pb.ChangeMembersResponse(
        status=SUCCESS,
        configuration_index=outcome.index,
        configuration_term=outcome.term,
        change_id=outcome.change_id,
        members=[
            pb.MemberInfo(
                id=one.node_id,
                peer_address=address_text(one.host, one.port),
                member_role=encode_member_role(one.role),
                number=one.number,
                uid=one.uid,
                promote=one.promote,
                replaces=one.replaces,
            )
            for one in outcome.members
        ],
    ).SerializeToString()


def decode_changed(data: bytes) -> Configuration:
    """The answer; ``next_number`` is not told. Raises the error that it tells of."""
    wire = parse(pb.ChangeMembersResponse, data)
    raise_failure(wire.status)
    return Configuration(
        tuple(_members(wire.members)),
        LogIndex(wire.configuration_index),
        Term(wire.configuration_term),
        change_id=wire.change_id,
    )


def _members(wire: Iterable[pb.MemberInfo]) -> Iterable[ClusterMember]:
    for one in wire:
        try:
            host, port = parse_address(one.peer_address)
        except ValueError as error:
            raise InvalidRequestError(f"member {one.id}: {error}") from error
        yield ClusterMember(
            NodeId(one.id),
            host,
            port,
            member_role_of(one.member_role),
            one.number,
            one.uid,
            one.promote,
            one.replaces,
        )


def _node_id(text: str) -> NodeId:
    """Ids are words of settings, so what separates words there may not be part of one."""
    if not text or not text.isprintable() or not _SEPARATORS.isdisjoint(text):
        raise InvalidRequestError(f"invalid member id {text[:64]!r}")
    return NodeId(name(text, "id"))


def _place(host: str, port: int) -> tuple[str, int]:
    if not name(host, "host") or host != host.strip() or not host.isprintable():
        raise InvalidRequestError("the member's host is missing, or no name of a host")
    if not 0 < port <= PORT_MAX:
        raise InvalidRequestError(f"port={port} must be between 1 and {PORT_MAX}")
    return host, port
