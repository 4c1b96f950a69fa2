"""Transactions of Python producers at a real group of brokers: each ends exactly once, whoever dies when."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dledger.errors import DLedgerError
from dledger.remoting.codes import AnswerCode
from rocketstore.broker_remoting.sends import ROLLBACK as ROLLED_BACK
from rocketstore.client import Message, PreparedMessage, Producer, TransactionState
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.remoting.codes import RequestCode
from tests.integration.broker_harness import BrokerGroup
from tests.support.broker_load import TOPIC
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until

COMMIT, ROLLBACK, UNKNOWN = TransactionState
SOON = {"transactionCheckInterval": "500", "transactionTimeOut": "500", "transactionCheckMax": "1000"}
WAIT_S = 60.0
DIES = """\
import sys
from rocketstore.client import Message, Producer, TransactionState

with Producer(sys.argv[1], group="shop", check=lambda _: TransactionState.UNKNOWN) as producer:
    with producer.transaction(Message(sys.argv[2], b"of the dead")) as transaction:
        print(transaction.id, flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[BrokerGroup]:
    """Three, which ask about transactions after half a second."""
    with BrokerGroup(tmp_path, settings=SOON) as made:
        made.master()
        made.create_topic()
        yield made


class Shop:
    """A producer of the group ``shop``, and what all of them note together: the state of each transaction."""

    def __init__(self, brokers: BrokerGroup, notes: dict[str, TransactionState], timeout_s: float = 30.0) -> None:
        self.notes = notes
        self.asked: list[str] = []
        self.unnoted = UNKNOWN
        self.producer = Producer(brokers.addresses, group="shop", check=self._check, timeout_s=timeout_s)

    def _check(self, prepared: PreparedMessage) -> TransactionState:
        self.asked.append(prepared.transaction_id)
        return self.notes.get(prepared.transaction_id, self.unnoted)


def delivered(brokers: BrokerGroup) -> Counter[bytes]:
    """What consumers get, from the master."""
    with brokers.admin(20.0) as admin:
        found: Counter[bytes] = Counter()
        for one in admin.queue_ranges(TOPIC):
            at = one.min_offset
            while True:
                messages, next_at = admin.messages(one.queue, at)
                found.update(one.body for one in messages)
                if next_at <= at:
                    break
                at = next_at
        return found


def open_count(brokers: BrokerGroup) -> int:
    """Transactions that the master knows as open; -1 while it does not know."""
    info = brokers.broker_status(brokers.master()).table
    return int(info["transactionsOpen"]) if info.get("transactionsReady") == "true" else -1


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
def test_the_master_dies_between_half_and_end(brokers: BrokerGroup, state: TransactionState) -> None:
    """The next master is told, and ends it as the producer said, once."""
    notes: dict[str, TransactionState] = {}

    def execute(prepared: PreparedMessage) -> TransactionState:
        notes[prepared.transaction_id] = state
        master = brokers.master()
        brokers.kill(master)
        return state

    with Shop(brokers, notes).producer as producer:
        result = producer.send_in_transaction(Message(TOPIC, b"one"), execute, queue=1)
        assert result.problem is None, result
        producer.send_in_transaction(Message(TOPIC, b"then"), lambda _: COMMIT)
    expected = Counter({b"then": 1, b"one": 1} if state is COMMIT else {b"then": 1})
    wait_until(lambda: delivered(brokers) == expected, "what was committed is there once", WAIT_S)


def test_a_deposed_master_ends_nothing(brokers: BrokerGroup) -> None:
    """Told to roll back while it sleeps, it refuses that when it wakes up; meanwhile its successor has committed."""
    with Shop(brokers, {}).producer as producer, ThreadPoolExecutor(1) as pool:
        deposed = brokers.master()
        with RemotingSocket(brokers.nodes[deposed].client_port) as client:
            with producer.transaction(Message(TOPIC, b"one"), queue=1) as transaction:
                brokers.pause(deposed)
                fields = {
                    "producerGroup": "shop",
                    "tranStateTableOffset": transaction.half.offset,
                    "commitLogOffset": parse_offset_message_id(transaction.half.offset_id)[1],
                    "commitOrRollback": ROLLED_BACK,
                    "msgId": transaction.id,
                }

                def say_otherwise() -> int | None:
                    try:
                        return client.ask(RequestCode.END_TRANSACTION, fields).code
                    except (EOFError, ConnectionResetError):  # it has hung up instead
                        return None

                said = pool.submit(say_otherwise)
                brokers.master(other_than=deposed)
            problem = transaction.result.problem  # the commit is told again if its answer came too late
            assert problem is None or problem.outcome == "unknown", transaction.result
            brokers.resume(deposed)
            assert said.result(WAIT_S) != AnswerCode.SUCCESS
        wait_until(lambda: delivered(brokers) == Counter([b"one"]), "it is delivered", WAIT_S)
        wait_until(lambda: open_count(brokers) == 0, "nothing is open", WAIT_S)
    stored = brokers.verified_bodies()
    assert [body for bodies in stored.values() for body in bodies] == [b"one"]


def test_a_producer_dies_and_another_of_its_group_is_asked(brokers: BrokerGroup) -> None:
    """It was killed before it could say anything; what it noted is committed, in Python or not."""
    notes: dict[str, TransactionState] = {}
    shop = Shop(brokers, notes)
    command = [sys.executable, "-c", DIES, ",".join(brokers.addresses), TOPIC]
    with shop.producer:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as dying:
            assert dying.stdout is not None
            transaction_id = dying.stdout.readline().strip()
            dying.kill()
        assert len(transaction_id) == 32
        wait_until(lambda: transaction_id in shop.asked, "the other is asked", WAIT_S)
        assert not delivered(brokers)
        notes[transaction_id] = COMMIT
        wait_until(lambda: delivered(brokers) == Counter([b"of the dead"]), "it is delivered", WAIT_S)


def test_every_transaction_ends_once_while_masters_die(brokers: BrokerGroup) -> None:
    """Two producers of a group, many transactions at once, two masters killed: some ends are told twice, some never.

    What was noted as committed is delivered once, and nothing else, though all were asked about it.
    """
    notes: dict[str, TransactionState] = {}
    states = (COMMIT, ROLLBACK, UNKNOWN, COMMIT)
    wanted: dict[bytes, TransactionState] = {}
    begun = threading.Semaphore(0)
    shops = [Shop(brokers, notes), Shop(brokers, notes, timeout_s=1.5)]

    def transact(number: int) -> None:
        body, shop = b"%d" % number, shops[number % 2]

        def execute(prepared: PreparedMessage) -> TransactionState:
            state = states[number % 4]
            wanted[body] = notes[prepared.transaction_id] = COMMIT if state is UNKNOWN else state
            begun.release()
            return state

        while body not in wanted:  # what is not prepared is tried again; if it was after all, it is never noted
            try:
                shop.producer.send_in_transaction(Message(TOPIC, body), execute)
            except DLedgerError:  # no master for longer than the producer's patience
                continue

    with shops[0].producer, shops[1].producer, ThreadPoolExecutor(8) as pool:
        under_way = [pool.submit(transact, number) for number in range(120)]
        for _ in range(2):
            assert all(begun.acquire(timeout=WAIT_S) for _ in range(25))
            master = brokers.master()
            brokers.kill(master)
            brokers.master(other_than=master)
            brokers.start(master)
        for one in under_way:
            one.result(WAIT_S)
        for shop in shops:
            shop.unnoted = ROLLBACK
        wait_until(lambda: open_count(brokers) == 0, "all have ended", WAIT_S)
        expected = Counter(body for body, state in wanted.items() if state is COMMIT)
        assert len(expected) == 90
        assert delivered(brokers) == expected
    stored = brokers.verified_bodies()
    assert Counter(body for bodies in stored.values() for body in bodies) == expected
