"""The one road of clients' messages to the store: role, room, topic, queue, size, keys, half messages are checked here.

Messages that the broker itself writes (due, committed, its state) go to ``MessageStore.submit`` on the threads that
made them, and pass only what it looks at for all of them.

Requests that arrive while others are being stored wait for more, but not long, and reach the store together: one that
is stored alone costs ten times as much as one of fifty, on every member.

Order. Requests for a topic, and those of a numbered producer, reach the store in the order in which they came, also if
they wait until a topic has been created.

Each message of a request is refused by itself, unless the request is stored entirely or not at all: then all are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from dledger.access.quota import Quota
from dledger.errors import DLedgerError
from dledger.monitoring import Conditions
from dledger.rpc.loops import LoopBridge
from dledger.types import ProducerBatch
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.timed.service import TimedPlace, TimedSends
from rocketstore.broker.topics import Topics, sendable_system_topic
from rocketstore.broker.transactions.service import Begun, HalfMessages
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.replicated import status_of
from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.message.checks import check_body, check_client_topic, check_keys, check_message
from rocketstore.message.message import PROPERTY_PRIORITY, SYS_FLAG_TRANSACTION, Message
from rocketstore.message.properties import ANY_TYPE, priority_of, take_out, type_problem
from rocketstore.message.timed import TIMED_MARK
from rocketstore.settings import LiveConfig
from rocketstore.state.changes import TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import MessageType, PutMessageStatus, PutResult

CREATE_S_MAX: Final = 1.2
"""How long a message may wait for its topic: RocketMQ's clients hang up after 3 s, and lose everything under way."""
CREATED_MAX: Final = 64
"""Topics that one request may need: all its messages are looked at again after each one that is created."""
FLIGHTS_MAX: Final = 2
"""While as many groups of requests are being stored, the next ones gather,"""
GATHER_S_MAX: Final = 0.005
"""at most for this long,"""
GATHER_BYTES_MAX: Final = 64 * KIB
"""and only up to this size: more would hardly make each cheaper."""
NOTHING_DENIED: Final[Mapping[str, PutResult]] = {}
_ILLEGAL: Final = frozenset({PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED})
_PLACELESS: Final = frozenset(
    {PutMessageStatus.QUEUE_NOT_FOUND, PutMessageStatus.NOT_WRITABLE, PutMessageStatus.WRONG_MESSAGE_TYPE}
)

SendDone = Callable[[Sequence[PutResult]], None]
"""Called once, on the loop, with one result per message."""


class MessageSource(NamedTuple):
    """The sender: its quota, and the topics that access control denies it, with the refusal of each message."""

    quota: Quota
    denied: Mapping[str, PutResult] = NOTHING_DENIED


class SendBatch(NamedTuple):
    """A request to store messages; ``size`` is what it counts for in limits, in bytes.

    ``wait``: whether the answer waits for what the broker's settings promise. ``producer`` numbers the messages: then
    all of them are stored or none, as with ``together``. ``topic`` is created if the messages' is missing, otherwise
    one of the broker's default, of at most ``queues_max`` queues (0: the default). ``again``: they were taken before,
    and a consumer sends them back: only whether there is a place for them is looked at.
    """

    messages: list[Message]
    size: int
    wait: bool = True
    producer: ProducerBatch | None = None
    together: bool = False
    topic: TopicConfig | None = None
    queues_max: int = 0
    again: bool = False


class _Send:
    """A request on its way. ``allowed`` are the messages that are not in ``refused``, by place."""

    __slots__ = ("allowed", "batch", "begun", "caller", "done", "occupies", "refused", "timed", "tried")

    def __init__(self, caller: MessageSource | None, batch: SendBatch, done: SendDone) -> None:
        self.caller = caller
        self.batch = batch
        self.done = done
        self.allowed: Sequence[Message] = batch.messages
        self.refused: dict[int, PutResult] | None = None
        self.begun: list[Begun] | None = None
        self.timed: list[TimedPlace] | None = None
        self.occupies = False
        """Whether it takes up room."""
        self.tried: tuple[str, ...] = ()
        """Topics that were created for it, or could not be."""

    @property
    def is_whole(self) -> bool:
        """Whether it is stored entirely or not at all."""
        return self.batch.together or self.batch.producer is not None

    def refuse(self, refused: dict[int, PutResult]) -> None:
        """Leave out these messages; all if one of a whole request is refused."""
        if self.is_whole:
            refused = _refused_wholly(refused, len(self.batch.messages))
        self.refused = refused if self.refused is None else self.refused | refused
        self.allowed = [one for at, one in enumerate(self.batch.messages) if at not in self.refused]


class Sending:
    """Lives on the event loop."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        live: LiveConfig,
        store: MessageStore,
        topics: Topics,
        halves: HalfMessages,
        timed: TimedSends,
        mastership: Mastership,
        bridge: LoopBridge,
        conditions: Conditions,
    ) -> None:
        self._live = live
        self._store = store
        self._topics = topics
        self._halves = halves
        self._timed = timed
        self._mastership = mastership
        self._bridge = bridge
        self._conditions = conditions
        self._creations: dict[str, list[_Send]] = {}  # by topic, those that wait for it, in their order
        self._behind: dict[str, str] = {}  # numbered producers of which requests wait, and for which topic
        self._gathered = _Gathered(self._launch)
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._last_topic: tuple[TopicConfig | None, BrokerConfig, int] = None, live.now, 0
        self.messages_pending = 0
        """How many messages have no answer yet."""
        self.bytes_pending = 0

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the results of what was stored together have been given."""
        self._listeners = (*self._listeners, listener)

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be accepted for now."""
        config = self._live.now
        return (
            self.messages_pending >= config.send_pending_messages_max
            or self.bytes_pending >= config.send_pending_bytes_max
        )

    def submit(self, caller: MessageSource | None, batch: SendBatch, done: SendDone) -> None:
        """Store messages, or refuse them; ``caller`` None: it is the broker itself."""
        if not batch.messages:
            done([])
            return
        if batch.again:
            send = _Send(caller, batch, done)
            if refused := self._unplaced(batch.messages):
                send.refuse(refused)
            self._accept(send)
            return
        problem = self.problem(caller)
        if problem is not None:
            done([problem] * len(batch.messages))
            return
        if caller is not None:
            for message in batch.messages:
                take_out(message)
        send = _Send(caller, batch, done)
        if batch.producer is not None and (topic := self._behind.get(batch.producer.producer)):
            self._creations[topic].append(send)
            self._occupy(send)
        else:
            self._route(send)

    async def send(self, caller: MessageSource | None, batch: SendBatch) -> Sequence[PutResult]:
        """The same for who waits for the results."""
        stored: asyncio.Future[Sequence[PutResult]] = asyncio.get_running_loop().create_future()

        def done(results: Sequence[PutResult]) -> None:
            if not stored.done():  # otherwise nobody is waiting any more
                stored.set_result(results)

        self.submit(caller, batch, done)
        return await stored

    # -- what is looked at ---------------------------------------------------------------------------------------------

    def problem(self, caller: MessageSource | None) -> PutResult | None:
        """Why nothing of a request is taken now, whatever is in it."""
        if not self._mastership.is_master:
            return self._mastership.refusal()
        if caller is None:
            return None
        if caller.quota.is_full:
            problem = _refusal(PutMessageStatus.FLOW_CONTROL, str(caller.quota.full_error()))
        elif self.is_full:
            why = f"broker busy: {self.messages_pending} messages are waiting to be stored (send_pending_messages_max)"
            problem = _refusal(PutMessageStatus.FLOW_CONTROL, why)
        else:
            return None
        self._conditions.limit(problem.reason)
        return problem

    def _route(self, send: _Send) -> None:
        """Wait for a topic that is missing, or go on."""
        messages, find, being_made = send.batch.messages, self._topics.find, self._creations
        if len(messages) == 1 and not being_made and (send.caller is None or not send.caller.denied):
            message = messages[0]
            topic = find(message.topic)
            queues = 0 if topic is None else self._writable_queues(message.topic, topic)
            if self._is_usual(message, queues, self._live.now.store) and _expected_type(topic) is None:
                self._accept(send)
                return
        topics = {name: find(name) for name in {one.topic for one in messages}}
        if None in topics.values() or (being_made and not being_made.keys().isdisjoint(topics)):
            for name, topic in topics.items():
                if (topic is None or name in being_made) and self._waits(send, name):
                    return
        refused = self._refusals(send, topics)
        producer = send.batch.producer
        if producer is not None and any(one.status in _PLACELESS for one in refused.values()):
            self._occupy(send)
            post, go_on = self._bridge.post, partial(self._go_on, send, producer, refused)
            self._store.submit_producer(producer.producer, lambda following: post(partial(go_on, following)))
            return
        if refused:
            send.refuse(refused)
        self._accept(send)

    def _go_on(
        self, send: _Send, producer: ProducerBatch, refused: dict[int, PutResult], following: int | DLedgerError
    ) -> None:
        """Messages before number ``following`` are stored: that their queues are gone since is no reason to refuse."""
        if isinstance(following, DLedgerError):  # whatever it is, a question changes nothing
            problem = _refusal(status_of(following), str(following))._replace(leader=self._mastership.leader_address)
            self._answer(send, [problem] * len(send.batch.messages))
            return
        stored = following - producer.sequence
        refused = {at: why for at, why in refused.items() if at >= stored or why.status not in _PLACELESS}
        if refused:
            send.refuse(refused)
        self._accept(send)

    def _refusals(self, send: _Send, topics: Mapping[str, TopicConfig | None]) -> dict[int, PutResult]:
        """The refused messages by place; sets the queues of the others, and makes half messages of what begins a
        transaction: from then on they are of another topic, so what is denied must not get that far.
        """
        refused: dict[int, PutResult] = {}
        batch, denied = send.batch, NOTHING_DENIED if send.caller is None else send.caller.denied
        name, queues, chosen, expected = "", 0, -1, None
        config = self._live.now.store
        for at, message in enumerate(batch.messages):
            if message.topic != name:
                name = message.topic
                queues = self._writable_queues(name, topics[name])
                expected = _expected_type(topics[name])
            if denied and name in denied:
                refused[at] = denied[name]
                continue
            if expected is not None:
                wrong = _look_at_type(expected, message, queues, batch.messages[0] if batch.together else message)
                if wrong is not None:
                    refused[at] = wrong
                    continue
            if self._is_usual(message, queues, config):
                continue  # everything below costs ten times as much
            problem = None
            if not 0 <= message.queue_id < queues or message.sys_flag & SYS_FLAG_TRANSACTION:
                if chosen >= 0 and message.queue_id < 0:
                    message.queue_id = chosen
                problem = self._place(message)
                if batch.together:
                    chosen = message.queue_id  # a batch of RocketMQ's is for one queue
                if problem is None and message.sys_flag & SYS_FLAG_TRANSACTION:
                    problem = self._begin(send, message, at)
            problem = problem or _illegal(message, config)
            problem = problem or self._wait_for_time(send, message, at)
            if problem is not None:
                refused[at] = problem
        return refused

    @staticmethod
    def _is_usual(message: Message, queues: int, config: MessageStoreConfig) -> bool:
        """Whether it is for a queue of a topic with so many, and there is nothing in it to look at."""
        text = message.property_string
        return (
            0 <= message.queue_id < queues
            and len(text) < 2 * config.message_keys_max
            and len(message.body) <= config.max_message_size
            and not message.sys_flag & SYS_FLAG_TRANSACTION
            and not message.properties
            and TIMED_MARK not in text
        )

    def _writable_queues(self, name: str, topic: TopicConfig | None) -> int:
        """Remembers the last topic: most messages are for the same one, which is another object after a change."""
        config, last = self._live.now, self._last_topic
        if topic is not None and last[0] is topic and last[1] is config:
            return last[2]
        usable = topic is not None and not check_client_topic(name) and not self._topics.write_problem(topic, -1)
        queues = topic.write_queues if topic is not None and usable else 0
        self._last_topic = topic, config, queues
        return queues

    def _place(self, message: Message) -> PutResult | None:
        """Choose the queue if the producer did not; returns the reason for a refusal, or None."""
        topics = self._topics
        topic = topics.find(message.topic)
        if topic is None or check_client_topic(message.topic):
            return topics.missing(message.topic)
        problem = topics.write_problem(topic, message.queue_id)
        if problem:
            of_topic = topics.write_problem(topic, -1)
            status = PutMessageStatus.NOT_WRITABLE if of_topic else PutMessageStatus.QUEUE_NOT_FOUND
            return _refusal(status, of_topic or problem)
        if message.queue_id < 0:
            message.queue_id = topics.next_queue(topic)
        return None

    def _unplaced(self, messages: Sequence[Message]) -> dict[int, PutResult]:
        """Those of messages to be stored again that have no place here, with the reason."""
        if not self._mastership.is_master:
            return dict.fromkeys(range(len(messages)), self._mastership.refusal())
        found = {at: self._place(message) for at, message in enumerate(messages)}
        return {at: problem for at, problem in found.items() if problem is not None}

    def _begin(self, send: _Send, message: Message, place: int) -> PutResult | None:
        """Make it a half message; or the reason for a refusal."""
        begun = self._halves.begin(message, place, is_alone=not send.batch.together)
        if isinstance(begun, PutResult):
            return begun
        send.begun = [*(send.begun or ()), begun]
        return None

    def _wait_for_time(self, send: _Send, message: Message, place: int) -> PutResult | None:
        """Make it wait if it asks for a time of delivery; or the reason for a refusal."""
        owner = "" if send.caller is None else send.caller.quota.owner
        found = self._timed.begin(message, place, owner, together=send.batch.together)
        if found is None or isinstance(found, PutResult):
            return found
        send.timed = [*(send.timed or ()), found]
        return None

    # -- topics that are missing ---------------------------------------------------------------------------------------

    def _waits(self, send: _Send, name: str) -> bool:
        """Whether a request waits now until this topic has been created."""
        batch, caller = send.batch, send.caller
        if name in send.tried or (caller is not None and name in caller.denied):
            return False
        waiting = self._creations.get(name)
        if waiting is None:
            topic = batch.topic if batch.topic is not None and batch.topic.name == name else None
            topic = topic or sendable_system_topic(self._live.now, name)
            if topic is None and not self._topics.may_create(name):
                return False
            waiting = self._creations[name] = []
            owner = "" if caller is None else caller.quota.owner
            task = asyncio.get_running_loop().create_task(self._create(name, topic, owner, batch.queues_max))
            task.add_done_callback(partial(self._created, name))
        waiting.append(send)
        self._occupy(send)
        if batch.producer is not None:
            self._behind[batch.producer.producer] = name
        return True

    async def _create(self, name: str, topic: TopicConfig | None, owner: str, queues_max: int) -> PutResult | None:
        """Returns why nothing is to be sent to it; None: it exists, or the topics know why it does not."""
        try:
            async with asyncio.timeout(CREATE_S_MAX):
                if topic is None:
                    await self._topics.create_default(name, owner, queues_max)
                    return None
                result = await self._topics.create(topic, owner)
        except TimeoutError:
            why = f"topic {name} has not been created within {CREATE_S_MAX:g} s: the message is not stored"
            return _refusal(PutMessageStatus.SERVICE_NOT_AVAILABLE, why)
        return None if result.ok else _refusal(PutMessageStatus.TOPIC_NOT_CREATED, result.reason)

    def _created(self, name: str, task: asyncio.Task[PutResult | None]) -> None:
        waiting = self._creations.pop(name)
        self._behind = {producer: topic for producer, topic in self._behind.items() if topic != name}
        problem = self.refusal_when_stopping() if task.cancelled() else task.result()
        for send in waiting:
            producer = send.batch.producer
            if problem is None and len(send.tried) >= CREATED_MAX:
                why = f"this request is for more than {CREATED_MAX} topics that did not exist: send it once more"
                self._answer(send, [_refusal(PutMessageStatus.FLOW_CONTROL, why)] * len(send.batch.messages))
            elif problem is not None:
                self._answer(send, [problem] * len(send.batch.messages))
            elif producer is not None and (other := self._behind.get(producer.producer)):
                self._creations[other].append(send)
            else:
                send.tried += (name,)
                self._route(send)

    def refusal_when_stopping(self) -> PutResult:
        """The result of requests that are not accepted any more."""
        refusal = _refusal(PutMessageStatus.SERVICE_NOT_AVAILABLE, "this broker is stopping")
        return refusal._replace(leader=self._mastership.leader_address)

    # -- storing -------------------------------------------------------------------------------------------------------

    def _accept(self, send: _Send) -> None:
        batch = send.batch
        if not send.allowed:
            self._answer(send, self._completed(send, ()))
            return
        self._occupy(send)
        if batch.producer is None and not batch.again:
            self._gathered.add(send)
        else:
            self._launch([send])

    def _occupy(self, send: _Send) -> None:
        """Count a request that waits or is accepted against the limits until it is answered."""
        if send.occupies:
            return
        send.occupies = True
        count, size = len(send.batch.messages), send.batch.size
        self.messages_pending += count
        self.bytes_pending += size
        if send.caller is not None:
            send.caller.quota.take(count, size)

    def _answer(self, send: _Send, results: Sequence[PutResult]) -> None:
        """Answer a request of which nothing was given to the store; the room that it took up is free again."""
        if send.occupies:
            count, size = len(send.batch.messages), send.batch.size
            self.messages_pending -= count
            self.bytes_pending -= size
            if send.caller is not None:
                send.caller.quota.give(count, size)
        send.done(results)

    def _launch(self, sends: Sequence[_Send]) -> None:
        """Store these together."""
        self._gathered.flights += 1
        self._store_allowed(sends)

    def _store_allowed(self, sends: Sequence[_Send]) -> None:
        """The store accepts or refuses its input as a whole: refused messages are then left out.

        It decides before ``submit`` returns, so a later request cannot overtake the rest of this one.
        """
        first = sends[0].batch
        messages = sends[0].allowed if len(sends) == 1 else [one for send in sends for one in send.allowed]
        if not messages:
            self._bridge.post(partial(self._landed, sends, ()))
            return

        def stored(results: Sequence[PutResult]) -> None:  # on any thread
            if len(messages) > 1 and results[0].status in _ILLEGAL and self._leave_out_illegal(sends):
                self._store_allowed(sends)
            else:
                self._bridge.post(partial(self._landed, sends, results))

        crowded = None if first.again else self._store.crowded
        if crowded is not None:
            self._bridge.post(partial(self._landed, sends, [crowded] * len(messages)))
        else:
            self._store.submit(messages, stored, wait=first.wait, producer=first.producer)

    def _leave_out_illegal(self, sends: Sequence[_Send]) -> bool:
        """Returns whether there were any."""
        found, config = False, self._live.now.store
        for send in sends:
            known = send.refused or {}
            checked = {at: check_message(one, config) for at, one in enumerate(send.batch.messages) if at not in known}
            illegal = {at: refusal for at, refusal in checked.items() if refusal is not None}
            if illegal:
                found = True
                send.refuse(illegal)
        return found

    def _landed(self, sends: Sequence[_Send], results: Sequence[PutResult]) -> None:
        """On the loop: the store has answered. Frees the room that the requests took, once for each quota."""
        self._gathered.landed()
        freed: dict[Quota, list[int]] = {}
        at, is_one = 0, len(sends) == 1
        for send in sends:
            batch, end = send.batch, at + len(send.allowed)
            mine, at = results if is_one else results[at:end], end
            count = len(batch.messages)
            self.messages_pending -= count
            self.bytes_pending -= batch.size
            if send.caller is not None:
                taken = freed.get(send.caller.quota)
                if taken is None:
                    freed[send.caller.quota] = [count, batch.size]
                else:
                    taken[0] += count
                    taken[1] += batch.size
            if send.refused is not None or send.begun is not None or send.timed is not None:
                mine = self._completed(send, mine)
            send.done(mine)
        for quota, (messages, size) in freed.items():
            quota.give(messages, size)
        for listener in self._listeners:
            listener()

    def _completed(self, send: _Send, results: Sequence[PutResult]) -> Sequence[PutResult]:
        """The results of all its messages."""
        if send.refused is not None:
            stored, refused = iter(results), send.refused
            results = [refused[at] if at in refused else next(stored) for at in range(len(send.batch.messages))]
        if send.timed is not None:
            results = self._timed.all_stored(send.timed, results)
        return results if send.begun is None else self._halves.all_stored(send.begun, results)


class _Gathered:
    """Requests that wait for others, while some are being stored; ``launch`` stores some of them together."""

    def __init__(self, launch: Callable[[Sequence[_Send]], None]) -> None:
        self._launch = launch
        self._sends: list[_Send] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        """Ends the wait for more."""
        self._goes_soon = False
        """Whether all are stored at the end of this turn of the loop."""
        self.flights = 0

    def add(self, send: _Send) -> None:
        """Have it stored soon."""
        self._sends.append(send)
        self._bytes += send.batch.size
        if self.flights < FLIGHTS_MAX or self._bytes >= GATHER_BYTES_MAX or send.begun is not None:
            self._go_soon()
        elif self._timer is None and not self._goes_soon:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S_MAX, self._go)

    def landed(self) -> None:
        """Some have been stored."""
        self.flights -= 1
        if self._sends:
            self._go_soon()

    def _go_soon(self) -> None:
        if self._goes_soon:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._goes_soon = True
        asyncio.get_running_loop().call_soon(self._go)

    def _go(self) -> None:
        sends, self._sends, self._bytes = self._sends, [], 0
        self._timer, self._goes_soon = None, False
        begin = 0
        for at in range(1, len(sends)):
            if not _fit(sends[begin], sends[at]):
                self._launch(sends[begin:at])
                begin = at
        self._launch(sends[begin:])


def _fit(one: _Send, other: _Send) -> bool:
    """Whether they may be stored together."""
    return one.batch.wait == other.batch.wait and one.batch.together == other.batch.together


def _expected_type(topic: TopicConfig | None) -> MessageType | None:
    """None: messages of any type."""
    return None if topic is None or topic.message_type in ANY_TYPE else topic.message_type


def _look_at_type(expected: MessageType, message: Message, queues: int, first: Message) -> PutResult | None:
    """Why a topic for one type of messages does not take this one; or sets its queue, if that is a matter of priority:
    that of ``first``, as a batch of RocketMQ's is for one queue.
    """
    if wrong := type_problem(expected, message):
        return _refusal(PutMessageStatus.WRONG_MESSAGE_TYPE, wrong)
    if expected is MessageType.PRIORITY and queues:
        priority = priority_of(first)
        if priority < 0:
            why = f"the priority ({PROPERTY_PRIORITY}) must be a whole number, 0 or more"
            return _refusal(PutMessageStatus.MESSAGE_ILLEGAL, why)
        message.queue_id = min(priority, queues - 1)
    return None


def _illegal(message: Message, config: MessageStoreConfig) -> PutResult | None:
    """Why it may be stored nowhere."""
    why = check_body(message, config) or check_keys(message, config.message_keys_max)
    return _refusal(PutMessageStatus.MESSAGE_ILLEGAL, why) if why else None


def _refusal(status: PutMessageStatus, reason: str) -> PutResult:
    return PutResult(status, outcome="not_applied", reason=reason)


def _refused_wholly(refused: Mapping[int, PutResult], count: int) -> dict[int, PutResult]:
    """The results of a request that is stored entirely or not at all, in which some messages are refused."""
    why = f"message {min(refused)} of the request was refused, and a numbered request is stored entirely or not at all"
    other = _refusal(PutMessageStatus.OUT_OF_ORDER_SEQUENCE, why)
    return {at: refused.get(at, other) for at in range(count)}
