"""Begins and ends transactions on a master: each half is committed or rolled back once, or not yet.

**Exactly as the producer said.** What has ended is what the log says: the commit, or the op message. A commit is
written before its op, in one batch. A master that takes over reads the log first, and finishes what lacks only its op.
From then on it knows every open transaction, marks one before its end goes to the log, and forgets it when the log
shows its op; so of two requests to end it, or two answers to a check, only one is written. See docs/messages.md.

For the protocols' adapters: ``HalfMessages`` makes half messages of messages that begin a transaction, before the store
sees them; ``ProducerChecks`` asks the producers of open transactions what became of them; ``Resumptions`` begins
transactions again that were given up because no producer answered for them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.errors import CorruptLogError, InvalidRequestError, ShutdownError
from dledger.monitoring import Conditions
from dledger.rpc.loops import LoopBridge, LoopCallback
from dledger.runtime.threads import Supervisor
from dledger.values import host_of
from rocketstore.broker.clients import Client, ClientTables, HalfCheck
from rocketstore.broker.mastership import Mastership, host_text
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.transactions.checks import AskedDone, Asker, Askers, Check
from rocketstore.broker.transactions.halves import check_record, make_half, resumed
from rocketstore.broker.transactions.run import NOT_READY, EndDone, NotReadyError, Run
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.checks import check_body, check_client_topic, check_keys, check_message
from rocketstore.message.ids import is_of_client, is_of_process, offset_message_id, parse_offset_message_id, process_of
from rocketstore.message.message import (
    LOOPBACK,
    PROPERTY_CHECK_TIMES,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION,
    PROPERTY_UNIQUE_KEY,
    HostAddress,
    Message,
)
from rocketstore.message.properties import decode_properties
from rocketstore.message.record import decode_record
from rocketstore.message.timed import asks_for_delay
from rocketstore.settings import LiveConfig
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC, PutMessageStatus, PutResult, RecordHead


class TransactionService:
    """``start`` on a master, ``stop`` before it is none any more; both may be called any number of times."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        state: BrokerState,
        clock: Clock | None = None,
        *,
        supervisor: Supervisor | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._state = state
        self._clock = clock or Clock()
        self._supervisor = supervisor or Supervisor(lambda _error: None)
        self._conditions = conditions or Conditions("transactions", self._clock)
        self._lifecycle = threading.Lock()  # serializes start and stop
        self._run: Run | None = None
        self._askers = Askers()
        self._ready_listeners: tuple[Callable[[], None], ...] = ()
        self.host = LOOPBACK
        """This broker's address, in op messages."""
        store.add_arrival_listener(self._on_arrival)

    def start(self) -> None:
        """Read which transactions are open, then end and check them. Does nothing if running."""
        with self._lifecycle:
            if self._run is None:
                self._run = run = Run(
                    self._config,
                    self._store,
                    self._state,
                    self._clock,
                    lambda: self.host,
                    self._askers,
                    self._tell_ready,
                )
                run.start(self._supervisor)

    def stop(self) -> None:
        """No end reaches the log any more. Idempotent."""
        with self._lifecycle:
            run, self._run = self._run, None
            if run is not None:
                run.stop()

    @property
    def fatal(self) -> BaseException | None:
        """The error that ended the thread: the broker must stop."""
        return self._supervisor.fatal

    @property
    def is_running(self) -> bool:
        """Whether transactions may begin here; their ends wait until it is ready."""
        return self._run is not None

    @property
    def is_ready(self) -> bool:
        """Whether it knows which transactions are open."""
        run = self._run
        return run is not None and run.is_ready

    @property
    def open_count(self) -> int:
        """How many transactions are open, as far as known."""
        run = self._run
        return 0 if run is None else len(run.halves)

    @property
    def dropped_count(self) -> int:
        """How many messages were to be committed after their topic was deleted, since this broker is the master."""
        run = self._run
        return 0 if run is None else run.dropped

    @property
    def given_up_count(self) -> int:
        """How many transactions were given up, since this broker is the master."""
        run = self._run
        return 0 if run is None else run.given_up

    def runtime_info(self) -> dict[str, str]:
        """For operators; empty on a slave."""
        run = self._run
        if run is None:
            return {}
        return {"transactionsOpen": str(len(run.halves)), "transactionsReady": str(run.is_ready).lower()}

    def refusal(self, group: str, coming: int = 0, coming_of_group: int = 0) -> str:
        """Why a producer group has too many open transactions to begin another; empty if it may. On a master only.

        ``coming``: half messages that the log does not show yet, of all groups and of this one.
        """
        run = self._run
        problem = "" if run is None else run.refusal(group, coming, coming_of_group)
        if problem:
            self._conditions.limit(problem)
        return problem

    def end(self, queue_offset: int, offset: int, group: str, *, commit: bool, done: EndDone) -> None:
        """Commit or roll back the transaction of ``group`` whose half message is there; may wait for a disk.

        Raises ``EndRefusedError`` and ``NotReadyError``: then nothing was done.
        """
        run = self._run
        if run is None:
            raise NotReadyError(NOT_READY)
        run.end(queue_offset, offset, group, commit=commit, done=done)

    def ask_with(self, asker: Asker) -> None:
        """Ask the producers of open transactions with this, too."""
        self._askers.add(asker)

    def add_ready_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener``, on this service's thread, whenever it has become ready."""
        self._ready_listeners = (*self._ready_listeners, listener)

    def _tell_ready(self) -> None:
        for listener in self._ready_listeners:
            listener()

    def is_open(self, check: Check) -> bool:
        """Whether a check is still to be made."""
        run = self._run
        return run is not None and run.is_open(check.queue_offset)

    def step(self) -> int | None:
        """Do what is due; returns when (monotonic ms) the next step is. Tests call it instead of the thread."""
        run = self._run
        return None if run is None else run.step()

    def _on_arrival(self, heads: Sequence[RecordHead]) -> None:
        run = self._run
        if run is not None:
            run.on_arrival(heads)


_CHECKS: Final = f"\x02{PROPERTY_CHECK_TIMES}\x011000".encode()
_READY_S_MAX: Final = 2.0
"""How long an end waits for a new master to read which transactions are open."""


class Begun(NamedTuple):
    """A half message on its way to the store: its place in the request, its group, and the queue it is for."""

    place: int
    group: str
    queue_id: int


class HalfMessages:
    """On the loop."""

    def __init__(self, live: LiveConfig, transactions: TransactionService) -> None:
        self._live = live
        self._transactions = transactions
        self._on_their_way: Counter[str] = Counter()  # by group

    def begin(self, message: Message, place: int = 0, *, is_alone: bool = True) -> Begun | PutResult:
        """Turn a message whose queue is chosen into a half message, which counts as open until the store has answered;
        or the reason for a refusal. ``is_alone``: it is not of a batch.
        """
        properties = message.properties or decode_properties(message.property_string)
        if properties.get(PROPERTY_TRANSACTION, "").lower() != "true":
            return _illegal(f"a message that begins a transaction needs the property {PROPERTY_TRANSACTION}=true")
        group = properties.get(PROPERTY_PRODUCER_GROUP, "")
        if problem := self._problem(message):
            return _illegal(problem)
        refusal = self._refusal(group, is_plain=is_alone and not asks_for_delay(properties))
        if refusal is not None:
            return refusal
        begun = Begun(place, group, message.queue_id)
        make_half(message)
        self._on_their_way[group] += 1
        return begun

    def _refusal(self, group: str, *, is_plain: bool) -> PutResult | None:
        """Why ``group`` may begin no transaction, or not now. ``is_plain``: neither delayed nor of a batch."""
        if self._live.now.reject_transaction_message:
            reason = "this broker takes no transactional messages (rejectTransactionMessage)"
            return PutResult(PutMessageStatus.NO_PERMISSION, outcome="not_applied", reason=reason)
        if not group:
            return _illegal("a transaction needs a producer group")
        if not is_plain:
            return _illegal("a transaction is of one message, without delay")
        if not self._transactions.is_running:
            reason = "this broker is not quite the master yet"
            return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reason)
        waiting = self._on_their_way
        problem = self._transactions.refusal(group, waiting.total(), waiting[group])
        if problem:
            return PutResult(PutMessageStatus.FLOW_CONTROL, outcome="not_applied", reason=problem)
        return None

    def _problem(self, message: Message) -> str:
        """Why a half message does not do. Its later forms must fit into a record, too: its commit, whose topic may
        be longer, and what producers are asked about, with the number of checks.
        """
        probe = replace(message, queue_id=max(message.queue_id, 0))
        make_half(probe)
        probe.property_string += _CHECKS
        probe.topic = max(message.topic, probe.topic, key=len)
        config = self._live.now.store
        refusal = check_message(probe, config)
        problem = (
            check_client_topic(message.topic)
            or check_body(message, config)
            or check_keys(message, config.message_keys_max)
        )
        return problem or ("" if refusal is None else refusal.reason)

    def all_stored(self, begun: Sequence[Begun], results: Sequence[PutResult]) -> Sequence[PutResult]:
        """The store has answered a request: its results, which name the queues that the messages are for."""
        found = list(results)
        for one in begun:
            self._on_their_way[one.group] -= 1
            if not self._on_their_way[one.group]:
                del self._on_their_way[one.group]
            stored = found[one.place].stored
            if stored is not None:
                found[one.place] = found[one.place]._replace(stored=stored._replace(queue_id=one.queue_id))
        return found


def _illegal(reason: str) -> PutResult:
    return PutResult(PutMessageStatus.MESSAGE_ILLEGAL, outcome="not_applied", reason=reason)


class TransactionEnds:
    """Requests to end a transaction, whichever protocol they came by.

    On the loop.
    """

    def __init__(
        self,
        transactions: TransactionService,
        readers: ReadThreads,
        bridge: LoopBridge,
        mastership: Mastership,
    ) -> None:
        self._transactions = transactions
        self._readers = readers
        self._bridge = bridge
        self._mastership = mastership
        self._ready = asyncio.Event()
        transactions.add_ready_listener(lambda: bridge.post(self._ready.set))

    async def end(self, queue_offset: int, offset: int, group: str, *, commit: bool) -> None:
        """Commit or roll back the transaction of ``group`` whose half message is there; returns when the log has it.

        Raises ``Refusal``, of which ``EndRefusedError`` and ``NotReadyError`` mean that nothing was done.
        """
        self._mastership.require()
        await self._wait_ready()
        ended: LoopCallback[PutResult] = LoopCallback(self._bridge)
        request = partial(self._transactions.end, queue_offset, offset, group, commit=commit, done=ended.done)
        await self._readers.run(request)
        result = await ended.future
        if not result.ok:
            raise Refusal.of(result, self._mastership.leader_address)

    async def _wait_ready(self) -> None:
        """A new master soon knows which transactions are open."""
        if not self._transactions.is_ready:
            self._ready.clear()
            if not self._transactions.is_ready:  # else it was told just before
                with suppress(TimeoutError):
                    async with asyncio.timeout(_READY_S_MAX):
                        await self._ready.wait()


TRIES: Final = 8
"""How many producers of a group to try, if the first does not take the question."""
_log = logging.getLogger("rocketstore")


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
                _log.error("transactions: half message %d cannot be read: %s", check.queue_offset, error)
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


_RESUMED_MAX: Final = 10_000
"""How many are remembered, so that none is begun twice."""


class Resumptions:
    """Begins transactions again that were given up, each once for each master. On the loop."""

    def __init__(
        self,
        store: MessageStore,
        state: BrokerState,
        bridge: LoopBridge,
        readers: ReadThreads,
        mastership: Mastership,
        store_host: HostAddress,
    ) -> None:
        self._store = store
        self._state = state
        self._bridge = bridge
        self._readers = readers
        self._mastership = mastership
        self._store_host = store_host
        self._resumed: OrderedDict[int, None] = OrderedDict()

    async def resume(self, message_id: str) -> None:
        """Begin the transaction of a message of ``CHECKED_TOO_OFTEN_TOPIC`` again. Raises ``Refusal``."""
        self._mastership.require()
        offset = parse_offset_message_id(message_id)[1]
        self._check_new(offset)
        record = await self._readers.run(self._given_up, offset)
        self._check_new(offset)
        self._resumed[offset] = None  # whatever becomes of it: two would be two transactions
        if len(self._resumed) > _RESUMED_MAX:
            self._resumed.popitem(last=False)
        stored: LoopCallback[Sequence[PutResult]] = LoopCallback(self._bridge)
        self._store.submit([resumed(record, self._store_host)], stored.done)
        (result,) = await stored.future
        if result.outcome == "not_applied":
            self._resumed.pop(offset, None)
        if not result.ok:
            why = f"Put message back to RMQ_SYS_TRANS_HALF_TOPIC failed. {result.reason}"
            raise Refusal(RefusalKind.FAILED, why, outcome=result.outcome, leader=result.leader)

    def _check_new(self, offset: int) -> None:
        if offset in self._resumed:
            raise Refusal(RefusalKind.INVALID, f"the message at {offset} is being checked again already")

    def _given_up(self, offset: int) -> bytes:
        """On a read thread. Raises ``Refusal``: there is no message that was given up."""
        store = self._store
        record = store.read_record(offset) if offset >= 0 else None
        if record is not None:
            message = decode_record(record)
            known = store.position_of(CHECKED_TOO_OFTEN_TOPIC, 0, message.queue_offset)
            if message.topic == CHECKED_TOO_OFTEN_TOPIC and known == offset:
                self._check_topic(message)
                return record
        why = f"there is no message of {CHECKED_TOO_OFTEN_TOPIC} at {offset}: only those can be checked again"
        raise Refusal(RefusalKind.NO_MESSAGE, why)

    def _check_topic(self, given_up: Message) -> None:
        name = given_up.properties.get(PROPERTY_REAL_TOPIC, "")
        waited = QueueOffset(CHECKED_TOO_OFTEN_TOPIC, 0, given_up.queue_offset)
        if self._state.place_for(name, 0, waited) is None:
            why = f"topic {name} was deleted since: its transactions cannot be checked again"
            raise Refusal(RefusalKind.INVALID, why)
