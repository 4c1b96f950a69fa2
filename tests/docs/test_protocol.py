"""``docs/protocol.md``: its messages are those of the wire, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from typing import Final

import pytest

from dledger.pb import raft_pb2
from dledger.rpc.peers import frames
from tests.docs.documents import ROOT, documents, lines, table_below

PROTOCOL: Final = ROOT / "docs" / "protocol.md"
_NOT_SHOWN: Final = {
    "Header",
    "EntryId",
    "PushRequest",
    "HandshakeRequest",
    "HandshakeResponse",
}
"""Described in sentences."""


def test_the_messages_are_those_of_the_wire() -> None:
    """Every message of raft.proto, with all its fields but the header."""
    shown = {row[0]: set(re.findall(r"`(\w+)`", row[1])) for row in table_below(PROTOCOL, "Messages")}

    wire = {
        name: {field.name for field in message.fields} - {"header"}
        for name, message in raft_pb2.DESCRIPTOR.message_types_by_name.items()
    }

    assert set(shown) | _NOT_SHOWN == set(wire)
    assert shown == {name: wire[name] for name in shown}


def test_a_frame_is_drawn_as_it_is_sent() -> None:
    """Kind and length, then the payload."""
    rows = table_below(PROTOCOL, "Frames")
    kinds = re.findall(r"(\d+) (?=[a-z])", rows[0][4])

    packed = frames.pack(frames.FrameKind.PUSH, b"payload")

    assert [row[:3] for row in rows[:2]] == [["0", "1", "u8"], ["1", "4", "u32"]]
    assert packed == bytes([10]) + (7).to_bytes(4, "big") + b"payload"
    assert int(rows[2][0]) == frames.HEADER_BYTES
    assert list(map(int, kinds)) == [kind.value for kind in frames.FrameKind]


def test_the_purposes_of_connections_are_those_of_the_handshake() -> None:
    """By number and name."""
    rows = table_below(PROTOCOL, "Connections")

    assert [row[0] for row in rows] == [f"{one.value} {one.name.lower()}" for one in frames.Purpose]


def test_every_test_that_is_named_exists() -> None:
    """A claim "tested in" must not outlive its test."""
    defined = {
        node.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }

    named = [
        (line.place, name)
        for path in documents()
        for line in lines(path)
        for name in re.findall(r"`(test_\w+)`", line.text)
    ]

    assert len(named) > 30
    assert [one for one in named if one[1] not in defined] == []


@pytest.mark.parametrize("heading", ["Differences from the papers", "Differences from Java's DLedger"])
def test_every_difference_says_where_it_is_tested(heading: str) -> None:
    """Except what is not here."""
    untested = [row[0] for row in table_below(PROTOCOL, heading) if not re.search(r"`test_\w+`", row[3])]

    assert [one for one in untested if not one.startswith("no ")] == []
