"""Whole frames of our own requests and their answers, byte for byte: what other programs may rely on."""

from __future__ import annotations

from dledger.errors import LeaderHint, NotLeaderError
from dledger.remoting import log_codec
from dledger.remoting.frame import Frame, decode, encode
from dledger.remoting.log_codec import LogCode, error_answer, error_of, success_bytes
from dledger.rpc.clients import group_codec
from dledger.rpc.clients.codec import Append, Read
from dledger.types import (
    AppendedBatch,
    ChangeKind,
    ClusterMember,
    Configuration,
    LogIndex,
    MemberChange,
    MemberRole,
    NodeId,
    Term,
)

REQUEST_HEADER = b'{"code":%d,"flag":0,"language":"PYTHON","opaque":7,"serializeTypeCurrentRPC":"JSON","version":409}'
ANSWER_HEADER = (
    b'{"code":%d,"extFields":{},"flag":1,"language":"PYTHON","opaque":7,%b'
    b'"serializeTypeCurrentRPC":"JSON","version":409}'
)


def framed(header: bytes, body: bytes) -> bytes:
    """A frame with a header in JSON."""
    return (4 + len(header) + len(body)).to_bytes(4) + len(header).to_bytes(4) + header + body


def test_an_append() -> None:
    """Two entries, unordered, of no producer."""
    body = bytes.fromhex("00000000 0000000000000000 00000002 07 00 64656661756c74 00000001 00000002 61 6263")
    request = Frame(LogCode.APPEND, 7, body=log_codec.encode_append(0, Append("default", (b"a", b"bc"))))
    assert encode(request) == framed(REQUEST_HEADER % 20000, body)


def test_the_answer_to_an_append() -> None:
    """Made without the general machinery, it is what that would make."""
    body = bytes.fromhex("0000000000000001 0000000000000005 00000001 00000000 0000000000000100")
    request = Frame(LogCode.APPEND, 7)
    batch = AppendedBatch(Term(1), LogIndex(5), LogIndex(5), (256,))
    assert success_bytes(request, log_codec.encode_appended(batch)) == framed(ANSWER_HEADER % (0, b""), body)
    assert encode(request.answer(body=body)) == framed(ANSWER_HEADER % (0, b""), body)


def test_a_read() -> None:
    """Of at most one entry, which may wait for a second."""
    body = bytes.fromhex("0000000000000005 00000001 00000000 00 000003e8 64656661756c74")
    request = Frame(LogCode.READ, 7, body=log_codec.encode_read(Read("default", LogIndex(5), 1), 1000))
    assert encode(request) == framed(REQUEST_HEADER % 20001, body)


def test_a_change_of_members() -> None:
    """A new voter in place of another one, if the configuration is still the one at index 5."""
    change = MemberChange(ChangeKind.ADD, NodeId("n4"), 3, "h", 9, replaces="n3", expected_index=LogIndex(5))
    body = bytes.fromhex("0a 07 64656661756c74 10 05 18 03 22 0d 0a 02 6e34 12 01 68 18 09 2a 02 6e33")
    request = Frame(LogCode.CHANGE_MEMBERS, 7, body=group_codec.encode_change("default", change))
    assert encode(request) == framed(REQUEST_HEADER % 20010, body)


def test_the_answer_to_a_change_of_members() -> None:
    """The configuration: who the members are, what they do, and at which index that is written."""
    members = (ClusterMember(NodeId("n4"), "h", 9, MemberRole.LEARNER, 3, 1, promote=True, replaces="n3"),)
    body = bytes.fromhex(
        "0a 03 08 c801 10 06 18 02 20 03"
        "2a 23 0a 02 6e34 12 03 683a39 22 07 6c6561726e6572 28 03 31 0100000000000000 38 01 42 02 6e33"
    )
    answer = group_codec.encode_changed(Configuration(members, LogIndex(6), Term(2), change_id=3))
    assert encode(Frame(LogCode.CHANGE_MEMBERS, 7).answer(body=answer)) == framed(ANSWER_HEADER % (0, b""), body)


def test_an_error() -> None:
    """The code is DLedger's, the body a ``Status``."""
    error = NotLeaderError("ask n1", leader=LeaderHint(NodeId("n1"), "h:1"))
    data = encode(error_answer(Frame(LogCode.APPEND, 7), error))
    status = bytes.fromhex("08 9403 12 06 61736b206e31 22 02 6e31 2a 03 683a31 32 0e") + b"NotLeaderError"
    assert data == framed(ANSWER_HEADER % (404, b'"remark":"ask n1",'), status)
    found = error_of(decode(memoryview(data)), "h:2")
    assert (type(found), str(found), found.leader) == (NotLeaderError, "ask n1", error.leader)
