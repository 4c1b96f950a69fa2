"""The keys of records and their hashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketstore.config import KEYS_INDEXED_MAX
from rocketstore.index.format import TopicHashes, hashes_of, key_hash, key_hashes
from rocketstore.message.message import SYS_FLAG_COMMITTED, SYS_FLAG_PREPARED, SYS_FLAG_ROLLED_BACK
from rocketstore.types import RecordHead
from tests.unit.rocketstore.heads import head, keyed


def java(text: str) -> int:
    """``Math.abs(text.hashCode())``, the least of numbers as 0."""
    value = 0
    units = text.encode("utf-16-be")
    for at in range(0, len(units), 2):
        value = (31 * value + int.from_bytes(units[at : at + 2], "big")) & 0xFFFFFFFF
    return abs(value - (value >> 31 << 32)) & 0x7FFFFFFF


def expected(records: list[RecordHead]) -> list[tuple[int, int]]:
    """Java's way: a map of properties, then the unique key and the words of the keys."""
    found = []
    for number, record in enumerate(records):
        properties: dict[str, str] = {}
        for part in record.properties.decode("utf-8", "replace").split("\x02"):
            at = part.find("\x01")
            if len(part) >= 3 and 1 <= at < len(part) - 1:
                properties[part[:at]] = part[at + 1 :]
        if record.sys_flag & 0xC == 0xC:
            continue
        keys = [properties.get("UNIQ_KEY", ""), *properties.get("KEYS", "").split(" ")]
        found += [(java(f"{record.topic}#{key}"), number) for key in keys if key]
    return found


def computed(records: list[RecordHead]) -> list[tuple[int, int]]:
    """Of all together, and the same one by one."""
    hashes, owners = key_hashes(records, TopicHashes())
    found = list(zip(hashes.tolist(), owners.tolist(), strict=True))
    topics = TopicHashes()
    assert found == [(key, number) for number, record in enumerate(records) for key in hashes_of(record, topics)]
    return found


def test_hashes_are_javas() -> None:
    assert key_hash("TopicTest", "k1") == 2746024
    assert key_hash("TopicTest", "polygenelubricants") == 0x019A9582
    assert key_hash("\u4e2d", "\u6587") == java("\u4e2d#\u6587")


def key_with_hash(topic: str, wanted: int) -> str:
    """A key such that the unsigned hash of ``topic#key`` is ``wanted``: eight digits to base 31."""
    start = 0
    for character in f"{topic}#((((((((":
        start = (31 * start + ord(character)) & 0xFFFFFFFF
    rest = (wanted - start) % (1 << 32)
    return "".join(chr(ord("(") + rest // 31**power % 31) for power in range(7, -1, -1))


def test_a_hash_that_has_no_positive_counterpart_is_stored_as_0() -> None:
    key = key_with_hash("T", 1 << 31)
    assert key_hash("T", key) == 0
    assert computed([keyed(0, key)]) == [(0, 0)]


@pytest.mark.parametrize(
    "properties",
    [
        b"",
        b"KEYS\x01a b  c \x02UNIQ_KEY\x01u\x02TAGS\x01t g",
        b"UNIQ_KEY\x01u\x02KEYS\x01a\x02",
        b"KEYS\x01\x02UNIQ_KEY\x01",
        b"KEYS\x01old\x02KEYS\x01new\x02KEYS\x01",
        b"xKEYS\x01no\x02MY_UNIQ_KEY\x01no",
        b"A\x01KEYS\x01no\x02B\x01UNIQ_KEY\x01no",
        b"KEYS\x01a\x01b",
        b"KEYS\x01   ",
        b"KEY\x02S\x01a\x02KEYS",
        "KEYS\x01\u4e2d \u6587\U0001f600\x02UNIQ_KEY\x01u".encode(),
        b"KEYS\x01bad\xff\xfe utf\x02UNIQ_KEY\x01u",
        b"\x02\x02KEYS\x01a\x02\x02",
    ],
)
def test_keys_are_found_as_java_finds_them(properties: bytes) -> None:
    records = [keyed(0, "k"), head(properties=properties), keyed(2, unique="U")]
    assert computed(records) == expected(records)


def test_prepared_and_committed_records_have_keys_and_rolled_back_ones_have_none() -> None:
    flags = (0, SYS_FLAG_PREPARED, SYS_FLAG_COMMITTED, SYS_FLAG_ROLLED_BACK, SYS_FLAG_ROLLED_BACK | 1)
    records = [head(sys_flag=flag, properties=b"KEYS\x01k") for flag in flags]
    assert [owner for _, owner in computed(records)] == [0, 1, 2]


def test_batches_of_any_size_are_hashed() -> None:
    long = "x" * 32_000
    records = [keyed(number, long if number % 7 == 0 else "k", unique=str(number)) for number in range(300)]
    assert computed(records) == expected(records)
    huge = [keyed(0, "y" * 300_000, unique="u"), keyed(1, "k")]
    assert computed(huge) == expected(huge)


PROPERTIES = st.lists(
    st.sampled_from(
        ["KEYS", "UNIQ_KEY", "\x01", "\x02", " ", "a", "b", "Z", "\u00e9", "KEYS\x01", "UNIQ_KEY\x01", "\x02KEYS\x01"]
    ),
    max_size=12,
).map(lambda parts: "".join(parts).encode())


@given(st.lists(st.tuples(st.sampled_from(["T", "Other"]), PROPERTIES, st.sampled_from([0, 4, 8, 12])), max_size=8))
def test_any_properties_give_the_keys_that_java_finds(rows: list[tuple[str, bytes, int]]) -> None:
    records = [head(topic=topic, properties=properties, sys_flag=flag) for topic, properties, flag in rows]
    assert computed(records) == expected(records)


@given(st.lists(PROPERTIES.filter(lambda text: text.isascii()), min_size=1, max_size=8))
def test_the_fast_way_finds_the_same(rows: list[bytes]) -> None:
    records = [head(properties=properties) for properties in rows]
    assert computed(records) == expected(records)


def test_a_record_is_indexed_under_a_bounded_number_of_keys() -> None:
    """The first ones; records around it keep theirs. Brokers once took messages with any number of keys."""
    many = [f"k{number}" for number in range(KEYS_INDEXED_MAX + 5)]
    records = [keyed(0, "a", "b"), keyed(100, *many, unique="u"), keyed(200, "c"), keyed(300, *many[:-5])]

    kept = [keyed(0, "a", "b"), keyed(100, *many[:-5], unique="u"), *records[2:]]
    assert computed(records) == expected(kept)
