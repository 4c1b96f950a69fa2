"""The whole store over a plain log: puts, its gate, reads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dledger.errors import DLedgerError, ShutdownError
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.replicated import status_of
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import SYS_FLAG_PREPARED, HostAddress, Message
from rocketstore.message.record import decode_record
from rocketstore.store.dispatch import CALM_NAP_S, SLAVE_NAP_S
from rocketstore.store.message_store import MessageStore
from rocketstore.types import (
    BROKER_STATE_TOPIC,
    SCHEDULE_TOPIC,
    BrokerRole,
    FlushDiskType,
    GetMessageStatus,
    PutMessageStatus,
    PutResult,
    RecordHead,
)
from tests.crash.crash_fs import FailingFs
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import FOREVER_MS, WAIT_S, UnsyncedFs, bodies, fill, make_store, running


# -- puts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ip", [b"\x7f\0\0\1", bytes(15) + b"\1"])
def test_what_is_put_is_got(config: MessageStoreConfig, ip: bytes) -> None:
    """DefaultMessageStoreTest: write and read, IPv4 and IPv6."""
    host = HostAddress(ip, 10911)
    with running(config) as store:
        result = store.put(Message("T", b"body", 3, {"KEYS": "a b", "TAGS": "x"}, born_host=host, store_host=host))
        assert store.wait_dispatched(WAIT_S)

        found = store.get("T", 3, 0, max_count=10)
        message = decode_record(found.records[0])
        assert result.status is PutMessageStatus.PUT_OK
        assert result.stored is not None
        assert (message.body, message.offset, message.born_host) == (b"body", result.stored.offset, host)
        assert store.read_record(result.stored.offset) == found.records[0]
        assert store.query("T", "b", 10, 0, FOREVER_MS) == [found.records[0]]
        assert store.queues() == [("T", 3)]


def test_messages_gather_on_slaves_and_while_nobody_waits_for_them(config: MessageStoreConfig) -> None:
    """By itself a store cannot know who waits: then everything is dispatched at once."""
    store = make_store(config)
    assert store.pace.nap_s_min() == 0
    awaited = True
    store.pace.is_awaited = lambda: awaited
    assert store.pace.nap_s_min() == 0
    awaited = False
    assert store.pace.nap_s_min() == CALM_NAP_S
    store.become_slave()
    assert store.pace.nap_s_min() == SLAVE_NAP_S
    awaited = True
    assert store.pace.nap_s_min() == 0


def test_the_gate_refuses_in_order(config: MessageStoreConfig) -> None:
    """store.md 3.1."""
    store = make_store(config)
    message = Message("T", b"x")

    def refused() -> str:
        result = store.put(message)
        assert result.outcome == "not_applied"
        return f"{result.status} {result.reason}"

    assert refused() == "SERVICE_NOT_AVAILABLE the store is not running"
    store.load()
    assert refused() == "SERVICE_NOT_AVAILABLE the store is not running"
    store.start()
    store.become_slave()
    store.allow_writing(allowed=False)
    assert refused() == "SERVICE_NOT_AVAILABLE this node is a slave"
    store.become_master(BrokerRole.SYNC_MASTER)
    assert refused() == "SERVICE_NOT_AVAILABLE writing is disabled"
    store.allow_writing(allowed=True)
    assert store.put(message).status is PutMessageStatus.PUT_OK
    store.shutdown()
    assert refused() == "SERVICE_NOT_AVAILABLE the store is not running"


def test_a_producer_may_ask_for_its_number_again(config: MessageStoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is closed, or a log that stops, is a reason to ask another broker, not one to give up."""
    found: list[int | DLedgerError] = []

    def refused() -> tuple[PutMessageStatus, str]:
        store.submit_producer("p", found.append)
        error = found.pop()
        assert isinstance(error, DLedgerError)
        return status_of(error), str(error)

    with running(config) as store:
        store.allow_writing(allowed=False)
        assert refused() == (PutMessageStatus.SERVICE_NOT_AVAILABLE, "writing is disabled")
        store.allow_writing(allowed=True)
        monkeypatch.setattr(store.log, "submit_producer", lambda _name, done: done(ShutdownError("it stops")))
        assert refused() == (PutMessageStatus.SERVICE_NOT_AVAILABLE, "it stops")
        monkeypatch.undo()
        store.submit_producer("p", found.append)
        wait_until(lambda: found == [0], "it is known")


def test_whoever_becomes_master_is_another_incarnation(config: MessageStoreConfig) -> None:
    """Also in the same process: as a slave it may have exchanged its log's end for that of another."""
    store, other = make_store(config), make_store(config)
    seen = {store.incarnation, other.incarnation}
    for _ in range(2):
        store.become_slave()
        store.become_master(BrokerRole.SYNC_MASTER)
        seen.add(store.incarnation)
    assert len(seen) == 4
    assert all(0 < one < 1 << 63 for one in seen)


def test_a_put_lock_held_for_long_means_busy(config: MessageStoreConfig) -> None:
    class Slow(PlainCommitLog):
        held_ms = 1001

        @property
        def put_lock_ms(self) -> int:
            return self.held_ms

    fs = UnsyncedFs()
    store = make_store(config, fs=fs)
    log = Slow(config, clock=store._derived.clock, fs=fs)
    store = MessageStore(config, log, fs=fs)
    store.load()
    store.start()

    assert store.put(Message("T", b"x")).status is PutMessageStatus.OS_PAGECACHE_BUSY
    log.held_ms = 1000
    assert store.put(Message("T", b"x")).status is PutMessageStatus.PUT_OK
    assert store.stats.failed_puts == 1
    store.shutdown()


def test_puts_wait_for_queues_and_index_that_are_far_behind(config: MessageStoreConfig) -> None:
    """Else consumers and queries fall behind without a bound, with messages that cost more to index than to store."""
    go_on = threading.Event()
    with running(replace(config, dispatch_behind_bytes_max=2000)) as store:
        store.add_arrival_listener(lambda _heads: assert_set(go_on))
        fill(store, 1)
        results = [store.put(Message("T", b"x" * 500)) for _ in range(15)]
        taken = [one for one in results if one.ok]
        refused = results[-1]
        assert 6 <= len(taken) <= 9, "clients do not shut out the broker's own writers, which have twice the room"
        assert store.crowded == refused
        assert (refused.status, refused.outcome) == (PutMessageStatus.OS_PAGECACHE_BUSY, "not_applied")
        assert "behind the log" in refused.reason
        assert "dispatch_behind_bytes_max" in refused.reason

        go_on.set()
        wait_until(lambda: store.put(Message("T", b"x" * 500)).ok, "puts are taken again", WAIT_S)
        wait_until(lambda: store.crowded is None, "clients' messages are, too", WAIT_S)


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_one_illegal_message_refuses_all(config: MessageStoreConfig) -> None:
    with running(config) as store:
        results = store.put_many([Message("T", b"x"), Message("no/topic", b"x")])

        assert [result.status for result in results] == [PutMessageStatus.MESSAGE_ILLEGAL] * 2
        assert store.log.max_offset == 0


def test_a_put_that_nothing_answers_is_unknown(config: MessageStoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketstore.store.message_store._PUT_SLACK_S", 0.0)
    with running(replace(config, sync_flush_timeout=10, slave_timeout=10)) as store:
        monkeypatch.setattr(store.log, "submit", lambda *_, **__: None)

        result = store.put(Message("T", b"x"))

        assert (result.status, result.outcome) == (PutMessageStatus.UNKNOWN_ERROR, "unknown")


def test_messages_get_consecutive_offsets_per_queue(config: MessageStoreConfig) -> None:
    with running(config) as store:
        results = store.put_many([Message("T", b"x", number % 2) for number in range(6)])

        assert [result.stored.queue_offset for result in results if result.stored] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", list(FlushDiskType))
def test_many_producers_and_a_reader_over_many_files(config: MessageStoreConfig, kind: FlushDiskType) -> None:
    """What the reader finds while producers write is what is there in the end."""
    with running(replace(config, flush_disk_type=kind)) as store:
        answers: list[PutResult] = []

        def produce(producer: int) -> None:
            for number in range(150):
                store.submit((Message("T", f"{producer} {number}".encode()),), answers.extend)

        producers = [threading.Thread(target=produce, args=(producer,)) for producer in range(4)]
        for thread in producers:
            thread.start()
        read: list[Message] = []
        wait_until(lambda: take(store, read) == 600, "all messages are read")
        for thread in producers:
            thread.join()

        assert [message.queue_offset for message in read] == list(range(600))
        for producer in range(4):
            mine = [message.body for message in read if message.body.startswith(b"%d " % producer)]
            assert mine == [b"%d %d" % (producer, number) for number in range(150)]
        wait_until(lambda: len(answers) == 600, "all answers")
        assert all(result.status is PutMessageStatus.PUT_OK for result in answers)
        assert store.stats.puts == store.stats.topics()["T"].messages == 600


def take(store: MessageStore, read: list[Message]) -> int:
    """Read on; how many were read."""
    read += map(decode_record, store.get("T", 0, len(read), max_count=32).records)
    return len(read)


def test_delayed_and_hidden_messages_have_queues(config: MessageStoreConfig) -> None:
    with running(config) as store:
        store.put(Message("T", b"later", properties={"DELAY": "3"}))
        store.put(Message(BROKER_STATE_TOPIC, b"{}"))
        assert store.wait_dispatched(WAIT_S)

        assert store.get(SCHEDULE_TOPIC, 2, 0, max_count=1).status is GetMessageStatus.FOUND
        assert store.get(BROKER_STATE_TOPIC, 0, 0, max_count=1).status is GetMessageStatus.FOUND
        assert store.max_offset("T", 0) == 0


def test_prepared_messages_have_no_place_in_a_queue(config: MessageStoreConfig) -> None:
    with running(config) as store:
        store.put(Message("T", b"1", sys_flag=SYS_FLAG_PREPARED))
        fill(store, 2, queues=1)

        assert bodies(store) == [0, 1]
    with running(config) as store:
        assert bodies(store) == [0, 1]


def test_listeners_hear_of_messages_that_can_be_got(config: MessageStoreConfig) -> None:
    with running(config) as store:
        heard: list[tuple[int, GetMessageStatus]] = []

        def listen(heads: Sequence[RecordHead]) -> None:
            for head in heads:
                got = store.get(head.topic, head.queue_id, head.queue_offset, max_count=1)
                heard.append((head.queue_offset, got.status))

        store.add_arrival_listener(listen)
        fill(store, 5, queues=1)
        wait_until(lambda: len(heard) == 5, "all heard")

        assert heard == [(number, GetMessageStatus.FOUND) for number in range(5)]


def test_with_sync_flush_nothing_is_read_that_a_crash_could_take_back(config: MessageStoreConfig) -> None:
    """Else a consumer commits an offset that another message gets after the crash."""

    class Held(FailingFs):
        held = False

        def sync(self, fd: int) -> None:
            if "commitlog" in self._path(fd):
                wait_until(lambda: not self.held, "the disk")

    fs = Held()
    with running(replace(config, flush_disk_type=FlushDiskType.SYNC_FLUSH), fs=fs) as store:
        fill(store, 1, queues=1)
        fs.held = True
        answers: list[PutResult] = []
        store.submit((Message("T", b"1"),), answers.extend)
        assert store.wait_dispatched(WAIT_S)
        before = (bodies(store), answers[:])
        fs.held = False
        wait_until(lambda: len(answers) == 1, "the answer")
        assert store.wait_dispatched(WAIT_S)

        assert before == ([0], [])
        assert bodies(store) == [0, 1]


# -- reads -----------------------------------------------------------------------------------------------------------
def test_offsets_by_time(config: MessageStoreConfig) -> None:
    """DefaultMessageStoreTest: exact, and far away, where the first message at or after the time is meant."""
    with running(config) as store:
        fill(store, 20, queues=1)
        times = [store.store_time("T", 0, number) for number in range(20)]

        assert store.offset_by_time("T", 0, times[7]) == times.index(times[7])
        assert store.offset_by_time("T", 0, times[0] - 10_000) == 0
        assert store.offset_by_time("T", 0, times[-1] + 10_000) == 20
        assert store.earliest_message_time() == times[0]


def test_an_unknown_queue_is_no_error(config: MessageStoreConfig) -> None:
    """DefaultMessageStoreTest: 0 and -1."""
    with running(config) as store:
        assert (store.min_offset("T", 0), store.max_offset("T", 0), store.offset_by_time("T", 0, 5)) == (-1, 0, 0)
        assert store.get("T", 0, 0, max_count=1).status is GetMessageStatus.NO_MATCHED_LOGIC_QUEUE
        assert store.store_time("T", 0, 0) == -1


def test_a_store_that_is_not_running_gives_nothing(config: MessageStoreConfig) -> None:
    store = make_store(config)

    with pytest.raises(ShutdownError):
        store.get("T", 0, 0, max_count=1)
    with pytest.raises(ShutdownError):
        store.read_record(0)
    with pytest.raises(ShutdownError):
        store.query("T", "k", 1, 0, 1)


def test_runtime_info_has_rocketmqs_keys(config: MessageStoreConfig) -> None:
    with running(config) as store:
        fill(store, 3)
        store.get("T", 0, 0, max_count=1)
        store.get("T", 0, 99, max_count=1)
        info = store.runtime_info()

        assert info["commitLogMaxOffset"] == str(store.log.max_offset)
        assert {"commitLogDiskRatio", "consumeQueueDiskRatio", "putTps", "dispatchBehindBytes"} <= set(info)
        assert {"remainHowManyDataToFlush", "pageCacheLockTimeMills", "earliestMessageTimeStamp"} <= set(info)
        assert (store.stats.gets_found, store.stats.gets_missed) == (1, 1)
