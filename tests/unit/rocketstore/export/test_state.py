"""``StateRecords``: the messages of the state topic as an export finds them in a log."""

from __future__ import annotations

from pathlib import Path

from rocketstore.types import BROKER_STATE_TOPIC, GetMessageStatus, RecordHead
from rocketstore.upgrade.directories import StateRecords
from rocketstore.verification.verify import LogPart

SIZE = 10


def head(number: int, offset: int) -> RecordHead:
    """A record with this number in the queue, at this place in the log."""
    return RecordHead(BROKER_STATE_TOPIC, 0, offset, SIZE, 0, 0, number, 0, 0, b"")


def records_of(directory: Path, *numbers: int) -> StateRecords:
    """Records with these numbers, one behind the other, each with its own letter."""
    file = directory / "segment"
    file.write_bytes(b"".join(bytes([ord("a") + at]) * SIZE for at in range(len(numbers))))
    records = StateRecords()
    records.add_part(LogPart({0: file}, 1000, 0, SIZE * len(numbers)))
    for at, number in enumerate(numbers):
        records.add(head(number, SIZE * at))
    return records


def letters(records: StateRecords, begin: int) -> bytes:
    """The first letters of what is got from there on."""
    found = records.get(BROKER_STATE_TOPIC, 0, begin, max_count=100)
    assert found.status is GetMessageStatus.FOUND
    assert found.next_offset == records.next_offset
    return b"".join(record[:1] for record in found.records)


def test_a_repeated_number_is_not_in_the_queue(tmp_path: Path) -> None:
    """As in consume queues: the first record has the place, and nothing behind it moves."""
    records = records_of(tmp_path, 4, 5, 4, 5, 6)

    assert records.next_offset == records.max_offset(BROKER_STATE_TOPIC, 0) == 7
    assert records.min_offset(BROKER_STATE_TOPIC, 0) == 4
    assert letters(records, 4) == b"abe"
    assert letters(records, 6) == b"e"


def test_numbers_before_the_first_and_behind_the_last_are_told(tmp_path: Path) -> None:
    """Messages have expired, or there are none yet."""
    records = records_of(tmp_path, 4, 5)

    before = records.get(BROKER_STATE_TOPIC, 0, 3, max_count=1)
    assert (before.status, before.next_offset) == (GetMessageStatus.OFFSET_TOO_SMALL, 4)
    behind = records.get(BROKER_STATE_TOPIC, 0, 6, max_count=1)
    assert behind.status is GetMessageStatus.OFFSET_OVERFLOW_ONE
