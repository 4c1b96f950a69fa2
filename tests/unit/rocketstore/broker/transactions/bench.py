"""A broker with transactions and without its service, over a real store on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dledger.clock import Clock
from dledger.store.fs import FileSystem
from rocketstore.broker.transactions.halves import make_half
from rocketstore.broker.transactions.run import EndRefusedError
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState, StateSettings
from rocketstore.store.message_store import MessageStore
from rocketstore.types import HALF_TOPIC, OP_TOPIC, GetMessageStatus, PutResult, StoredPlace
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import WAIT_S, make_store

GROUP = "producers"
TOPIC = "T"


def half(body: bytes, *, group: str = GROUP, queue_id: int = 0, topic: str = TOPIC) -> Message:
    """A half message as a producer's broker stores it."""
    message = Message(topic, body, queue_id, {"PGROUP": group, "TRAN_MSG": "true", "KEYS": "k"}, sys_flag=4)
    make_half(message)
    return message


@dataclass
class Broker:
    """One that runs."""

    store: MessageStore
    state: BrokerState
    transactions: TransactionService

    def prepare(self, body: bytes, **kind: object) -> StoredPlace:
        """Where the half message is."""
        result = self.store.put(half(body, **kind))  # type: ignore[arg-type]  # as the function takes them
        assert result.ok, result
        assert result.stored is not None
        return result.stored

    def end(self, place: StoredPlace, *, commit: bool, group: str = GROUP) -> str:
        """What became of it, at once; a refusal has its reason."""
        answers: list[PutResult] = []
        try:
            self.transactions.end(place.queue_offset, place.offset, group, commit=commit, done=answers.append)
        except EndRefusedError as error:
            return str(error)
        wait_until(lambda: bool(answers), "the end is answered", WAIT_S)
        return "" if answers[0].ok else answers[0].reason or str(answers[0].status)

    def messages(self, topic: str = TOPIC, queue_id: int = 0) -> list[Message]:
        """What a queue holds."""
        wait_until(lambda: self.store.wait_dispatched(60), "all is dispatched", WAIT_S)
        found: list[Message] = []
        at = max(0, self.store.min_offset(topic, queue_id))
        while (result := self.store.get(topic, queue_id, at, max_count=32)).status is GetMessageStatus.FOUND:
            found += map(decode_record, result.records)
            at = result.next_offset
        return found

    def bodies(self, topic: str = TOPIC, queue_id: int = 0) -> list[bytes]:
        """Of these messages."""
        return [one.body for one in self.messages(topic, queue_id)]

    @property
    def ops(self) -> list[bytes]:
        """Which halves have ended, as the log says."""
        return self.bodies(OP_TOPIC)

    @property
    def halves(self) -> list[bytes]:
        """All that were prepared."""
        return self.bodies(HALF_TOPIC)

    def wait_open(self, count: int) -> None:
        """Until so many are open."""
        wait_until(
            lambda: self.transactions.is_ready and self.transactions.open_count == count, f"{count} are open", WAIT_S
        )


@contextmanager
def broker_on(
    store_config: MessageStoreConfig,
    config: BrokerConfig | None = None,
    *,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
) -> Iterator[Broker]:
    """One that runs, until the block ends."""
    clock = clock or Clock()
    store = make_store(store_config, fs=fs, clock=clock)
    state = BrokerState(
        store, store_config.config_dir, clock=clock, fs=fs, settings=StateSettings(accept_incomplete=True)
    )
    transactions = TransactionService(config or BrokerConfig(), store, state, clock)
    try:
        store.load()
        state.load()
        state.start()
        store.start()
        state.catch_up()
        transactions.start()
        wait_until(lambda: transactions.is_ready, "it knows which transactions are open", WAIT_S)
        yield Broker(store, state, transactions)
    finally:
        transactions.stop()
        state.shutdown()
        store.shutdown()
