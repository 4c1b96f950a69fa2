"""Producers that prepare messages, and commit them or roll them back, at times twice, at times only when asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from dledger.errors import DLedgerError
from rocketstore.broker.transactions.checks import AskedDone, Check
from rocketstore.broker.transactions.halves import make_half
from rocketstore.broker.transactions.run import GROUP, EndRefusedError, NotReadyError
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.store.message_store import MessageStore
from rocketstore.types import (
    CHECKED_TOO_OFTEN_TOPIC,
    HALF_TOPIC,
    HIDDEN_TOPICS,
    OP_TOPIC,
    GetMessageStatus,
    PutMessageStatus,
    PutResult,
    StoredPlace,
)
from tests.sim_store.model import require
from tests.sim_store.threads import Event, Group, Scheduler

TOPIC: Final = "X"
PRODUCERS: Final = "producers"
PROPERTIES: Final = frozenset({"PGROUP", "TRAN_MSG", "REAL_TOPIC", "REAL_QID"})
UNMODELLED: Final = HIDDEN_TOPICS | {TOPIC, HALF_TOPIC, OP_TOPIC, CHECKED_TOO_OFTEN_TOPIC}
OWN_GROUPS: Final = frozenset({GROUP})
CONFIG: Final = BrokerConfig(transaction_check_interval=400, transaction_time_out=100, transaction_check_max=1000)


@dataclass(eq=False)
class Transaction:
    """What a producer knows of one."""

    body: bytes
    commit: bool
    """What it decides, whenever it is asked."""
    outcome: Literal["unknown", "acked", "refused"] = "unknown"
    """Of preparing it."""


class Producers:
    """All of a world."""

    def __init__(self, scheduler: Scheduler, dice: Random) -> None:
        self._scheduler = scheduler
        self._dice = dice
        self._services: dict[MessageStore, TransactionService] = {}
        self.transactions: dict[bytes, Transaction] = {}
        self.hits: Counter[str] = Counter()

    def serve(self, store: MessageStore, service: TransactionService) -> None:
        """A broker that asks them."""
        self._services[store] = service
        service.ask_with(lambda checks, done: self._answer(store, service, checks, done))

    def transact(self, group: Group, store: MessageStore, answer_s: float) -> None:
        """One transaction, at one broker."""
        dice = self._dice
        body = f"x{len(self.transactions)}".encode().ljust(int(dice.random() * dice.choice((10, 300))) + 8, b".")
        made = self.transactions[body] = Transaction(body, dice.random() < 0.6)
        message = Message(TOPIC, body, dice.randrange(2), {"PGROUP": PRODUCERS, "TRAN_MSG": "true"}, born_timestamp=1)
        make_half(message)
        answered, found = Event(), list[PutResult]()

        def done(results: Sequence[PutResult]) -> None:
            if not group.dead:
                found.extend(results)
                answered.set()

        store.submit([message], done)
        require(answered.wait(answer_s), "a half message is not answered", made)
        result = found[0]
        if result.status is PutMessageStatus.PUT_OK:
            made.outcome = "acked"
        elif result.outcome == "not_applied":
            made.outcome = "refused"
        for _ in range(dice.choice((0, 1, 1, 2, 3)) if result.ok and result.stored is not None else 0):
            if dice.random() < 0.3:
                self._scheduler.sleep_us(int(dice.random() * 100_000))
            if result.stored is not None:
                self._end(self._services[store], made, result.stored)

    def _end(self, service: TransactionService, made: Transaction, place: StoredPlace) -> None:
        try:
            service.end(place.queue_offset, place.offset, PRODUCERS, commit=made.commit, done=lambda _result: None)
            self.hits["end"] += 1
        except NotReadyError:
            self.hits["end of an unready master"] += 1
        except EndRefusedError:
            self.hits["end refused"] += 1

    def _answer(
        self, store: MessageStore, service: TransactionService, checks: Sequence[Check], done: AskedDone
    ) -> None:
        """On the thread that asks."""
        for check in checks:
            if self._dice.random() < 0.2:
                continue
            try:
                record = store.read_record(check.offset)
                if record is not None:
                    place = StoredPlace(check.offset, 0, 0, check.queue_offset, 0)
                    self.hits["check"] += 1
                    self._end(service, self.transactions[decode_record(record).body], place)
            except DLedgerError:
                self.hits["check failed"] += 1
        done([one.queue_offset for one in checks])

    # -- checks --------------------------------------------------------------------------------------------------------

    def have_ended(self, store: MessageStore, service: TransactionService) -> bool:
        """Whether none is open any more but those whose properties a power cut has torn: no checksum covers them."""
        run = service._run
        if run is None or not run.is_ready:
            return False
        return all(self._is_torn(store, one.offset) for one in list(run.halves))

    def _is_torn(self, store: MessageStore, offset: int) -> bool:
        record = store.read_record(offset)
        if record is None:  # it has expired, and so has its transaction
            return False
        properties = decode_record(record).properties
        return properties.keys() != PROPERTIES or (properties["PGROUP"], properties["REAL_TOPIC"]) != (PRODUCERS, TOPIC)

    def check(self, store: MessageStore, *, all_kept: bool) -> None:
        """What is committed is there once, what is rolled back never.

        ``all_kept``: nothing may be missing, as long as nothing of the log has expired.
        """
        found: Counter[bytes] = Counter()
        for queue_id in range(2):
            at = max(store.min_offset(TOPIC, queue_id), 0)
            while at < store.max_offset(TOPIC, queue_id):
                result = store.get(TOPIC, queue_id, at, max_count=32)
                require(result.next_offset > at, "committed messages cannot be read on", queue_id, at, result)
                if result.status is GetMessageStatus.FOUND:
                    found.update(decode_record(one).body for one in result.records)
                at = result.next_offset
        for body, count in found.items():
            require(count == 1, "a transaction was committed twice", body, count)
            require(self.transactions[body].commit, "a transaction was rolled back, and delivered", body)
        if all_kept and max(store.log.min_offset, *(store.min_offset(TOPIC, one) for one in range(2))) <= 0:
            self.hits["nothing missing"] += 1
            missing = [one for one in self.transactions.values() if one.commit and one.body not in found]
            lost = [one for one in missing if one.outcome == "acked"]
            require(not lost, "a committed transaction is lost", *lost[:3])
        self.hits["committed"] += len(found)
