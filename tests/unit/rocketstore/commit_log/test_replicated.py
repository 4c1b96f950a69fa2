"""The replicated commit log: where records are, which queue offsets they get, what may be read, how puts end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dledger import errors
from dledger.config import ServerConfig
from dledger.errors import ConfigError, CorruptLogError, DLedgerError, LeaderHint
from dledger.records import ENTRY_HEADER_BYTES
from dledger.server import OPAQUE, DLedgerServer
from dledger.types import NOOP_CHANNEL, LogIndex, Magic, NodeId, Term
from rocketstore.commit_log.port import CommitLog
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog, status_of
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import SYS_FLAG_COMMITTED, SYS_FLAG_PREPARED, SYS_FLAG_ROLLED_BACK, HostAddress
from rocketstore.message.record import HEAD_V4_BYTES, decode_record, encode_record
from rocketstore.types import (
    QUEUE_NUMBERS_TOPIC,
    SCHEDULE_TOPIC,
    TERM_START_TOPIC,
    PutMessageStatus,
    PutResult,
    RecordHead,
    StoredPlace,
)
from tests.support.waiting import ManualClock, wait_until
from tests.unit.rocketstore.commit_log.replicas import SEGMENT_BYTES, Replica, members_of, message, node_config


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return node_config(tmp_path, members_of(1))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def replica(config: ServerConfig, clock: ManualClock) -> Iterator[Replica]:
    """The only member of its group; it leads and takes puts."""
    replica = Replica(config, clock).start().lead()
    yield replica
    replica.stop()


@pytest.fixture
def log(replica: Replica) -> ReplicatedCommitLog:
    return replica.log


def stored(result: PutResult) -> StoredPlace:
    assert (result.status, result.outcome, result.ok) == (PutMessageStatus.PUT_OK, "stored", True), result
    assert result.stored is not None
    return result.stored


def change(replica: Replica, what: object) -> None:
    """Do something to the node, under its lock."""
    replica.server._driver.call(lambda now_ms: what(replica.server._node, now_ms))  # type: ignore[operator]


def next_leadership(replica: Replica) -> Term:
    """Lose leadership and win it again in a later term; gives that term."""
    before = replica.server.status().term
    change(replica, lambda node, now_ms: node.state.become_follower(Term(before + 1), None, now_ms))
    wait_until(lambda: replica.leads and replica.server.status().term > before, "it leads again")
    return replica.server.status().term


# --- where records are ----------------------------------------------------------------------------------------------


def test_it_is_a_commit_log(log: ReplicatedCommitLog) -> None:
    """The port's, as the type checker confirms."""
    as_port: CommitLog = log
    assert as_port.is_replicated


def test_a_record_says_where_it_is(replica: Replica, clock: ManualClock) -> None:
    """Its offset is its own, 48 bytes behind its entry's; the append hook wrote it before it was replicated."""
    one, two = map(stored, replica.put(message(b"one"), message(b"two")))

    assert two.offset == one.offset + one.size + ENTRY_HEADER_BYTES
    for result, body, queue_offset in ((one, b"one", 0), (two, b"two", 1)):
        record = replica.log.read(result.offset, result.size)
        assert record is not None
        decoded = decode_record(record)
        assert (decoded.body, decoded.offset, decoded.queue_offset) == (body, result.offset, queue_offset)
        assert (decoded.store_timestamp, result.store_timestamp) == (clock.now_ms, clock.now_ms)


def test_storing_is_noted_in_the_message(replica: Replica, clock: ManualClock) -> None:
    """What a caller may want to know without decoding."""
    sent = message()

    result = stored(replica.put(sent)[0])

    assert (sent.offset, sent.queue_offset, sent.size) == (result.offset, result.queue_offset, result.size)
    assert sent.store_timestamp == clock.now_ms


def test_records_between_ipv6_hosts_have_their_timestamp_elsewhere(replica: Replica, clock: ManualClock) -> None:
    """12 bytes further on."""
    sent = replace(message(), born_host=HostAddress(b"\1" * 16, 7), store_host=HostAddress(b"\2" * 16, 8))

    result = stored(replica.put(sent)[0])

    record = replica.log.read_record(result.offset)
    assert record is not None
    assert decode_record(record) == sent
    assert decode_record(record).store_timestamp == clock.now_ms


def test_the_entry_that_begins_a_term_is_a_record_for_every_reader(replica: Replica, clock: ManualClock) -> None:
    """RocketMQ's readers parse every body; ours step over it, by its channel."""
    entry = replica.server.log.read(LogIndex(0))

    begins = decode_record(entry.body)

    assert (entry.magic, entry.channel) == (Magic.NOOP, NOOP_CHANNEL)
    assert (begins.topic, begins.offset, begins.store_timestamp) == (TERM_START_TOPIC, 48, clock.now_ms)
    assert replica.heads() == []
    assert replica.log.read_record(48) is None


def test_a_log_that_holds_other_things_is_refused(tmp_path: Path) -> None:
    """Whoever forgets ``for_broker`` would find out when a reader stumbles."""
    config = replace(node_config(tmp_path, members_of(1)), client_appends=True)
    for settings, bodies in ((config, MESSAGES), (replace(config, client_appends=False), OPAQUE)):
        server = DLedgerServer(settings, bodies=bodies)
        with pytest.raises(ConfigError, match="for_broker"):
            ReplicatedCommitLog(server, MessageStoreConfig())
        server.stop(graceful=False)


# --- queue offsets --------------------------------------------------------------------------------------------------


def test_queue_offsets_are_consecutive_per_queue(replica: Replica) -> None:
    """Across batches, whatever lies between."""
    first = replica.put(message(), message(queue_id=1), message())
    second = replica.put(message(queue_id=1), message(topic="Other"), message())

    assert [stored(one).queue_offset for one in (*first, *second)] == [0, 0, 1, 1, 0, 2]
    assert replica.log.queue_offsets == {("TopicTest", 0): 3, ("TopicTest", 1): 2, ("Other", 0): 1}
    assert [head.queue_offset for head in replica.heads()] == [0, 0, 1, 1, 0, 2]


def test_many_threads_leave_no_gap_and_no_repeat(replica: Replica) -> None:
    """The order in a queue is that of the log."""

    def put() -> None:
        for _ in range(20):
            replica.put(message(), message(queue_id=1))

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    heads = replica.heads()
    for queue_id in (0, 1):
        assert [head.queue_offset for head in heads if head.queue_id == queue_id] == list(range(80))


def test_a_message_may_be_in_a_batch_twice(replica: Replica) -> None:
    """Two records, two offsets."""
    one = message()

    results = replica.put(one, one)

    assert [stored(result).queue_offset for result in results] == [0, 1]
    assert [head.queue_offset for head in replica.heads()] == [0, 1]


def test_prepared_and_rolled_back_messages_take_no_queue_offset(replica: Replica) -> None:
    """Committed ones do."""
    flags = (SYS_FLAG_PREPARED, SYS_FLAG_ROLLED_BACK, SYS_FLAG_COMMITTED, 0)

    results = replica.put(*(replace(message(), sys_flag=flag) for flag in flags))

    assert [stored(result).queue_offset for result in results] == [0, 0, 0, 1]
    assert [head.queue_offset for head in replica.heads()] == [-1, -1, 0, 1]


def test_a_refused_batch_takes_no_queue_offsets(replica: Replica) -> None:
    """RocketMQ's table would go on only after some failures, and repeat offsets after others."""
    replica.put(message())
    change(replica, lambda node, _now_ms: setattr(node.state.role, "transferring", True))

    refused = replica.put(message(), message())

    assert [(one.status, one.outcome, one.stored) for one in refused] == [
        (PutMessageStatus.SERVICE_NOT_AVAILABLE, "not_applied", None)
    ] * 2
    change(replica, lambda node, _now_ms: setattr(node.state.role, "transferring", False))
    assert stored(replica.put(message())[0]).queue_offset == 1


def test_nothing_is_given_out_until_the_term_is_open(replica: Replica) -> None:
    """Between demotion and promotion the gate is shut, here too: the store's own may be a moment late."""
    replica.put(message())
    replica.log.close_term()

    (refused,) = replica.put(message())

    assert (refused.status, refused.outcome) == (PutMessageStatus.SERVICE_NOT_AVAILABLE, "not_applied")
    assert replica.log.queue_offsets == {("TopicTest", 0): 1}
    assert len(replica.heads()) == 1


def test_a_put_never_uses_the_table_of_an_earlier_term(replica: Replica) -> None:
    """The node lost leadership and won it again before anybody noticed; the table still counts for the old term."""
    replica.put(message())
    term = next_leadership(replica)
    replica.log.set_queue_offsets({("TopicTest", 0): 700})  # as a promotion of a term that is over might still do

    (refused,) = replica.put(message())

    assert (refused.status, refused.outcome) == (PutMessageStatus.SERVICE_NOT_AVAILABLE, "not_applied")
    assert f"term {term}" in refused.reason
    replica.log.set_queue_offsets({("TopicTest", 0): 1})
    replica.log.open_term(term)
    assert stored(replica.put(message())[0]).queue_offset == 1


def test_the_table_is_replaced_as_a_whole(replica: Replica) -> None:
    """By what was counted from the consume queues."""
    replica.put(message(queue_id=5))
    replica.log.set_queue_offsets({("TopicTest", 0): 41})

    assert stored(replica.put(message())[0]).queue_offset == 41
    assert replica.log.queue_offsets == {("TopicTest", 0): 42}


def test_timestamps_never_go_back_in_the_log(replica: Replica, clock: ManualClock) -> None:
    """Searching by time relies on it; the wall clock may be set back."""
    replica.put(message())
    clock.now_ms -= 5000
    replica.put(message())
    clock.now_ms += 6000
    replica.put(message())

    start = clock.now_ms - 1000
    assert [head.store_timestamp for head in replica.heads()] == [start, start, start + 1000]


# --- how puts end ---------------------------------------------------------------------------------------------------


def test_timestamps_do_not_go_back_with_the_clock_of_a_new_leader(
    config: ServerConfig, replica: Replica, clock: ManualClock
) -> None:
    """Searches by time halve the log. What a term begins with takes over the newest time, also after a restart."""
    before = stored(replica.put(message())[0]).store_timestamp
    replica.stop()
    slow = ManualClock()
    slow.now_ms = before - 60_000
    again = Replica(config, slow).start().lead()
    try:
        begins = decode_record(again.server.log.read(again.server.log.last.index).body)
        assert begins.topic == TERM_START_TOPIC
        assert begins.store_timestamp == before
        assert stored(again.put(message())[0]).store_timestamp == before
        slow.now_ms = before + 5
        assert stored(again.put(message())[0]).store_timestamp == before + 5
    finally:
        again.stop()


def test_queue_numbers_are_written_in_the_term_that_they_are_of(replica: Replica) -> None:
    """In a later one the table may count what was lost: everybody would wait for offsets that nobody gives out."""
    results: list[PutResult] = []
    done = threading.Event()

    def finish(found: Sequence[PutResult]) -> None:
        results.extend(found)
        done.set()

    def encode(end: int, offsets: Mapping[tuple[str, int], int], bytes_max: int) -> list[bytes]:
        assert (end, dict(offsets)) == (replica.log.end_offset, {("TopicTest", 0): 1})
        assert bytes_max > 1000
        if change_term:
            replica.log.open_term(next_leadership(replica))
        return [b"numbers"]

    replica.put(message())
    change_term = True
    replica.log.submit_numbering(encode, finish)
    assert done.wait(60)
    assert (results[0].status, results[0].outcome) == (PutMessageStatus.SERVICE_NOT_AVAILABLE, "not_applied")

    change_term = False
    done.clear()
    replica.log.submit_numbering(encode, finish)
    assert done.wait(60)
    record = replica.log.read_record(stored(results[1]).offset)
    assert record is not None
    assert (decode_record(record).topic, decode_record(record).body) == (QUEUE_NUMBERS_TOPIC, b"numbers")


def test_a_put_may_be_made_while_another_one_is_told_its_end(replica: Replica) -> None:
    """No lock is held then."""
    done, results = threading.Event(), list[PutResult]()

    def again(found: Sequence[PutResult]) -> None:
        results.extend(found)
        if len(results) < 3:
            replica.log.submit([message()], again)
        else:
            done.set()

    replica.log.submit([message()], again)

    assert done.wait(60)
    assert [stored(result).queue_offset for result in results] == [0, 1, 2]


def test_no_messages_are_stored_at_once(replica: Replica) -> None:
    """Nothing to wait for."""
    assert replica.put() == []


def test_a_record_that_no_entry_can_hold_is_illegal(replica: Replica) -> None:
    """RocketMQ fails with a buffer overflow; here all of the batch is refused, and each message hears why."""
    limit = SEGMENT_BYTES - 8 - ENTRY_HEADER_BYTES
    fits = limit - len(encode_record(message(b"")))
    too_large, small = message(b"x" * (fits + 1)), message()

    results = replica.put(small, too_large)

    assert [(one.status, one.outcome) for one in results] == [(PutMessageStatus.MESSAGE_ILLEGAL, "not_applied")] * 2
    assert results[0].reason.startswith("message 1 of the batch")
    assert results[1].reason == f"a record of {limit + 1} bytes is too large: at most {limit} fit an entry"
    assert stored(replica.put(message(b"x" * fits))[0]).size == limit


def test_what_cannot_be_encoded_is_illegal(replica: Replica) -> None:
    """Nothing of the batch is stored."""
    results = replica.put(message(), replace(message(), topic="x" * 200))

    assert {one.status for one in results} == {PutMessageStatus.MESSAGE_ILLEGAL}
    assert replica.heads() == []


def test_delayed_messages_wait_in_the_queue_of_their_level(replica: Replica, clock: ManualClock) -> None:
    """With the time they are due as their tags code."""
    sent = message()
    sent.properties["DELAY"] = "2"

    replica.put(sent)

    (head,) = replica.heads()
    assert (head.topic, head.queue_id, head.tags_code) == (SCHEDULE_TOPIC, 1, clock.now_ms + 5000)


def test_a_member_that_does_not_lead_refuses(tmp_path: Path) -> None:
    """Nothing is applied; alone of two, it knows of no leader."""
    replica = Replica(node_config(tmp_path, members_of(2))).start()
    replica.log.open_term(Term(0))

    (refused,) = replica.put(message())

    assert (refused.status, refused.outcome) == (PutMessageStatus.SERVICE_NOT_AVAILABLE, "not_applied")
    assert (refused.stored, refused.leader) == (None, "")
    replica.stop()


def test_a_stopped_member_refuses(replica: Replica) -> None:
    """It says so instead of hanging."""
    replica.stop()

    (refused,) = replica.put(message())

    assert (refused.status, refused.outcome) == (PutMessageStatus.SERVICE_NOT_AVAILABLE, "not_applied")


@pytest.mark.slow  # for an election by members that are patient
def test_without_a_quorum_the_outcome_is_unknown_and_nothing_can_be_read(tmp_path: Path) -> None:
    """testCommittedPos: busy, maximum 0 beyond the begin; with the follower back, the message is there."""
    members = members_of(2)
    configs = [node_config(tmp_path / str(one), members, one, ack_timeout_ms=200, election=SLOW) for one in (0, 1)]
    both = [Replica(config).start() for config in configs]
    wait_until(lambda: any(one.leads for one in both), "one leads")
    leader, other = both if both[0].leads else reversed(both)
    leader.lead()
    wait_until(lambda: leader.log.max_offset == leader.log.end_offset, "its NOOP is committed")
    before = leader.log.max_offset
    other.stop()

    (unknown,) = leader.put(message())

    assert (unknown.status, unknown.outcome, unknown.ok) == (PutMessageStatus.OS_PAGECACHE_BUSY, "unknown", False)
    assert unknown.stored is not None
    assert (unknown.stored.offset, unknown.stored.queue_offset) == (before + ENTRY_HEADER_BYTES, 0)
    assert leader.log.max_offset == before
    assert leader.log.read_record(unknown.stored.offset) is None
    assert leader.log.read(unknown.stored.offset, unknown.stored.size) is None
    assert leader.heads() == []
    again = Replica(configs[int(other.server.config.node_id[1:])]).start()
    wait_until(lambda: len(leader.heads()) == 1, "committed after all")
    wait_until(lambda: again.heads() == leader.heads(), "on both")
    leader.stop()
    again.stop()


SLOW = replace(node_config(Path(), members_of(1)).election, election_timeout_ms_min=4000, election_timeout_ms_max=9000)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.NotLeaderError("x"), "SERVICE_NOT_AVAILABLE"),
        (errors.LeaderNotReadyError("x"), "SERVICE_NOT_AVAILABLE"),
        (errors.DiskFullError("x"), "SERVICE_NOT_AVAILABLE"),
        (errors.PendingFullError("x"), "OS_PAGECACHE_BUSY"),
        (errors.LeaderTransferringError("x"), "SERVICE_NOT_AVAILABLE"),
        (errors.QuorumAckTimeoutError("x"), "OS_PAGECACHE_BUSY"),
        (errors.TermChangedError("x"), "UNKNOWN_ERROR"),
        (errors.DiskError("x"), "UNKNOWN_ERROR"),
        (errors.ShutdownError("x"), "UNKNOWN_ERROR"),
        (errors.EntryTooLargeError("x"), "MESSAGE_ILLEGAL"),
    ],
)
def test_every_error_has_rocketmqs_status(error: DLedgerError, status: str) -> None:
    """None of them is one that producers take as sent."""
    assert status_of(error) == status


def test_a_refusal_names_the_leader(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the broker wants it spelled."""
    error = errors.NotLeaderError("elsewhere", leader=LeaderHint(NodeId("n1"), "h:1"))
    monkeypatch.setattr(replica.server, "submit_prepared", lambda _put, done, _producer: done(error))

    (refused,) = replica.put(message())

    assert (refused.leader, refused.reason) == ("h:1", "elsewhere")


def test_the_time_in_the_put_lock_is_told(
    replica: Replica, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a stuck disk shows as busy."""
    seen: list[int] = []
    write = replica.server.log.append_as_leader

    def slow(*args: object, **options: object) -> object:
        clock.now_ms += 1500
        seen.append(replica.log.put_lock_ms)
        return write(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(replica.server.log, "append_as_leader", slow)

    replica.put(message())

    assert seen == [1500]
    assert replica.log.put_lock_ms == 0


def test_a_failing_disk_leaves_no_lock_behind(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node stops, the outcome is unknown; whoever shuts the broker down must not hang."""

    def fail(*_: object, **__: object) -> None:
        raise errors.DiskError("broken")

    monkeypatch.setattr(replica.server.log, "append_as_leader", fail)

    (failed,) = replica.put(message())

    assert (failed.status, failed.outcome) == (PutMessageStatus.UNKNOWN_ERROR, "unknown")
    replica.log.close_term()
    replica.log.set_queue_offsets({})


# --- reads ----------------------------------------------------------------------------------------------------------


def fill(replica: Replica, count: int = 100) -> list[StoredPlace]:
    """Messages over several segments."""
    bodies = [b"x" * (300 + 7 * number % 500) for number in range(count)]
    return [stored(one) for one in replica.put(*(message(body, number % 3) for number, body in enumerate(bodies)))]


def places(heads: Sequence[RecordHead]) -> list[tuple[int, int, int, int]]:
    return [(head.offset, head.size, head.queue_id, head.queue_offset) for head in heads]


def test_a_scan_gives_every_message_once(replica: Replica) -> None:
    """Over blanks and NOOPs, in steps of any size, from entries, records, ends of records, or before the begin."""
    sent = fill(replica, 50)
    replica.log.open_term(next_leadership(replica))
    sent += fill(replica, 50)
    expected = [one[:4] for one in sent]
    assert replica.log.max_offset > 3 * SEGMENT_BYTES

    for bytes_max in (1, 500, 10_000, 1 << 20):
        assert places(replica.heads(0, bytes_max)) == expected
    for number, one in enumerate(sent):
        for offset in (one.offset, one.offset - ENTRY_HEADER_BYTES):
            assert places(replica.heads(offset)) == expected[number:]
        assert places(replica.heads(one.offset + one.size)) == expected[number + 1 :]


def test_a_scan_ends_at_the_end(replica: Replica) -> None:
    """And stays there; a dispatcher ahead of what a restarted member knows waits, too."""
    fill(replica, 3)
    end = replica.log.max_offset
    for offset in (end, end + 1000):
        assert replica.log.scan(offset, 1 << 20) == ([], offset)


def test_a_scan_from_a_place_where_nothing_begins_is_refused(replica: Replica) -> None:
    """With the file and the offset in it."""
    sent = fill(replica)
    in_body = sent[-1].offset + 100

    with pytest.raises(CorruptLogError) as refused:
        replica.log.scan(in_body, 1 << 20)

    assert refused.value.offset == in_body % SEGMENT_BYTES
    assert refused.value.path.exists()
    assert int(refused.value.path.name) == in_body - in_body % SEGMENT_BYTES


def test_an_entry_that_is_no_record_is_damage(replica: Replica) -> None:
    """Somebody wrote to the log before it was a broker's."""
    done = threading.Event()
    replica.server.submit_append([bytes(200)], lambda _result: done.set())
    assert done.wait(60)

    with pytest.raises(CorruptLogError):
        replica.heads()


def test_reads_give_whole_records_only(replica: Replica) -> None:
    """The size must be the record's; nothing below the begin, nothing beyond the end."""
    one = fill(replica, 2)[0]
    assert replica.log.read(one.offset, one.size) is not None

    for offset, size in (
        (one.offset, one.size - 1),
        (one.offset - ENTRY_HEADER_BYTES, one.size),
        (-5, 10),
        (1 << 40, 100),
        (0, 3),
    ):
        assert replica.log.read(offset, size) is None


def test_bytes_within_a_body_are_no_record(replica: Replica) -> None:
    """A message id may come from anybody, and so may a body that looks like entries and records."""
    outer = stored(replica.put(message(b"."))[0])
    inside = outer.offset + outer.size + ENTRY_HEADER_BYTES + HEAD_V4_BYTES
    forged = replica.server.log.read_run(LogIndex(1), LogIndex(1)).data
    replica.put(message(forged))

    assert replica.log.read(inside + ENTRY_HEADER_BYTES, outer.size) is None
    assert replica.log.read_record(inside + ENTRY_HEADER_BYTES) is None
    assert replica.log.read_record(inside) is None
    assert replica.log.read_record(outer.offset) is not None
    assert [replica.log.read_record(offset) for offset in (-1, 0, 47, 1 << 50)] == [None] * 4


def test_the_first_message_tells_the_earliest_time(replica: Replica, clock: ManualClock) -> None:
    """Whatever NOOPs come before it."""
    assert replica.log.earliest_message_time() == -1
    next_leadership(replica)
    clock.now_ms += 1000
    replica.log.open_term(next_leadership(replica))
    replica.put(message())
    clock.now_ms += 1000
    replica.put(message())

    assert replica.log.earliest_message_time() == clock.now_ms - 1000
    assert replica.log.earliest_message_time() == clock.now_ms - 1000


# --- the rest of the port -------------------------------------------------------------------------------------------


def test_offsets_bound_what_is_there(replica: Replica) -> None:
    """Positions of entries; records begin 48 bytes later."""
    wait_until(lambda: replica.log.max_offset == replica.log.end_offset, "the NOOP is committed")
    begin, empty = replica.log.min_offset, replica.log.max_offset
    last = fill(replica)[-1]

    assert (begin, replica.log.min_offset) == (0, 0)
    assert empty < last.offset
    assert replica.log.max_offset == replica.log.end_offset == last.offset + last.size
    assert replica.log.next_file_offset(0) == SEGMENT_BYTES
    assert replica.log.next_file_offset(SEGMENT_BYTES) == 2 * SEGMENT_BYTES


def test_a_flush_makes_everything_durable(replica: Replica) -> None:
    """And says up to where."""
    fill(replica, 3)

    assert replica.log.flush() == replica.log.end_offset
    assert replica.log.remaining_to_flush() == 0


def test_old_files_are_the_nodes_own_business(replica: Replica) -> None:
    """Its cleaner knows what followers still need."""
    assert replica.log.delete_expired(now_ms=1 << 50, immediately=True) == 0
    assert [Path(one).name for one in replica.log.directories()] == ["data"]


def test_listeners_hear_when_more_can_be_read(replica: Replica, config: ServerConfig) -> None:
    """After the fact: what is committed can be scanned at once."""
    seen: list[int] = []
    replica.log.listen(lambda: seen.append(replica.log.max_offset))

    result = stored(replica.put(message())[0])

    assert seen
    assert max(seen) == result.offset + result.size


def test_a_restart_finds_everything(config: ServerConfig) -> None:
    """Offsets go on where the consume queues, counted anew here, end."""
    replica = Replica(config).start().lead()
    sent = fill(replica)
    replica.stop()

    again = Replica(config).start().lead()
    wait_until(lambda: again.log.max_offset == again.log.end_offset, "the new NOOP is committed")
    heads = again.heads()
    again.log.set_queue_offsets({(one.topic, one.queue_id): one.queue_offset + 1 for one in heads})

    assert places(heads) == [one[:4] for one in sent]
    assert stored(again.put(message(queue_id=2))[0]).queue_offset == 33
    again.stop()


def flip(replica: Replica, position: int, bit: int = 0) -> None:
    """Turn one bit of the log's first segment as a disk does."""
    path = Path(replica.log.directories()[0]) / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def refusal(replica: Replica, one: StoredPlace, sound: bytes) -> CorruptLogError | None:
    """How reading a record is refused; None if it is given out, as it was stored."""
    try:
        assert replica.log.read(one.offset, one.size) == sound
    except CorruptLogError as error:
        return error
    return None


def test_no_altered_record_is_given_out(replica: Replica) -> None:
    """Wherever in an entry a bit turns, its record is refused with file and offset, or given out as it was stored."""
    one = fill(replica, 3)[1]
    sound = replica.log.read(one.offset, one.size)
    assert sound is not None
    told: list[CorruptLogError] = []
    replica.server.log.on_damage(told.append)

    for number, position in enumerate(range(one.offset - ENTRY_HEADER_BYTES, one.offset + one.size)):
        flip(replica, position, number % 8)
        caught = refusal(replica, one, sound)
        if caught is None:
            assert position < one.offset, "a bit of the record itself"
        else:
            assert (caught.path.name, caught.offset) == (f"{0:020d}", one.offset - ENTRY_HEADER_BYTES)
            assert told.pop() is caught
        flip(replica, position, number % 8)
    assert replica.log.read(one.offset, one.size) == sound


def test_no_altered_record_is_dispatched(replica: Replica) -> None:
    """A scan ends before a record that was altered, and the next one names file and offset."""
    places = fill(replica, 3)
    flip(replica, places[1].offset + places[1].size - 1)

    first = replica.log.scan(0, 1 << 20)
    assert [head.offset for head in first.heads] == [places[0].offset]
    with pytest.raises(CorruptLogError) as caught:
        replica.log.scan(first.next_offset, 1 << 20)
    assert caught.value.offset == places[1].offset - ENTRY_HEADER_BYTES
