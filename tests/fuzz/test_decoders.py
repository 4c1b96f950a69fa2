"""Every decoder of what comes over a wire or from a disk gives a value or a typed error, for any bytes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message as ProtoMessage
from hypothesis import given
from hypothesis import strategies as st

from dledger import properties
from dledger.access import addresses, plain_yaml, rules, signing
from dledger.config import parse_members
from dledger.core.producer_payload import UnreadableProducersError, decode_payload
from dledger.errors import DLedgerError
from dledger.rpc import bulk_codec, client_codec, codec, push_frames
from dledger.store import checkpoint, hard_state, slots
from dledger.store.format import encode_record, scan_run
from dledger.types import EntryId, EntryRun, HardState, LogIndex, Position, Term
from rocketstore import numbering_record
from rocketstore.broker import codec as broker_codec
from rocketstore.message import batch
from rocketstore.message import properties as message_properties
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.message.record import encode_record as encode_message
from rocketstore.message.scan import scan_records
from tests.fuzz.shapes import fuzzed, messages, mutilated

Decode = Callable[[bytes], object]


def _wire_decoders() -> Iterator[tuple[str, Decode]]:
    """All of them, also those that are written tomorrow."""
    for module in (codec, client_codec, bulk_codec, broker_codec):
        for name, one in sorted(vars(module).items()):
            if name.startswith("decode_") and isinstance(one, types.FunctionType) and one.__module__ == module.__name__:
                required = [
                    each
                    for each in inspect.signature(one).parameters.values()
                    if each.default is inspect.Parameter.empty
                ]
                if len(required) == 1:
                    yield f"{module.__name__}.{name}", one


WIRE = dict(_wire_decoders())


def _kind_of(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> type[ProtoMessage]:
    """What a decoder parses."""
    module = inspect.getmodule(decode)
    assert module is not None
    parse, kinds = module.parse, []

    def note(kind: type[ProtoMessage], data: bytes) -> object:
        kinds.append(kind)
        return parse(kind, data)

    with monkeypatch.context() as patch:
        patch.setattr(module, "parse", note)
        with suppress(DLedgerError):
            decode(b"")
    return kinds[0]


def only_typed_errors(decode: Callable[..., object], *arguments: Any, also: tuple[type[Exception], ...] = ()) -> None:  # noqa: ANN401
    """Anything but a value, or an error that the caller is told about, is a bug."""
    with suppress(DLedgerError, *also):
        decode(*arguments)


def test_all_wire_decoders_are_found() -> None:
    """Else what is below proves nothing."""
    assert len(WIRE) >= 33
    assert {name.rpartition(".")[0] for name in WIRE} >= {codec.__name__, client_codec.__name__, bulk_codec.__name__}


@pytest.mark.parametrize("name", WIRE)
def test_what_comes_over_the_wire_is_taken_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields of any value, absent, twice, cut."""
    kind = _kind_of(WIRE[name], monkeypatch)

    @fuzzed()
    @given(messages(kind) | st.binary(max_size=100))
    def run(data: bytes) -> None:
        only_typed_errors(WIRE[name], data)

    run()


RECORD = encode_message(
    Message("topic", b"body", properties={"KEYS": "a b", "TAGS": "t"}), queue_offset=3, physical_offset=48
)
SLOT = slots.encode_slot(7, b"payload")
TEXTS: dict[str, tuple[Callable[[str], object], str]] = {
    "members": (parse_members, "n0-h:1;n1-h:2"),
    "rules": (
        rules.parse_rules,
        "accounts:\n- accessKey: a1234567\n  secretKey: s1234567\n  defaultTopicPerm: PUB|SUB\n",
    ),
    "yaml": (plain_yaml.parse, "a:\n- b: c\n  d: 'e, f'\n- 'g'\n"),
    "addresses": (addresses.parse_patterns, "10.0.0.*, 192.168.{1,2}.*, ::1"),
    "nonce": (signing.parse_nonce, "0123456789abcdef-17"),
    "properties": (properties.parse, "a = b\\\n  c\n# d\ne: \\u0041\n"),
}
BYTES: dict[str, tuple[Decode, bytes]] = {
    "record": (decode_record, RECORD),
    "scan": (lambda data: scan_records(data, 48, check_crc=True), RECORD * 3),
    "batch": (batch.decode_batch, batch.encode_batch([Message("topic", b"one"), Message("topic", b"two")])),
    "message properties": (message_properties.decode_properties, b"KEYS\x01a\x02TAGS\x01b\x02"),
    "numbering": (numbering_record.decode_numbering, b"\0" * 64),
    "slot": (lambda data: slots.decode_slot(0, data), SLOT),
    "producers": (decode_payload, b"\0" * 64),
    "frame": (lambda data: push_frames.parse_header(data.ljust(5, b"\0")[:5], 1 << 20), b"\1\0\0\0\7"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_taken_or_refused(name: str) -> None:
    """Of people and of programs."""
    parse, sound = TEXTS[name]

    @fuzzed(100)
    @given(mutilated(sound.encode()) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
    def run(data: bytes) -> None:
        only_typed_errors(parse, data.decode("utf-8", "replace"), also=(ValueError,))

    parse(sound)
    run()


@pytest.mark.parametrize("name", BYTES)
def test_stored_bytes_are_taken_or_refused(name: str) -> None:
    """Of the disk, and of other programs' files."""
    decode, sound = BYTES[name]
    also = (UnreadableProducersError,) if name == "producers" else ()

    @fuzzed(150)
    @given(mutilated(sound) | st.binary(max_size=200))
    def run(data: bytes) -> None:
        only_typed_errors(decode, data, also=also)

    run()


@fuzzed(200)
@given(st.data())
def test_a_run_of_entries_is_taken_up_to_the_first_wrong_byte(data: st.DataObject) -> None:
    """No mutilation gives other bytes than those that were written."""
    records, chain, whole = [], 0, b""
    for index in range(3):
        record, chain = encode_record(1, index, len(whole), b"body %d" % index, chain, 1, 0)
        records.append(record)
        whole += record
    found = data.draw(mutilated(whole))

    run = EntryRun(EntryId(Term(0), LogIndex(-1)), 0, LogIndex(0), LogIndex(2), Position(0), found)
    scan = scan_run(run)

    assert found[: scan.end_offset] == whole[: scan.end_offset]
    assert scan.end_offset in {0, len(records[0]), len(records[0] + records[1]), len(whole)}


@pytest.mark.parametrize("name", ["checkpoint", "hard_state"])
def test_a_small_file_of_any_bytes_is_read_or_refused(tmp_path: Path, name: str) -> None:
    """Of a member's memory: with the file named."""
    path = tmp_path / name
    payload = b"\0" * 81 if name == "checkpoint" else hard_state.encode_hard_state(HardState(Term(3)))

    @fuzzed(100)
    @given(mutilated(slots.encode_slot(3, payload).ljust(slots.SLOT_BYTES, b"\0") * 2))
    def run(data: bytes) -> None:
        path.write_bytes(data)
        if name == "checkpoint":
            only_typed_errors(checkpoint.read_checkpoint, path)
        else:
            only_typed_errors(hard_state.read_hard_state, tmp_path)

    run()
