"""``BrokerSession``: a consumer's queues at the brokers of one name: takes, leaves, locks and commits them.

Each has a task of its own, so that brokers without a master hold up nothing but their own queues.

Before a consumer starts, it looks whether brokers filter by its conditions, and whether its group subscribes to
something else: members of a group divide its queues whatever they subscribe to, so all must subscribe to the same, or
messages would be missed. A broker of RocketMQ or of this project tells what its group subscribes to
(GET_CONSUMER_CONNECTION_LIST): what the last heartbeat said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from dledger.access.rules import RETRY_PREFIX
from dledger.errors import ConfigError
from dledger.records import record
from dledger.remoting.codes import RequestError
from rocketstore.client.aio.assignment import Assignment, DeliveryQueue
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.connections import Deadline
from rocketstore.client.aio.consumer_options import SQL92, TAG, ConsumerOptions, Expression, Sql, tags_of_expression
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerUnreachableError,
    ClientError,
    OtherIncarnationError,
    RefusedError,
    may_repeat,
)
from rocketstore.client.aio.offsets import LOOKS_MAX, OffsetStore, StartOffsets, in_parallel
from rocketstore.client.aio.queue_reader import TOOLS_GROUP, PullSettings, QueueReader
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import (
    CheckClientBody,
    ConsumerConnectionList,
    LockedQueuesBody,
    LockQueuesBody,
    SubscriptionData,
)
from rocketstore.remoting.headers import GroupHeader
from rocketstore.remoting.topics import MessageQueue
from rocketstore.types import MessageModel

_log = logging.getLogger(__name__)
REBALANCE_S: Final = 20.0
"""How often queues are taken without being told to: those that had to be left may be readable again."""
RETRY_S: Final = 1.0
"""Before what failed is tried again."""
SETTLE_S: Final = 0.2
"""How long a member that loses queues waits for messages in use before it commits."""
TAKE_OVER_S: Final = 0.3
"""How long a member that gains queues waits before it asks where to begin, so that the one before can commit."""
RENEW_S: Final = 20.0
"""How often locks are renewed, as RocketMQ's clients do."""
COMMIT_PAUSE_S: Final = 0.05
"""Before a commit looks again whether a broker that has become master still has what was read."""
LOCK_VALID_S: Final = 30.0
"""How long a lock counts without a renewal; the broker's lasts a minute."""


@record(frozen=True, slots=True)
class Subscriptions:
    """Subscriptions: tag expressions or conditions by topic.

    ``group``: empty for a consumer that commits nothing.
    """

    group: str
    client_id: str
    expressions: Mapping[str, str | Sql]
    options: ConsumerOptions

    @property
    def needs_locks(self) -> bool:
        """Whether queues are locked at the brokers before they are read."""
        return bool(self.group) and self.options.ordered and not self.options.broadcast

    def wanted(self, topic: str) -> Expression:
        """The filter for a topic. Raises ``ConfigError``."""
        return Expression.of(self.expressions.get(topic, "*"))

    def pull_settings(self, topic: str) -> PullSettings:
        """How to pull a topic."""
        options = self.options
        return PullSettings(
            self.group,
            self.wanted(topic),
            options.pull_messages,
            options.pull_wait_s,
            options.stock_bytes_max,
            options.when_out_of_range == "go_on",
        )


@record(frozen=True, slots=True)
class SessionPlan:
    """Which queues at these brokers are this consumer's. ``is_alone``: no other member may have had them."""

    queues: frozenset[MessageQueue] = frozenset()
    is_alone: bool = True


class BrokerSession:
    """``store``: None for a consumer that commits nothing."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        subscriptions: Subscriptions,
        deliveries: DeliveryQueue,
        starts: StartOffsets,
        store: OffsetStore | None,
    ) -> None:
        self.name: Final = name
        self.failure: ClientError | OSError | None = None
        """Why the plan has not been carried out, or in the end the last offsets not committed."""
        self._cluster = cluster
        self._subscriptions = subscriptions
        self._deliveries = deliveries
        self._starts = starts
        self._store = store
        self._plan: SessionPlan | None = None
        self._carried_out: SessionPlan | None = None
        self._leaving: list[Assignment] = []
        self._reported: dict[str, str] = {}
        self._committing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._is_closing = False
        self._apply_at = 0.0
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"consumer at {name or 'brokers'}")

    # -- for the consumer ----------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the plan has been carried out."""
        return self._plan is not None and self._carried_out is self._plan

    @property
    def planned(self) -> frozenset[MessageQueue]:
        """The queues that are this consumer's, though it may not have them yet."""
        return frozenset() if self._plan is None else self._plan.queues

    @property
    def is_handling(self) -> bool:
        """Whether the application may still be at work on a message of an ordered queue.

        The next member must not begin before, so the lock is renewed, however long it takes.
        """
        if not self._subscriptions.needs_locks:
            return False
        assignments = [*self._held(), *self._leaving]
        return any(one.out for one in assignments) or not (self.is_settled or self.failure is not None)

    def assign(self, plan: SessionPlan) -> None:
        """Take these queues, and leave all others."""
        if plan != self._plan:
            self._plan = plan
            self._apply_at = 0.0
            self._wake.set()

    def message_done(self) -> None:
        """Perhaps it was the last one that a queue waits for."""
        if self._leaving:
            self._wake.set()

    async def commit(self) -> None:
        """Commit what is done now. Raises ``ClientError``, and ``OSError`` of a file."""
        await self._commit_all(self._held())

    async def stop(self) -> None:
        """Commit, unlock and end; ``failure`` says whether the last commit failed. Idempotent."""
        self._is_closing = True
        self._wake.set()
        await asyncio.shield(self._task)

    @property
    def has_ended(self) -> bool:
        """Whether ``stop`` would return at once."""
        return self._task.done()

    # -- the task ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop, commit_s = asyncio.get_running_loop(), self._subscriptions.options.commit_s
        renew_at, commit_at = 0.0, loop.time() + (commit_s or float("inf"))
        master = ""
        while not self._is_closing:
            self._wake.clear()
            broker = self._cluster.routes.broker(self.name)
            before, master = master, "" if broker is None else broker.master
            if self._subscriptions.needs_locks and (loop.time() >= renew_at or master != before):
                failed = await self._try("renew its locks", self._renew)
                renew_at = loop.time() + (RENEW_S if failed is None else RETRY_S)
            if self._plan is not None and loop.time() >= self._apply_at:
                self._apply_at = loop.time() + REBALANCE_S
                self.failure = await self._try("take its queues", self._apply)
                if self.failure is not None:
                    self._apply_in(RETRY_S)
            if loop.time() >= commit_at:
                commit_at = loop.time() + (commit_s or float("inf"))
                await self._try("commit", lambda: self._commit(self._held()))
            if self._leaving:
                await self._try("give queues back", self._finish_leaving)
            due = min(self._apply_at if self._plan is not None else float("inf"), commit_at, loop.time() + RETRY_S)
            try:
                async with asyncio.timeout_at(due):
                    await self._wake.wait()
            except TimeoutError:
                pass
        await self._leave()

    async def _leave(self) -> None:
        assignments = [*self._held(), *self._leaving]
        self.failure = await self._try("commit at the end", lambda: self._commit_all(assignments))
        for one in assignments:
            one.reader.stop()
            self._deliveries.remove(one)
            one.in_flight.is_abandoned = True
        await self._unlock([one.queue for one in assignments])

    def _apply_in(self, seconds: float) -> None:
        self._apply_at = min(self._apply_at, asyncio.get_running_loop().time() + seconds)

    async def _try(self, action: str, run: Callable[[], Awaitable[None]]) -> ClientError | OSError | None:
        """Its error, if it failed. The same one is logged once."""
        try:
            await run()
        except (ClientError, OSError) as error:
            if self._reported.get(action) != str(error):
                self._reported[action] = str(error)
                at = f" at {self.name}" if self.name else ""
                _log.warning("group %s: cannot %s%s: %s", self._subscriptions.group, action, at, error)
            return error
        except Exception as error:  # noqa: BLE001  # else locks, commits and rebalancing would end without a word
            _log.exception("group %s: cannot %s, unexpectedly", self._subscriptions.group, action)
            return ClientError(f"cannot {action}: unexpected {error!r}")
        self._reported.pop(action, None)
        return None

    def _held(self) -> list[Assignment]:
        return [one for queue, one in self._deliveries.assignments.items() if queue.broker_name == self.name]

    # -- taking and leaving queues -------------------------------------------------------------------------------------

    async def _apply(self) -> None:
        plan = self._plan
        assert plan is not None
        held = {one.queue: one for one in self._held()}
        await self._release([one for queue, one in held.items() if queue not in plan.queues])
        leaving = {one.queue for one in self._leaving}
        gained = plan.queues - held.keys() - leaving
        if gained:
            if not plan.is_alone:
                await asyncio.sleep(TAKE_OVER_S)
            if self._plan is plan and not self._is_closing:
                await self._gain(plan, gained)
        if leaving & plan.queues:
            self._apply_in(RETRY_S)
        self._carried_out = plan

    async def _gain(self, plan: SessionPlan, gained: Collection[MessageQueue]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._subscriptions.needs_locks:
            gained = await self._lock(gained)
        added: set[MessageQueue] = set()
        try:
            offsets, incarnation = await self._starts.of(gained)
            if self._plan is not plan or self._is_closing:  # it took long: perhaps others have them by now
                return
            for queue in sorted(offsets, key=lambda one: (one.topic, one.queue_id)):
                usable_until = began + LOCK_VALID_S if self._subscriptions.needs_locks else float("inf")
                self._add(queue, offsets[queue], incarnation, usable_until)
                added.add(queue)
        finally:
            await self._unlock([one for one in gained if one not in added])

    def _add(self, queue: MessageQueue, offset: int, incarnation: int, usable_until: float) -> None:
        settings = self._subscriptions.pull_settings(queue.topic)
        reader = QueueReader(self._cluster, queue, offset, settings, self._deliveries.changed, incarnation)
        assignment = Assignment(queue, reader, offset, None if self._store is None else offset)
        assignment.usable_until = usable_until
        self._deliveries.add(assignment)
        reader.start()

    async def _release(self, lost: Sequence[Assignment]) -> None:
        if not lost:
            return
        for one in lost:
            self._deliveries.remove(one)
            one.reader.stop()
        self._leaving += lost
        await self._deliveries.wait_idle(lost, SETTLE_S)
        await self._finish_leaving()

    async def _finish_leaving(self) -> None:
        """Commit and unlock; in order only once the message in use is done, because the next member starts then."""
        ready = [one for one in self._leaving if not (self._subscriptions.options.ordered and one.out)]
        try:
            await self._commit(ready)
        except ClientError as error:
            if may_repeat(error, harmless=True) or isinstance(error, OtherIncarnationError):
                raise
            _log.warning(
                "group %s: the offsets of queues that it leaves are not committed: %s", self._subscriptions.group, error
            )
        for one in ready:
            one.in_flight.is_abandoned = True
        self._leaving = [one for one in self._leaving if one not in ready]
        await self._unlock([one.queue for one in ready])

    # -- locks ---------------------------------------------------------------------------------------------------------

    async def _lock(self, queues: Collection[MessageQueue]) -> list[MessageQueue]:
        """Those that are ours now. Raises ``ClientError``."""
        body = LockQueuesBody(self._subscriptions.client_id, self._subscriptions.group, tuple(queues)).encode()
        answer = await self._cluster.ask_master(
            self.name, RequestCode.LOCK_BATCH_MQ, None, body, deadline=self._cluster.deadline()
        )
        try:
            locked = set(LockedQueuesBody.decode(answer.body).locked)
        except RequestError as error:
            raise BadAnswerError(f"the answer to a request for locks cannot be read: {error}") from error
        got = [one for one in queues if one in locked]
        if len(got) < len(queues):  # another member is not done with them yet
            self._apply_in(RETRY_S)
        return got

    async def _renew(self) -> None:
        began = asyncio.get_running_loop().time()
        held = self._held()
        queues = [one.queue for one in (*held, *self._leaving)]
        got = set(await self._lock(queues) if queues else ())
        for one in held:
            if one.queue in got:
                one.usable_until = began + LOCK_VALID_S
        self._deliveries.changed()
        await self._release([one for one in held if one.queue not in got])

    async def _unlock(self, queues: Sequence[MessageQueue]) -> None:
        """Best effort: an old lock ends by itself."""
        if not queues or not self._subscriptions.needs_locks:
            return
        body = LockQueuesBody(self._subscriptions.client_id, self._subscriptions.group, tuple(queues)).encode()
        try:
            await self._cluster.ask_master(
                self.name, RequestCode.UNLOCK_BATCH_MQ, None, body, deadline=self._cluster.deadline()
            )
        except ClientError as error:
            _log.info("group %s: queues stay locked for a minute: %s", self._subscriptions.group, error)

    # -- offsets -------------------------------------------------------------------------------------------------------

    async def _commit_all(self, assignments: Sequence[Assignment]) -> None:
        """Commit, once it is known that the broker still has what was read.

        Raises ``ClientError`` if that is not known soon.
        """
        deadline: Deadline | None = None
        while True:
            await self._commit(assignments)
            waiting = [
                one
                for one in assignments
                if one.is_in_doubt
                and one.awaits_look
                and not one.in_flight.is_abandoned
                and one.in_flight.done != one.committed
            ]
            if not waiting or self._store is None:
                return
            deadline = deadline or self._cluster.deadline()
            if deadline.expired:
                queues = ", ".join(f"{one.queue.queue_id} of {one.queue.topic}" for one in waiting)
                raise BrokerUnreachableError(
                    f"group {self._subscriptions.group}: offsets of queues {queues} are not committed: their broker "
                    "was restarted or replaced, and it is not known yet whether it still has what was read"
                )
            await asyncio.sleep(COMMIT_PAUSE_S)

    async def _commit(self, assignments: Sequence[Assignment]) -> None:
        """Also of queues that are left: a position that was reset, or is gone, is not overwritten."""
        store = self._store
        if not assignments or store is None:
            return
        async with self._committing:  # from before the look on: a commit after it would seem to have been undone
            for left in reversed(range(LOOKS_MAX)):
                incarnation = await self._adopt_changes(store, assignments)
                try:
                    await self._commit_once(store, assignments, incarnation)
                except OtherIncarnationError:
                    if not left:
                        raise
                else:
                    return

    async def _commit_once(self, store: OffsetStore, assignments: Sequence[Assignment], incarnation: int) -> None:
        places = {
            one: (one.in_flight.done, one.may_rewind)
            for one in assignments
            if not (one.in_flight.is_abandoned or one.is_in_doubt)
            and (one.may_rewind or one.in_flight.done != one.committed)
        }
        for one, (offset, _) in places.items():
            one.offered = offset
        for rewind in (False, True):
            chosen = {one: offset for one, (offset, back) in places.items() if back is rewind}
            if not chosen:
                continue
            await store.commit({one.queue: offset for one, offset in chosen.items()}, incarnation, rewind=rewind)
            for one, offset in chosen.items():
                one.committed = offset
                one.may_rewind = one.may_rewind and not (rewind and one.in_flight.done >= offset)

    async def _adopt_changes(self, store: OffsetStore, assignments: Sequence[Assignment]) -> int:
        """Adopt offsets that were changed elsewhere: reset, or committed by the member before.

        Returns the incarnation of the broker for which ours may be committed then.
        """
        stored, incarnation = await store.fetch([one.queue for one in assignments])
        same = await in_parallel(assignments, partial(self._has_what_was_read, incarnation))
        gone: list[Assignment] = []
        for one, is_same in same.items():
            is_unsure = one.reader.has_nothing_to_compare
            offset = stored.get(one.queue)
            first = await self._first(one) if is_unsure and offset is None else None
            is_told = offset is not None or first is not None
            one.is_in_doubt = not (is_same or (is_unsure and is_told))
            one.awaits_look = is_same is False and not one.reader.has_looked_at(incarnation)
            if first is not None:
                self._deliveries.go_to(one, first, incarnation)
            elif offset is not None:
                self._adopt(one, offset, incarnation, is_unsure=is_unsure)
            if is_unsure and is_told:
                one.reader.confirm(incarnation)
            if offset is not None:
                one.committed = offset
            elif one.committed is not None and not one.is_in_doubt:
                one.committed = one.offered = None
                gone.append(one)
        if gone:
            _log.warning(
                "group %s: its offsets are gone: the group or a topic was deleted, or the broker lost its disk; they "
                "are stored again (%s)",
                self._subscriptions.group,
                ", ".join(f"queue {one.queue.queue_id} of {one.queue.topic}: {one.in_flight.done}" for one in gone),
            )
        return incarnation

    def _adopt(self, one: Assignment, offset: int, incarnation: int, *, is_unsure: bool) -> None:
        """Go to a stored offset if it is not ours.

        ``is_unsure``: nothing but this offset tells what the broker has, so that nothing in hand counts, unless all of
        it was read from there on since the broker was exchanged.
        """
        if is_unsure:
            if one.reader.has_read_since(offset, incarnation):
                return
            if offset == one.in_flight.done:
                if one.has_any_in_hand:
                    self._deliveries.go_to(one, offset, incarnation)
                return
            is_before = True
        elif offset in (one.committed, one.offered) or one.may_rewind:
            return
        else:
            is_before = one.committed is not None and offset < one.committed
        if offset > one.in_flight.next or is_before:
            _log.warning(
                "group %s: its offset in queue %d of %s was changed to %d elsewhere; continuing there",
                self._subscriptions.group,
                one.queue.queue_id,
                one.queue.topic,
                offset,
            )
            self._deliveries.go_to(one, offset, incarnation)
            one.is_in_doubt = False

    @staticmethod
    async def _has_what_was_read(incarnation: int, one: Assignment) -> bool | None:
        """None: it may not be read now, perhaps later."""
        try:
            return await one.reader.is_at(incarnation)
        except RefusedError as error:
            if may_repeat(error, harmless=True):
                raise
            return None

    async def _first(self, one: Assignment) -> int | None:
        """Where the queue begins; None if it does not exist."""
        return (await self._starts.offsets_at([one.queue], "first")).get(one.queue)


ASK_S_MAX: Final = 1.0
"""How long one broker may take: the start waits for it."""
_ADVICE: Final = "Give each subscription a group of its own"


async def check_conditions(cluster: Cluster, subscriptions: Subscriptions) -> None:
    """Ask the masters whether they filter by this consumer's conditions, as Java's clients do (CHECK_CLIENT_CONFIG).

    Raises ``RefusedError`` if one does not; those that do not answer are not waited for.
    """
    checks: list[tuple[str, bytes]] = []
    for topic in subscriptions.expressions:
        wanted = subscriptions.wanted(topic)
        if wanted.kind == SQL92:
            group = subscriptions.group or TOOLS_GROUP
            body = CheckClientBody(subscriptions.client_id, group, wanted.subscription(topic)).encode()
            route = await cluster.route(topic, cluster.deadline())
            checks += [(name, body) for name in {one.broker for one in route.parts}]
    await asyncio.gather(*(_check(cluster, name, body) for name, body in checks))


async def _check(cluster: Cluster, name: str, body: bytes) -> None:
    try:
        await cluster.ask_master(name, RequestCode.CHECK_CLIENT_CONFIG, body=body, deadline=cluster.deadline(ASK_S_MAX))
    except ClientError as error:
        if isinstance(error, RefusedError) and not may_repeat(error, harmless=True):
            raise
        _log.debug("brokers %s: whether they filter by conditions is unknown: %s", name, error)


async def warn_of_others(cluster: Cluster, subscriptions: Subscriptions, names: Iterable[str]) -> None:
    """Log how this consumer differs from its group, asking the masters of these brokers; best effort."""
    for found in await asyncio.gather(*(_asked(cluster, subscriptions.group, one) for one in names)):
        if found is None or found.message_model is MessageModel.BROADCASTING:
            continue
        if problem := difference(subscriptions, found.subscription_table):
            _log.warning("%s", problem)
            return


def difference(subscriptions: Subscriptions, table: Mapping[str, SubscriptionData]) -> str:
    """How a consumer's subscriptions differ from its group's, for people; empty if they do not."""
    group, mine = subscriptions.group, subscriptions.expressions
    others = {topic: one for topic, one in table.items() if not topic.startswith(RETRY_PREFIX)}
    for topic in mine.keys() & others.keys():
        wanted = subscriptions.wanted(topic)
        if (wanted.kind, wanted.text if wanted.kind == SQL92 else wanted.tags) != _selected(others[topic]):
            return (
                f"other consumers of group {group} subscribe to topic {topic} with "
                f"{_shown(others[topic].expression_type, others[topic].sub_string)}, and this one with "
                f"{_shown(wanted.kind, wanted.text)}: each misses the messages in the other's queues. {_ADVICE}"
            )
    if not others or mine.keys() == others.keys():
        return ""
    only_mine, only_others = (", ".join(sorted(one)) for one in (mine.keys() - others.keys(), others.keys() - mine))
    if only_mine:
        who = f"this one to {only_mine}, and others do not"
    else:
        who = f"others to {only_others}, and this one does not"
    return (
        f"consumers of group {group} subscribe to different topics: {who}, so nobody reads the queues of that topic "
        f"that are their share. {_ADVICE}"
    )


def _shown(kind: str, text: str) -> str:
    return repr(text) if kind in ("", TAG) else f"{kind} {text!r}"


def _selected(one: SubscriptionData) -> tuple[str, frozenset[str] | str | None]:
    """The kind of filter, and the wanted tags (None for all) or the text of another one."""
    if one.expression_type not in ("", TAG):
        return one.expression_type, one.sub_string
    try:
        return TAG, frozenset(one.tags_set) or tags_of_expression(one.sub_string or "*")
    except ConfigError:
        return TAG, one.sub_string


async def _asked(cluster: Cluster, group: str, name: str) -> ConsumerConnectionList | None:
    try:
        answer = await cluster.ask_master(
            name,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            GroupHeader(group),
            deadline=cluster.deadline(ASK_S_MAX),
        )
        return ConsumerConnectionList.decode(answer.body or b"{}")
    except (ClientError, RequestError) as error:  # nobody of the group is connected there, or the broker is away
        _log.debug("group %s: its subscriptions at %s are unknown: %s", group, name, error)
        return None
