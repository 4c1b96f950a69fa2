"""Reading many records at once gives what reading one after the other gives, and queues and index come out the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from struct import pack
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import CorruptLogError
from dledger.records import ENTRY_HEADER_BYTES
from dledger.rpc.loops import LoopBridge
from dledger.types import NOOP_CHANNEL
from rocketstore.broker.pull import WaitingPulls
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.index.service import IndexService
from rocketstore.message.columns import FEWEST, RecordColumns, read_entries, read_records, sizes_of, topics_of
from rocketstore.message.message import DelayLevels, Message
from rocketstore.message.record import (
    BLANK_HEAD,
    BLANK_MAGIC,
    MESSAGE_MAGIC_V2,
    OVERHEAD,
    PHYSICAL_OFFSET,
    PHYSICAL_OFFSET_AT,
    QUEUE_OFFSET,
    QUEUE_OFFSET_AT,
    encode_record,
)
from rocketstore.message.scan import scan_entries, scan_records
from rocketstore.store.stats import StoreStats
from rocketstore.types import SCHEDULE_TOPIC, TERM_START_TOPIC, RecordHead
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.message.samples import (
    MESSAGES,
    PROPERTIES_LENGTH_AT,
    RECORD,
    TOPIC_LENGTH_AT,
    entry,
    golden_message,
    golden_message_v6,
    resized,
)

BASE = 1 << 40
COUNT = 2 * FEWEST
LEVELS = DelayLevels.parse("1s 5s")
_ORDINARY = MESSAGES.map(
    lambda message: replace(message, sys_flag=message.sys_flag & ~0xC, queue_id=message.queue_id & 7)
)


def entries(messages: Sequence[Message], *, base: int = BASE, index: int = 7) -> bytes:
    """They as the log has them, every one with its place in its queue."""
    log, places = bytearray(), dict[tuple[str, int], int]()
    for number, message in enumerate(messages):
        queue = (message.topic, message.queue_id)
        place = places[queue] = places.get(queue, -1) + 1
        at = base + len(log)
        record = encode_record(message, queue_offset=place, physical_offset=at + ENTRY_HEADER_BYTES)
        log += entry(record, index=index + number, position=at)
    return bytes(log)


def plain(messages: Sequence[Message], *, base: int = BASE) -> bytes:
    """They as a plain log has them."""
    log, places = bytearray(), dict[tuple[str, int], int]()
    for message in messages:
        queue = (message.topic, message.queue_id)
        place = places[queue] = places.get(queue, -1) + 1
        log += encode_record(message, queue_offset=place, physical_offset=base + len(log))
    return bytes(log)


def ordinary(number: int) -> Message:
    """Of two topics with four queues; some with tags, some with keys, some without a body."""
    properties = {"UNIQ_KEY": f"{number:032X}"}
    if number % 3:
        properties["TAGS"] = f"Tag{number % 5}"
    if number % 4:
        properties["KEYS"] = f"k{number} größe"
    message = replace(golden_message(), topic="AB"[number % 7 == 0], queue_id=number % 4, properties=properties)
    return replace(message, body=b"x" * (number % 5))


def alike(log: bytes, base: int = BASE, *, columns: bool | None = None, framed: bool = True) -> None:
    """Both ways to read find the same; ``columns``: whether that is read in columns."""
    read, scan = (read_entries, scan_entries) if framed else (read_records, scan_records)
    outcome = read(log, base, delay_levels=LEVELS)

    assert outcome == scan(log, base, check_crc=False, delay_levels=LEVELS)
    assert columns is None or isinstance(outcome.heads, RecordColumns) is columns


@given(st.lists(_ORDINARY, min_size=1, max_size=8), st.booleans())
def test_any_records_are_read_alike(messages: list[Message], ipv4: bool) -> None:
    """Whatever their topics, hosts, tags and properties."""
    if ipv4:
        messages = [
            replace(one, born_host=golden_message().born_host, store_host=golden_message().store_host)
            for one in messages
        ]
    columns = True if ipv4 and not any(one.sys_flag & 0x30 for one in messages) else None
    alike(entries((messages * COUNT)[:COUNT]), columns=columns)
    alike(plain((messages * COUNT)[:COUNT]), columns=columns, framed=False)


@given(st.integers(0, 2**40), st.booleans())
def test_any_flipped_bit_is_read_alike(bit: int, framed: bool) -> None:
    """Damage is found by reading one after the other, which says where and what it is."""
    log = bytearray((entries if framed else plain)([ordinary(number) for number in range(FEWEST)]))
    at = bit % (len(log) * 8)
    log[at // 8] ^= 1 << at % 8

    alike(bytes(log), framed=framed)


@given(st.integers(0, 400), st.booleans())
def test_wherever_the_data_ends_it_is_read_alike(less: int, framed: bool) -> None:
    """In the middle of a record, of its header, or between two."""
    log = (entries if framed else plain)([ordinary(number) for number in range(COUNT)])

    alike(log[: len(log) - less], columns=True, framed=framed)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"TAGS\x01", b"TAGS\x01a\x02TAGS\x01", b"TAGS\x01a\x02TAGS\x01b", b"XTAGS\x01a", b"K\x01TAGS\x01a",
        b"TAGS", b"TAGS\x02a", b"\x02\x02TAGS\x01a\x02\x02", b"\x01\x01TAGS\x01a", b"TAGS\x01\xff\xfe",
        "TAGS\x01größe".encode(), b"TAGS\x01\x01a", b"x" * 40_000, b"KEYS\x01TAGS\x01a b\x02UNIQ_KEY\x01u",
    ],
)  # fmt: skip
def test_odd_properties_are_read_alike(text: bytes) -> None:
    """As they may stand in a log that others wrote."""
    record = bytearray(resized(RECORD[:PROPERTIES_LENGTH_AT] + pack(">H", len(text)) + text))
    log = bytearray()
    for number in range(COUNT):
        PHYSICAL_OFFSET.pack_into(record, PHYSICAL_OFFSET_AT, BASE + len(log) + ENTRY_HEADER_BYTES)
        log += entry(bytes(record), index=number, position=BASE + len(log))

    alike(bytes(log))


def _noop(index: int, position: int) -> bytes:
    return entry(b"", index=index, position=position, magic=2)


def _compatible_noop(index: int, position: int) -> bytes:
    message = replace(golden_message(), topic=TERM_START_TOPIC)
    return entry(
        encode_record(message, physical_offset=position + ENTRY_HEADER_BYTES),
        index=index,
        position=position,
        channel=NOOP_CHANNEL,
    )


def _of(message: Message) -> Callable[[int, int], bytes]:
    def made(index: int, position: int) -> bytes:
        return entry(
            encode_record(message, physical_offset=position + ENTRY_HEADER_BYTES), index=index, position=position
        )

    return made


def _long_topic(index: int, position: int) -> bytes:
    record = encode_record(golden_message(), physical_offset=position + ENTRY_HEADER_BYTES)
    long = resized(record[:TOPIC_LENGTH_AT] + b"\0" + record[TOPIC_LENGTH_AT:], MESSAGE_MAGIC_V2)
    return entry(long, index=index, position=position)


def _wrong_place(index: int, position: int) -> bytes:
    return entry(encode_record(golden_message(), physical_offset=position), index=index, position=position)


@pytest.mark.parametrize("at", [0, FEWEST - 1, FEWEST, COUNT])
@pytest.mark.parametrize(
    "unusual",
    [
        _noop,
        _compatible_noop,
        _of(golden_message_v6()),
        _of(replace(golden_message(), topic=SCHEDULE_TOPIC, properties={"DELAY": "2"})),
        _of(replace(golden_message(), sys_flag=0x4)),
        _of(replace(golden_message(), sys_flag=0xC)),
        _of(replace(golden_message(), queue_id=-3)),
        _of(replace(golden_message(), topic="..")),
        _long_topic,
        _wrong_place,
        lambda _index, _position: pack(">ii", -1, 4096),
        lambda _index, _position: pack(">ii", -1, 64) + bytes(56),
        lambda _index, _position: pack(">ii", -1, 64) + bytes(57),
        lambda _index, _position: bytes(200),
        lambda _index, _position: b"garbage" * 30,
        lambda index, position: _noop(index + 1, position),
        lambda index, position: _noop(index, position)[:20],
        lambda index, position: _noop(index, position) + bytes(7),
    ],
)  # fmt: skip
def test_what_is_unusual_is_read_alike(unusual: Callable[[int, int], bytes], at: int) -> None:
    """In front of ordinary records, among them, behind them."""
    messages = [ordinary(number) for number in range(COUNT)]
    before = entries(messages[:at])
    middle = unusual(7 + at, BASE + len(before))
    after = entries(messages[at:], base=BASE + len(before) + len(middle), index=8 + at)

    alike(before + middle + after)


@pytest.mark.parametrize("at", [0, FEWEST - 1, FEWEST, COUNT])
@pytest.mark.parametrize(
    "unusual",
    [
        pack(">i", 4096) + pack(">i", BLANK_MAGIC),
        pack(">i", 64) + pack(">i", BLANK_MAGIC) + bytes(56),
        encode_record(golden_message(), physical_offset=-1),
        encode_record(golden_message_v6(), physical_offset=-1),
        bytes(200),
        b"garbage" * 30,
        resized(RECORD[: OVERHEAD - 1]),
        RECORD[: BLANK_HEAD.size - 1],
        RECORD[: OVERHEAD - 1],
    ],
)
def test_what_is_unusual_in_a_plain_log_is_read_alike(unusual: bytes, at: int) -> None:
    """In front of ordinary records, among them, behind them."""
    messages = [ordinary(number) for number in range(COUNT)]
    before = plain(messages[:at])
    middle = unusual.replace(b"\xff" * 8, pack(">q", BASE + len(before)))

    alike(before + middle + plain(messages[at:], base=BASE + len(before) + len(middle)), framed=False)


def test_few_records_are_read_one_after_the_other() -> None:
    """That is faster then."""
    alike(entries([ordinary(number) for number in range(FEWEST - 1)]), columns=False)
    alike(plain([ordinary(number) for number in range(FEWEST - 1)]), columns=False, framed=False)


def test_columns_are_a_sequence_of_heads() -> None:
    """For whoever looks at single ones."""
    log = entries([ordinary(number) for number in range(COUNT)])
    found = read_entries(log, BASE).heads
    heads = list(scan_entries(log, BASE, check_crc=False).heads)

    assert isinstance(found, RecordColumns)
    assert (len(found), found[0], found[-1], found[5:9]) == (COUNT, heads[0], heads[-1], heads[5:9])
    assert topics_of(found) == topics_of(heads) == [head.topic for head in heads]
    assert sizes_of(found) == sizes_of(heads) == [head.size for head in heads]
    with pytest.raises(IndexError):
        found[COUNT]


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@given(pieces=st.lists(st.integers(0, COUNT), max_size=4), again=st.integers(0, COUNT))
def test_queues_and_index_come_out_the_same(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int], again: int
) -> None:
    """In whatever pieces the records come, and when some come a second time."""
    root = tmp_path_factory.mktemp("derived")
    log = entries([ordinary(number) for number in range(COUNT)], base=0)
    bounds = sorted({0, *pieces, COUNT})
    heads = list(scan_entries(log, 0, check_crc=False).heads)
    written = []
    for name in ("columns", "heads"):
        table = ConsumeQueueTable(root / name / "queues", 400)
        index = IndexService(root / name / "index", 50, 10_000)
        table.load()
        index.load(clean_stop=True, index_timestamp_ms=0)
        for first, end in [*pairwise(bounds), (again, COUNT)]:
            part: Sequence[RecordHead] = heads[first:end]
            if name == "columns" and part:
                start = part[0].offset - ENTRY_HEADER_BYTES
                part = read_entries(log[start : part[-1].offset + part[-1].size], start).heads
            table.append(part)
            index.append(part)
        table.flush()
        index.flush()
        table.close()
        written.append({key: value for key, value in files(root / name).items() if "index" not in key})
        written.append({"index": b"".join(files(root / name / "index").values())})

    assert written[:2] == written[2:]


def test_waiting_pulls_and_counters_see_columns_as_they_see_heads() -> None:
    """Whom a message is for is woken once, with or without tags; topics are counted."""
    log = entries([ordinary(number) for number in range(COUNT)])
    heads = list(scan_entries(log, BASE, check_crc=False).heads)
    some = next(head for head in heads if head.tags_code)
    seen = []
    for records in (read_entries(log, BASE).heads, heads):
        woken: list[Callable[[], None]] = []
        waiting = WaitingPulls(cast("LoopBridge", SimpleNamespace(post=woken.append)), waiting_max=9)
        waiters = [
            waiting.enter(key, codes)
            for key in ((some.topic, some.queue_id), ("C", 0))
            for codes in (None, frozenset({some.tags_code}), frozenset({1}))
        ]
        waiting.arrived(records)
        assert len(woken) == 1
        woken[0]()
        stats = StoreStats(ManualClock())
        stats.dispatched(records, 1)
        seen.append(([one.woken for one in waiters], stats.topics()))

    assert seen[0] == seen[1]
    assert seen[0][0] == [True, True, False, False, False, False]


def test_offsets_that_are_missing_in_a_queue_are_filled_up_or_refused(tmp_path: Path) -> None:
    """As with heads."""
    messages = [replace(golden_message(), topic="T", queue_id=0) for _ in range(FEWEST)]
    log = bytearray(entries(messages, base=0))
    entry_bytes = len(log) // FEWEST
    for number in range(10, FEWEST):
        QUEUE_OFFSET.pack_into(log, number * entry_bytes + ENTRY_HEADER_BYTES + QUEUE_OFFSET_AT, number + 3)
    found = read_entries(bytes(log), 0).heads
    assert isinstance(found, RecordColumns)
    table = ConsumeQueueTable(tmp_path, 400)
    table.load()

    table.append(found)

    queue = table.find("T", 0)
    assert queue is not None
    assert queue.max_offset == FEWEST + 3
    assert [number for number in range(FEWEST + 3) if queue.unit(number) is None] == [10, 11, 12]
    QUEUE_OFFSET.pack_into(log, len(log) - entry_bytes + ENTRY_HEADER_BYTES + QUEUE_OFFSET_AT, 1 << 40)
    other = ConsumeQueueTable(tmp_path / "other", 400)
    other.load()
    with pytest.raises(CorruptLogError, match=f"of the record at {(FEWEST - 1) * entry_bytes + ENTRY_HEADER_BYTES}"):
        other.append(read_entries(bytes(log), 0).heads)
    table.close()
    other.close()
