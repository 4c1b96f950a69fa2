"""A configuration as bytes."""

from __future__ import annotations

import pytest

from dledger.core.membership import (
    CONFIGURATION_BYTES_MAX,
    decode_configuration,
    encode_configuration,
    read_configuration,
)
from dledger.core.noop_payload import Registration, UnreadablePayloadError, decode_payload, encode_registration
from dledger.core.noops import describe_payload
from dledger.errors import InvalidRequestError
from dledger.types import MEMBERS_MAX, ClusterMember, Configuration, LogIndex, Magic, MemberRole, NodeId, Term
from tests.support.cluster import made_log
from tests.support.producers import newer_payload

_MEMBERS = Configuration(
    (
        ClusterMember(NodeId("a"), "10.0.0.1", 20911, number=0, uid=2**64 - 1),
        ClusterMember(NodeId("b"), "::1", 65535, MemberRole.LEARNER, 7, promote=True, replaces="a"),
    ),
    next_number=8,
    change_id=2**63,
)


def test_a_configuration_comes_back_from_its_bytes_inside_any_record() -> None:
    """A broker's NOOP is a record of its own."""
    assert decode_configuration(b"record" + encode_configuration(_MEMBERS) + b"topic") == _MEMBERS


def test_other_bodies_hold_no_configuration() -> None:
    """Neither do those that tell of producers; and producers are not told of by a configuration."""
    assert decode_configuration(b"begins a term") is None
    assert decode_configuration(encode_registration(Registration("p", 1))) is None
    assert decode_payload(encode_configuration(_MEMBERS)) is None
    assert decode_configuration(newer_payload()) is None


def test_a_configuration_of_a_later_version_is_an_error() -> None:
    """Who cannot know the members must not take part."""
    newer = bytearray(encode_configuration(_MEMBERS))
    newer[8] = 2
    with pytest.raises(UnreadablePayloadError, match="version 2"):
        decode_configuration(bytes(newer))


@pytest.mark.parametrize(
    "member",
    [
        ClusterMember(NodeId("a"), "\u00fc" * 128, 20911),
        ClusterMember(NodeId("\U0001f600" * 64), "h", 20911),
        ClusterMember(NodeId("a"), "h", 20911, replaces="x" * 256),
    ],
)
def test_what_would_not_come_back_as_it_was_is_not_written(member: ClusterMember) -> None:
    """Cut within a letter, it would stop every member for good: nobody could read who belongs to the group."""
    with pytest.raises(InvalidRequestError, match="256 bytes"):
        encode_configuration(Configuration((member,)))


def test_its_index_and_term_are_those_of_its_entry() -> None:
    """Nothing in the payload could contradict them."""
    log = made_log(1, 1)
    log.append_as_leader(Term(3), [encode_configuration(_MEMBERS)], Magic.NOOP)

    found = read_configuration(log, LogIndex(2))

    assert found is not None
    assert (found.index, found.term, found.members) == (2, 3, _MEMBERS.members)
    assert read_configuration(log, LogIndex(1)) is None


@pytest.mark.parametrize("at", range(9, 90))
def test_damaged_configurations_are_refused_or_mean_another_sound_one(at: int) -> None:
    """Nothing but the named error comes out of any change of one byte."""
    payload = encode_configuration(_MEMBERS)
    for value in (0, 1, 255):
        changed = bytearray(payload)
        changed[min(at, len(payload) - 1)] = value
        for data in (bytes(changed), bytes(changed[:at])):
            try:
                found = decode_configuration(data)
            except UnreadablePayloadError:
                continue
            assert found is None or found.members


def test_the_most_members_with_long_names_fit() -> None:
    """And longer ones are refused before anything is written."""
    many = [ClusterMember(NodeId(f"{number:064}"), "h" * 200, 1) for number in range(MEMBERS_MAX)]
    assert len(encode_configuration(Configuration(tuple(many)))) <= CONFIGURATION_BYTES_MAX
    longer = [ClusterMember(NodeId(f"{number:0128}"), "h" * 253, 1) for number in range(MEMBERS_MAX)]
    with pytest.raises(InvalidRequestError, match="the limit is 4096"):
        encode_configuration(Configuration(tuple(longer)))


def test_a_no_op_that_tells_of_members_can_be_shown() -> None:
    """Instead of its bytes."""
    assert describe_payload(encode_configuration(_MEMBERS)) == "members: a, b (learner)"
