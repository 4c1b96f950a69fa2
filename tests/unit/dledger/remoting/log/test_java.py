"""DLedger's own requests, byte for byte as its Java client sends them, and what it reads of the answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from dledger.config import ReplicationConfig, ServerConfig
from dledger.errors import LeaderHint, QuorumAckTimeoutError
from dledger.remoting.frame import Frame
from dledger.remoting.log_codec import JavaCode
from dledger.remoting.log_service import TOLERANT_BYTES_MAX
from dledger.rpc.ports import MemberStatus
from dledger.types import NodeId
from tests.support.fake_node import FakeNode
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until
from tests.unit.dledger.remoting.log.harness import GROUP, Served, served

BASE = {"code": 200, "group": GROUP, "remoteId": "n0", "term": -1}
"""What each of Java's requests has."""


@pytest.fixture
def serving() -> Iterator[Served]:
    """A node that leads a group of three, of which it knows two addresses."""
    members = (
        MemberStatus(NodeId("n0"), "h:20911", "h:20921"),
        MemberStatus(NodeId("n1"), "h:20912", "h:20922"),
        MemberStatus(NodeId("n2"), "h:20913", ""),
    )
    with served(node=FakeNode(members=members)) as found:
        yield found


@pytest.fixture
def client(serving: Served) -> Iterator[RemotingSocket]:
    """A connection to it."""
    with serving.dial() as found:
        yield found


def ask(client: RemotingSocket, code: JavaCode, **members: object) -> dict[str, Any]:  # Any: whatever JSON holds
    """The body of the answer."""
    return told(client.ask(code, body=json.dumps(BASE | members).encode()))


def told(answer: Frame) -> dict[str, Any]:
    """The body of an answer, whose frame always says 200."""
    assert answer.code == 200
    found: dict[str, Any] = json.loads(answer.body)
    return found


def text(body: bytes) -> str:
    """A body in JSON."""
    return base64.b64encode(body).decode()


def test_metadata_name_the_leader_and_the_addresses_for_clients(client: RemotingSocket) -> None:
    """Java's client looks both up; whose address is not known, it keeps the one that it was given."""
    found = ask(client, JavaCode.METADATA)
    assert (found["code"], found["leaderId"], found["term"]) == (200, "n0", 1)
    assert found["peers"] == {"n0": "h:20921", "n1": "h:20922"}


def test_an_append_and_a_get(client: RemotingSocket, serving: Served) -> None:
    """The entry has every field that Java's has; its checksums are signed numbers there."""
    appended = ask(client, JavaCode.APPEND, body=text(b"\x00body\xff"))
    found = ask(client, JavaCode.GET, beginIndex=0, maxSize=0)
    stored = serving.node.entries[0]

    assert (appended["code"], appended["index"], appended["pos"], appended["term"]) == (200, 0, 0, 1)
    (entry,) = found["entries"]
    assert bytes(number & 0xFF for number in entry.pop("body")) == stored.body == b"\x00body\xff"
    assert {name: number % 2**32 for name, number in entry.items()} == {
        "magic": stored.magic,
        "size": 48 + len(stored.body),
        "index": 0,
        "term": 1,
        "pos": 0,
        "channel": 0,
        "chainCrc": stored.chain_crc,
        "bodyCrc": stored.body_crc,
    }


def test_fastjsons_own_spelling_is_understood(client: RemotingSocket, serving: Served) -> None:
    """Members in its order, with a null; the body as text, and as fastjson2 has it."""
    one = b'{"body":"AGL/fw==","code":200,"group":"default","leaderId":null,"remoteId":"n0","term":-1}'
    two = b'{"body":[0,98,-1,127],"code":200,"group":"default","remoteId":"n0","term":-1}'
    empty = b'{"body":[],"code":200,"group":"default","remoteId":"n0","term":-1}'
    assert [told(client.ask(JavaCode.APPEND, body=body))["index"] for body in (one, two, empty)] == [0, 1, 2]
    assert serving.node.batches == [(b"\x00b\xff\x7f",), (b"\x00b\xff\x7f",), (b"",)]


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({"remoteId": "n1"}, 401),
        ({"group": "other"}, 400),
        ({"remoteId": "n1", "group": "other"}, 401),
        ({"body": "no base64!"}, 411),
        ({"body": 7}, 411),
        ({"body": [128]}, 411),
        ({"body": [-129]}, 411),
        ({"body": ["a"]}, 411),
        ({"body": [1.5]}, 411),
        ({"body": text(bytes(5 << 20))}, 411),
    ],
)
def test_an_append_is_refused_with_dledgers_code(
    client: RemotingSocket, serving: Served, members: dict[str, object], code: int
) -> None:
    """In its order: the addressee first, then the group."""
    found = ask(client, JavaCode.APPEND, **{"body": text(b"a")} | members)
    assert (found["code"], found["index"], found["pos"]) == (code, -1, -1)
    assert not serving.node.batches


@pytest.mark.parametrize("code", [JavaCode.APPEND, JavaCode.GET, JavaCode.LEADERSHIP_TRANSFER])
def test_who_does_not_lead_names_the_leader(code: JavaCode) -> None:
    """Java's client asks for it anew, and tries again once."""
    with served(node=FakeNode(leader=LeaderHint(NodeId("n1"), "h:1"))) as serving, serving.dial() as client:
        found = ask(client, code, body=text(b"a"), beginIndex=0, transfereeId="n2")
        assert (found["code"], found["leaderId"]) == (404, "n1")


def test_an_unknown_outcome_is_no_refusal(client: RemotingSocket, serving: Served) -> None:
    """502: it may be stored."""
    serving.node.fail_appends = [QuorumAckTimeoutError("no quorum")]
    assert ask(client, JavaCode.APPEND, body=text(b"a"))["code"] == 502


@pytest.mark.parametrize("index", [-1, 1, 9])
def test_a_get_outside_the_log_is_refused(client: RemotingSocket, index: int) -> None:
    """The next index, too."""
    ask(client, JavaCode.APPEND, body=text(b"a"))
    found = ask(client, JavaCode.GET, beginIndex=index)
    assert (found["code"], found["entries"]) == (410, [])


def test_a_transfer_is_of_the_present_term(client: RemotingSocket) -> None:
    """One that was meant for an earlier leadership does not depose this one."""
    transfer = JavaCode.LEADERSHIP_TRANSFER
    assert ask(client, transfer, transferId="n0", transfereeId="n1", term=1)["code"] == 200
    assert ask(client, transfer, transferId="n0", transfereeId="n1", term=0)["code"] == 404
    assert ask(client, transfer, transferId="n0", term=1)["code"] == 411


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"group":1}'])
@pytest.mark.parametrize("code", JavaCode)
def test_malformed_requests_are_refused(client: RemotingSocket, code: JavaCode, body: bytes) -> None:
    """With an answer in their form."""
    assert told(client.ask(code, body=body))["code"] in (400, 411)


def test_a_full_quota_is_dledgers_pending_full() -> None:
    """503: Java's client tries again, or tells its caller."""
    config = ServerConfig(client_port=0, replication=ReplicationConfig(pending_entries_max=2))
    with served(config) as serving, serving.dial() as client:
        serving.node.hold = True
        body = json.dumps(BASE | {"body": text(b"a")}).encode()
        first = client.begin(JavaCode.APPEND, body=body)
        wait_until(lambda: len(serving.node.held) == 1, "it was submitted")
        codes = {told(client.ask(JavaCode.APPEND, body=body))["code"] for _ in range(1)}
        serving.node.release()
        assert told(client.answer_to(first))["code"] == 200
    assert codes == {503}


def test_only_a_small_request_may_be_other_than_json(client: RemotingSocket, serving: Served) -> None:
    """Fastjson's variant takes the loop half a second for the largest frame."""
    odd = b"{'group':'default','body':'%s'}"
    assert told(client.ask(JavaCode.APPEND, body=odd % text(b"x" * 1000).encode()))["index"] == 0
    refused = client.ask(JavaCode.APPEND, body=odd % text(b"x" * TOLERANT_BYTES_MAX).encode())
    assert (told(refused)["code"], refused.remark) == (411, "malformed body: not JSON")
    usual = odd.replace(b"'", b'"') % text(b"x" * TOLERANT_BYTES_MAX).encode()
    assert told(client.ask(JavaCode.APPEND, body=usual))["index"] == 1


def test_an_entry_that_no_frame_holds_in_json_is_refused(client: RemotingSocket, serving: Served) -> None:
    """Up to five bytes for each of its own; others are read as usual, before and after."""
    serving.node.submit_append([b"\x80" * (4 << 20), b"\x00\x80" * (1 << 20)], lambda _: None)
    refused = ask(client, JavaCode.GET, beginIndex=0, maxSize=0)
    assert (refused["code"], refused["entries"]) == (411, [])
    (entry,) = ask(client, JavaCode.GET, beginIndex=1, maxSize=0)["entries"]
    assert entry["body"] == [0, -128] * (1 << 20)
