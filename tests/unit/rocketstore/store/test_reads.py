"""Reading: RocketMQ's statuses and next offsets, limits, filters, keys, and what it skips by mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from dledger.errors import CorruptLogError
from dledger.store.fs import FileSystem
from rocketstore.config import MessageStoreConfig
from rocketstore.consume_queue.files import UNIT_BYTES
from rocketstore.consume_queue.queue import ConsumeQueue
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import decode_record, encode_record, store_timestamp
from rocketstore.store import reads
from rocketstore.store.reads import StoreReader, is_record_at
from rocketstore.types import GetMessageStatus, GetResult, QueueUnit
from tests.unit.rocketstore.fakes import FakeIndex, RecordLog, UnitQueue
from tests.unit.rocketstore.message.samples import changed, field

FILLER = QueueUnit(0, 0x7FFFFFFF, 0)
CONFIG = MessageStoreConfig()
MANY = 1 << 40


class Bench:
    """A queue of messages with bodies 0, 1, 2, … and a reader over it."""

    def __init__(
        self,
        count: int,
        *,
        begin: int = 1000,
        config: MessageStoreConfig = CONFIG,
        memory_bytes: int = MANY,
        body: int = 0,
    ) -> None:
        self.log = RecordLog(begin)
        units = []
        for number in range(count):
            message = Message(
                "T",
                str(number).encode().ljust(body, b"."),
                properties={"TAGS": "ABC"[number % 3]},
                queue_offset=number,
                store_timestamp=1000 + number * 10,
            )
            units.append(self.log.add(message)._replace(tags_code=ord("ABC"[number % 3])))
        self.queue = UnitQueue(units)
        self.index = FakeIndex()
        self.config, self.memory_bytes = config, memory_bytes
        self.find: Callable[[], ConsumeQueue] = lambda: self.queue
        self.make_reader()

    def make_reader(self) -> None:
        """As after a start."""
        self.reader = StoreReader(
            self.log,
            lambda topic, _queue_id: self.find() if topic == "T" else None,
            self.index,
            self.config,
            memory_bytes=self.memory_bytes,
        )

    def search(self, offset: int, matches_record: Callable[[bytes], bool]) -> GetResult:
        """All messages that pass a filter."""
        return self.reader.get(
            "T",
            0,
            offset,
            max_count=32,
            max_bytes=0,
            matches_tags=None,
            matches_record=matches_record,
            correct_offset=True,
        )

    def get(
        self,
        offset: int,
        max_count: int = 32,
        *,
        max_bytes: int = 0,
        tags: int | None = None,
        body: bytes | None = None,
        topic: str = "T",
        correct_offset: bool = True,
    ) -> GetResult:
        return self.reader.get(
            topic,
            0,
            offset,
            max_count=max_count,
            max_bytes=max_bytes,
            matches_tags=None if tags is None else lambda code: code == ord("A") + tags,
            matches_record=None if body is None else lambda record: decode_record(record).body == body,
            correct_offset=correct_offset,
        )


def numbers(result: GetResult) -> list[int]:
    return [int(decode_record(record).body.rstrip(b".")) for record in result.records]


@pytest.mark.parametrize(
    ("offset", "status", "next_offset"),
    [
        (2, GetMessageStatus.OFFSET_TOO_SMALL, 3),
        (3, GetMessageStatus.FOUND, 10),
        (9, GetMessageStatus.FOUND, 10),
        (10, GetMessageStatus.OFFSET_OVERFLOW_ONE, 10),
        (11, GetMessageStatus.OFFSET_OVERFLOW_BADLY, 10),
        (-1, GetMessageStatus.OFFSET_TOO_SMALL, 3),
    ],
)
def test_statuses_and_next_offsets(offset: int, status: GetMessageStatus, next_offset: int) -> None:
    """The table of store.md 6.1."""
    bench = Bench(10)
    bench.queue.min_offset = 3

    result = bench.get(offset)

    assert (result.status, result.next_offset) == (status, next_offset)
    assert (result.min_offset, result.max_offset) == (3, 10)
    assert numbers(result) == list(range(offset, 10) if status is GetMessageStatus.FOUND else [])


@pytest.mark.parametrize("offset", [0, 7])
def test_an_unknown_queue_and_an_empty_one(offset: int) -> None:
    bench = Bench(0)

    assert (bench.get(offset).status, bench.get(offset).next_offset) == (GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0)
    unknown = bench.get(offset, topic="other")
    assert (unknown.status, unknown.next_offset) == (GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 0)


@pytest.mark.parametrize(("dispatched", "offset", "right"), [(10, 12, True), (10, 13, False), (0, 1, True)])
@pytest.mark.parametrize("topic", ["T", "other"])
def test_an_offset_of_a_message_that_is_not_dispatched_yet_is_right(
    topic: str, dispatched: int, offset: int, right: bool
) -> None:
    """A consumer that knows what was stored is told that there is nothing yet, not to begin elsewhere."""
    bench = Bench(dispatched)
    bench.log.numbers = {(topic, 0): 12}
    end = dispatched if topic == "T" else 0

    result = bench.get(offset, topic=topic)

    assert (result.status is GetMessageStatus.OFFSET_OVERFLOW_ONE, result.max_offset) == (right, end)
    assert result.next_offset == (offset if right else end)


@pytest.mark.parametrize(("offset", "topic"), [(0, "T"), (12, "T"), (5, "other")])
def test_a_slave_does_not_put_offsets_right(offset: int, topic: str) -> None:
    """store.md 6.1: it may know less than the master."""
    bench = Bench(10)
    bench.queue.min_offset = 3

    assert bench.get(offset, topic=topic, correct_offset=False).next_offset == offset


def test_a_queue_whose_units_cannot_be_read_goes_on_in_its_next_file() -> None:
    bench = Bench(10, config=MessageStoreConfig(mapped_file_size_consume_queue=80))
    bench.queue.broken_at = 5

    found = bench.get(5)

    assert (found.status, found.next_offset) == (GetMessageStatus.OFFSET_FOUND_NULL, 8)


def test_a_get_goes_on_over_queue_files() -> None:
    """Units come from one file at a time; RocketMQ stops there. What it may give is counted over all of them."""
    bench = Bench(10, body=100)
    whole = bench.queue.units
    bench.queue.units = lambda offset, count: whole(offset, min(count, 4 - offset % 4))  # type: ignore[method-assign]

    assert numbers(bench.get(1)) == list(range(1, 10))
    assert numbers(bench.get(1, 6)) == list(range(1, 7))
    assert numbers(bench.get(1, max_bytes=5 * bench.queue.all[0].size)) == list(range(1, 6))


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (10, 10), (20, 20), (32, 32), (40, 32)])
def test_at_most_32_messages_in_memory(asked: int, given: int) -> None:
    """DefaultMessageStoreTest: pull sizes 32/20/10."""
    result = Bench(100).get(0, asked)

    assert (len(result.records), result.next_offset) == (given, given)


def test_what_is_not_in_memory_comes_in_smaller_bites_and_better_from_a_slave() -> None:
    """store.md 6.1: 8 messages, and the hint, if more than 40 % of the memory lie between it and the end."""
    bench = Bench(100, memory_bytes=1000)

    cold, warm = bench.get(0), bench.get(99)

    assert (len(cold.records), cold.suggest_slave) == (8, True)
    assert (len(warm.records), warm.suggest_slave) == (1, False)


@pytest.mark.parametrize(("cold", "given"), [(False, 2), (True, 1)])
def test_bytes_are_limited_but_the_first_message_always_comes(*, cold: bool, given: int) -> None:
    """256 KiB in memory, 64 KiB from disk."""
    bench = Bench(10, body=100 * 1024, memory_bytes=0 if cold else MANY)

    assert len(bench.get(0).records) == given


def test_the_callers_own_byte_limit_holds() -> None:
    bench = Bench(10, body=100)

    assert len(bench.get(0, max_bytes=3 * bench.queue.all[0].size).records) == 3
    assert len(bench.get(0, max_bytes=1).records) == 1


def test_nothing_is_given_if_nothing_is_asked_for() -> None:
    result = Bench(10).get(0, 0)

    assert (result.records, result.next_offset) == ((), 0)


def test_tags_are_filtered_first_then_records() -> None:
    bench = Bench(12)
    assert numbers(bench.get(0, tags=1)) == [1, 4, 7, 10]
    both = bench.get(0, tags=1, body=b"7")
    assert (numbers(both), both.next_offset) == ([7], 12)


def test_nothing_that_matches_moves_the_offset_on() -> None:
    bench = Bench(12)

    for result in (bench.get(0, tags=9), bench.get(0, body=b"none")):
        assert (result.status, result.next_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 12)


def test_a_get_looks_at_a_limited_number_of_units() -> None:
    """Whatever the caller asks for: no more than the settings let one get give, and says where to go on."""
    bench = Bench(1200, config=replace(CONFIG, max_transfer_count_on_message_in_memory=1000))

    assert bench.get(0, tags=9).next_offset == 800
    assert bench.get(0, 900, tags=9).next_offset == 900
    assert bench.get(0, 2**31 - 1, tags=9).next_offset == 1000
    assert bench.get(1000, 2**31 - 1, tags=9).next_offset == 1200


def test_a_get_reads_a_limited_number_of_bytes_to_no_avail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of which only the hash of the tag passes the filter: the get ends and says where to go on."""
    monkeypatch.setattr("rocketstore.store.reads.PASSED_BYTES_MAX", 5000)
    bench = Bench(50, body=1000)

    result = bench.get(0, body=b"none")
    assert (result.status, result.next_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 5)
    assert numbers(bench.get(5, body=b"7".ljust(1000, b"."))) == [7]


def test_the_next_offset_is_behind_the_last_message_given() -> None:
    """A batch that is full must not pass over the messages after it."""
    result = Bench(100).get(0, 5, tags=2)

    assert (numbers(result), result.next_offset) == ([2, 5, 8, 11, 14], 15)


def test_a_slave_is_suggested_by_where_the_last_message_given_lies() -> None:
    """Who comes from far behind and has caught up needs no slave."""
    bench = Bench(5)
    bench.memory_bytes = (bench.log.max_offset - bench.queue.all[2].offset) * 100 // 40 + 3  # 40 % of it, rounded up
    bench.make_reader()

    assert [bench.get(0, count).suggest_slave for count in (1, 2, 3, 4)] == [True, True, False, False]


def test_fillers_are_no_messages() -> None:
    """store.md 4.1: places before a queue's first message or in a gap of it."""
    bench = Bench(5)
    bench.queue.all[1:3] = [FILLER, FILLER]

    assert numbers(bench.get(0)) == [0, 3, 4]
    only = bench.get(1, 1)
    assert (numbers(only), only.next_offset) == ([3], 4)


def test_records_that_are_gone_are_passed_over_up_to_the_next_file() -> None:
    bench = Bench(10)
    bench.log.file_bytes = bench.log.min_offset = bench.queue.all[4].offset

    result = bench.get(0)

    assert numbers(result) == [4, 5, 6, 7, 8, 9]
    assert result.next_offset == 10


def test_if_all_are_gone_the_status_says_so() -> None:
    bench = Bench(4)
    bench.log.min_offset = bench.log.max_offset

    result = bench.get(0)

    assert (result.status, result.next_offset) == (GetMessageStatus.MESSAGE_WAS_REMOVING, 4)


@pytest.mark.parametrize(
    ("known", "expected"), [(0, GetMessageStatus.OFFSET_OVERFLOW_ONE), (3, GetMessageStatus.FOUND)]
)
def test_what_may_not_be_read_yet_is_not_skipped(known: int, expected: GetMessageStatus) -> None:
    """A restarted member's queues may reach behind its commit position; RocketMQ would count these as removed."""
    bench = Bench(5)
    bench.log.max_offset = bench.queue.all[known].offset

    result = bench.get(0)

    assert (result.status, numbers(result), result.next_offset) == (expected, list(range(known)), known)


def test_a_wrong_unit_is_written_again_from_the_log() -> None:
    """Queues are derived: where the log knows the message, nobody need hear of it."""
    bench = Bench(5)
    right = bench.queue.all[2]
    bench.queue.all[2] = right._replace(offset=right.offset + 4)

    assert numbers(bench.get(0)) == [0, 1, 2, 3, 4]
    assert bench.queue.all[2] == right


def test_a_unit_without_any_record_is_damage() -> None:
    bench = Bench(5)
    del bench.log.records[bench.queue.all[2].offset]

    assert numbers(bench.get(0)) == [0, 1]
    with pytest.raises(CorruptLogError, match="there is none"):
        bench.get(2)


def walked(bench: Bench, tags: int | None = None) -> list[int]:
    """What a consumer gets that goes through the whole queue."""
    found: list[int] = []
    at, result = 0, bench.get(0, tags=tags)
    while result.next_offset > at:
        found += numbers(result)
        at, result = result.next_offset, bench.get(result.next_offset, tags=tags)
    return found


def test_no_turned_bit_of_a_queue_hides_a_message(tmp_path: Path) -> None:
    """Wherever it is, before a start or while running: filtered and unfiltered consumers get all, and it is mended."""
    count, random = 40, Random(7)
    bench = Bench(count)
    queue = ConsumeQueue("T", 0, tmp_path / "T" / "0", 64 * UNIT_BYTES, FileSystem())
    queue.load()
    queue.append(bench.log.scan(0, 1).heads)
    bench.find = lambda: queue
    path = next((tmp_path / "T" / "0").iterdir())
    sound = path.read_bytes()
    for trial in range(400):
        position, bit = random.randrange(count * UNIT_BYTES), random.randrange(8)
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([sound[position] ^ (1 << bit)]))
        if trial % 2:
            bench.make_reader()
        assert walked(bench, tags=1) == list(range(1, count, 3)), (position, bit)
        assert walked(bench) == list(range(count)), (position, bit)
        assert path.read_bytes() == sound, (position, bit)
    queue.close()


def test_a_unit_that_points_at_another_record_is_damage() -> None:
    bench = Bench(5)
    bench.log.records[bench.queue.all[2].offset] = bench.log.records[bench.queue.all[3].offset]

    with pytest.raises(CorruptLogError):
        bench.get(2)


def test_a_made_up_offset_gives_nothing() -> None:
    """store.md 6.2: RocketMQ reads whatever lies there as a length."""
    bench = Bench(3)
    unit = bench.queue.all[1]
    record = bench.log.records[unit.offset]
    bench.log.records[unit.offset + 8] = record

    assert bench.reader.read_record(unit.offset) == record
    assert bench.reader.read_record(unit.offset + 8) is None
    assert bench.reader.read_record(unit.offset + 1) is None
    assert bench.reader.read_record(0) is None
    assert bench.reader.read_record(bench.log.max_offset) is None
    assert bench.reader.read_record(-1) is None


def test_is_record_at_wants_length_magic_and_place() -> None:
    record = encode_record(Message("T", b"x"), physical_offset=77)

    assert is_record_at(record, 77)
    assert not is_record_at(record, 78)
    assert not is_record_at(record + b"x", 77)
    assert not is_record_at(changed(record, field("magic", 0)), 77)
    assert not is_record_at(b"short", 77)


@pytest.mark.parametrize("ip", [b"\x01" * 4, b"\x01" * 16])
def test_store_timestamps_are_found_without_decoding(ip: bytes) -> None:
    record = encode_record(Message("T", b"x", born_host=HostAddress(ip, 1), store_timestamp=12345))

    assert store_timestamp(record) == 12345


def test_offset_and_time() -> None:
    bench = Bench(5)

    assert bench.reader.offset_by_time("T", 0, 1021) == 3
    assert bench.reader.offset_by_time("other", 0, 1021) == 0
    assert bench.reader.store_time("T", 0, 3) == 1030
    assert bench.reader.store_time("T", 0, 5) == -1
    assert bench.reader.store_time("other", 0, 0) == -1
    bench.queue.all[3] = FILLER
    assert bench.reader.store_time("T", 0, 3) == -1
    bench.log.min_offset = bench.log.max_offset
    assert bench.reader.store_time("T", 0, 2) == -1


class KeyBench:
    """Messages with keys, and an index that is told what to find."""

    def __init__(self, *messages: Message, config: MessageStoreConfig = CONFIG) -> None:
        self.log = RecordLog()
        self.offsets = [self.log.add(message).offset for message in messages]
        self.index = FakeIndex(list(reversed(self.offsets)))
        self.reader = StoreReader(self.log, lambda _topic, _queue: None, self.index, config)

    def query(
        self,
        key: str,
        max_num: int = 10,
        begin_ms: int = 0,
        end_ms: int = MANY,
        *,
        unique: bool = False,
        max_bytes: int = 0,
    ) -> list[str]:
        records = self.reader.query("T", key, max_num, begin_ms, end_ms, unique=unique, max_bytes=max_bytes)
        return [decode_record(record).body.decode() for record in records]


def keyed(body: str, keys: str, *, topic: str = "T", at_ms: int = 1000, unique: str = "u") -> Message:
    return Message(topic, body.encode(), properties={"KEYS": keys, "UNIQ_KEY": unique}, store_timestamp=at_ms)


def test_keys_are_compared_because_hashes_collide() -> None:
    """store.md 4.2: callers may get false positives. "Aa" and "BB" have the same hash."""
    bench = KeyBench(keyed("1", "BB x"), keyed("2", "x Aa"), keyed("3", "Aa", topic="other"), keyed("4", "Aaa"))

    assert bench.query("Aa") == ["2"]


def test_the_newest_messages_with_a_key_are_given_as_far_as_their_bytes_are_allowed() -> None:
    """One is always given, however long it is."""
    messages = [keyed(f"{number}", "k") for number in range(5)]
    bench = KeyBench(*messages)
    size = len(bench.log.records[bench.offsets[0]])

    assert bench.query("k", max_bytes=2 * size) == ["3", "4"]
    assert KeyBench(*messages).query("k", max_bytes=3 * size - 1) == ["3", "4"]
    assert KeyBench(*messages).query("k", max_bytes=1) == ["4"]


def test_unique_keys_are_not_looked_for_among_the_others() -> None:
    messages = (keyed("1", "id", unique="x"), keyed("2", "x", unique="id"))

    assert KeyBench(*messages).query("id", unique=True) == ["2"]
    assert KeyBench(*messages).query("id") == ["1", "2"]


def test_the_newest_come_in_log_order() -> None:
    assert KeyBench(*(keyed(str(n), "k") for n in range(5))).query("k", 2) == ["3", "4"]


def test_times_are_compared_exactly_though_the_index_rounds_them_down() -> None:
    messages = [keyed(str(ms), "k", at_ms=ms) for ms in (1999, 2000, 2500, 3000, 3001)]
    bench = KeyBench(*messages)

    assert bench.query("k", begin_ms=2000, end_ms=3000) == ["2000", "2500", "3000"]
    assert bench.index.asked[0][1] == 1000


def test_records_that_are_gone_are_left_out() -> None:
    bench = KeyBench(keyed("1", "k"), keyed("2", "k"))
    bench.log.min_offset = bench.offsets[1]

    assert bench.query("k") == ["2"]


def test_a_full_answer_of_the_index_without_enough_matches_is_asked_for_more() -> None:
    """Up to three rounds, each ending where the one before began (store.md 6.2)."""
    config = MessageStoreConfig(max_msgs_num_batch=2)
    bench = KeyBench(*(keyed(str(n), "k" if n == 0 else "other", at_ms=n * 1000) for n in range(4)), config=config)
    a, b, c, d = bench.offsets
    bench.index.rounds = [[d, c], [c, b], [b, a], [a]]

    assert bench.query("k") == ["0"]
    assert [end_ms for _, _, end_ms in bench.index.asked] == [MANY, 2000, 1000]


def test_rounds_that_bring_nothing_new_end() -> None:
    bench = KeyBench(*(keyed(str(n), "other") for n in range(2)), config=MessageStoreConfig(max_msgs_num_batch=2))
    bench.index.rounds = [bench.offsets] * 5

    assert bench.query("k") == []
    assert len(bench.index.asked) == 2


def test_without_an_index_nothing_is_found() -> None:
    bench = KeyBench(keyed("1", "k"))

    assert StoreReader(bench.log, lambda _topic, _queue: None, None, CONFIG).query("T", "k", 1, 0, MANY) == []
    assert bench.query("") == []
    assert replace(CONFIG, default_query_max_num=1).default_query_max_num == 1


def test_a_search_ends_after_a_while_and_goes_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the filter takes for a message; each search gets at least one message further."""
    bench, now_s = Bench(100), [0.0]

    def slow(_record: bytes) -> bool:
        now_s[0] += reads.FILTER_S_MAX / 10
        return False

    monkeypatch.setattr(reads, "monotonic", lambda: now_s[0])
    assert bench.search(0, slow).next_offset == 11
    monkeypatch.setattr(reads, "FILTER_S_MAX", -1.0)
    assert bench.search(11, slow).next_offset == 12
