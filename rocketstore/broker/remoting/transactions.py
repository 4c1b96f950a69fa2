"""Transactions over remoting: a producer ends what it prepared, and is asked about what it did not end."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import ip_address
from itertools import count, islice
from typing import Final, NamedTuple

from dledger.errors import CorruptLogError, InvalidRequestError, ShutdownError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import Place, RemotingConnection
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.broker.codec import SendCall
from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.remoting.clients import Client, ClientLink, ClientTables
from rocketstore.broker.transactions.checks import AskedDone, Check
from rocketstore.broker.transactions.messages import check_record, resumed
from rocketstore.broker.transactions.run import EndRefusedError, NotReadyError
from rocketstore.message.ids import is_of_process, offset_message_id, parse_offset_message_id, process_of
from rocketstore.message.message import PROPERTY_REAL_TOPIC, PROPERTY_UNIQUE_KEY, Message
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import (
    CheckTransactionHeader,
    EndTransactionHeader,
    ResumeCheckHeader,
    read_header,
    write_header,
)
from rocketstore.state.changes import QueueOffset
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC, BrokerRole, PutResult

COMMIT: Final = 8
ROLLBACK: Final = 12
UNKNOWN: Final = 0
RESUMED_MAX: Final = 10_000
TRIES: Final = 8
"""How many producers of a group to try, if the first does not take what it has been sent."""

_LOG: Final = logging.getLogger("rocketstore")


class _Request(NamedTuple):
    """CHECK_TRANSACTION_STATE, the real topic, and where the message was sent from."""

    frame: Frame
    topic: str
    born: Place
    unique_key: str


class RemotingTransactions:
    """On the loop."""

    def __init__(self, parts: BrokerParts, clients: ClientTables, may_send: Callable[[ClientLink, str], bool]) -> None:
        self._parts = parts
        self._may_send = may_send
        self._clients = clients
        self._turns = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resumed: OrderedDict[int, None] = OrderedDict()
        parts.transactions.ask_with(self._ask_soon)

    async def close(self) -> None:
        """Ask nobody any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def end(self, _: RemotingConnection, frame: Frame) -> Frame:
        """END_TRANSACTION. It is oneway: what a producer does not hear of, a check will ask again."""
        parts, header = self._parts, read_header(EndTransactionHeader, frame.fields)
        if parts.store.role is BrokerRole.SLAVE:
            raise RequestError("this broker is a slave: end transactions at the master", AnswerCode.SLAVE_NOT_AVAILABLE)
        if header.commit_or_rollback == UNKNOWN:
            return frame.answer()
        if header.commit_or_rollback not in (COMMIT, ROLLBACK):
            raise RequestError(f"a transaction cannot end with {header.commit_or_rollback}")
        try:
            await parts.ends.end(
                header.tran_state_table_offset,
                header.commit_log_offset,
                header.producer_group,
                commit=header.commit_or_rollback == COMMIT,
            )
        except EndRefusedError as error:
            raise RequestError(str(error)) from error
        except NotReadyError as error:
            raise RequestError(str(error), AnswerCode.SERVICE_NOT_AVAILABLE) from error
        return frame.answer()

    async def resume(self, _: RemotingConnection, frame: Frame) -> Frame:
        """RESUME_CHECK_HALF_MESSAGE: begin a transaction again that was given up, once for each master."""
        parts, header = self._parts, read_header(ResumeCheckHeader, frame.fields)
        if parts.store.role is BrokerRole.SLAVE:
            raise RequestError("this broker is a slave: ask the master", AnswerCode.SERVICE_NOT_AVAILABLE)
        offset = parse_offset_message_id(header.msg_id)[1]
        if offset in self._resumed:
            raise RequestError(f"the message at {offset} is being checked again already")
        record = await parts.readers.run(self._given_up, offset)
        if offset in self._resumed:
            raise RequestError(f"the message at {offset} is being checked again already")
        self._resumed[offset] = None  # whatever becomes of it: two would be two transactions
        if len(self._resumed) > RESUMED_MAX:
            self._resumed.popitem(last=False)
        stored: asyncio.Future[PutResult] = asyncio.get_running_loop().create_future()

        def done(results: Sequence[PutResult]) -> None:
            if not stored.done():
                stored.set_result(results[0])

        message = resumed(record, parts.store_host)
        parts.sender.submit(SendCall(0, [message], True, len(record), own=True, again=True), done)
        result = await stored
        if result.outcome == "not_applied":
            self._resumed.pop(offset, None)
        if not result.ok:
            raise RequestError(f"Put message back to RMQ_SYS_TRANS_HALF_TOPIC failed. {result.reason}")
        return frame.answer()

    def _given_up(self, offset: int) -> bytes:
        """On a read thread. Raises ``RequestError``: there is no message that was given up."""
        store = self._parts.store
        record = store.read_record(offset) if offset >= 0 else None
        if record is not None:
            message = decode_record(record)
            known = store.position_of(CHECKED_TOO_OFTEN_TOPIC, 0, message.queue_offset)
            if message.topic == CHECKED_TOO_OFTEN_TOPIC and known == offset:
                self._check_topic(message)
                return record
        raise RequestError(f"at {offset} is no message of {CHECKED_TOO_OFTEN_TOPIC}: only those can be checked again")

    def _check_topic(self, given_up: Message) -> None:
        name = given_up.properties.get(PROPERTY_REAL_TOPIC, "")
        waited = QueueOffset(CHECKED_TOO_OFTEN_TOPIC, 0, given_up.queue_offset)
        if self._parts.state.place_for(name, 0, waited) is None:
            raise RequestError(f"topic {name} was deleted since: its transactions cannot be checked again")

    # -- checks --------------------------------------------------------------------------------------------------------

    def _ask_soon(self, checks: Sequence[Check], done: AskedDone) -> None:
        """On the thread of transactions."""
        self._parts.bridge.post(partial(self._begin_asking, checks, done))

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
                request = await self._parts.readers.run(self._request, check)
            except (CorruptLogError, InvalidRequestError, ShutdownError) as error:
                _LOG.error("transactions: half message %d cannot be read: %s", check.queue_offset, error)
                continue
            if request is not None and self._tell_one(check.group, request):
                asked.append(check.queue_offset)

    def _tell_one(self, group: str, request: _Request) -> bool:
        """Who prepared the message is asked first: the producer with its connection, or after a reconnection that of
        its process, or one on its machine. Then the group's other producers get their turns. One that is slow is passed
        over, and one that may not send there.
        """
        producers = [one for one in self._clients.producers(group) if self._may_send(one.connection, request.topic)]
        first = next(self._turns) % max(len(producers), 1)
        born, process = request.born, process_of(request.unique_key)

        def strangeness(one: Client) -> tuple[bool, bool, bool]:
            place = one.connection.place
            return place != born, not is_of_process(one.client_id, process), place.host != born.host

        nearest = sorted(producers[first:] + producers[:first], key=strangeness)
        return any(one.connection.tell(request.frame) for one in islice(nearest, TRIES))

    def _request(self, check: Check) -> _Request | None:
        """On a read thread; None if there is nothing to ask any more."""
        parts = self._parts
        record = parts.store.read_record(check.offset) if parts.transactions.is_open(check) else None
        if record is None:
            return None
        body = check_record(record, check.times)
        half = decode_record(record)
        properties = half.properties
        unique, topic = properties.get(PROPERTY_UNIQUE_KEY, ""), properties.get(PROPERTY_REAL_TOPIC, "")
        offset_id = offset_message_id(parts.store_host, check.offset)
        header = CheckTransactionHeader(check.queue_offset, check.offset, unique, unique, offset_id)
        frame = Frame(RequestCode.CHECK_TRANSACTION_STATE, 0, write_header(header), body)
        return _Request(frame, topic, Place(str(ip_address(half.born_host.ip)), half.born_host.port), unique)
