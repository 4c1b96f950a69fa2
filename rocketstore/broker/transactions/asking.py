"""Asks the producers of open transactions what became of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from itertools import count, islice
from typing import Final, NamedTuple

from dledger.errors import CorruptLogError, InvalidRequestError, ShutdownError
from dledger.rpc.bridge import LoopBridge
from dledger.values import host_of
from rocketstore.broker.clients import Client, ClientTables, HalfCheck
from rocketstore.broker.hosts import host_text
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.transactions.checks import AskedDone, Check
from rocketstore.broker.transactions.messages import check_record
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.message.ids import is_of_client, is_of_process, offset_message_id, process_of
from rocketstore.message.message import PROPERTY_REAL_TOPIC, PROPERTY_UNIQUE_KEY, HostAddress
from rocketstore.message.record import decode_record
from rocketstore.store.message_store import MessageStore

TRIES: Final = 8
"""How many producers of a group to try, if the first does not take the question."""
_LOG: Final = logging.getLogger("rocketstore")


class _Question(NamedTuple):
    """A check to send, and the host that the message was sent from."""

    check: HalfCheck
    born: HostAddress


class ProducerChecks:
    """On the loop; ``store_host`` is in the ids of messages."""

    def __init__(
        self,
        store: MessageStore,
        transactions: TransactionService,
        clients: ClientTables,
        readers: ReadThreads,
        bridge: LoopBridge,
        store_host: HostAddress,
    ) -> None:
        self._store = store
        self._transactions = transactions
        self._clients = clients
        self._readers = readers
        self._bridge = bridge
        self._store_host = store_host
        self._turns = count()
        self._tasks: set[asyncio.Task[None]] = set()
        transactions.ask_with(self._ask_soon)

    async def close(self) -> None:
        """Ask nobody any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ask_soon(self, checks: Sequence[Check], done: AskedDone) -> None:
        """On the thread of transactions."""
        self._bridge.post(partial(self._begin_asking, checks, done))

    def _begin_asking(self, checks: Sequence[Check], done: AskedDone) -> None:
        asked: list[int] = []
        task = asyncio.get_running_loop().create_task(self._ask(checks, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _task: done(asked))

    async def _ask(self, checks: Sequence[Check], asked: list[int]) -> None:
        """Adds to ``asked`` the queue offsets of those that a producer was sent."""
        for check in checks:
            if not any(True for _ in self._clients.producers(check.group)):
                continue
            try:
                question = await self._readers.run(self._question, check)
            except (CorruptLogError, InvalidRequestError, ShutdownError) as error:
                _LOG.error("transactions: half message %d cannot be read: %s", check.queue_offset, error)
                continue
            if question is not None and self._ask_one(check.group, question):
                asked.append(check.queue_offset)

    def _ask_one(self, group: str, question: _Question) -> bool:
        """The producer that prepared the message, known by its unique ids or its connection, and as long as it is there
        nobody else: others may know nothing of the transaction. Then one of its process or on its machine, then the
        group's others in turn, of which one that is slow is passed over. One that may not send there is never asked.
        """
        check, born = question.check, host_text(question.born)
        producers = [one for one in self._clients.producers(group) if one.link.may_send(check.topic)]
        first = next(self._turns) % max(len(producers), 1)
        host, process = host_of(born), process_of(check.unique_id)

        def strangeness(one: Client) -> tuple[bool, bool]:
            return not is_of_process(one.client_id, process), one.link.host != host

        asked = (
            [one for one in producers if is_of_client(one.client_id, check.unique_id)]
            or [one for one in producers if one.link.address == born]
            or sorted(producers[first:] + producers[:first], key=strangeness)
        )
        return any(one.link.check_half(check) for one in islice(asked, TRIES))

    def _question(self, check: Check) -> _Question | None:
        """On a read thread; None if there is nothing to ask any more."""
        record = self._store.read_record(check.offset) if self._transactions.is_open(check) else None
        if record is None:
            return None
        shown = check_record(record, check.times)
        half = decode_record(record)
        unique, topic = half.properties.get(PROPERTY_UNIQUE_KEY, ""), half.properties.get(PROPERTY_REAL_TOPIC, "")
        message_id = offset_message_id(self._store_host, check.offset)
        return _Question(HalfCheck(topic, shown, check.queue_offset, check.offset, message_id, unique), half.born_host)
