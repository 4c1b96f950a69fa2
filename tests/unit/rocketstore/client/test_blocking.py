"""The blocking clients: threads, signals, forks, and the ends of clients and programs."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from queue import Queue
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import pytest
import uvloop

from dledger.errors import ConfigError
from dledger.remoting.codes import AnswerCode
from rocketstore.client import blocking, loop_thread
from rocketstore.client.aio import errors
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.aio.errors import PreparedMessage, SendResult, TransactionState
from rocketstore.client.aio.outgoing import OutgoingMessage, PipelineLimits, outgoing
from rocketstore.client.aio.producer import ProducerOptions
from rocketstore.client.blocking import Admin, HandOver, Producer
from rocketstore.client.loop_thread import ClientThread
from rocketstore.message.message import Message
from rocketstore.remoting.codes import RequestCode
from tests.support.scripted_server import MessageStore, ScriptedServer, Topics, refuses
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from _typeshed import TraceFunction

PROGRAM_S = 60.0


class World:
    """A broker on a loop of its own."""

    def __init__(self, thread: ClientThread) -> None:
        self.thread = thread
        self.server = ScriptedServer()
        self.store = MessageStore()
        thread.run(self.server.start())
        self.address = self.server.address
        Topics({"a": {0: self.address}}, {"T": {"a": 4}}).serve(self.server)
        self.store.serve(self.server)
        for code in (RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT, RequestCode.END_TRANSACTION):
            self.server.scripts[code] = lambda frame: frame.answer()

    def hold(self) -> None:
        """Answer nothing until ``release``."""
        self.thread.run(self._hold())

    async def _hold(self) -> None:
        self.store.held = asyncio.Event()

    def release(self) -> None:
        """Answer what was held."""
        held = self.store.held
        assert held is not None
        self.store.held = None
        self.thread.post(held.set)

    def sends(self) -> int:
        """How many requests with messages have arrived."""
        return len(self.server.of(RequestCode.SEND_MESSAGE_V2)) + len(self.server.of(RequestCode.SEND_BATCH_MESSAGE))


@pytest.fixture
def world() -> Iterator[World]:
    thread = ClientThread()
    here = World(thread)
    try:
        yield here
    finally:
        thread.run(here.server.stop())
        thread.stop()


def message(body: bytes = b"x") -> Message:
    return Message("T", body)


def test_all_kinds_of_messages_are_sent(world: World) -> None:
    with Producer(world.address, timeout_s=60) as producer:
        assert producer.send(message(b"1"), queue=3).offset == 0
        assert len(producer.send_many([message(b"2"), message(b"3")])) == 2
        future = producer.submit(message(b"4"), key="k")
        assert future.result(60).topic == "T"
        producer.send_oneway(message(b"5"))
        wait_until(lambda: sorted(world.store.bodies()) == [b"1", b"2", b"3", b"4", b"5"], "all have arrived")
        with pytest.raises(errors.MessageRefusedError):
            producer.submit(Message("", b""))
        with pytest.raises(ConfigError, match="give either key or queue"):
            producer.send(message(), key="k", queue=1)


def test_threads_share_a_producer_and_each_keeps_its_order(world: World) -> None:
    def many(producer: Producer, name: int) -> list[SendResult]:
        sent = [producer.submit(message(b"%d %d" % (name, one)), key=str(name)) for one in range(300)]
        return [one.result(60) for one in sent]

    with Producer(world.address, timeout_s=60) as producer, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: many(producer, name), range(8)))
    for results in found:
        offsets = [one.offset for one in results]
        assert offsets == sorted(offsets)
    for name in range(8):
        mine = [body for body in world.store.bodies() if body.startswith(b"%d " % name)]
        assert mine == [b"%d %d" % (name, one) for one in range(300)]


def test_errors_arrive_with_their_outcome(world: World) -> None:
    with Producer(world.address, timeout_s=60) as producer:
        world.store.answers.append(refuses(AnswerCode.SYSTEM_ERROR, "late"))
        with pytest.raises(errors.BrokerFailedError, match="late") as caught:
            producer.send(message())
        assert caught.value.outcome == "unknown"
        world.store.answers.append(refuses(AnswerCode.SYSTEM_ERROR, "late"))
        future = producer.submit(message())
        assert isinstance(future.exception(60), errors.BrokerFailedError)
        with pytest.raises(errors.NotFoundError):
            producer.send(Message("nowhere", b""))


@pytest.mark.parametrize("size", [1, 100_000])
def test_who_submits_too_much_waits_and_then_is_told(world: World, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ProducerOptions(limits=PipelineLimits(pending_messages_max=10))
    with Producer(world.address, timeout_s=60, options=options) as producer:
        world.hold()
        sent = [producer.submit(message(b"x" * size)) for _ in range(10)]
        wait_until(lambda: not producer._producer.has_room, "they are counted")
        monkeypatch.setattr(producer._producer._cluster, "timeout_s", 0.05)
        with pytest.raises(errors.SendQueueFullError):
            producer.submit(message(b"x" * size))
        assert producer.pending_messages == 10
        world.release()
        wait(sent)


def test_messages_on_their_way_to_the_thread_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who submits faster than the thread takes them waits for it."""
    monkeypatch.setattr(blocking, "HANDED_OVER_MAX", 5)
    with Producer(world.address, timeout_s=60) as producer:
        blocked, go = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            go.wait(30)

        producer._thread.post(block)
        blocked.wait(30)
        with ThreadPoolExecutor(1) as pool:
            submitted = pool.submit(lambda: [producer.submit(message()) for _ in range(20)])
            wait_until(lambda: len(producer._handed_over) == 5, "as many as may be are on their way")
            assert not submitted.done()
            go.set()
            wait(submitted.result(30))
        assert len(world.store.messages) == 20


def test_a_future_that_was_cancelled_in_time_is_not_sent(world: World) -> None:
    with Producer(world.address, timeout_s=60) as producer:
        producer.send(message(b"0"))
        blocked, go = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            go.wait(60)

        producer._thread.post(block)
        blocked.wait(60)
        first, second = producer.submit(message(b"1")), producer.submit(message(b"2"))
        assert first.cancel()
        go.set()
        second.result(60)
        assert world.store.bodies() == [b"0", b"2"]


class Ending(NamedTuple):
    """A thread for clients, and what another thread does with it while it ends."""

    thread: ClientThread
    then: list[Callable[[ClientThread], object]]


@pytest.fixture(params=["stopped", "closed"])
def ending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ending:
    """When its loop has stopped, or as it is closed."""
    then: list[Callable[[ClientThread], object]] = []

    class Loop(uvloop.Loop):
        def run_forever(self) -> None:
            super().run_forever()
            if request.param == "stopped":
                self._do()

        def close(self) -> None:
            self._do()
            super().close()

        def _do(self) -> None:
            while then:
                other = threading.Thread(target=then.pop(), args=(thread,))
                other.start()
                other.join(0.1)  # as far as it comes

    monkeypatch.setattr(uvloop, "new_event_loop", Loop)
    thread = ClientThread()
    return Ending(thread, then)


def test_a_callback_that_is_posted_while_the_thread_ends_is_called_or_refused(ending: Ending) -> None:
    """A message that another thread submits beside a close must get an outcome."""
    outcomes: Queue[object] = Queue()

    def post(thread: ClientThread) -> None:
        try:
            thread.post(lambda: outcomes.put("called"))
        except errors.ClientClosedError as error:
            outcomes.put(error)

    ending.then.append(post)
    ending.thread.stop()

    outcomes.get(timeout=60)
    assert outcomes.empty()


def test_a_call_while_the_thread_ends_fails_and_leaves_nothing_that_was_never_awaited(ending: Ending) -> None:
    """As of a part that asks on and on, beside the close of its client."""
    outcomes: Queue[object] = Queue()
    asked = asyncio.sleep(3600)

    def ask(thread: ClientThread) -> None:
        try:
            outcomes.put(thread.run(asked))
        except errors.ClientClosedError as error:
            outcomes.put(error)

    ending.then.append(ask)
    ending.thread.stop()

    assert isinstance(outcomes.get(timeout=60), errors.ClientClosedError)
    assert inspect.getcoroutinestate(asked) == inspect.CORO_CLOSED


def test_a_message_whose_thread_was_to_be_told_by_another_one_fails_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who tells the clients' thread finds that it has ended."""
    thread = ClientThread()
    handed_over = HandOver(thread, lambda _: None)
    post = thread.post
    futures: list[Future[SendResult]] = []

    def post_late(callback: Callable[[], object]) -> None:
        futures.append(handed_over.add(outgoing(message(), 1024)))
        thread.stop()
        post(callback)

    monkeypatch.setattr(thread, "post", post_late)
    with pytest.raises(errors.ClientClosedError):
        handed_over.add(outgoing(message(), 1024))

    assert isinstance(futures[0].exception(0), errors.ClientClosedError)
    assert len(handed_over) == 0


def test_messages_added_while_others_are_taken_are_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may add one after any instruction of the clients' thread: here after each."""
    thread = ClientThread()
    told: list[Callable[[], object]] = []
    monkeypatch.setattr(thread, "post", told.append)
    added = [outgoing(message(b"%d" % number), 1024) for number in range(200)]
    taken: list[OutgoingMessage] = []
    handed_over = HandOver(thread, taken.extend)
    left = iter(added)

    def add_one() -> None:
        if (one := next(left, None)) is not None:
            handed_over.add(one)

    def after_instructions(frame: FrameType, event: str, _: object) -> TraceFunction:
        frame.f_trace_opcodes = frame.f_code is HandOver.take.__code__
        if event == "opcode":
            add_one()
        return after_instructions

    add_one()
    tracing = sys.gettrace()
    sys.settrace(after_instructions)
    try:
        while told:
            told.pop()()
            add_one()
    finally:
        sys.settrace(tracing)
        thread.stop()

    assert taken == added
    assert len(handed_over) == 0


def test_flush_waits_for_what_was_submitted(world: World) -> None:
    with Producer(world.address, timeout_s=60) as producer:
        sent = [producer.submit(message(b"%d" % one)) for one in range(500)]
        producer.flush()
        assert all(one.done() for one in sent)
        assert producer.pending_messages == 0


def test_local_transactions_run_on_the_callers_thread(world: World) -> None:
    ran: list[int] = []

    def execute(prepared: PreparedMessage) -> TransactionState:
        ran.append(threading.get_ident())
        assert prepared.transaction_id
        return TransactionState.COMMIT

    def check(_: PreparedMessage) -> TransactionState:
        return TransactionState.UNKNOWN

    with Producer(world.address, group="P", check=check, timeout_s=60) as producer:
        assert producer.send_in_transaction(message(), execute).state is TransactionState.COMMIT
        assert ran == [threading.get_ident()]
        with producer.transaction(message()) as transaction:
            assert transaction.id == transaction.half.message_id == transaction.prepared.transaction_id
            transaction.rollback()
        assert transaction.result.state is TransactionState.ROLLBACK
        ends = [one.fields["commitOrRollback"] for one in world.server.of(RequestCode.END_TRANSACTION)]
        assert ends == ["8", "12"]


def test_an_administrator_blocks_too(world: World) -> None:
    world.server.scripts[RequestCode.UPDATE_AND_CREATE_TOPIC] = lambda frame: frame.answer()
    with Admin(world.address, timeout_s=60) as admin:
        (broker,) = admin.brokers()
        assert broker.master == world.address
        admin.put_topic(TopicInfo("U"))
        with pytest.raises(errors.NotFoundError):
            admin.delete_topic("nowhere")


# -- the thread --------------------------------------------------------------------------------------------------------


def client_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "rocketmq-clients"]


@pytest.fixture
def _no_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared loop that no other test's clients use."""
    monkeypatch.setattr(loop_thread, "SHARED", loop_thread.SharedLoop())


@pytest.mark.usefixtures("_no_other_clients")
def test_all_clients_share_a_thread_that_ends_with_the_last_one(world: World) -> None:
    before = len(client_threads())  # the broker's
    first, second = Producer(world.address), Admin(world.address)
    assert len(client_threads()) == before + 1
    first.close()
    first.close()
    assert len(client_threads()) == before + 1
    second.close()
    assert len(client_threads()) == before
    with pytest.raises(errors.ClientClosedError, match="closed"):
        first.send(message())
    with Producer(world.address, timeout_s=60) as third:
        third.send(message())


@pytest.mark.usefixtures("_no_other_clients")
def test_a_client_that_nobody_has_any_more_is_closed(world: World) -> None:
    """The thread ends with it, as with one that is closed."""
    before = len(client_threads())
    producer = Producer(world.address, timeout_s=60)
    future = producer.submit(message())
    del producer
    gc.collect()
    assert future.result(60)
    wait_until(lambda: not loop_thread.SHARED._clients, "it is closed")
    wait_until(lambda: len(client_threads()) == before, "the thread has ended")


def test_a_client_is_not_copied_or_pickled_and_stays_open(world: World) -> None:
    """The end of a copy would close the one that it was made from."""
    with Producer(world.address) as producer:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a Producer cannot be copied or pickled: make one in each process"):
                attempt(producer)
        gc.collect()
        assert producer.send(Message("T", b"x")).broker == "a"


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        ({"addresses": 5}, TypeError, "addresses are texts, .* or a list of them, not 5"),
        ({"addresses": ["127.0.0.1:1", 5]}, TypeError, "addresses are texts"),
        ({"enable_idempotence": "yes"}, ConfigError, "must be True, False or \"auto\", not 'yes'"),
        ({"group": "a b"}, ConfigError, "group 'a b': 1 to 120 of the characters"),
    ],
)
def test_arguments_of_a_producer_are_checked(
    arguments: dict[str, object], error: type[Exception], problem: str
) -> None:
    """At once, with what to write."""
    with pytest.raises(error, match=problem):
        Producer(**{"addresses": "127.0.0.1:1"} | arguments)  # type: ignore[arg-type]


def test_a_callback_that_waits_for_its_client_is_an_error_and_no_deadlock(world: World) -> None:
    with Producer(world.address, timeout_s=60) as producer:
        found: list[BaseException] = []

        def callback(_: Future[SendResult]) -> None:
            try:
                producer.send(message())
            except RuntimeError as error:
                found.append(error)

        producer.submit(message()).add_done_callback(callback)
        wait_until(lambda: bool(found), "it was called")
        assert "must not wait for it" in str(found[0])


def test_closing_from_two_threads_at_once(world: World) -> None:
    producer = Producer(world.address, timeout_s=60)
    sent = [producer.submit(message()) for _ in range(100)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: producer.close(), range(4)))
    assert all(one.result(0) for one in sent)


# -- signals -----------------------------------------------------------------------------------------------------------


@contextmanager
def on_signal(handler: object) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)  # type: ignore[arg-type]  # a handler
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def signal_once_waiting(world: World) -> threading.Thread:
    """Send SIGUSR1 to the main thread once its message has arrived."""

    def send() -> None:
        wait_until(lambda: world.sends() > 0, "the message has arrived")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_an_interrupted_wait_leaves_the_client_usable(world: World) -> None:
    """Ctrl-C: the message may be stored, and nobody waits for it any more."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with Producer(world.address, timeout_s=60) as producer, on_signal(interrupt):
        world.hold()
        thread = signal_once_waiting(world)
        with pytest.raises(KeyboardInterrupt):
            producer.send(message(b"1"))
        thread.join()
        world.release()
        producer.send(message(b"2"))
        assert b"2" in world.store.bodies()


def test_a_signal_handler_may_close_the_client_that_its_thread_waits_for(world: World) -> None:
    """It ends within the time that closing may take, and so does the wait."""
    producer = Producer(world.address, timeout_s=3600, options=ProducerOptions(close_timeout_s=0.2))

    def close(_number: int, _frame: FrameType | None) -> None:
        producer.close()

    with on_signal(close):
        world.hold()
        thread = signal_once_waiting(world)
        with pytest.raises(errors.ClientError) as caught:
            producer.send(message(b"1"))
        thread.join()
    assert caught.value.outcome == "unknown"


# -- programs ----------------------------------------------------------------------------------------------------------

_BEGIN = """
    import os, sys
    from rocketstore.client.aio.errors import ClientError
    from rocketstore.client.aio.producer import ProducerOptions
    from rocketstore.client.blocking import Producer
    from rocketstore.message.message import Message
    address = sys.argv[1]
"""


def program(address: str, text: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    source = textwrap.dedent(_BEGIN) + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", source, address], capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )


def test_messages_submitted_just_before_a_program_ends_are_sent(world: World) -> None:
    """Nobody closed the producer, and nobody waited for the futures."""
    ended = program(
        world.address,
        """
        producer = Producer(address)
        for number in range(200):
            producer.submit(Message("T", b"%d" % number))
        """,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(world.store.messages) == 200


def test_a_program_ends_in_time_with_messages_that_cannot_be_sent_and_says_how_many(world: World) -> None:
    world.hold()
    ended = program(
        world.address,
        """
        import logging
        logging.basicConfig()
        producer = Producer(address, timeout_s=300, options=ProducerOptions(close_timeout_s=0.5))
        for number in range(3):
            producer.submit(Message("T", b"%d" % number), key="k")
            producer.submit(Message("T", b"x"), queue=number)
        """,
    )
    assert ended.returncode == 0
    assert "the producer is closed before 6 messages have an outcome" in ended.stderr
    world.release()


def test_a_producer_from_before_a_fork_says_so_and_a_new_one_works(world: World) -> None:
    """gunicorn, Celery and multiprocessing fork; the parent's goes on."""
    ended = program(
        world.address,
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        producer = Producer(address, timeout_s=30)
        producer.send(Message("T", b"before"))
        child = os.fork()
        if not child:
            for call in (
                lambda: producer.send(Message("T", b"x")),
                lambda: producer.submit(Message("T", b"x")),
                producer.flush,
                producer.start,
            ):
                try:
                    call()
                except ClientError as error:
                    assert "made in another process: make one after the fork" in str(error), error
                else:
                    os._exit(1)
            producer.close()
            with Producer(address, timeout_s=30) as mine:
                mine.send(Message("T", b"child"))
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        producer.send(Message("T", b"after"))
        producer.close()
        """,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert world.store.bodies() == [b"before", b"child", b"after"]


def test_what_is_pending_at_a_fork_has_failed_in_the_child(world: World) -> None:
    """Sent or still handed over, numbered by the application or not: nobody would ever settle these futures there."""
    world.hold()
    ended = program(
        world.address,
        """
        import threading, warnings
        from concurrent.futures import wait
        warnings.simplefilter("ignore", DeprecationWarning)
        producer = Producer(address, timeout_s=300)
        numbered = producer.numbered("n")
        may_take, has_taken = threading.Event(), threading.Event()
        producer._thread.post(may_take.wait)
        sent = [producer.submit(Message("T", b"sent")), numbered.submit(Message("T", b"sent"), 0, queue=1)]
        producer._thread.post(has_taken.set)
        producer._thread.post(threading.Event().wait)  # before it hears that this broker does not number
        may_take.set()
        has_taken.wait()
        handed_over = [producer.submit(Message("T", b"x")), numbered.submit(Message("T", b"x"), 1, queue=1)]
        child = os.fork()
        if not child:
            futures = [*sent, *handed_over]
            assert wait(futures, 20).not_done == set()
            for future in futures:
                try:
                    future.result(60)
                except ClientError as error:
                    assert "made in another process: make one after the fork" in str(error), error
                    assert error.outcome == "unknown"
                else:
                    os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert not any(future.done() for future in [*sent, *handed_over])
        os._exit(status and 1)
        """,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    world.release()


def test_ctrl_c_ends_a_program_that_waits(world: World) -> None:
    world.hold()
    source = textwrap.dedent(_BEGIN) + textwrap.dedent(
        """
        with Producer(address, timeout_s=300, options=ProducerOptions(close_timeout_s=0.5)) as producer:
            producer.send(Message("T", b"x"))
        """
    )
    process = subprocess.Popen([sys.executable, "-c", source, world.address], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: world.sends() > 0, "it waits", PROGRAM_S)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PROGRAM_S)
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in told
    assert process.returncode != 0
    world.release()


def test_clients_over_remoting_load_neither_grpc_nor_numpy() -> None:
    """Which take longer to load than all of the client, also with TLS and an account."""
    program = (
        "import sys; import rocketstore.client.blocking, rocketstore.client.blocking_consumer, "
        "dledger.client.shared; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PROGRAM_S
    )

    assert "rocketstore.client.aio.consumer" in done.stdout.split()
    assert not {"grpc", "google.protobuf", "numpy"} & set(done.stdout.split())
