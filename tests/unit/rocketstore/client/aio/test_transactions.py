"""Transactions: what the broker is told, when it is asked to ask again, and how checks are answered."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dledger.errors import ConfigError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.client.aio import errors, routes, transactions
from rocketstore.client.aio.errors import PreparedMessage, SendStatus, TransactionState
from rocketstore.client.aio.producer import Producer, ProducerOptions
from rocketstore.client.aio.transactions import Check, Transaction
from rocketstore.message.ids import is_of_client
from rocketstore.message.message import SYS_FLAG_COMPRESSED, SYS_FLAG_PREPARED, Message
from rocketstore.message.record import decode_record, encode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import HeartbeatData
from rocketstore.remoting.headers import CheckTransactionHeader, EndTransactionHeader, read_header, write_header
from rocketstore.server import BrokerServer
from tests.support.on_loop import on_loop, until
from tests.support.scripted_server import MessageStore, ScriptedServer, Topics, refuses, scripted_server
from tests.unit.rocketstore.test_server import plain, running

SEND, END = RequestCode.SEND_MESSAGE_V2, RequestCode.END_TRANSACTION
COMMIT, ROLLBACK = 8, 12
MESSAGE = Message("T", b"half", tags="new")


async def unknown(_: PreparedMessage) -> TransactionState:
    return TransactionState.UNKNOWN


class World:
    """One broker, and a producer of group P."""

    def __init__(self, server: ScriptedServer, producer: Producer) -> None:
        self.server = server
        self.producer = producer
        self.store = MessageStore()
        self.store.serve(server)
        self.topics = Topics({"a": {0: server.address}}, {"T": {"a": 1}})
        self.topics.serve(server)
        for code in (RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT, END):
            server.scripts[code] = lambda frame: frame.answer()

    @property
    def ends(self) -> list[EndTransactionHeader]:
        return [read_header(EndTransactionHeader, one.fields) for one in self.server.of(END)]

    def ask(self, unique_key: str = "U1", offset: int = 700, message: Message = MESSAGE) -> None:
        """As a broker asks about a transaction."""
        named = Message("T", message.body, properties={"UNIQ_KEY": unique_key, "TRANSACTION_CHECK_TIMES": "3"})
        named.sys_flag = message.sys_flag
        header = CheckTransactionHeader(5, offset, unique_key, unique_key, "")
        body = encode_record(named)
        frame = Frame(RequestCode.CHECK_TRANSACTION_STATE, 0, write_header(header), body)
        assert self.server.connections[0].tell(frame)


@asynccontextmanager
async def world(check: Check = unknown, *, timeout_s: float = 20.0, workers: int = 1) -> AsyncIterator[World]:
    async with scripted_server() as server:
        options = ProducerOptions(check_workers=workers)
        producer = Producer(server.address, group="P", check=check, timeout_s=timeout_s, options=options)
        here = World(server, producer)
        async with producer:
            yield here


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.02)


# -- the producer's own ------------------------------------------------------------------------------------------------


@on_loop
async def test_a_block_that_ends_commits_its_message() -> None:
    async with world() as here:
        async with here.producer.transaction(MESSAGE, key="k") as transaction:
            (request,) = here.server.of(SEND)
            assert int(request.fields["f"]) & SYS_FLAG_PREPARED
            properties = dict(one.split("\x01") for one in request.fields["i"].split("\x02"))
            assert properties == {"TAGS": "new", "UNIQ_KEY": transaction.id, "TRAN_MSG": "true", "PGROUP": "P"}
            assert transaction.prepared.message.properties["UNIQ_KEY"] == transaction.id
            assert not here.ends
        (end,) = here.ends
        assert (end.producer_group, end.commit_or_rollback, end.commit_log_offset) == ("P", COMMIT, 7)
        assert (end.msg_id, end.tran_state_table_offset) == (transaction.id, 0)
        assert not end.from_transaction_check
        assert transaction.result.state is TransactionState.COMMIT
        assert transaction.result.problem is None


@on_loop
async def test_its_id_tells_a_broker_whom_to_ask_about_it() -> None:
    """This very client, not any other one of the group or the process."""
    async with world() as here:
        async with here.producer.transaction(MESSAGE):
            pass
        (end,) = here.ends
        assert is_of_client(here.producer.client_id, end.msg_id)


async def commits(transaction: Transaction) -> None:
    async with transaction:
        pass


async def fails_in(transaction: Transaction) -> None:
    """Its block says so, and raises."""
    async with transaction:
        transaction.rollback()
        raise ZeroDivisionError


@on_loop
async def test_a_block_that_raises_decides_nothing_unless_it_says_so() -> None:
    """The local transaction may have succeeded before the error: check looks."""
    async with world() as here:
        with pytest.raises(ZeroDivisionError):
            async with here.producer.transaction(MESSAGE) as transaction:
                raise ZeroDivisionError
        assert (here.ends, transaction.result.state) == ([], TransactionState.UNKNOWN)
        with pytest.raises(ZeroDivisionError):
            await fails_in(here.producer.transaction(MESSAGE))
        assert [one.commit_or_rollback for one in here.ends] == [ROLLBACK]
        async with here.producer.transaction(MESSAGE) as transaction:
            transaction.leave_open()
        assert len(here.ends) == 1
        with pytest.raises(RuntimeError, match="used once"):
            await transaction.__aenter__()


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (TransactionState.COMMIT, [COMMIT]),
        (TransactionState.ROLLBACK, [ROLLBACK]),
        (TransactionState.UNKNOWN, []),
    ],
)
@on_loop
async def test_a_function_says_what_its_local_transaction_came_to(state: TransactionState, told: list[int]) -> None:
    async with world() as here:
        seen: list[PreparedMessage] = []

        async def execute(prepared: PreparedMessage) -> TransactionState:
            seen.append(prepared)
            return state

        result = await here.producer.send_in_transaction(MESSAGE, execute)
        assert [one.commit_or_rollback for one in here.ends] == told
        assert (result.state, result.transaction_id) == (state, seen[0].transaction_id)
        assert seen[0].message.body == b"half"


@on_loop
async def test_a_function_that_returns_nothing_decides_nothing() -> None:
    async with world() as here:

        async def forgets(_: PreparedMessage) -> TransactionState:
            return None  # type: ignore[return-value]  # which is the point

        with pytest.raises(TypeError, match="must return a TransactionState, not None"):
            await here.producer.send_in_transaction(MESSAGE, forgets)
        assert not here.ends


@on_loop
async def test_a_half_message_that_is_not_safe_is_rolled_back_without_the_local_transaction() -> None:
    """As RocketMQ's producers do."""
    async with world() as here:
        here.store.status = AnswerCode.SLAVE_NOT_AVAILABLE
        called: list[PreparedMessage] = []

        async def execute(prepared: PreparedMessage) -> TransactionState:
            called.append(prepared)
            return TransactionState.COMMIT

        result = await here.producer.send_in_transaction(MESSAGE, execute)
        assert not called
        assert (result.state, result.half.status) == (TransactionState.ROLLBACK, SendStatus.SLAVE_NOT_AVAILABLE)
        assert [one.commit_or_rollback for one in here.ends] == [ROLLBACK]


@on_loop
async def test_a_message_that_cannot_be_prepared_begins_nothing() -> None:
    async with world() as here:
        here.store.answers.append(refuses(AnswerCode.MESSAGE_ILLEGAL, "no"))
        entered = False
        with pytest.raises(errors.MessageRefusedError):
            async with here.producer.transaction(MESSAGE):
                entered = True
        assert not entered
        assert not here.ends
        assert here.producer._find_transactions()._in_progress == {}


@on_loop
async def test_a_broker_that_cannot_be_told_asks_later() -> None:
    """The producer tells it again, until its time is over."""
    async with world() as here:
        here.server.scripts[END] = refuses(AnswerCode.SERVICE_NOT_AVAILABLE, "starting")
        async with asyncio.TaskGroup() as group:
            transaction = here.producer.transaction(MESSAGE)
            committing = group.create_task(commits(transaction))
            await until(lambda: len(here.ends) > 1, "it was told again")
            assert not committing.done()
            here.server.scripts[END] = lambda frame: frame.answer()
        assert transaction.result.problem is None
        assert transaction.result.state is TransactionState.COMMIT


@on_loop
async def test_what_could_not_be_told_is_settled_by_the_next_check() -> None:
    """Only what the broker has noted has ended: it asks about the other."""

    async def check(_: PreparedMessage) -> TransactionState:
        return TransactionState.COMMIT

    async with world(check, timeout_s=1.0) as here:
        here.server.scripts[END] = refuses(AnswerCode.SERVICE_NOT_AVAILABLE, "starting")
        async with here.producer.transaction(MESSAGE) as transaction:
            pass
        assert isinstance(transaction.result.problem, errors.NotMasterError)
        here.server.scripts[END] = lambda frame: frame.answer()
        here.ask(transaction.id)
        await until(lambda: here.ends[-1].from_transaction_check, "the check is answered")
        assert here.ends[-1].msg_id == transaction.id


@on_loop
async def test_an_end_that_the_broker_refuses_for_good_is_said_once() -> None:
    async with world() as here:
        here.server.scripts[END] = refuses(AnswerCode.SYSTEM_ERROR, "find prepared transaction message failed")
        async with here.producer.transaction(MESSAGE) as transaction:
            pass
        assert isinstance(transaction.result.problem, errors.BrokerFailedError)
        assert len(here.ends) == 1


@on_loop
async def test_a_transaction_does_not_begin_twice_even_where_duplicates_are_allowed() -> None:
    """The end would be that of one half; asked about the other, a check commits the message once more."""
    async with scripted_server() as server:
        options = ProducerOptions(allow_duplicates=True)
        producer = Producer(server.address, group="P", check=unknown, timeout_s=60.0, options=options)
        here = World(server, producer)
        async with producer:
            here.store.answers.append(lambda frame: frame.answer(AnswerCode.SYSTEM_ERROR, "late"))
            with pytest.raises(errors.BrokerFailedError, match="late") as caught:
                async with producer.transaction(MESSAGE):
                    pytest.fail("it has not begun")
            assert (caught.value.outcome, len(server.of(SEND))) == ("unknown", 1)


@on_loop
async def test_transactions_need_a_group_and_a_check() -> None:
    async with scripted_server() as server, Producer(server.address) as producer:
        with pytest.raises(ConfigError, match="needs group=… and check=…"):
            async with producer.transaction(MESSAGE):
                pass


# -- joining -----------------------------------------------------------------------------------------------------------


@on_loop
async def test_a_producer_with_a_check_joins_its_group_and_leaves_it() -> None:
    async with world() as here:
        (beat,) = here.server.of(RequestCode.HEART_BEAT)
        data = HeartbeatData.decode(beat.body)
        assert data.client_id == here.producer.client_id
        assert [one.group_name for one in data.producer_data_set] == ["P"]
        server = here.server
    (left,) = server.of(RequestCode.UNREGISTER_CLIENT)
    assert left.fields == {"clientID": data.client_id, "producerGroup": "P"}


@on_loop
async def test_who_may_not_join_is_told_at_the_start() -> None:
    async with scripted_server() as server:
        Topics({"a": {0: server.address}}, {"T": {"a": 1}}).serve(server)
        server.scripts[RequestCode.HEART_BEAT] = refuses(AnswerCode.NO_PERMISSION, "not your group")
        with pytest.raises(errors.ForbiddenError, match="not your group"):
            async with Producer(server.address, group="P", check=unknown):
                pass


# -- checks ------------------------------------------------------------------------------------------------------------


@on_loop
async def test_a_check_is_answered_over_the_connection_that_asked() -> None:
    seen: list[PreparedMessage] = []

    async def check(prepared: PreparedMessage) -> TransactionState:
        seen.append(prepared)
        return TransactionState.COMMIT

    async with world(check) as here:
        here.ask("U1", 700)
        await until(lambda: here.ends, "it is answered")
        (end,) = here.ends
        assert end == EndTransactionHeader("P", 5, 700, COMMIT, "U1", True, "U1")
        assert (seen[0].transaction_id, seen[0].checks, seen[0].message.body) == ("U1", 3, b"half")


@on_loop
async def test_a_check_may_be_a_plain_function_which_does_not_hold_the_loop() -> None:
    threads: list[int] = []

    def check(_: PreparedMessage) -> TransactionState:
        threads.append(threading.get_ident())
        return TransactionState.ROLLBACK

    async with world(check) as here:
        here.ask()
        await until(lambda: here.ends, "it is answered")
        assert here.ends[0].commit_or_rollback == ROLLBACK
        assert threads != [threading.get_ident()]


@pytest.mark.parametrize("error", [ValueError("bug"), SystemExit(3), asyncio.CancelledError()])
@on_loop
async def test_a_check_that_fails_is_asked_again_and_ends_no_worker(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[BaseException] = [error]

    async def check(_: PreparedMessage) -> TransactionState:
        if failures:
            raise failures.pop()
        return TransactionState.COMMIT

    async with world(check) as here:
        here.ask()
        await until(lambda: "a check failed" in caplog.text, "it failed")
        assert not here.ends
        here.ask()
        await until(lambda: here.ends, "it is answered")


@on_loop
async def test_what_is_in_progress_here_is_not_asked_about() -> None:
    """The local transaction is not finished; nobody could say more."""
    asked: list[str] = []

    async def check(prepared: PreparedMessage) -> TransactionState:
        asked.append(prepared.transaction_id)
        return TransactionState.COMMIT

    async with world(check) as here, here.producer.transaction(MESSAGE) as transaction:
        here.ask(transaction.id, 700)
        here.ask("other", 701)
        await until(lambda: asked, "the other is asked about")
        assert asked == ["other"]


@on_loop
async def test_what_has_just_ended_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """RocketMQ 5 asks before it has noted the end, and would deliver the message a second time."""
    asked: list[str] = []

    async def check(prepared: PreparedMessage) -> TransactionState:
        asked.append(prepared.transaction_id)
        return TransactionState.COMMIT

    monkeypatch.setattr(transactions, "ENDED_MAX", 2)
    async with world(check) as here:
        ended: list[str] = []
        for _ in range(3):
            async with here.producer.transaction(MESSAGE) as transaction:
                ended.append(transaction.id)
        here.ask(ended[2], 700)
        here.ask("other", 701)
        await until(lambda: asked, "the other is asked about")
        here.ask(ended[0], 702)  # not remembered: there were too many since
        await until(lambda: len(asked) == 2, "the first is asked about")
        assert asked == ["other", ended[0]]
        monkeypatch.setattr(transactions, "ENDED_S", 0.0)
        here.ask(ended[2], 703)
        await until(lambda: len(asked) == 3, "after a while it is asked about, too")


@on_loop
async def test_waiting_checks_are_bounded_and_known_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others come again in the broker's next round."""
    monkeypatch.setattr(transactions, "CHECKS_PENDING_MAX", 3)
    asked: list[str] = []
    go = asyncio.Event()

    async def check(prepared: PreparedMessage) -> TransactionState:
        asked.append(prepared.transaction_id)
        await go.wait()
        return TransactionState.COMMIT

    async with world(check) as here:
        for offset in (0, 0, 1, 1, 2, 3, 4):
            here.ask(f"U{offset}", offset)
        pending = here.producer._find_transactions()
        await until(lambda: len(pending._known) == 3, "as many as may be are known")
        go.set()
        await until(lambda: len(here.ends) == 3, "they are answered")
        assert asked == ["U0", "U1", "U2"]
        here.ask("U3", 3)
        await until(lambda: len(here.ends) == 4, "a later round is answered")


@on_loop
async def test_as_many_checks_as_workers_at_once() -> None:
    together = 0
    go = asyncio.Event()

    async def check(_: PreparedMessage) -> TransactionState:
        nonlocal together
        together += 1
        await go.wait()
        return TransactionState.UNKNOWN

    async with world(check, workers=2) as here:
        for offset in range(5):
            here.ask(f"U{offset}", offset)
        await until(lambda: together == 2, "two are asked about")
        go.set()
        await until(lambda: together == 5, "all are asked about")
        assert not here.ends  # unknown decides nothing


@on_loop
async def test_garbage_instead_of_a_message_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as here:
        header = write_header(CheckTransactionHeader(1, 2))
        here.server.connections[0].tell(Frame(RequestCode.CHECK_TRANSACTION_STATE, 0, header, b"junk"))
        here.server.connections[0].tell(Frame(RequestCode.CHECK_TRANSACTION_STATE, 0, {}, b""))
        await until(lambda: caplog.text.count("cannot be read") == 2, "both are passed over")


@on_loop
async def test_a_compressed_message_is_checked_as_it_was_sent() -> None:
    """By a producer in Java; nobody should have to know that."""
    seen: list[bytes] = []

    async def check(prepared: PreparedMessage) -> TransactionState:
        seen.append(prepared.message.body)
        return TransactionState.UNKNOWN

    async with world(check) as here:
        here.ask(message=Message("T", zlib.compress(b"long"), sys_flag=SYS_FLAG_COMPRESSED))
        await until(lambda: seen, "it is asked about")
        assert seen == [b"long"]


@on_loop
async def test_what_waits_to_be_checked_is_as_small_as_it_was_sent() -> None:
    """It is counted by that: a thousand messages that grow a thousandfold would fill the memory of their producer."""
    go, asked = asyncio.Event(), asyncio.Event()

    async def check(_: PreparedMessage) -> TransactionState:
        asked.set()
        await go.wait()
        return TransactionState.COMMIT

    async with world(check) as here:
        bomb = Message("T", zlib.compress(bytes(1 << 20)), sys_flag=SYS_FLAG_COMPRESSED)
        for offset in range(4):
            here.ask(f"U{offset}", offset, bomb)
        pending = here.producer._find_transactions()
        await until(lambda: asked.is_set() and len(pending._pending) == 3, "one is asked about, the others wait")
        assert max(len(one.prepared.message.body) for one in pending._pending) == len(bomb.body)
        go.set()
        await until(lambda: len(here.ends) == 4, "they are answered")


@on_loop
async def test_closing_waits_for_a_check_that_is_being_answered() -> None:
    go, asked = asyncio.Event(), asyncio.Event()

    async def check(_: PreparedMessage) -> TransactionState:
        asked.set()
        await go.wait()
        return TransactionState.COMMIT

    async with world(check) as here:
        here.ask()
        await asked.wait()
        closing = asyncio.create_task(here.producer.close())
        await asyncio.sleep(0)
        go.set()
        await closing
        assert len(here.ends) == 1


@on_loop
async def test_what_else_a_broker_asks_is_answered_with_a_refusal() -> None:
    async with world() as here:
        answer = await here.server.connections[0].call(Frame(RequestCode.GET_CONSUMER_RUNNING_INFO, 0), 10)
        assert answer.code == AnswerCode.REQUEST_CODE_NOT_SUPPORTED


# -- a whole broker ----------------------------------------------------------------------------------------------------


def committed(broker: BrokerServer) -> list[bytes]:
    """The bodies that consumers of topic T see."""
    found = []
    for queue in range(broker.config.default_topic_queue_nums):
        for offset in range(broker.store.max_offset("T", queue)):
            position = broker.store.position_of("T", queue, offset)
            record = None if position is None else broker.store.read_record(position)
            assert record is not None
            found.append(decode_record(record).body)
    return sorted(found)


@on_loop
async def test_a_broker_delivers_what_was_committed_and_asks_about_what_was_left_open(tmp_path: Path) -> None:
    states: dict[bytes, TransactionState] = {
        b"left, succeeded": TransactionState.COMMIT,
        b"left, failed": TransactionState.ROLLBACK,
    }
    asked: list[bytes] = []

    async def check(prepared: PreparedMessage) -> TransactionState:
        asked.append(prepared.message.body)
        return states[prepared.message.body]

    with running(plain(tmp_path, transactionTimeOut="0", transactionCheckInterval="100")) as broker:
        async with Producer(broker.address, group="P", check=check, timeout_s=30) as producer:
            await producer.send(Message("T", b"ordinary"))
            for body in (b"committed", b"rolled back", *states):
                async with producer.transaction(Message("T", body)) as transaction:
                    if body == b"rolled back":
                        transaction.rollback()
                    elif body in states:
                        transaction.leave_open()
                assert transaction.result.problem is None
            await until(lambda: set(asked) == set(states), "both are asked about")
            expected = [b"committed", b"left, succeeded", b"ordinary"]
            await until(lambda: committed(broker) == expected, "what was committed is delivered")
