"""Transactions of our clients, at a broker of real services over a store in memory."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dledger.access.rules import parse_rules
from dledger.client.discovery import Directory
from dledger.errors import AccessDeniedError, ConfigError, InvalidRequestError, UnavailableError
from rocketstore.broker.clients import HalfCheck
from rocketstore.client import transactions
from rocketstore.client.errors import MessageRefusedError
from rocketstore.client.transactional_producer import TransactionalProducer
from rocketstore.client.transactions import (
    PendingChecks,
    PreparedMessage,
    TransactionEnd,
    TransactionState,
    checked_message,
)
from rocketstore.message.message import Message
from rocketstore.message.record import CorruptRecordError, encode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.remoting.codes import RequestCode
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HALF_TOPIC, OP_TOPIC, PutMessageStatus, PutResult, StoredPlace
from tests.support.fake_broker import FakeBrokers
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.broker_remoting.test_producer_groups import ALICE, RULES, finish
from tests.unit.rocketstore.broker_remoting.test_transactions import SOON, beat, stored

COMMIT, ROLLBACK, UNKNOWN = TransactionState
WAIT_S = 30.0


class Ledger:
    """What an application knows: every check is answered by ``answers``, in turn, then as the last."""

    def __init__(self, *answers: TransactionState | BaseException) -> None:
        self.asked: list[PreparedMessage] = []
        self._answers = deque(answers or (UNKNOWN,))

    def check(self, prepared: PreparedMessage) -> TransactionState:
        self.asked.append(prepared)
        answer = self._answers.popleft() if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def say(self, answer: TransactionState) -> None:
        """From now on."""
        self._answers = deque((answer,))

    async def check_async(self, prepared: PreparedMessage) -> TransactionState:
        await asyncio.sleep(0)
        return self.check(prepared)


def saying(state: TransactionState) -> Callable[[PreparedMessage], TransactionState]:
    return lambda _prepared: state


def never(_prepared: PreparedMessage) -> TransactionState:
    pytest.fail("it is executed")


def producer(broker: RemotingHarness, ledger: Ledger | None = None, **options: object) -> TransactionalProducer:
    wish = {"group": "producers", "check": (ledger or Ledger()).check, "timeout_s": 15.0} | options
    return TransactionalProducer([broker.address], **wish)  # type: ignore[arg-type]


@pytest.fixture
def broker() -> Iterator[RemotingHarness]:
    """Which checks at once and often."""
    with RemotingHarness(SOON) as made:
        yield made


def bodies(broker: RemotingHarness, topic: str = "T") -> list[bytes]:
    return [one.body for one in stored(broker, topic)]


def test_a_message_is_delivered_if_its_transaction_succeeds(broker: RemotingHarness) -> None:
    """And not before; the callback gets what it needs to note it."""
    seen: list[tuple[PreparedMessage, list[bytes]]] = []

    def execute(prepared: PreparedMessage) -> TransactionState:
        seen.append((prepared, bodies(broker)))
        return COMMIT

    with producer(broker) as sender:
        receipt = sender.send_in_transaction(Message("T", b"one", keys="k"), execute, queue_id=2)
        assert (receipt.state, receipt.end, receipt.problem) == (COMMIT, TransactionEnd.ENDED, None)
    ((prepared, before),) = seen
    assert (before, prepared.checks, prepared.message.body) == ([], 0, b"one")
    assert prepared.message.properties == {"KEYS": "k", "UNIQ_KEY": receipt.transaction_id}
    (message,) = stored(broker, "T")
    assert (message.body, message.queue_id, receipt.half.queue_id) == (b"one", 2, 2)
    assert message.properties["UNIQ_KEY"] == receipt.transaction_id == prepared.transaction_id
    assert message.properties["PGROUP"] == "producers"


def test_what_is_rolled_back_is_never_delivered(broker: RemotingHarness) -> None:
    with producer(broker) as sender:
        receipt = sender.send_in_transaction(Message("T", b"one"), saying(ROLLBACK))
        assert (receipt.state, receipt.end) == (ROLLBACK, TransactionEnd.ENDED)
    assert (bodies(broker), len(bodies(broker, OP_TOPIC))) == ([], 1)


def test_what_is_not_known_yet_is_asked_until_it_is(broker: RemotingHarness) -> None:
    """With the message, its id, and how often that was."""
    ledger = Ledger(UNKNOWN, UNKNOWN, COMMIT)
    with producer(broker, ledger) as sender:
        receipt = sender.send_in_transaction(Message("T", b"one"), saying(UNKNOWN), queue_id=3)
        assert (receipt.state, receipt.end, receipt.problem) == (UNKNOWN, TransactionEnd.OPEN, None)
        wait_until(lambda: bodies(broker) == [b"one"], "it is committed")
    times = [one.checks for one in ledger.asked[:3]]
    assert 1 <= times[0] < times[1] < times[2]  # some came while it was under way here
    asked = ledger.asked[0]
    assert (asked.transaction_id, asked.message.body) == (receipt.transaction_id, b"one")
    assert (asked.message.topic, asked.message.queue_id) == ("T", 3)
    assert len(bodies(broker, OP_TOPIC)) == 1


def test_an_error_in_the_callback_leaves_the_transaction_open(broker: RemotingHarness) -> None:
    """It is passed on; the check decides."""

    def execute(_prepared: PreparedMessage) -> TransactionState:
        raise ZeroDivisionError

    ledger = Ledger(ROLLBACK)
    with producer(broker, ledger) as sender:
        with pytest.raises(ZeroDivisionError):
            sender.send_in_transaction(Message("T", b"one"), execute)
        wait_until(lambda: len(bodies(broker, OP_TOPIC)) == 1, "it has ended")
    assert bodies(broker) == []
    assert ledger.asked


def test_a_callback_that_returns_nothing_decides_nothing(broker: RemotingHarness) -> None:
    """Neither here nor in a check."""
    ledger = Ledger(None, "COMMIT", COMMIT)  # type: ignore[arg-type]
    with producer(broker, ledger) as sender:
        with pytest.raises(TypeError, match="TransactionState, not None"):
            sender.send_in_transaction(Message("T", b"one"), lambda _: None)  # type: ignore[arg-type,return-value]
        wait_until(lambda: bodies(broker) == [b"one"], "it is committed")
    assert len(ledger.asked) >= 3


@pytest.mark.parametrize("error", [ValueError("scripted"), SystemExit(1), asyncio.CancelledError()])
def test_a_check_that_fails_is_asked_again(
    broker: RemotingHarness, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """Whatever it raises: its only worker goes on."""
    with producer(broker, Ledger(error, COMMIT)) as sender:
        sender.send_in_transaction(Message("T", b"one"), saying(UNKNOWN))
        wait_until(lambda: bodies(broker) == [b"one"], "it is committed")
    assert "a check failed" in caplog.text


def test_what_cannot_be_prepared_is_not_executed(broker: RemotingHarness) -> None:
    """The error is that of an ordinary message."""
    executed: list[PreparedMessage] = []

    def execute(prepared: PreparedMessage) -> TransactionState:
        executed.append(prepared)
        return COMMIT

    with producer(broker, timeout_s=2.0) as sender:
        with pytest.raises(MessageRefusedError, match="reserved"):
            sender.send_in_transaction(Message(HALF_TOPIC, b"one"), execute)
        with pytest.raises(MessageRefusedError, match="without delay"):
            sender.send_in_transaction(Message("T", b"one", delay_level=1), execute)
        for name in ("TRAN_MSG", "PGROUP", "UNIQ_KEY"):
            with pytest.raises(MessageRefusedError, match=f"{name} means something"):
                sender.send_in_transaction(Message("T", b"one", properties={name: "x"}), execute)
        assert not sender._under_way, "checks of it would never be answered here"
    with pytest.raises(UnavailableError, match="closed"):
        sender.send_in_transaction(Message("T", b"one"), execute)
    assert (executed, broker.store.log.records) == ([], [])


def test_what_is_not_safe_enough_is_rolled_back(broker: RemotingHarness) -> None:
    """As in RocketMQ: a half message that was not flushed in time may be lost, and its commit would find nothing."""
    place = StoredPlace(0, 100, 0, 0, 0)
    with producer(broker) as sender:
        broker.store.refusals.append(PutResult(PutMessageStatus.FLUSH_DISK_TIMEOUT, place))
        receipt = sender.send_in_transaction(Message("T", b"one"), never)
    assert (receipt.state, receipt.half.status) == (ROLLBACK, PutMessageStatus.FLUSH_DISK_TIMEOUT)


def test_an_end_that_is_not_told_is_settled_by_a_check(broker: RemotingHarness) -> None:
    """The receipt says so, and why."""

    def execute(_prepared: PreparedMessage) -> TransactionState:
        broker.broker.storage.transactions.stop()
        return COMMIT

    ledger = Ledger(COMMIT)
    with producer(broker, ledger, timeout_s=1.0) as sender:
        receipt = sender.send_in_transaction(Message("T", b"one"), execute)
        assert (receipt.state, receipt.end) == (COMMIT, TransactionEnd.OPEN)
        assert receipt.problem is not None
        assert bodies(broker) == []
        broker.broker.storage.transactions.start()
        wait_until(lambda: bodies(broker) == [b"one"], "it is committed")


def test_an_end_is_told_again_until_the_master_takes_it(broker: RemotingHarness) -> None:
    """What certainly did not happen, and what is on its way."""
    busy = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied", reason="busy")

    def execute(_prepared: PreparedMessage) -> TransactionState:
        broker.store.refusals += [busy, busy]
        return COMMIT

    with producer(broker) as sender:
        receipt = sender.send_in_transaction(Message("T", b"one"), execute)
    assert receipt.end in (TransactionEnd.ENDED, TransactionEnd.ENDED_BEFORE)
    assert bodies(broker) == [b"one"]


def test_what_has_ended_before_is_said(broker: RemotingHarness) -> None:
    """By a check's answer at another member, for example."""

    def execute(prepared: PreparedMessage) -> TransactionState:
        (half,) = stored(broker, HALF_TOPIC)
        assert prepared.transaction_id == half.properties["UNIQ_KEY"]
        place = pb.TransactionCheck(offset=half.offset, queue_offset=half.queue_offset)
        assert finish(broker, place, "ROLLBACK") == "ENDED"
        return COMMIT

    with producer(broker) as sender:
        receipt = sender.send_in_transaction(Message("T", b"one"), execute)
    assert (receipt.state, receipt.end) == (COMMIT, TransactionEnd.ENDED_BEFORE)
    assert bodies(broker) == []


def test_a_half_message_whose_place_nobody_remembers_is_settled_by_a_check(broker: RemotingHarness) -> None:
    """It is stored, so its transaction goes on."""
    with producer(broker, Ledger(COMMIT)) as sender:
        sender.send_in_transaction(Message("T", b"zero"), saying(COMMIT))
        broker.store.refusals.append(PutResult(PutMessageStatus.PUT_OK))
        receipt = sender.send_in_transaction(Message("T", b"one"), saying(COMMIT))
    assert (receipt.state, receipt.end) == (COMMIT, TransactionEnd.OPEN)
    assert "does not remember" in str(receipt.problem)


def test_nobody_is_asked_here_about_what_is_under_way_here(broker: RemotingHarness) -> None:
    """However long it takes: the check would find nothing yet, and roll back what is about to be committed."""
    ledger = Ledger(ROLLBACK)

    with producer(broker, ledger) as sender:

        def execute(_prepared: PreparedMessage) -> TransactionState:
            (client,) = broker.groups.clients.producers("producers")
            told, tell = threading.Semaphore(0), client.link.check_half

            def told_too(check: HalfCheck) -> bool:
                told.release()
                return tell(check)

            client.link.check_half = told_too  # type: ignore[method-assign]
            assert all(told.acquire(timeout=WAIT_S) for _ in range(4))
            return COMMIT

        receipt = sender.send_in_transaction(Message("T", b"one"), execute)
    assert receipt.end is TransactionEnd.ENDED
    assert (bodies(broker), ledger.asked) == ([b"one"], [])


def test_another_member_answers_for_one_that_is_gone(broker: RemotingHarness) -> None:
    """Whatever language either is written in."""
    ledger = Ledger(COMMIT)
    with producer(broker) as first:
        first.send_in_transaction(Message("T", b"python"), saying(UNKNOWN))
    with broker.dial() as java:
        java.send(properties="TRAN_MSG\x01true\x02PGROUP\x01producers\x02UNIQ_KEY\x01u", body=b"java")
    with producer(broker, ledger):
        wait_until(lambda: len(bodies(broker)) == 2, "both are committed")
    assert sorted(bodies(broker)) == [b"java", b"python"]
    assert {one.transaction_id for one in ledger.asked} > {"u"}


def test_two_producers_of_one_process_are_asked_about_their_own(broker: RemotingHarness) -> None:
    """Though they share group, machine and process, and send by other connections than they are asked on: neither knows
    what the other's transactions came to. When one has gone, the other is asked."""
    others, own = Ledger(ROLLBACK), Ledger(UNKNOWN, UNKNOWN, COMMIT)
    with producer(broker, others):
        with producer(broker, own) as first:
            for number in range(8):
                first.send_in_transaction(Message("T", b"%d" % number), saying(UNKNOWN))
            wait_until(lambda: len(bodies(broker)) == 8, "all are committed")
            assert others.asked == []
            own.say(UNKNOWN)
            first.send_in_transaction(Message("T", b"left"), saying(UNKNOWN))
        wait_until(lambda: bool(others.asked), "the other one is asked")
        assert {one.message.body for one in others.asked} == {b"left"}


def test_rocketmqs_producers_answer_for_ours(broker: RemotingHarness) -> None:
    with producer(broker) as sender:
        sender.send_in_transaction(Message("T", b"one"), saying(UNKNOWN))
    with broker.dial() as java:
        beat(java, "producers")
        check = java.request(RequestCode.CHECK_TRANSACTION_STATE)
        fields = {"producerGroup": "producers", "commitOrRollback": 8, "fromTransactionCheck": "true"}
        named = {name: check.fields[name] for name in ("tranStateTableOffset", "commitLogOffset", "msgId")}
        java.tell(RequestCode.END_TRANSACTION, fields | named)
        wait_until(lambda: bodies(broker) == [b"one"], "it is committed")


def test_a_producer_that_was_only_started_is_asked(broker: RemotingHarness) -> None:
    """For those that were killed, nothing has to be sent first; many are asked at once if it has many workers."""
    with producer(broker) as first:
        for number in range(3):
            first.send_in_transaction(Message("T", b"%d" % number), saying(UNKNOWN))
    together = threading.Barrier(3)

    def check(_prepared: PreparedMessage) -> TransactionState:
        together.wait(WAIT_S)
        return COMMIT

    second = producer(broker, check=check, check_workers=3)
    second.start()
    second.start()
    wait_until(lambda: len(bodies(broker)) == 3, "all are committed")
    second.close()
    second.close()


def test_ordinary_messages_are_sent_beside_transactions(broker: RemotingHarness) -> None:
    with producer(broker) as sender:
        sender.send(Message("T", b"now"))
        sender.send_in_transaction(Message("T", b"then"), saying(COMMIT))
    assert bodies(broker) == [b"now", b"then"]


def test_it_is_said_why_a_producer_cannot_join() -> None:
    """No group, nobody there, or closed."""
    with pytest.raises(ConfigError, match="name of its group"):
        TransactionalProducer("127.0.0.1:1", group="", check=saying(UNKNOWN))
    nobody = TransactionalProducer("127.0.0.1:1", group="g", check=saying(UNKNOWN), timeout_s=0.3)
    with pytest.raises(UnavailableError, match="not joined"), nobody:
        pytest.fail("it has joined")
    with pytest.raises(UnavailableError, match="closed"):
        nobody.start()


def test_a_group_with_a_strange_name_cannot_be_joined(broker: RemotingHarness) -> None:
    with pytest.raises(InvalidRequestError, match="group 'bad name'"):
        producer(broker, group="bad name").start()


def test_brokers_of_an_older_version_are_named(brokers: FakeBrokers) -> None:
    """They know nothing of producer groups: upgrade them first."""
    older = TransactionalProducer(brokers.addresses, group="g", check=saying(UNKNOWN), timeout_s=5.0)
    with pytest.raises(InvalidRequestError, match="older version"), older:
        pytest.fail("it has joined")


def test_access_control_applies() -> None:
    """Streams and ends are signed; a topic that one may not send to has no transactions."""
    topics = (TopicConfig("T", 4, 4), TopicConfig("read", 4, 4))
    with (
        RemotingHarness(SOON, *topics, rules=parse_rules(RULES), security=ALICE) as broker,
        producer(broker, Ledger(COMMIT), security=ALICE) as sender,
    ):
        assert sender.send_in_transaction(Message("T", b"one"), saying(COMMIT)).end is TransactionEnd.ENDED
        sender.send_in_transaction(Message("T", b"two"), saying(UNKNOWN))
        with pytest.raises(AccessDeniedError):
            sender.send_in_transaction(Message("read", b"one"), never)
        wait_until(lambda: bodies(broker) == [b"one", b"two"], "both are committed")


# --- the queue of checks ----------------------------------------------------------------------------------------------


def check_of(offset: int, size: int = 10) -> pb.TransactionCheck:
    return pb.TransactionCheck(record=bytes(size), offset=offset)


def test_checks_wait_in_bounds_and_each_transaction_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number and bytes, those being worked on included; one larger than all that is taken alone."""
    monkeypatch.setattr(transactions, "CHECKS_PENDING_MAX", 3)
    monkeypatch.setattr(transactions, "CHECKS_PENDING_BYTES_MAX", 100)
    news: list[None] = []
    pending = PendingChecks(lambda: news.append(None))
    assert [pending.put(check_of(one)) for one in (1, 1, 2, 3, 4)] == [True, False, True, True, False]
    assert len(news) == 3
    first = pending.pop()
    assert first == check_of(1)
    assert not pending.put(check_of(1))
    pending.done(first)
    assert pending.put(check_of(1))
    while (one := pending.pop()) is not None:
        pending.done(one)
    assert pending.put(check_of(5, 1000))
    assert not pending.put(check_of(6))
    assert (pending.pop(), pending.pop()) == (check_of(5, 1000), None)


@pytest.mark.parametrize(
    ("body", "sys_flag", "expected"),
    [
        (zlib.compress(b"plain"), 1, (b"plain", 0)),
        (zlib.compress(b"plain"), 0x301, (b"plain", 0)),
        (b"by LZ4", 0x101, (b"by LZ4", 0x101)),
        (b"plain", 0, (b"plain", 0)),
    ],
)
def test_what_others_have_compressed_is_plain_in_a_check(
    body: bytes, sys_flag: int, expected: tuple[bytes, int]
) -> None:
    """RocketMQ's producers compress bodies of more than 4 KiB; what we cannot decompress is left, with its flags."""
    record = encode_record(Message("T", body, sys_flag=sys_flag), queue_offset=0, physical_offset=0)
    found = checked_message(pb.TransactionCheck(record=record)).message
    assert (found.body, found.sys_flag) == expected


def test_garbage_in_a_check_is_refused() -> None:
    with pytest.raises(CorruptRecordError):
        checked_message(pb.TransactionCheck(record=b"garbage"))


def test_a_directory_may_be_shared(broker: RemotingHarness) -> None:
    """As producers of a cluster do, whose name servers know where its brokers are."""
    directory = Directory((broker.address,), leader_is="master")
    with TransactionalProducer(directory, group="producers", check=saying(UNKNOWN), timeout_s=15.0) as sender:
        assert sender.send_in_transaction(Message("T", b"one"), saying(COMMIT)).end is TransactionEnd.ENDED
    assert directory.leader == broker.address


def test_a_failure_of_the_master_is_no_end() -> None:
    """Of unknown outcome: it is asked for until it is known."""
    lost = PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome="unknown", reason="no quorum in time")

    with RemotingHarness() as master:  # which asks nobody soon: its note of that would be refused instead of the end

        def execute(_prepared: PreparedMessage) -> TransactionState:
            master.store.refusals.append(lost)
            return COMMIT

        with producer(master, Ledger(COMMIT), timeout_s=4.0) as sender:
            receipt = sender.send_in_transaction(Message("T", b"one"), execute)
        assert receipt.end is TransactionEnd.OPEN  # nobody knows here whether this log has it
        assert receipt.problem is not None
        assert bodies(master) == []


def test_replaced_messages_keep_their_fields(broker: RemotingHarness) -> None:
    """The message that was given is not changed."""
    given = Message("T", b"one", tags="A", flag=3)
    before = replace(given, properties=dict(given.properties))
    with producer(broker) as sender:
        sender.send_in_transaction(given, saying(COMMIT))
    assert given == before
    assert (stored(broker, "T")[0].flag, stored(broker, "T")[0].tags) == (3, "A")
