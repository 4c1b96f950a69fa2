"""``QueueReader``: pulls one queue ahead of its consumer, from the master or, while there is none, from a copy.

A queue may lose messages: the oldest by age, the newest with a broker that lost its disk and has no copy, and other
messages may take their offsets then. The reader knows the last message that it was given; whenever the master is of
another *incarnation*, it compares that one with what is in its place now. A master of this project tells its
incarnation; of another one, each connection counts as one, because it ends with the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from dledger.clock import Backoff
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.consumer_options import ALL, Expression
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerFailedError,
    BrokerUnreachableError,
    ClientError,
    OffsetOutOfRangeError,
    may_repeat,
    refusal_of,
)
from rocketstore.client.aio.offsets import read_answer
from rocketstore.client.aio.received import ConsumedMessage, split_pulled
from rocketstore.message.record import is_same_message
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import OffsetAnswer, OffsetByTimeHeader, PullAnswer, PullHeader, write_header
from rocketstore.remoting.topics import MASTER_ID, MessageQueue

_log = logging.getLogger(__name__)
SUSPEND: Final = 2
"""System flag of a pull: the broker may wait for messages."""
SUBSCRIPTION: Final = 4
"""The pull contains its subscription."""
TOOLS_GROUP: Final = "TOOLS_CONSUMER"
"""The group that reads for nobody: RocketMQ's brokers know it without its being created."""
PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 1.0
IDLE_PAUSE_S: Final = 0.05
"""The pause after an empty answer that came at once, although the broker could have waited for messages."""
REFUSED_PAUSE_S: Final = 1.0
"""The pause before a queue that was refused is asked for again."""
COPY_WAIT_S: Final = 1.0
"""How long a copy may wait for messages: a master may be back by then."""
BEYOND_END_S: Final = 3.0
"""How long masters must keep reporting that a queue ends before the wanted offset until that is believed: one that was
paused or disconnected may not know yet that it was replaced, nor what was stored since.
"""
LOOK_BACK_S: Final = 1.0
"""How long a master has to show the last message again after the connection broke."""


@dataclass(frozen=True, slots=True)
class PullSettings:
    """The parameters of every pull of a topic, and how much is kept in stock per queue.

    ``group``: empty for a consumer that commits nothing.
    """

    group: str
    wanted: Expression = ALL
    max_messages: int = 1024
    wait_s: float = 15.0
    stock_bytes_max: int = 4 << 20
    skips_missing: bool = True


_GO_ON: Final = frozenset({AnswerCode.SUCCESS, AnswerCode.PULL_RETRY_IMMEDIATELY})
_ANSWERS: Final = _GO_ON | {AnswerCode.PULL_NOT_FOUND, AnswerCode.PULL_OFFSET_MOVED}


class PulledBatch(NamedTuple):
    """Messages of one answer, and where the queue continues after them."""

    messages: list[ConsumedMessage]
    next_offset: int
    size: int = 0
    rewinds: bool = False
    """Whether that is before what came earlier: the broker has lost messages."""


class _BeyondEnd(Exception):  # noqa: N818  # it is no error, but a finding
    """The master insists that the queue ends before the wanted offset."""

    def __init__(self, end: int, incarnation: int) -> None:
        self.end = end
        self.incarnation = incarnation


class _Shown(NamedTuple):
    """A master's answer about one place: the message there or the next one, if any."""

    header: PullAnswer
    message: ConsumedMessage | None
    incarnation: int

    def has(self, known: ConsumedMessage) -> bool:
        """Whether this message is there."""
        return self.message is not None and is_same_message(self.message.record, known.record)

    def has_another(self, known: ConsumedMessage) -> bool:
        """Whether another one is in its place; a broker answers with a later one if it is gone."""
        found = self.message
        return found is not None and found.queue_offset == known.queue_offset and not self.has(known)


class QueueReader:
    """Belongs to one assignment; ``arrived`` is called after every change that ``take`` would see."""

    def __init__(
        self,
        cluster: Cluster,
        queue: MessageQueue,
        offset: int,
        settings: PullSettings,
        arrived: Callable[[], None],
        incarnation: int = 0,
    ) -> None:
        """``incarnation``: of the broker that knew the offset; 0: of whichever answers first."""
        self.queue: Final = queue
        self.max_offset = -1
        """The queue's end in the last answer; -1 if unknown."""
        self.skipped = 0
        """How many offsets were skipped because their messages no longer exist."""
        self.refusal: ClientError | None = None
        """Why it was refused at the last attempt; it is asked for again."""
        self._cluster = cluster
        self._settings = settings
        self._arrived = arrived
        self._begin_at(offset, incarnation)
        self._stock: deque[PulledBatch] = deque()
        self._stock_bytes = 0
        self._room = asyncio.Event()
        self._error: ClientError | None = None
        self._source = MASTER_ID  # the broker id to read from, as the last answer suggested
        self._avoided = ""  # the address that failed last
        self._is_in_touch = False  # whether the last pull was answered
        self._task: asyncio.Task[None] | None = None

    # -- for the consumer ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to pull."""
        name = f"pull {self.queue.topic} {self.queue.broker_name} {self.queue.queue_id}"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    def stop(self) -> None:
        """Pull no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    @property
    def is_ready(self) -> bool:
        """Whether ``take`` would return or raise something."""
        return bool(self._stock) or self._error is not None

    def take(self) -> PulledBatch | None:
        """The next messages, or None. Raises ``OffsetOutOfRangeError``, again and again until ``seek``."""
        if self._stock:
            batch = self._stock.popleft()
            self._stock_bytes -= batch.size
            self._room.set()
            return batch
        if self._error is not None:
            raise self._error
        return None

    def seek(self, offset: int, incarnation: int | None = None) -> None:
        """Drop what is in stock, and continue at ``offset``.

        ``incarnation``: of the broker that knew the offset; 0: whichever answers; None: that of what came last.
        """
        running = self._task is not None
        self.stop()
        self._begin_at(offset, self._incarnation if incarnation is None else incarnation)
        self._error = None
        self._stock.clear()
        self._stock_bytes = 0
        if running:
            self.start()

    def _begin_at(self, offset: int, incarnation: int) -> None:
        self._offset = offset
        # The messages in front of the offset that this incarnation's broker is known to have as they were read:
        self._incarnation = incarnation
        self._last: ConsumedMessage | None = None  # the last message that came
        self._learn_at = offset - 1  # the message to ask for in its place, -1: none
        self._again_until = 0  # what comes before this offset was not there, or not wanted, when it was read first
        self._needs_offset = False  # there is no such message: only the group's offset can tell
        self._read_from = -1  # then: the offset at which the broker was exchanged, all that was read is from there on
        self._beyond_since: float | None = None

    @property
    def has_nothing_to_compare(self) -> bool:
        """Whether only the group's offset can tell if the broker has what was taken so far."""
        return self._needs_offset

    def has_read_since(self, offset: int, incarnation: int) -> bool:
        """Whether all that was read is from this offset on, and this incarnation has it: only what is before is in
        doubt.
        """
        is_there = incarnation == self._incarnation and not (self._again_until or self.goes_back)
        return is_there and self._read_from == offset

    def has_looked_at(self, incarnation: int) -> bool:
        """Whether it is settled what the broker of this incarnation has: ``is_at`` will not change by itself."""
        return incarnation in (0, self._incarnation)

    def confirm(self, incarnation: int) -> None:
        """The broker of this incarnation has the group's offset: everything before it is as it was."""
        if incarnation in (0, self._incarnation):
            self._needs_offset = False

    async def is_at(self, incarnation: int) -> bool:
        """Whether the broker of this incarnation has what was taken so far, as it was read. Raises ``ClientError``.

        Otherwise nothing may be committed there: other messages may be in the place of those that were read.
        """
        known, last, offset = self._incarnation, self._last, self._offset
        if not incarnation or known == incarnation:
            return self._has_all
        if not known:
            self._incarnation = incarnation
            return True
        if last is None or last.queue_offset + 1 != offset:
            return False
        shown = await self._message_at(last.queue_offset, self._cluster.timeout_s)
        if self._incarnation == incarnation:  # a pull has looked meanwhile
            return self._has_all
        is_same = (self._incarnation, self._last, self._offset) == (known, last, offset)
        if not is_same or not shown.has(last) or shown.incarnation != incarnation:
            return False
        self._incarnation = incarnation
        return self._has_all

    @property
    def _has_all(self) -> bool:
        return not (self._needs_offset or self._again_until or self.goes_back)

    @property
    def goes_back(self) -> bool:
        """Whether something is in stock that is before what came earlier."""
        return any(one.rewinds for one in self._stock)

    # -- pulling -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff(PAUSE_S_MIN, PAUSE_S_MAX)
        told = ""
        while True:
            try:
                while self._stock_bytes >= self._settings.stock_bytes_max or self._error is not None:
                    self._room.clear()
                    await self._room.wait()
                if await self._pull():
                    backoff.succeeded()
                    told = ""
            except _BeyondEnd as beyond:
                try:
                    await self._go_back(beyond.end, beyond.incarnation)
                except ClientError as error:
                    _log.warning("%s: %s; retrying", self._named, error)
                    await asyncio.sleep(backoff.pause())
            except ClientError as error:
                if may_repeat(error, harmless=True) or isinstance(error, BadAnswerError):
                    if str(error) != told:  # once, not for every attempt
                        told = str(error)
                        _log.warning("%s: %s; retrying", self._named, error)
                    await asyncio.sleep(backoff.pause())
                    await self._look_for_brokers()
                else:
                    await self._wait_out(error)
            except Exception:  # noqa: BLE001  # else the queue would be read no more without a word
                _log.exception("%s: an unexpected error; retrying", self._named)
                await asyncio.sleep(PAUSE_S_MAX)

    @property
    def _named(self) -> str:
        at = f" at {self.queue.broker_name}" if self.queue.broker_name else ""
        return f"queue {self.queue.queue_id} of {self.queue.topic}{at}"

    async def _look_for_brokers(self) -> None:
        self._cluster.routes.doubt(self.queue.topic)
        try:
            async with asyncio.timeout(PAUSE_S_MAX):
                await self._cluster.routes.refresh_brokers()
        except (ClientError, TimeoutError):
            pass  # the next attempt says what is the matter

    async def _wait_out(self, error: ClientError) -> None:
        """Say once that the queue is refused, and try again after a while: the topic may be made anew."""
        if self.refusal is None:
            _log.warning("%s: %s; waiting", self._named, error)
        self.refusal = error
        self._arrived()
        self._cluster.routes.doubt(self.queue.topic)
        await asyncio.sleep(REFUSED_PAUSE_S)

    async def _pull(self) -> bool:
        """Pull once. Whether the broker has answered."""
        address, is_master = await self._choose()
        loop, settings = asyncio.get_running_loop(), self._settings
        began = loop.time()
        wait_s = settings.wait_s if is_master else min(settings.wait_s, COPY_WAIT_S)
        if not self._is_in_touch:
            wait_s = 0.0  # this answer says where the queue ends, and which incarnation the master is of
        try:
            answer = await self._ask(
                address,
                self._offset,
                settings.max_messages,
                wanted=settings.wanted,
                wait_s=wait_s,
                timeout_s=self._cluster.timeout_s,
            )
        except ClientError:
            self._avoided, self._source = address, MASTER_ID
            self._is_in_touch = False
            raise
        self._avoided, self._is_in_touch = "", True
        if answer.code not in _ANSWERS:
            raise refusal_of(answer, self._named)
        incarnation = self._incarnation_of(address, answer)
        if is_master:
            if not incarnation or (incarnation != self._incarnation and not await self._look_back(incarnation)):
                return True  # another one has begun meanwhile, or the queue goes on elsewhere
            if answer.code != AnswerCode.SUCCESS:
                await self._learn(incarnation)
        if not self._take_in(answer, incarnation, is_master=is_master) and loop.time() - began < IDLE_PAUSE_S:
            await asyncio.sleep(IDLE_PAUSE_S)
        return True

    async def _choose(self) -> tuple[str, bool]:
        """Where to read now, and whether that is the master. Raises ``ClientError``."""
        deadline = self._cluster.deadline()
        broker = await self._cluster.broker(self.queue.broker_name, deadline)
        suggested = broker.addresses.get(self._source, "")
        candidates = dict.fromkeys(one for one in (suggested, *broker.readable) if one)
        address = next((one for one in candidates if one != self._avoided), self._avoided)
        if not address:
            raise BrokerUnreachableError(f"brokers {self.queue.broker_name or 'of this group'} have no address now")
        return address, address == broker.master

    async def _ask(
        self, address: str, offset: int, max_messages: int, *, wanted: Expression, wait_s: float, timeout_s: float
    ) -> Frame:
        header = PullHeader(
            consumer_group=self._settings.group or TOOLS_GROUP,
            topic=self.queue.topic,
            queue_id=self.queue.queue_id,
            queue_offset=offset,
            max_msg_nums=max_messages,
            sys_flag=SUBSCRIPTION | (SUSPEND if wait_s else 0),
            commit_offset=0,
            suspend_timeout_millis=round(1000 * wait_s),
            sub_version=0,
            subscription=wanted.text,
            expression_type=wanted.kind,
        )
        request = Frame(RequestCode.PULL_MESSAGE, 0, write_header(header), b"")
        return await self._cluster.connections.call(address, request, wait_s + timeout_s)

    def _take_in(self, answer: Frame, incarnation: int, *, is_master: bool) -> bool:
        """Process an answer that is no refusal; whether it was of any use. Raises ``ClientError``, ``_BeyondEnd``."""
        header = read_answer(PullAnswer, answer)
        offset, self.max_offset = self._offset, header.max_offset
        self.refusal = None
        self._source = header.suggest_which_broker_id
        if answer.code in _GO_ON:
            messages = split_pulled(answer.body, self.queue) if answer.code == AnswerCode.SUCCESS else []
            if header.next_begin_offset < offset or (messages and header.next_begin_offset == offset):
                raise BadAnswerError(
                    f"asked for offset {offset}, but the answer continues at {header.next_begin_offset}"
                )
            self._beyond_since = None
            if header.next_begin_offset == offset:
                return False
            self._add(messages, header.next_begin_offset, len(answer.body))
            return True
        if answer.code == AnswerCode.PULL_OFFSET_MOVED and header.min_offset > offset:
            self._beyond_since = None
            self._go_to(header.min_offset, self._incarnation, f"messages {offset} to {header.min_offset - 1} are gone")
            return True
        if header.max_offset >= offset or not is_master:  # a copy may lag; only the master knows the end
            self._beyond_since = None
        elif self._is_long_beyond():
            raise _BeyondEnd(max(header.max_offset, 0), incarnation)
        self._arrived()
        return False

    def _add(self, messages: list[ConsumedMessage], next_offset: int, size: int) -> None:
        if self._offset < self._again_until:
            if messages:
                self._stock.append(PulledBatch([], self._offset, rewinds=True))
            elif next_offset < self._again_until:
                self._offset = next_offset
                return
            self._again_until = 0
        if messages:
            self._last = messages[-1]
        wanted = self._settings.wanted
        if wanted.tags is not None:
            messages = [one for one in messages if wanted.takes(one.tags)]
        self._offset = next_offset
        self._stock.append(PulledBatch(messages, next_offset, size))
        self._stock_bytes += size
        self._arrived()

    def _is_long_beyond(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._beyond_since is None:
            self._beyond_since = now
        return now >= self._beyond_since + BEYOND_END_S

    def _go_to(self, offset: int, incarnation: int, reason: str) -> None:
        self._beyond_since = None
        if not self._settings.skips_missing:
            self._error = OffsetOutOfRangeError(f"{self._named}: {reason}")
        else:
            _log.warning("%s: %s; continuing at %d", self._named, reason, offset)
            rewinds = offset <= self._offset
            self.skipped += max(offset - self._offset, 0)
            needs_offset = self._needs_offset  # that of what is before ``offset`` remains unknown
            self._begin_at(offset, incarnation)
            self._needs_offset = needs_offset
            self._stock.append(PulledBatch([], offset, rewinds=rewinds))
        self._arrived()

    # -- what the broker may have lost ---------------------------------------------------------------------------------

    def _incarnation_of(self, address: str, answer: Frame) -> int:
        """Of the master that has just given this answer; 0: it became one while it was at it."""
        told = read_answer(PullAnswer, answer).incarnation if answer.code in _ANSWERS else 0
        if told or self._cluster.connections.protocol_version(address):
            return told
        return self._cluster.connections.connection_number(address)

    async def _learn(self, incarnation: int) -> None:
        """A message that was read in an earlier life is known, too: the one before the offset that was stored."""
        place = self._learn_at
        if place < 0 or self._last is not None:
            return
        try:
            shown = await self._message_at(place, LOOK_BACK_S)
        except ClientError as error:
            if not may_repeat(error, harmless=True):
                self._learn_at = -1
            return
        if shown.incarnation == incarnation:
            self._learn_at = -1
            if shown.message is not None and shown.message.queue_offset == place:
                self._last = shown.message

    async def _look_back(self, incarnation: int) -> bool:
        """Another incarnation has answered: it may have lost messages, and taken new ones at their offsets.

        Returns whether its answer counts. A queue that has become shorter is not believed at once: see
        ``BEYOND_END_S``.
        """
        last, offset, known = self._last, self._offset, self._incarnation
        if last is None or not known:
            self._needs_offset = bool(known and self._settings.group)
            self._read_from = offset
            self._incarnation = incarnation
            return True
        place = last.queue_offset
        try:
            shown = await self._message_at(place, LOOK_BACK_S)
        except BrokerFailedError as error:  # it was read before: the next messages are not held up
            _log.warning("%s: the last message is unreadable now: %s", self._named, error)
            self._incarnation = incarnation
            return True
        if shown.incarnation != incarnation:
            await asyncio.sleep(IDLE_PAUSE_S)
            return False
        if shown.header.max_offset <= place:
            return True
        if shown.has_another(last):
            target = min(await self._begin_after(last), place)
            reason = f"the message before {offset} is another one: the broker has lost messages"
            self._go_to(target, incarnation, reason)
            return False
        self._incarnation = incarnation
        if place + 1 < offset:  # what was not wanted there may have been replaced by what is
            self._again_until, self._offset = offset, max(place + 1, shown.header.min_offset)
        return self._offset == offset

    async def _go_back(self, end: int, incarnation: int) -> None:
        """The queue ends before our offset: behind what was lost, or where a queue in its place begins."""
        target = end if self._last is None else min(await self._begin_after(self._last), end)
        self._go_to(target, incarnation, f"the queue ends at {end}, before {self._offset}")

    async def _message_at(self, offset: int, timeout_s: float) -> _Shown:
        """The bounds of the queue, and the message there or the next one, if there is any. Of the master."""
        deadline = self._cluster.deadline(timeout_s)
        broker = await self._cluster.broker(self.queue.broker_name, deadline)
        if not broker.master:
            raise BrokerUnreachableError(f"brokers {self.queue.broker_name or 'of this group'} have no master now")
        answer = await self._ask(
            broker.master, offset, 1, wanted=ALL, wait_s=0.0, timeout_s=min(timeout_s, deadline.remaining_s)
        )
        incarnation = self._incarnation_of(broker.master, answer)
        if answer.code not in _ANSWERS:
            raise refusal_of(answer, broker.master)
        messages = split_pulled(answer.body, self.queue) if answer.code == AnswerCode.SUCCESS else []
        return _Shown(read_answer(PullAnswer, answer), messages[0] if messages else None, incarnation)

    async def _begin_after(self, last: ConsumedMessage) -> int:
        """The offset of the first message stored later than this one."""
        header = OffsetByTimeHeader(self.queue.topic, self.queue.queue_id, last.store_timestamp + 1)
        answer = await self._cluster.ask_master(
            self.queue.broker_name,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
            header,
            deadline=self._cluster.deadline(),
        )
        return max(read_answer(OffsetAnswer, answer).offset, 0)
