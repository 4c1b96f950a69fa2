"""The consumer: offsets that do not exist, lost ends of queues, answers that make no sense."""

from __future__ import annotations

from collections import deque

import grpc
import pytest

from dledger.errors import UnavailableError
from rocketstore.client import fetcher
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.errors import OffsetOutOfRangeError
from rocketstore.message.message import Message
from rocketstore.message.record import HEAD_V4_BYTES, CorruptRecordError
from rocketstore.pb import broker_pb2 as pb
from tests.support.fake_broker import FakeBrokers
from tests.support.waiting import wait_until
from tests.unit.rocketstore.client.consuming import committed, consumer, drain, put


def test_messages_that_are_gone_are_skipped_and_counted(brokers: FakeBrokers) -> None:
    """OFFSET_TOO_SMALL: retention was faster than the consumer."""
    put(brokers, 10)
    brokers.queues["orders", 0].base = 6
    brokers.offsets["billing", "orders", 0] = 2

    with consumer(brokers, queues=[0]) as source:
        assert drain(source, 4) == [b"0-6", b"0-7", b"0-8", b"0-9"]
        assert source.skipped == 4


def test_a_queue_that_ends_earlier_is_read_from_its_end(brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """OFFSET_OVERFLOW_BADLY from the master: the log lost its end; what comes now must not be missed."""
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.2)
    put(brokers, 3)
    brokers.offsets["billing", "orders", 0] = 8

    with consumer(brokers, queues=[0]) as source:
        wait_until(lambda: not source.poll(1, 0.01) and source.positions()[0] == 3, "the end of the queue")
        put(brokers, 1, start=3)
        assert drain(source, 1) == [b"0-3"]

    assert committed(brokers)[0] == 4


def test_a_master_that_is_none_any_more_is_no_reason_to_go_back(brokers: FakeBrokers) -> None:
    """Paused or cut off, it says for a moment that the queue ends before what its successor has given out already."""
    put(brokers, 3)
    with consumer(brokers, queues=[0], pull_wait_ms=10) as source:
        drain(source, 3)
        old = pb.PullResponse(status="OFFSET_OVERFLOW_BADLY", next_offset=1, max_offset=1)
        for node in brokers.nodes:
            node.pulls.extend([old] * 5)
        wait_until(lambda: any(not node.pulls for node in brokers.nodes), "all of its answers")

        assert source.positions() == {0: 3}
        put(brokers, 1, start=3)
        assert drain(source, 1) == [b"0-3"]


def test_each_shorter_queue_must_be_confirmed_anew(brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one was, says nothing of the next one: the queue may have been cut only once."""
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.3)
    put(brokers, 3)
    brokers.offsets["billing", "orders", 0] = 8
    again = pb.PullResponse(status="OFFSET_OVERFLOW_BADLY", next_offset=1, max_offset=1)

    with consumer(brokers, queues=[0], pull_wait_ms=10) as source:
        wait_until(lambda: not source.poll(1, 0.01) and source.positions()[0] == 3, "the end of the queue")
        for node in brokers.nodes:
            node.pulls.append(again)
        wait_until(lambda: any(not node.pulls for node in brokers.nodes), "another such answer")
        put(brokers, 1, start=3)
        assert drain(source, 1) == [b"0-3"]
        assert source.positions() == {0: 4}


def test_a_slave_that_lags_is_no_reason_to_go_back(brokers: FakeBrokers) -> None:
    """It does not know yet what the consumer has read already."""
    put(brokers, 3)
    with consumer(brokers, queues=[0], pull_wait_ms=10) as source:
        drain(source, 3)
        for node in brokers.nodes:
            node.pulls.extend([pb.PullResponse(status="OFFSET_OVERFLOW_BADLY", next_offset=1, max_offset=1)] * 2)
        brokers.nodes[0].pulls.clear()
        brokers.nodes[0].stop()
        brokers.elect(None)
        wait_until(lambda: not all(len(node.pulls) == 2 for node in brokers.nodes[1:]), "a slave's answer")
        assert source.positions() == {0: 3}
        for node in brokers.nodes[1:]:
            node.pulls.clear()
        brokers.elect(2)
        put(brokers, 1, start=3)
        assert drain(source, 1) == [b"0-3"]


@pytest.mark.parametrize("lost", [4, 2, 0])
def test_what_is_stored_behind_a_lost_end_is_not_skipped(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The queue was longer than what is left of it and what was sent since; the last message that came tells from when.

    With nothing left, it is a broker that lost its disk.
    """
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.1)
    put(brokers, 8, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 8)
        with brokers.changed:
            queue = brokers.queues["orders", 0]
            del queue.records[lost:], queue.messages[lost:]
        put(brokers, 2, start=100)
        assert drain(source, 2) == [b"0-100", b"0-101"]
    assert committed(brokers)[0] == lost + 2


def test_a_lost_end_without_messages_of_ones_own_brings_none_of_them_twice(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what tags leave out was lost: the last message that came is still there, and done."""
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.1)
    put(brokers, 3, tags="a", at_ms=1_700_000_000_000)
    put(brokers, 5, tags="b", start=3, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], tags="a", pull_wait_ms=50) as source:
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]
        wait_until(lambda: not source.poll(1, 0.01) and source.positions() == {0: 8}, "the others are passed over")
        with brokers.changed:
            queue = brokers.queues["orders", 0]
            del queue.records[5:], queue.messages[5:]
        put(brokers, 1, tags="a", start=100)
        assert drain(source, 1) == [b"0-100"]
    assert committed(brokers)[0] == 6


def test_what_takes_the_place_of_messages_that_tags_leave_out_is_read(brokers: FakeBrokers) -> None:
    """The last message that came is still there, and the queue as long as before: its end is another one."""
    put(brokers, 3, tags="a", at_ms=1_700_000_000_000)
    put(brokers, 5, tags="b", start=3, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], tags="a", pull_wait_ms=50) as source:
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]
        wait_until(lambda: not source.poll(1, 0.01) and source.positions() == {0: 8}, "the others are passed over")
        brokers.nodes[0].stop()
        brokers.lose("orders", 0, 5)
        put(brokers, 3, tags="a", start=100)
        brokers.nodes[0].start()
        assert drain(source, 3) == [b"0-100", b"0-101", b"0-102"]
        assert source.poll(1, 0.3) == []
    assert committed(brokers)[0] == 8


def test_messages_that_tags_leave_out_bring_none_twice_after_a_restart(brokers: FakeBrokers) -> None:
    """Nothing was lost: the position does not go back."""
    put(brokers, 3, tags="a")
    put(brokers, 5, tags="b", start=3)
    with consumer(brokers, queues=[0], tags="a", pull_wait_ms=50, auto_commit_s=0) as source:
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]
        wait_until(lambda: not source.poll(1, 0.01) and committed(brokers)[0] == 8, "all is committed")
        brokers.nodes[0].stop()
        brokers.nodes[0].start()
        put(brokers, 1, tags="a", start=100)
        assert drain(source, 1) == [b"0-100"]
    assert committed(brokers)[0] == 9
    assert [offset.offset for one in brokers.commits for offset in one.offsets] == sorted(
        offset.offset for one in brokers.commits for offset in one.offsets
    )


def test_nothing_is_committed_before_the_last_message_was_looked_at_again(brokers: FakeBrokers) -> None:
    """Others are in the places of messages that were read; the stream has not told yet, and who commits is told so."""
    put(brokers, 6, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], auto_commit_s=None, pull_wait_ms=5000, timeout_s=1) as source:
        drain(source, 6)
        brokers.lose("orders", 0, 3)
        put(brokers, 3, start=100)
        with pytest.raises(UnavailableError, match="not known yet whether it still has what was read"):
            source.commit()
        assert committed(brokers)[0] == 0
        assert drain(source, 3) == [b"0-100", b"0-101", b"0-102"]
    assert committed(brokers)[0] == 6


def test_only_the_position_tells_whoever_has_read_nothing(brokers: FakeBrokers) -> None:
    """There is no message to compare, and the position was lost with its end: the queue is read from its beginning."""
    brokers.offsets["billing", "orders", 0] = 0
    with consumer(brokers, queues=[0], auto_commit_s=0, pull_wait_ms=50) as source:
        assert source.poll(1, 0.1) == []
        source.seek(0, 0)
        put(brokers, 4)
        brokers.nodes[0].stop()
        source._queues[0].fetcher.seek(4, 1)
        brokers.offsets.clear()
        brokers.nodes[0].start()
        assert drain(source, 4) == [b"0-%d" % number for number in range(4)]


@pytest.mark.parametrize("new", [2, 3, 6])
def test_a_broker_that_has_filled_what_it_lost_is_noticed(brokers: FakeBrokers, new: int) -> None:
    """Its queue is as long as before or longer when the connection is back: the last message is another one."""
    put(brokers, 6, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 6)
        for node in brokers.nodes:
            node.stop()
        queue = brokers.queues["orders", 0]
        del queue.records[3:], queue.messages[3:]
        put(brokers, new, start=100)
        brokers.nodes[0].start()
        assert drain(source, new) == [b"0-%d" % number for number in range(100, 100 + new)]
    assert committed(brokers)[0] == 3 + new


def test_a_last_message_that_cannot_be_read_again_holds_nobody_up(brokers: FakeBrokers) -> None:
    """It is damaged at the broker since it was read, and the connection has broken: what follows comes all the same."""
    put(brokers, 6)
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 6)
        brokers.nodes[0].stop()
        damaged = (grpc.StatusCode.DATA_LOSS, "the message does not match its CRC", dict[str, str]())
        brokers.nodes[0].fail_calls["Pull"] = deque([damaged] * 10_000)
        put(brokers, 2, start=6)
        brokers.nodes[0].start()
        assert drain(source, 2) == [b"0-6", b"0-7"]
    assert committed(brokers)[0] == 8


def test_a_later_message_in_place_of_an_expired_one_is_no_other_history(brokers: FakeBrokers) -> None:
    """Retention has just removed the last one that was read: brokers then answer with the next, of the same moment."""
    for number in range(6):
        brokers.put(Message("orders", b"%d" % number, store_timestamp=1_700_000_000_000))
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 6)
        brokers.nodes[0].stop()
        for number in range(6, 9):
            brokers.put(Message("orders", b"%d" % number, store_timestamp=1_700_000_000_000))
        queue = brokers.queues["orders", 0]
        queue.records[5] = queue.records[6]
        brokers.nodes[0].start()
        assert drain(source, 3) == [b"6", b"7", b"8"]


def test_offsets_that_are_gone_bring_nothing_again_after_the_last_known_message_expired(brokers: FakeBrokers) -> None:
    """The group is deleted just after retention: the message in that place is a later one, and no other history."""
    put(brokers, 5, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], auto_commit_s=None, pull_wait_ms=50) as source:
        drain(source, 5)
        source.commit()
        put(brokers, 3, start=5, at_ms=1_700_000_000_000)
        drain(source, 3)
        with brokers.changed:
            queue = brokers.queues["orders", 0]
            queue.records[4] = queue.records[5]
            brokers.offsets.clear()
        source.commit()
        assert committed(brokers) == {0: 8}
        assert not source.poll(1, 0.2)


def test_a_lost_end_moves_nobody_forward(brokers: FakeBrokers) -> None:
    """Who has gone back meanwhile reads everything from there on, although what it read last is another message now."""
    put(brokers, 6, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 6)
        for node in brokers.nodes:
            node.stop()
        source.seek(0, 1)
        queue = brokers.queues["orders", 0]
        del queue.records[3:], queue.messages[3:]
        put(brokers, 6, start=100)
        brokers.nodes[0].start()
        assert drain(source, 8) == [b"0-1", b"0-2", *(b"0-%d" % number for number in range(100, 106))]


def test_what_was_pulled_ahead_is_not_skipped_with_a_lost_end(brokers: FakeBrokers) -> None:
    """The group's offsets were in the lost end, too: what the queue still has, and nobody has got yet, comes first."""
    put(brokers, 20, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], auto_commit_s=None) as source:
        assert len(source.poll(5, 5)) == 5
        wait_until(lambda: source._queues[0].fetcher._offset == 20, "all are pulled")
        source.commit()
        brokers.offsets.clear()
        brokers.lose("orders", 0, 15)
        put(brokers, 10, start=100)
        assert len(source.poll(1, 5)) == 1
        source.commit()
        wanted = [*range(6, 20), *range(100, 110)]  # what was lost, and had come, too
        assert drain(source, 24) == [b"0-%d" % number for number in wanted]


def test_garbage_is_no_last_message(brokers: FakeBrokers) -> None:
    """It can be compared with nothing once the connection has broken: after ``seek`` everything comes."""
    put(brokers, 3)
    brokers.nodes[0].pulls.append(pb.PullResponse(status="FOUND", next_offset=1, records=b"garbage", count=1))
    with consumer(brokers, queues=[0], pull_messages=1, pull_wait_ms=50, stock_bytes_max=1) as source:
        with pytest.raises(BadAnswerError):
            source.poll(1, 5)
        brokers.nodes[0].stop()
        brokers.nodes[0].start()
        source.seek(0, 0)
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]


@pytest.mark.parametrize("again", [1, 4])
def test_a_broker_that_lost_its_disk_is_read_from_the_beginning(brokers: FakeBrokers, again: int) -> None:
    """Also if it has more messages than before by the time it is asked: the offsets are gone, the last message, too."""
    put(brokers, 3, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], pull_wait_ms=50, auto_commit_s=0, pull_messages=1) as source:
        drain(source, 3)
        source.poll(1, 0)
        with brokers.changed:
            brokers.lose("orders", 0, 0)
            brokers.offsets.clear()
            put(brokers, again, start=50)
        bodies: list[bytes] = []

        def all_came() -> bool:
            bodies.extend(one.body for one in source.poll(1, 0.05))
            return {b"0-%d" % number for number in range(50, 50 + again)} <= set(bodies)

        wait_until(all_came, "all new messages")
    assert committed(brokers)[0] == again


def test_offsets_that_are_gone_are_stored_again(brokers: FakeBrokers, caplog: pytest.LogCaptureFixture) -> None:
    """The group was deleted under a consumer that has nothing to do: whoever follows it must not begin anew."""
    put(brokers, 5)
    with consumer(brokers, queues=[0], auto_commit_s=0, pull_wait_ms=50) as source:
        drain(source, 5)
        source.poll(1, 0)
        brokers.offsets.clear()
        source.poll(1, 0)
        assert committed(brokers) == {0: 5}
        assert sum("are gone" in one.message for one in caplog.records) == 1


@pytest.mark.parametrize("offset", [2, 12])
def test_out_of_range_is_an_error_if_asked_for(
    brokers: FakeBrokers, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every poll tells it, until ``seek``."""
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.2)
    put(brokers, 10)
    brokers.queues["orders", 0].base = 6
    brokers.offsets["billing", "orders", 0] = offset

    with consumer(brokers, queues=[0], when_out_of_range="error") as source:
        for _ in range(2):
            with pytest.raises(OffsetOutOfRangeError):
                source.poll(1, 5)
        source.seek(0, 7)
        assert drain(source, 1) == [b"0-7"]


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff",
        pb.PullResponse(status="NO_SUCH_STATUS"),
        pb.PullResponse(status="FOUND", next_offset=1, records=b"garbage", count=1),
        pb.PullResponse(status="FOUND", next_offset=0, records=bytes(200), count=1),
        pb.PullResponse(status="FOUND", next_offset=1, records=bytes(200), count=1),
        pb.PullResponse(status="OFFSET_TOO_SMALL", min_offset=0),
        pb.PullResponse(status="NO_MATCHED_MESSAGE", next_offset=-1),
    ],
)
def test_garbage_is_a_typed_error_and_no_end(brokers: FakeBrokers, answer: bytes | pb.PullResponse) -> None:
    """The position stays; after ``seek`` the messages come."""
    put(brokers, 3)
    brokers.nodes[0].pulls.append(answer)

    with consumer(brokers, queues=[0]) as source:
        with pytest.raises(BadAnswerError):
            source.poll(3, 5)
        assert source.positions() == {0: 0}
        source.seek(0, 0)
        assert len(drain(source, 3)) == 3


def test_a_damaged_body_is_noticed(brokers: FakeBrokers) -> None:
    """The CRC is checked at this end of the wire; the next try gets it whole."""
    put(brokers, 3)
    record = bytearray(brokers.queues["orders", 0].records[0])
    record[HEAD_V4_BYTES] ^= 1
    brokers.nodes[0].pulls.append(pb.PullResponse(status="FOUND", next_offset=1, records=bytes(record), count=1))

    with consumer(brokers, queues=[0]) as source:
        with pytest.raises(BadAnswerError, match="CRC"):
            source.poll(3, 5)
        assert len(drain(source, 3)) == 3


def test_damage_behind_the_body_loses_nothing_where_tags_are_looked_at(brokers: FakeBrokers) -> None:
    """No checksum covers it; the next try gets it whole."""
    put(brokers, 3, tags="a")
    record = bytearray(brokers.queues["orders", 0].records[0])
    record[-len("TAGS a") - 1] ^= 1  # the length of the properties
    brokers.nodes[0].pulls.append(pb.PullResponse(status="FOUND", next_offset=1, records=bytes(record), count=1))

    with consumer(brokers, queues=[0], tags="a") as source:
        with pytest.raises(CorruptRecordError, match="properties"):
            source.poll(3, 5)
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]
