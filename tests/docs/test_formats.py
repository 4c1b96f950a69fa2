"""``docs/formats.md``: each table against the struct that packs it, each example against real bytes."""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from dledger.core import membership, noop_payload
from dledger.store import durable_state
from dledger.store import durable_state as node_checkpoint
from dledger.store import format as entries
from dledger.store.identity import StoreIdentity
from dledger.types import ClusterMember, Configuration, HardState, MemberRole, NodeId, Standing, Term
from rocketstore.consume_queue import files
from rocketstore.index import format as index_format
from rocketstore.message import record
from rocketstore.store import directory as store_checkpoint
from rocketstore.timer import hours as timer_entries
from tests.docs.documents import ROOT, lines, table_below

FORMATS: Final = ROOT / "docs" / "formats.md"
GOLDEN: Final = ROOT / "tests" / "interop" / "golden"

_TYPES: Final = {
    "B": "u8",
    "i": "i32",
    "q": "i64",
    "I": "u32",
    "Q": "u64",
    "h": "i16",
    "H": "u16",
    "?": "bool",
    "s": "bytes",
}

_LATER_AT: Final = store_checkpoint._OWN_AT + store_checkpoint._OWN.size + store_checkpoint._CRC.size
LAYOUTS: Final[dict[str, tuple[tuple[int, struct.Struct], ...]]] = {
    "Entry": ((0, entries.HEADER),),
    "Blank": ((0, entries.BLANK),),
    "Producers": ((0, noop_payload._HEAD),),
    "Producers: snapshot": ((14, noop_payload._TABLE),),
    "Producers: one of a snapshot": ((22, noop_payload._PRODUCER),),
    "Producers: a run": ((50, noop_payload._RUN),),
    "Producers: registration": ((14, noop_payload._REGISTRATION),),
    "Members": ((14, membership._TABLE),),
    "Members: one of them": ((29, membership._MEMBER),),
    "Index unit": ((0, entries.UNIT),),
    "Slot": ((0, durable_state._HEAD), (durable_state._HEAD.size, durable_state._CRC)),
    "hard_state": ((0, durable_state._STATE),),
    "checkpoint": ((0, node_checkpoint._RECORD),),
    "Message": ((0, record._STRUCTS[0]),),
    "End of a file": ((0, record.BLANK),),
    "Consume queue unit": ((0, files._UNIT),),
    "Timed message": ((0, timer_entries.ENTRY.struct()),),
    "Index file header": ((0, index_format.HEADER),),
    "Index file entry": ((0, index_format.ENTRY),),
    "Checkpoint of the message store": (
        (0, store_checkpoint._TIMES),
        (store_checkpoint._OWN_AT, store_checkpoint._OWN),
        (store_checkpoint._OWN_AT + store_checkpoint._OWN.size, store_checkpoint._CRC),
        (_LATER_AT, store_checkpoint._LATER),
        (_LATER_AT + store_checkpoint._LATER.size, store_checkpoint._CRC),
    ),
}
"""Heading to the structs that the code packs it with, and where each begins."""


def _golden(archive: str, name: str, start: int, length: int) -> bytes:
    with zipfile.ZipFile(GOLDEN / f"{archive}.zip") as source:
        return source.read(name)[start : start + length]


def _entry() -> bytes:
    piece = entries.Piece(0x506, [b"hello"])
    return entries.encode_piece(1, 0x102, 0x304, piece, 0).records


def _slot() -> bytes:
    return durable_state.encode_slot(
        7, durable_state.encode_hard_state(HardState(Term(2), NodeId("n0"), standing=Standing.FULL))
    )


EXAMPLES: Final[dict[str, Callable[[], bytes]]] = {
    "Entry": _entry,
    "Blank": lambda: entries.blank_head(300),
    "Index unit": lambda: entries.encode_piece(1, 0x102, 0x304, entries.Piece(0x506, [b"hello"]), 0).units,
    "Slot": _slot,
    "hard_state": lambda: durable_state.encode_hard_state(HardState(Term(2), NodeId("n0"), standing=Standing.FULL)),
    "Message": lambda: _golden("plain", "commitlog/00000000000000000000", 0, 115),
    "Consume queue unit": lambda: _golden("plain", "consumequeue/%RETRY%group-1/0/00000000000000000000", 0, 20),
    "Index file header": lambda: _golden("plain", "index/20261121041535747", 0, 40),
}
"""The bytes that the document shows: from files that RocketMQ wrote, or made by the code now."""


def dump(data: bytes) -> str:
    """As the document shows bytes."""
    rows = []
    for at in range(0, len(data), 16):
        piece = data[at : at + 16]
        halves = "  ".join(" ".join(f"{one:02x}" for one in half) for half in (piece[:8], piece[8:]) if half)
        text = "".join(chr(one) if 32 <= one < 127 else "." for one in piece)
        rows.append(f"{at:04x}  {halves:<48}  {text}")
    return "\n".join(rows)


def _fields(layout: struct.Struct, start: int) -> list[tuple[int, int, str]]:
    """Offset, length and type of each field."""
    found: list[tuple[int, int, str]] = []
    for count, kind in re.findall(r"(\d*)([a-zA-Z?])", layout.format):
        length = struct.calcsize(f">{count}s") if kind == "s" else struct.calcsize(f">{kind}")
        for _ in range(1 if kind == "s" else int(count or 1)):
            found.append((start, length, _TYPES[kind]))
            start += length
    return found


@pytest.mark.parametrize("heading", LAYOUTS)
def test_a_drawn_layout_is_the_one_of_the_code(heading: str) -> None:
    """Offsets, lengths and types of the table are those of the structs; only what is of variable length follows."""
    rows = [row for row in table_below(FORMATS, heading) if re.fullmatch(r"\d+", row[0]) and row[1].isdigit()]

    drawn = [(int(row[0]), int(row[1]), row[2]) for row in rows]

    assert drawn == [field for start, layout in LAYOUTS[heading] for field in _fields(layout, start)]


@pytest.mark.parametrize("heading", EXAMPLES)
def test_a_worked_example_shows_real_bytes_and_what_they_mean(heading: str) -> None:
    """The dump is the golden vector, and the table's example column is what the code's struct reads there."""
    shown = _hex_below(heading)
    data = EXAMPLES[heading]()
    rows = [row for row in table_below(FORMATS, heading) if re.fullmatch(r"\d+", row[0]) and row[1].isdigit()]

    values = [value for start, layout in LAYOUTS[heading] for value in layout.unpack_from(data, start)]

    assert shown == dump(data)
    assert [_example(row[4]) for row in rows] == values


def test_the_payloads_of_no_ops_show_real_bytes() -> None:
    """What the tables give as examples, packed by the code."""
    runs = ((0, 3, 5), (5, 11, 2))
    snapshot = noop_payload.encode_snapshot(5, [noop_payload.ProducerRecord("sink/0", 4, 7, 60_000, runs)])
    registration = noop_payload.encode_registration(noop_payload.Registration("sink/0", 4, 2))
    member = ClusterMember(
        NodeId("n4"), "10.0.0.4", 30911, MemberRole.LEARNER, 3, 0x1122334455667788, promote=True, replaces="n3"
    )
    members = membership.encode_configuration(Configuration((member,), next_number=4, change_id=77))
    text = FORMATS.read_text()

    for payload in (snapshot, registration, members):
        assert f"```hex\n{dump(payload)}\n```" in text


def test_the_drawing_of_an_entry_has_its_offsets() -> None:
    """The numbers above the boxes."""
    numbers = next(line.text for line in lines(FORMATS) if line.fence == "text" and re.fullmatch(r"[\d ]+", line.text))

    fields = _fields(entries.HEADER, 0)

    assert list(map(int, numbers.split())) == [*(start for start, _, _ in fields), entries.HEADER.size]


def _hex_below(heading: str) -> str:
    found: list[str] = []
    below = False
    for line in lines(FORMATS):
        if line.fence is None and line.text.startswith("#"):
            if found:
                break
            below = line.text.lstrip("# ") == heading
        elif below and line.fence == "hex":
            found.append(line.text)
    return "\n".join(found)


def _example(cell: str) -> int | bool | bytes:
    text = cell.strip("`")
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"0x[0-9a-f]+", text):
        return int(text, 16)
    if address := re.fullmatch(r"(\d+)\.(\d+)\.(\d+)\.(\d+)", text):
        return bytes(map(int, address.groups()))
    return text.encode()


def test_fixed_numbers_of_the_document_are_those_of_the_code() -> None:
    """Sizes, magics and names that are said in sentences."""
    text = FORMATS.read_text()

    for said in (
        f"{durable_state.SLOT_BYTES} bytes",
        f"at most {durable_state.PAYLOAD_BYTES_MAX} bytes",
        f"`0x{record.MESSAGE_MAGIC & 0xFFFFFFFF:X}`",
        f"`0x{record.BLANK_MAGIC & 0xFFFFFFFF:X}`",
        f"{store_checkpoint.CHECKPOINT_BYTES} bytes",
        f"({', '.join(map(str, files.FILLER))})",
    ):
        assert said in text, said
    assert all(f'"{name}"' in text for name in StoreIdentity.__dataclass_fields__)


def test_every_file_of_a_directory_is_described(tmp_path: Path) -> None:
    """What lies in a node's directory after a start has a heading or a line."""
    from dledger.clock import Clock
    from dledger.config import StoreConfig
    from dledger.store.file_store import FileStore

    config = StoreConfig(base_dir=tmp_path, segment_bytes=1 << 16, index_segment_bytes=1 << 15)
    store = FileStore.open(config, cluster_id="c", group="g", node_id=NodeId("n0"), clock=Clock())
    store.hard_state.save(HardState(Term(1), NodeId("n0"), standing=Standing.FULL))
    store.close()

    names = {path.name for path in (tmp_path / "dledger-n0").iterdir()}

    tree = FORMATS.read_text().partition("```")[2].partition("```")[0]
    assert {name for name in names if not re.search(rf"  {name}\b", tree)} == set()
    assert names >= {"data", "index", "checkpoint", "hard_state", "identity", "lock", "currterm"}
