"""Every decoder of what comes over a wire or from a disk gives a value or a typed error, for any bytes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message as ProtoMessage
from hypothesis import given
from hypothesis import strategies as st

from dledger import properties, settings, values
from dledger.access import addresses, guard, rules
from dledger.access.rules import parse_permission
from dledger.client.discovery import parse_addresses
from dledger.config import FlushMode, parse_members
from dledger.core.membership import decode_configuration, encode_configuration
from dledger.core.messages import PushKind
from dledger.core.noop_payload import UnreadablePayloadError, decode_payload
from dledger.errors import DLedgerError, InvalidRequestError
from dledger.records import RecordLayout
from dledger.rpc.clients import bulk_codec
from dledger.rpc.clients import codec as client_codec
from dledger.rpc.peers import codec, frames
from dledger.store import durable_state
from dledger.store.durable_state import BOOT_RECORD_FILE, boot_record_of, last_life, write_boot_record
from dledger.store.format import encode_record, scan_run
from dledger.store.fs import FileSystem
from dledger.store.identity import (
    IDENTITY_FILE,
    MEMBERS_FILE,
    SavedMembers,
    StoreIdentity,
    read_identity,
    read_members,
    write_identity,
    write_members,
)
from dledger.types import (
    ClusterMember,
    Configuration,
    EntryId,
    EntryRun,
    HardState,
    LogIndex,
    MemberRole,
    NodeId,
    Position,
    Term,
)
from dledger_spark.option_values import offsets_value
from rocketstore import queue_numbers as numbering_record
from rocketstore.broker.reading import TagFilter
from rocketstore.client.aio.received import split_records
from rocketstore.consume_queue.files import QUEUE_ENDS_FILE, QueueEnd, parse_units, read_queue_ends, write_queue_ends
from rocketstore.index.format import IndexHeader, IndexSums, decode_sums, slot_blocks
from rocketstore.message import batch
from rocketstore.message import properties as message_properties
from rocketstore.message.columns import read_entries, read_records
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import DelayLevels, Message, parse_level
from rocketstore.message.record import decode_record
from rocketstore.message.record import encode_record as encode_message
from rocketstore.message.scan import scan_entries, scan_records
from rocketstore.message.sql import SqlCondition
from rocketstore.state.applier import SNAPSHOT_FILE, BrokerSnapshot, read_snapshot, write_snapshot
from rocketstore.state.changes import CommitOffsets, PutTopic, QueueOffset, SetDelayOffsets, TopicConfig, decode_state
from rocketstore.state.rocketmq_files import RocketmqFiles, read_rocketmq_files
from rocketstore.state.tables import Tables
from rocketstore.store.directory import DELETED_FILE, DeletedQueues
from rocketstore.store.directory import StoreCheckpoint as BrokerCheckpoint
from rocketstore.store.directory import decode_checkpoint as decode_broker_checkpoint
from tests.fuzz.shapes import changed_json, fuzzed, messages, mutilated

Decode = Callable[[bytes], object]


def _wire_decoders() -> Iterator[tuple[str, Decode]]:
    """All of them, also those that are written tomorrow."""
    for module in (codec, client_codec, bulk_codec):
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


_NUMBERS = st.sampled_from((-(1 << 63), -2, -1, 1 << 40, (1 << 63) - 1)) | st.integers(-(1 << 63), (1 << 63) - 1)


@st.composite
def structures(draw: st.DrawFn, layouts: Mapping[PushKind, RecordLayout]) -> bytes:
    """Fixed structures, mostly with small numbers; most are whole, others have more behind them, or are cut."""
    kind = draw(st.sampled_from(tuple(layouts)))
    data = bytes([kind])
    for _, code in layouts[kind].fields[1:]:
        width = int(code[1:])
        number = draw(st.integers(0, 2) if draw(st.integers(0, 31)) else _NUMBERS)
        data += (number % (1 << 8 * width)).to_bytes(width, "big")
    if draw(st.integers(0, 3)):
        return data
    return draw(mutilated(data) | st.binary(max_size=100).map(data.__add__) | st.binary(max_size=100))


def only_typed_errors(decode: Callable[..., object], *arguments: Any, also: tuple[type[Exception], ...] = ()) -> None:  # noqa: ANN401
    """Anything but a value, or an error that the caller is told about, is a bug."""
    with suppress(DLedgerError, *also):
        decode(*arguments)


def test_all_wire_decoders_are_found() -> None:
    """Else what is below proves nothing."""
    assert len(WIRE) >= 29
    assert {name.rpartition(".")[0] for name in WIRE} >= {codec.__name__, client_codec.__name__, bulk_codec.__name__}


@pytest.mark.parametrize(
    ("decode", "layouts"),
    [(frames.decode_push, frames.LAYOUTS), (frames.decode_answer, dict.fromkeys(PushKind, frames.ANSWER_LAYOUT))],
)
def test_a_push_and_its_answer_are_taken_or_refused(decode: Decode, layouts: Mapping[PushKind, RecordLayout]) -> None:
    """Any kind and any numbers, cut or with too much behind them; some of each are taken."""
    taken: list[object] = []

    @fuzzed(200)
    @given(structures(layouts))
    def run(data: bytes) -> None:
        with suppress(InvalidRequestError):
            taken.append(decode(data))

    run()
    assert taken


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
SLOT = durable_state.encode_slot(7, b"payload")
MEMBERS = Configuration(
    (ClusterMember(NodeId("n1"), "h", 1), ClusterMember(NodeId("n2"), "h", 2, MemberRole.LEARNER, 1, 9, replaces="n1"))
)
ENTRIES = encode_record(1, 0, 0, RECORD, 0)[0] + encode_record(1, 1, len(RECORD) + 48, RECORD, 0)[0]
SLOTS = 20
SUMS = IndexSums(
    IndexHeader(1, 2, 3, 4, 5, 6), np.zeros(slot_blocks(SLOTS), np.uint64), np.zeros(1, np.uint32)
).encode()


def _use_received(data: bytes) -> None:
    """As consumers do, every field."""
    for message in split_records(data, check_crc=False):
        message.property("KEYS")
        message.decode()


TEXTS: dict[str, tuple[Callable[[str], object], str]] = {
    "members": (parse_members, "n0-h:1;n1-h:2"),
    "rules": (
        rules.parse_rules,
        "accounts:\n- accessKey: a1234567\n  secretKey: s1234567\n  defaultTopicPerm: PUB|SUB\n",
    ),
    "yaml": (rules.parse_yaml, "a:\n- b: c\n  d: 'e, f'\n- 'g'\n"),
    "addresses": (addresses.parse_patterns, "10.0.0.*, 192.168.{1,2}.*, ::1"),
    "nonce": (guard.parse_nonce, "0123456789abcdef-17"),
    "properties": (properties.parse, "a = b\\\n  c\n# d\ne: \\u0041\n"),
    "permission": (parse_permission, "PUB|SUB"),
    "client addresses": (parse_addresses, "h:1,[::1]:2;h:3"),
    "message id": (parse_offset_message_id, "7F00000100002A9F00000000000000F0"),
    "delay level": (parse_level, "18"),
    "delay levels": (DelayLevels.parse, "1s 5m 2h 1d"),
    "tag expression": (TagFilter.parse, "a || b"),
    "SQL expression": (SqlCondition, "NOT (a > 1.5 OR b IN ('x', 'y')) AND c BETWEEN - 1 AND 2L /* d */ IS NULL"),
    "hours": (settings.parse_hours, "04;16"),
    "flush mode": (settings.parse_flush_mode, "SYNC_FLUSH"),
    "size": (values.parse_size, "16MiB"),
    "duration": (values.parse_duration_ms, "1.5h"),
    "milliseconds": (values.parse_millis, "30s"),
    "address": (values.parse_address, "[::1]:2"),
    "addresses given": (values.parse_addresses, "h:1,[::1]:2;h:3"),
    "number": (values.parse_integer, "-17"),
    "percentage": (values.parse_percentage, "75.5"),
    "boolean": (values.parse_boolean, "yes"),
    "Spark's offset": (offsets_value(starting=True), '{"index": 7}'),
}
BYTES: dict[str, tuple[Decode, bytes]] = {
    "record": (decode_record, RECORD),
    "scan": (lambda data: scan_records(data, 48, check_crc=True), RECORD * 3),
    "batch": (batch.decode_batch, batch.encode_batch([Message("topic", b"one"), Message("topic", b"two")])),
    "message properties": (message_properties.decode_properties, b"KEYS\x01a\x02TAGS\x01b\x02"),
    "numbering": (numbering_record.decode_numbering, b"\0" * 64),
    "slot": (lambda data: durable_state.decode_slot(0, data), SLOT),
    "producers": (decode_payload, b"\0" * 64),
    "members": (decode_configuration, encode_configuration(MEMBERS)),
    "frame": (lambda data: frames.parse_header(data.ljust(5, b"\0")[:5], 1 << 20), b"\1\0\0\0\7"),
    "frames": (
        lambda data: list(frames.FrameBuffer(1 << 16).feed(data)),
        frames.pack(frames.FrameKind.HANDSHAKE, b"one") + frames.pack(frames.FrameKind.PUSH, b"two"),
    ),
    "entries": (lambda data: scan_entries(data, 0, check_crc=True), ENTRIES),
    "columns of records": (lambda data: read_records(data, 48), RECORD * 3),
    "columns of entries": (lambda data: read_entries(data, 0), ENTRIES),
    "received records": (_use_received, RECORD * 2),
    "queue units": (parse_units, bytes(range(60))),
    "broker's checkpoint": (decode_broker_checkpoint, BrokerCheckpoint(1, 2, 3, 4, 5, 6, 7).encode()),
    "index sums": (lambda data: decode_sums(data, SLOTS), SUMS),
    "broker state": (
        decode_state,
        b'{"v":1,"changes":[{"op":"put_topic","name":"T","read":1,"write":1,"perm":6},'
        b'{"op":"offsets","group":"g","offsets":[["T",0,5]],"reset":false}]}',
    ),
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
    also = (UnreadablePayloadError,) if name == "producers" else ()

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


def _sound_files(directory: Path) -> dict[str, Callable[[], object]]:
    """Small files, written as a node and a broker write them; and what reads them."""
    fs = FileSystem()
    write_identity(fs, directory, StoreIdentity("c", "g", "n0", 1, 2))
    configuration = Configuration((ClusterMember(NodeId("n1"), "h", 1, uid=3),), LogIndex(4), Term(1), 1, 5)
    write_members(
        fs, directory, SavedMembers(6, configuration, LogIndex(4), {NodeId("n1"): EntryId(Term(1), LogIndex(2))})
    )
    write_boot_record(fs, directory, boot_record_of(directory, (IDENTITY_FILE,), FlushMode.SYNC))
    changes = (PutTopic(TopicConfig("T")), CommitOffsets("g", (QueueOffset("T", 0, 5),)), SetDelayOffsets(((1, 2),)))
    RocketmqFiles(fs, directory).write(Tables(changes), 1)
    for name in ROCKETMQ_FILES:
        path = directory / name
        path.write_bytes(path.read_bytes().replace(b"dledger", b"RocketMQ"))
    write_snapshot(fs, directory, BrokerSnapshot(changes, 3, (4, 5)))
    ends = {("T", 0): QueueEnd([[0, 1]], 20, 0, (0, 1), 30)}
    write_queue_ends(fs, directory / QUEUE_ENDS_FILE, (1, 2), ends)
    DeletedQueues(fs, directory / DELETED_FILE).add({("T", 0): 5}, {})
    return {
        IDENTITY_FILE: lambda: read_identity(directory),
        MEMBERS_FILE: lambda: read_members(directory),
        BOOT_RECORD_FILE: lambda: last_life(directory),
        SNAPSHOT_FILE: lambda: read_snapshot(directory),
        QUEUE_ENDS_FILE: lambda: read_queue_ends(directory / QUEUE_ENDS_FILE, (1, 2)),
        DELETED_FILE: lambda: DeletedQueues(fs, directory / DELETED_FILE).load(),
        **dict.fromkeys(ROCKETMQ_FILES, lambda: read_rocketmq_files(directory)),
    }


ROCKETMQ_FILES = ("topics.json", "subscriptionGroup.json", "consumerOffset.json", "delayOffset.json")
TEXT_FILES = (
    IDENTITY_FILE, MEMBERS_FILE, BOOT_RECORD_FILE, SNAPSHOT_FILE, QUEUE_ENDS_FILE, DELETED_FILE, *ROCKETMQ_FILES,
)  # fmt: skip


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_text_file_of_any_bytes_is_read_or_refused(tmp_path: Path, name: str) -> None:
    """What JSON may hold instead of what is expected, too."""
    read = _sound_files(tmp_path)[name]
    read()
    path = tmp_path / name
    sound = path.read_bytes()

    @fuzzed(40)
    @given(mutilated(sound) | changed_json(sound))
    def run(data: bytes) -> None:
        path.write_bytes(data)
        only_typed_errors(read)

    run()


@pytest.mark.parametrize("name", ["checkpoint", "hard_state"])
def test_a_small_file_of_any_bytes_is_read_or_refused(tmp_path: Path, name: str) -> None:
    """Of a member's memory: with the file named."""
    path = tmp_path / name
    payload = b"\0" * 81 if name == "checkpoint" else durable_state.encode_hard_state(HardState(Term(3)))

    @fuzzed(100)
    @given(mutilated(durable_state.encode_slot(3, payload).ljust(durable_state.SLOT_BYTES, b"\0") * 2))
    def run(data: bytes) -> None:
        path.write_bytes(data)
        if name == "checkpoint":
            only_typed_errors(durable_state.read_checkpoint, path)
        else:
            only_typed_errors(durable_state.read_hard_state, tmp_path)

    run()
