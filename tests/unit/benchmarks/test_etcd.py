"""The hand-made encoding of etcd's two messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import etcd
from benchmarks.processes import ChildError


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_varints_are_read_back(value: int) -> None:
    """Reading undoes writing and stops where the number ends."""
    encoded = etcd.varint(value)

    assert etcd.read_varint(encoded + b"\xff", 0) == (value, len(encoded))


def test_a_put_request_is_protobuf() -> None:
    """Golden bytes: field 1 = key, field 2 = value, both length-delimited."""
    assert etcd.put_request(b"k", b"v" * 300) == b"\x0a\x01k\x12\xac\x02" + b"v" * 300


@pytest.mark.parametrize(("leader", "expected"), [(7, True), (8, False), (0, False)])
def test_the_leader_is_the_member_that_names_itself(leader: int, expected: bool) -> None:
    """StatusResponse: the header's member id (2) against the leader (4); 0 is no leader."""
    header = b"\x08\x01\x10\x07"
    status = b"\x0a" + etcd.varint(len(header)) + header + b"\x12\x063.4.23" + b"\x20" + etcd.varint(leader)

    assert etcd.leads(status) is expected


def test_an_empty_status_is_no_leader() -> None:
    """A member that knows nothing yet answers with no fields."""
    assert not etcd.leads(b"")


def test_an_unexpected_wire_type_is_an_error() -> None:
    """Better than reading on at a wrong offset."""
    with pytest.raises(ChildError, match="wire type 5"):
        etcd.fields(b"\x0d\x00\x00\x00\x00")
