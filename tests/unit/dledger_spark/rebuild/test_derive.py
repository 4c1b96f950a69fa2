"""What is derived from records in arrays, against what the broker takes from them one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dledger_spark.decode import DecodeContext
from dledger_spark.decode.records import Records, rows_of
from dledger_spark.rebuild.derive import Details, keys_of, pieces, unit_columns
from rocketstore.config import DEFAULT_DELAY_LEVELS
from rocketstore.index.format import TopicHashes, key_hashes
from rocketstore.message.message import DelayLevels, HostAddress, Message
from rocketstore.message.record import encode_record
from rocketstore.message.scan import scan_records
from rocketstore.types import SCHEDULE_TOPIC, RecordHead

LEVELS = DelayLevels.parse(DEFAULT_DELAY_LEVELS)
PIECES = [
    b"KEYS\x01", b"UNIQ_KEY\x01", b"TAGS\x01", b"DELAY\x01", b"KEYS", b"\x01", b"\x02", b"\x02KEYS\x01", b" ", b"3",
    b"a", b"Z", "\u00e9".encode(), "\U0001f600".encode(), b"\xff\xe4",
]  # fmt: skip
HOSTS = st.sampled_from([HostAddress(bytes(4), 1), HostAddress(bytes(16), 2)])
MESSAGES = st.builds(
    lambda topic, body, properties, flag, born, store, ms: Message(
        topic, body, 3, sys_flag=flag, born_host=born, store_host=store, store_timestamp=ms, property_string=properties
    ),
    st.sampled_from(["T", "%RETRY%group", SCHEDULE_TOPIC, "x" * 120]),
    st.binary(max_size=30),
    st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join),
    st.sampled_from([0, 4, 8, 12, 1]),
    HOSTS,
    HOSTS,
    st.integers(0, 1 << 45),
)


def log_of(messages: list[Message], base: int) -> tuple[Sequence[RecordHead], Records]:
    """A plain log of them: what the broker's scan finds in it, and the same for arrays."""
    data, starts = bytearray(), []
    for number, message in enumerate(messages):
        starts.append(len(data))
        data += encode_record(message, queue_offset=number, physical_offset=base + len(data))
    scanned = scan_records(bytes(data), base, check_crc=True, delay_levels=LEVELS)
    assert scanned.consumed == len(data)
    window = np.frombuffer(bytes(data), np.uint8)
    return scanned.heads, rows_of(window, np.array(starts, np.int64), DecodeContext(framing="plain", base=base))


def expected_keys(heads: Sequence[RecordHead]) -> Iterator[tuple[int, int, int]]:
    hashes, owners = key_hashes(heads, TopicHashes())
    for value, owner in zip(hashes.tolist(), owners.tolist(), strict=True):
        yield value, heads[owner].offset, heads[owner].store_timestamp


@given(messages=st.lists(MESSAGES, min_size=1, max_size=12), base=st.integers(0, 1 << 40))
def test_keys_and_units_are_the_brokers_for_any_messages(messages: list[Message], base: int) -> None:
    """Any bytes as properties, every transaction state, IPv6 hosts, delayed messages."""
    heads, records = log_of(messages, base)

    details = Details(records)
    keys, columns = keys_of(details, TopicHashes()), unit_columns(details, LEVELS)

    assert keys.tolist() == list(expected_keys(heads))
    placed = [head for head in heads if not head.sys_flag & 4]
    assert columns.units.tolist() == [(head.offset, head.size, head.tags_code) for head in placed]
    assert columns.queue_offset.tolist() == [head.queue_offset for head in placed]
    assert [columns.topics[number].decode() for number in columns.topic] == [head.topic for head in placed]


@given(messages=st.lists(MESSAGES, max_size=12), limit=st.integers(1, 60))
def test_pieces_are_all_records_with_few_properties_each(messages: list[Message], limit: int) -> None:
    """What memory the keys of a piece may take is bounded, however long properties are."""
    _, records = log_of(messages, 0)

    cut = list(pieces(records, limit))

    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *(one.starts for one in cut)]), records.starts)
    assert all(len(one) == 1 or int(one.tails.property_lengths.sum()) <= limit for one in cut)
    assert all(len(one) for one in cut)
