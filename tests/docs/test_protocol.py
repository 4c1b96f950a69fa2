"""``docs/protocol.md``: its messages are those of the wire, and the tests that it names exist."""

from __future__ import annotations

import ast
import itertools
import re
from typing import Final

import pytest

from dledger.pb import raft_pb2
from dledger.remoting import log_codec as log_codec
from dledger.remoting.codes import ANNOUNCED
from dledger.remoting.connection import REQUEST_BYTES_MAX, REQUESTS_MAX
from dledger.remoting.log_codec import JavaCode, LogCode
from dledger.rpc.clients.codec import APPEND_ENTRIES_MAX
from dledger.rpc.peers import frames
from tests.docs.documents import ROOT, documents, lines, table_below

PROTOCOL: Final = ROOT / "docs" / "protocol.md"
_NOT_SHOWN: Final = {
    "Header",
    "EntryId",
    "Install",
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


def test_the_numbers_of_pushes_are_those_of_the_wire() -> None:
    """Of each push and of the answer: their names and types, in order."""
    rows = table_below(PROTOCOL, "Pushes")
    shown = {row[0]: re.findall(r"`(\w+)` (\w+)", row[1]) for row in rows}
    types = {"u1": "u8", "i2": "i16", "u4": "u32", "i8": "i64"}

    layouts = {kind.name: layout for kind, layout in frames.LAYOUTS.items()} | {"answer": frames.ANSWER_LAYOUT}

    head = [("kind", "u8"), ("term", "i64"), ("epoch", "i64")]
    assert {name: head + numbers for name, numbers in shown.items()} == {
        name: [(field, types[kind]) for field, kind in layout.fields] for name, layout in layouts.items()
    }
    assert [row[0] for row in rows] == [kind.name for kind in sorted(frames.LAYOUTS)] + ["answer"]


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


def test_the_request_codes_of_clients_are_those_of_the_wire() -> None:
    """DLedger's, and ours with the permissions that they need."""
    texts = PROTOCOL.read_text()
    rows = dict(re.findall(r"^\| (\d{5}) ([A-Z_]+) \|", texts, re.MULTILINE))
    assert {int(code): name for code, name in rows.items()} == {
        **{code.value: code.name for code in JavaCode},
        **{code.value: code.name for code in LogCode},
    }
    assert f"`{ANNOUNCED['dledger']}`: clients use none" in texts
    assert f"at most {APPEND_ENTRIES_MAX}: all are stored" in texts
    assert f"at most {log_codec.WAIT_MS_MAX:,}, to wait" in texts
    assert f"{REQUESTS_MAX} requests or {REQUEST_BYTES_MAX >> 20} MiB" in texts


@pytest.mark.parametrize(
    ("table", "packed"),
    [
        ("append", log_codec._APPEND.format),
        ("answer to an append", log_codec._APPENDED.format),
        ("read", log_codec._READ.format),
    ],
)
def test_the_fixed_parts_of_bodies_are_drawn_as_they_are_sent(table: str, packed: str) -> None:
    """Each field with its type, in order."""
    below = PROTOCOL.read_text().partition(f"\n| {table} | type |")[2].splitlines()[2:]
    kinds = [line.split("|")[2].strip() for line in itertools.takewhile(lambda line: line.startswith("|"), below)]
    letters = {"u8": "B", "u32": "I", "i64": "q"}
    fixed = "".join(letters[kind] for kind in itertools.takewhile(lambda kind: kind in letters, kinds))
    assert ">" + fixed == packed


def test_every_test_that_is_named_exists() -> None:
    """A claim "tested in" must not outlive its test."""
    defined = {
        node.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
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
