"""``GroupConsumer``: a member of a consumer group, which shares the group's queues with the other members."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from secrets import token_hex
from types import TracebackType
from typing import Final, Self, Unpack

from dledger.access.permissions import RETRY_PREFIX
from dledger.backoff import Backoff
from dledger.client.security import ClientSecurity
from dledger.client.shared import RETRY_WAIT_S_MIN, Deadline
from dledger.errors import ConfigError, DLedgerError, UnavailableError
from rocketstore.client.allocation import allocate
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import is_retried_read
from rocketstore.client.fetcher import PullOptions, QueueFetcher
from rocketstore.client.group_offsets import Beginnings, BrokerOffsets, LocalOffsets, OffsetStore
from rocketstore.client.group_options import GroupOptions, GroupSettings
from rocketstore.client.memberships import MemberStreams
from rocketstore.client.methods import LOCK_QUEUES, SEND_BACK, UNLOCK_QUEUES
from rocketstore.client.received import tags_of_expression
from rocketstore.client.shares import GroupDelivery, QueueName, Share, Shares
from rocketstore.client.topic_cache import TopicCache, no_such_topic
from rocketstore.client.topics import PERMISSION_READ
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger(__name__)
REBALANCE_S: Final = 20.0
"""How often a member divides the queues without being told to: topics may have more of them."""
LOOK_S: Final = 1.0
"""How often it checks on pulls, streams and the master, and retries what failed."""
MISSING_TOPIC_S: Final = 5.0
"""How often it looks for a topic that does not exist: the one of retries is made when a member joins."""
SETTLE_S: Final = 0.2
"""How long a member that loses queues waits for messages in use before it commits."""
TAKE_OVER_S: Final = 0.3
"""How long a member that gains queues waits before it asks where to begin, so that the one before can commit."""
RENEW_S: Final = 20.0
"""How often locks are renewed."""
LOCK_VALID_S: Final = 30.0
"""How long a lock counts without a renewal; the broker's lasts a minute."""
ORDERED_PAUSE_S: Final = 1.0
"""Before a message that failed in order is tried again."""
WORKERS: Final = 4

Handler = Callable[[GroupDelivery], object]


class GroupConsumer:
    """``subscribe``, then ``start`` with a handler; or without one, then ``receive``, ``ack`` and ``send_back``.

    The members of a group divide the queues of their topics among themselves, together with RocketMQ's clients in the
    same group, and anew whenever one joins or leaves. All must have the same subscriptions. Delivery is at least once:
    an offset is committed when all messages before it are done, so nothing is skipped. Messages come again if they were
    not committed when their queue changed hands: those in use when a member joins or leaves, and those of the last
    ``commit_s`` when one is killed. A queue may have two owners for a moment after a change of members or of the
    master. A message that is sent back, because its handler failed, comes again later, each time later, and goes to
    ``%DLQ%group`` in the end.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str,
        *,
        group: str,
        options: GroupOptions | None = None,
        security: ClientSecurity | None = None,
        **settings: Unpack[GroupSettings],
    ) -> None:
        if not group:
            raise ConfigError(["a member needs the name of its group"])
        self.group = group
        self.client_id: Final = f"{socket.gethostname()[:64]}@{os.getpid()}#{token_hex(6)}"
        self._options = options = options or GroupOptions(**settings)
        self._store: OffsetStore
        self._connection = BrokerConnection(addresses, timeout_s=options.timeout_s, security=security)
        if options.broadcast:
            self._store = LocalOffsets(options.offsets_file)
        else:
            self._store = BrokerOffsets(self._connection, group)
        self._beginnings = Beginnings(self._connection, self._store, options.start)
        self._topics = TopicCache(self._connection)
        self._tags: dict[str, str] = {}
        self._shares = Shares(
            ordered=options.ordered,
            pending_max=options.pending_messages_max,
            pending_bytes_max=options.pending_bytes_max,
            failed=self._cannot_read,
        )
        self._streams: MemberStreams | None = None
        self._life = threading.Lock()  # guards start and end
        self._closing = threading.Event()
        self._assigned = threading.Event()
        self._workers: list[threading.Thread] = []
        self._tender = threading.Thread(target=self._tend, name=f"rocketstore-group-{group}", daemon=True)
        self._wake = threading.Event()
        self._members_news = threading.Event()
        self._committing = threading.Lock()
        # Of the tender alone:
        self._rebalance_at = float("inf")
        self._leaving: list[Share] = []
        self._locked_at = float("-inf")
        self._master: str | None = None
        self._told: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DLedgerError as failure:
            if error is None:
                raise
            _log.warning("cannot commit the offsets of group %s: %s", self.group, failure)

    # --- the application ----------------------------------------------------------------------------------------------

    def subscribe(self, topic: str, tags: str = "*") -> None:
        """Consume a topic: all messages, or those with one of the tags ``"TagA || TagB"``. Before ``start``."""
        if self._streams is not None:
            raise ConfigError(
                ["subscribe before start: the members of a group are told the subscriptions when joining"]
            )
        tags_of_expression(tags)
        self._tags[topic] = tags

    def start(self, handler: Handler | None = None, workers: int = WORKERS) -> None:
        """Join the group; returns when this member knows its queues, which may be none.

        ``handler`` is called with every message on one of ``workers`` threads: when it returns, the message is done,
        and if it raises, sent back. Raises ``NotFoundError`` for a topic that does not exist, and what keeps this
        member from joining.
        """
        if not self._tags:
            raise ConfigError(["subscribe to a topic before starting"])
        with self._life:
            if self._closing.is_set() or self._streams is not None:
                raise UnavailableError("the consumer was started before, or is closed")
            for topic in self._tags:
                if self._topics.find(topic) is None:
                    raise no_such_topic(self._connection, topic)
            subscriptions = [pb.Subscription(topic=one, tag_expression=tags) for one, tags in self._tags.items()]
            request = pb.MembershipRequest(
                group=self.group,
                client_id=self.client_id,
                subscriptions=subscriptions,
                broadcast=self._options.broadcast,
            )
            self._streams = MemberStreams(self._connection, request, self._members_changed)
            self._tender.start()
        try:
            self._wait_assigned(self._streams)
        except DLedgerError:
            self.close()
            raise
        if handler is not None:
            for number in range(workers):
                name = f"rocketstore-worker-{self.group}-{number}"
                worker = threading.Thread(target=self._work, args=(handler,), name=name, daemon=True)
                self._workers.append(worker)
                worker.start()

    def _wait_assigned(self, streams: MemberStreams) -> None:
        deadline = Deadline(self._options.timeout_s)
        while not self._assigned.wait(0.05):
            error = streams.error() if streams.members() is None else None
            if error is not None and (deadline.expired or not is_retried_read(error)):
                raise error
            if deadline.expired:
                raise UnavailableError(f"group {self.group}: no share of the queues within {deadline.timeout_s:g} s")

    def receive(self, timeout_s: float = 1.0) -> GroupDelivery | None:
        """The next message; None if none comes in time, or the consumer is closed. For applications without handler."""
        return self._shares.receive(timeout_s)

    def __iter__(self) -> Iterator[GroupDelivery]:
        """Every message until the consumer is closed. Each must be acknowledged, or sent back."""
        while not self._closing.is_set():
            delivery = self.receive()
            if delivery is not None:
                yield delivery

    def ack(self, delivery: GroupDelivery) -> None:
        """The message is done. It is committed with the next commit if all before it in its queue are done, too."""
        if self._shares.claim(delivery):
            self._finish(delivery)

    def _finish(self, delivery: GroupDelivery) -> None:
        self._shares.finish(delivery)
        if self._leaving:  # perhaps it was the last one that its queue waits for
            self._wake.set()

    def send_back(self, delivery: GroupDelivery, delay_level: int = 0) -> None:
        """The message failed: deliver it again later (1 to 18: after that delay; 0: later each time; -1: never).

        In order, it is tried again in place first. To a broadcast it does not come again. Returns when the master has
        it; until then it is tried again, and if the consumer is closed meanwhile, the message stays uncommitted.
        """
        options = self._options
        if not self._shares.claim(delivery):
            return
        if options.broadcast:
            _log.warning("group %s: %r failed; a broadcast delivers it only once", self.group, delivery)
            self._finish(delivery)
        elif options.ordered and delay_level >= 0:
            if options.retries_max is None or delivery.attempts < options.retries_max:
                self._shares.deliver_again(delivery, ORDERED_PAUSE_S)
            else:
                self._put_back(delivery, -1)
        else:
            self._put_back(delivery, delay_level)

    def return_unused(self, delivery: GroupDelivery) -> None:
        """The message was not looked at: hand it out again."""
        if self._shares.claim(delivery):
            self._shares.deliver_again(delivery, 0.0, counts=False)

    def stop_receiving(self) -> None:
        """Hand out nothing more: the first step of closing."""
        self._shares.close()

    def commit(self) -> None:
        """Commit what is done now."""
        self._commit(list(self._held().values()))

    def lag(self) -> dict[QueueName, int]:
        """For each queue of this member, how many messages follow those handed out; -1: unknown."""
        with self._shares.changed:
            return {
                name: max(one.source.max_offset - one.progress.next, 0) if one.source.max_offset >= 0 else -1
                for name, one in self._shares.queues.items()
            }

    @property
    def queues(self) -> list[QueueName]:
        """The queues that this member has now."""
        return sorted(self._held())

    def close(self) -> None:
        """Wait for running handlers, commit what is done, and leave the group. Idempotent.

        Raises if the commit failed.
        """
        with self._life:
            if self._closing.is_set():
                return
            self._closing.set()
        self._shares.close()
        self._wake.set()
        started = self._streams is not None
        try:
            for thread in (*self._workers, *((self._tender,) if started else ())):
                if thread is not threading.current_thread():
                    thread.join()
            if started:
                self._leave()
        finally:
            if self._streams is not None:
                self._streams.stop()
            sources = [one.source for one in self._held().values()]
            for source in sources:
                source.stop()
            self._connection.close()
            for source in sources:
                source.join()

    def _leave(self) -> None:
        shares = [*self._held().values(), *self._leaving]
        self._commit(shares)
        if self._options.ordered:
            self._unlock(shares)

    # --- handlers -----------------------------------------------------------------------------------------------------

    def _work(self, handler: Handler) -> None:
        while not self._closing.is_set():
            delivery = self._shares.receive(LOOK_S)
            if delivery is None:
                continue
            try:
                handler(delivery)
            except Exception:  # noqa: BLE001  # whatever the application's code raises, the message comes again
                _log.warning("group %s: the handler failed with %r", self.group, delivery, exc_info=True)
                self.send_back(delivery)
            else:
                self.ack(delivery)

    def _put_back(self, delivery: GroupDelivery, delay_level: int) -> None:
        limit = self._options.retries_max
        request = pb.SendBackRequest(
            group=self.group,
            topic=delivery.message.topic,
            offset=delivery.message.decode().offset,
            delay_level=delay_level,
            retries_max=-1 if limit is None else limit,
        )
        backoff = Backoff(RETRY_WAIT_S_MIN, LOOK_S)
        while not delivery.progress.abandoned:  # otherwise it comes again anyway
            try:
                self._connection.ask_master(SEND_BACK, request, self._connection.deadline())
            except DLedgerError as error:
                if self._closing.is_set():
                    return
                if not is_retried_read(error):
                    _log.warning(
                        "group %s: %r is not taken back, and is tried again here: %s", self.group, delivery, error
                    )
                    self._shares.deliver_again(delivery, LOOK_S)
                    return
                self._closing.wait(backoff.pause())
            else:
                break
        self._finish(delivery)

    # --- the tender's thread ------------------------------------------------------------------------------------------

    def _members_changed(self) -> None:
        self._members_news.set()
        self._wake.set()

    def _rebalance_in(self, seconds: float) -> None:
        self._rebalance_at = min(self._rebalance_at, time.monotonic() + seconds)

    def _cannot_read(self, share: Share, error: DLedgerError) -> None:
        _log.warning("group %s: queue %d of %s: %s", self.group, share.name.queue_id, share.name.topic, error)
        self._shares.remove(share)
        share.progress.abandoned = True
        share.source.stop()

    def _tend(self) -> None:
        look_at, renew_at, commit_at = 0.0, 0.0, time.monotonic() + self._options.commit_s
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= look_at:
                look_at = now + LOOK_S
                self._try("check on the brokers", self._look_after)
            master, self._master = self._master, self._connection.directory.leader
            if self._options.ordered and (now >= renew_at or master != self._master):
                self._try("renew the locks", self._renew)
                renew_at = now + (RENEW_S if self._locked_at >= now else LOOK_S)
            if self._members_news.is_set() or now >= self._rebalance_at:
                self._members_news.clear()
                self._rebalance_at = now + REBALANCE_S
                if not self._try("divide the queues", self._rebalance):
                    self._rebalance_in(LOOK_S)
            if now >= commit_at:
                commit_at = now + self._options.commit_s
                self._try("commit", self._adopt_and_commit)
            if self._leaving:
                self._try("give queues back", self._finish_leaving)
            next_at = min(self._rebalance_at, commit_at, look_at)
            self._wake.wait(max(next_at - time.monotonic(), 0))
            self._wake.clear()

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        """Whether it worked. The same failure is logged once."""
        try:
            action()
        except (DLedgerError, OSError) as error:
            if self._told.get(what) != str(error) and not self._closing.is_set():
                self._told[what] = str(error)
                _log.warning("group %s: cannot %s: %s; retrying", self.group, what, error)
            return False
        self._told.pop(what, None)
        return True

    def _look_after(self) -> None:
        self._connection.seeker.look()
        if self._streams is not None:
            self._streams.look_after()
        master = self._connection.directory.leader
        for share in self._held().values():
            share.source.look_after(master)

    def _held(self) -> dict[QueueName, Share]:
        with self._shares.changed:
            return dict(self._shares.queues)

    # --- who has which queue ------------------------------------------------------------------------------------------

    def _rebalance(self) -> None:
        members = None if self._streams is None else self._streams.members()
        if members is None or self.client_id not in members:
            return  # the answer to our next heartbeat names us
        queues = self._readable()
        wanted: set[QueueName] = set()
        for topic, count in queues.items():
            shared = range(count) if self._options.broadcast else allocate(range(count), members, self.client_id)
            wanted.update(QueueName(topic, one) for one in shared)
        held = self._held()
        self._release([share for name, share in held.items() if name not in wanted])
        leaving = {one.name for one in self._leaving}
        gained = sorted(wanted - held.keys() - leaving)
        if gained:
            if len(members) > 1 and not self._options.broadcast and self._closing.wait(TAKE_OVER_S):
                return
            self._gain(queues, gained)
        if leaving & wanted:
            self._rebalance_in(LOOK_S)
        self._assigned.set()

    def _readable(self) -> dict[str, int]:
        """How many queues each topic has for us."""
        topics = dict.fromkeys(self._tags)
        if not self._options.broadcast:
            topics[f"{RETRY_PREFIX}{self.group}"] = None
        counts: dict[str, int] = {}
        for topic in topics:
            known = self._topics.find(topic)
            if known is None:
                self._rebalance_in(MISSING_TOPIC_S)
            elif known.permission & PERMISSION_READ:
                counts[topic] = known.read_queues
        return counts

    def _gain(self, queues: Mapping[str, int], gained: Sequence[QueueName]) -> None:
        options = self._options
        if options.ordered and not options.broadcast:
            gained = self._lock(gained, wanted=len(gained))
        offsets = self._beginnings.of(queues, gained)
        for name, offset in offsets.items():
            expression = self._tags.get(name.topic, "*")
            pulls = PullOptions(
                group=self.group,
                topic=name.topic,
                tag_expression=expression,
                max_messages=options.pull_messages,
                max_bytes=options.pull_bytes,
                wait_ms=options.pull_wait_ms,
                stock_bytes_max=options.stock_bytes_max,
            )
            share = Share(name, offset, offset, tags_of_expression(expression))
            share.source = QueueFetcher(self._connection, name.queue_id, offset, pulls, self._shares.arrived)
            self._shares.add(share)

    def _release(self, lost: Sequence[Share]) -> None:
        if not lost:
            return
        for share in lost:
            self._shares.remove(share)
            share.source.stop()
        self._leaving += lost
        self._shares.wait_idle(lost, SETTLE_S)
        for share in lost:
            share.source.join()
        self._finish_leaving()

    def _finish_leaving(self) -> None:
        """Commit and unlock; in order only once the message in use is done, because the next member starts then."""
        ready = [one for one in self._leaving if not (self._options.ordered and one.out)]
        try:
            self._commit(ready)
        except DLedgerError as error:
            if is_retried_read(error):
                raise
            _log.warning("group %s: the offsets of queues that it leaves are not committed: %s", self.group, error)
        with self._shares.changed:
            for share in ready:
                share.progress.abandoned = True
        self._leaving = [one for one in self._leaving if one not in ready]
        if self._options.ordered:
            self._unlock(ready)

    # --- locks --------------------------------------------------------------------------------------------------------

    def _wire(self, names: Iterable[QueueName]) -> list[pb.GroupQueue]:
        return [pb.GroupQueue(topic=one.topic, queue_id=one.queue_id) for one in names]

    def _lock(self, names: Sequence[QueueName], *, wanted: int) -> list[QueueName]:
        request = pb.LockQueuesRequest(group=self.group, client_id=self.client_id, queues=self._wire(names))
        answer = self._connection.ask_master(LOCK_QUEUES, request, self._connection.deadline())
        got = [QueueName(one.topic, one.queue_id) for one in answer.queues]
        if len(got) < wanted:  # another member is not done with them yet
            self._rebalance_in(LOOK_S)
        return got

    def _renew(self) -> None:
        if self._options.broadcast:
            return
        began = time.monotonic()
        held = self._held()
        try:
            names = [*held, *(one.name for one in self._leaving)]
            got = set(self._lock(names, wanted=len(names))) if names else set()
        except DLedgerError:
            if began - self._locked_at > LOCK_VALID_S:
                self._mark(held.values(), usable=False)
            raise
        self._locked_at = time.monotonic()
        self._mark(held.values(), usable=True)
        self._release([share for name, share in held.items() if name not in got])

    def _mark(self, shares: Iterable[Share], *, usable: bool) -> None:
        with self._shares.changed:
            for share in shares:
                share.usable = usable
            self._shares.changed.notify_all()

    def _unlock(self, shares: Sequence[Share]) -> None:
        """Best effort: an old lock ends by itself."""
        if not shares or self._options.broadcast:
            return
        names = self._wire(one.name for one in shares)
        request = pb.UnlockQueuesRequest(group=self.group, client_id=self.client_id, queues=names)
        try:
            self._connection.ask_master(UNLOCK_QUEUES, request, self._connection.deadline())
        except DLedgerError as error:
            _log.info("group %s: queues stay locked for a minute: %s", self.group, error)

    # --- offsets ------------------------------------------------------------------------------------------------------

    def _adopt_and_commit(self) -> None:
        """Adopt offsets that were changed elsewhere (reset, or committed by the member before), then commit."""
        held = self._held()
        stored = self._store.fetch({one.topic for one in held})
        for name, share in held.items():
            with self._shares.changed:
                offset, progress = stored.get(name), share.progress
                if offset is None or offset in (share.committed, share.offered) or share.rewind:
                    continue
                if offset > progress.next or (share.committed is not None and offset < share.committed):
                    _log.warning(
                        "group %s: its offset in queue %d of %s was changed to %d elsewhere; continuing there",
                        self.group,
                        name.queue_id,
                        name.topic,
                        offset,
                    )
                    self._shares.go_to(share, offset)
                share.committed = offset
        self._commit(list(held.values()))

    def _commit(self, shares: Sequence[Share]) -> None:
        with self._committing:
            self._commit_once(shares)

    def _commit_once(self, shares: Sequence[Share]) -> None:
        with self._shares.changed:
            places = {
                one: (one.progress.done, one.rewind)
                for one in shares
                if not one.progress.abandoned and (one.rewind or one.progress.done != one.committed)
            }
            for share, (offset, _) in places.items():
                share.offered = offset
        for rewind in (False, True):
            chosen = {share: offset for share, (offset, back) in places.items() if back is rewind}
            if not chosen:
                continue
            self._store.commit({share.name: offset for share, offset in chosen.items()}, rewind=rewind)
            with self._shares.changed:
                for share, offset in chosen.items():
                    share.committed = offset
                    share.rewind = share.rewind and not rewind
