"""``GroupConsumer``: a member of a consumer group, which shares the group's queues with the other members."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self, Unpack

from dledger.client.security import ClientSecurity
from dledger.errors import ConfigError, DLedgerError, UnavailableError
from rocketstore.client.aio.errors import UnreadableBodyError
from rocketstore.client.aio.received import tags_of_expression
from rocketstore.client.allocation import queues_in_java_order
from rocketstore.client.errors import is_retried_read
from rocketstore.client.group_branch import LOOK_S, Identity, unexpected
from rocketstore.client.group_division import Division
from rocketstore.client.group_offsets import LocalOffsets
from rocketstore.client.group_options import GroupOptions, GroupSettings
from rocketstore.client.group_places import GivenBrokers, KnownToNameServers, Places
from rocketstore.client.shares import GroupDelivery, QueueName, Share, Shares
from rocketstore.message.ids import new_client_id
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger(__name__)
ORDERED_PAUSE_S: Final = 1.0
"""Before a message that failed in order is tried again."""
AGAIN_S_MIN: Final = 10.0
"""The pause before a message that cannot be sent back is tried again here; each further one is three times as long."""
AGAIN_S_MAX: Final = 60.0
"""The longest such pause, and the one before a message that this installation cannot read is looked at again."""
RETRIES: Final = 16
"""How often such a message is tried if only the group's settings, which brokers have, say how often: 16 by default."""
TOLD_MAX: Final = 1000
LATE_S: Final = 10.0
"""How long a message may be in use before it is said that it holds up its queue's position,"""
LATE_AGAIN_S: Final = 60.0
"""and how often a member says so at most."""
LOOK_LATE_S: Final = 1.0
"""How often it is looked which messages take too long, and sent back again what no broker took."""
WORKERS: Final = 4

Handler = Callable[[GroupDelivery], object]


class GroupConsumer:
    """``subscribe``, then ``start`` with a handler; or without one, then ``receive``, ``ack`` and ``send_back``.

    Give either ``name_servers``, which know all groups of brokers that have the topics, or the ``addresses`` of a
    single group of brokers.

    The members of a group divide the queues of their topics among themselves, together with RocketMQ's clients in the
    same group, and anew whenever one joins or leaves, or a topic comes to further brokers. All must have the same
    subscriptions, and know the same brokers. Delivery is at least once: an offset is committed when all messages before
    it are done, so nothing is skipped. Messages come again if they were not committed when their queue changed hands:
    those in use when a member joins or leaves, and those of the last ``commit_s`` when one is killed. A queue may have
    two owners for a moment after a change of members or of the master, and for as long as their routes differ, which
    are refreshed every 30 s. Brokers without a master hold up only their own queues. A message that is sent back,
    because its handler failed, comes again later, each time later, and goes to ``%DLQ%group`` in the end.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str = (),
        *,
        group: str,
        name_servers: Sequence[str] | str = (),
        options: GroupOptions | None = None,
        security: ClientSecurity | None = None,
        **settings: Unpack[GroupSettings],
    ) -> None:
        if not group:
            raise ConfigError(["a member needs the name of its group"])
        if bool(addresses) == bool(name_servers):
            raise ConfigError(["give either name_servers, or the addresses of one group of brokers"])
        self.group = group
        self.client_id: Final = new_client_id()
        self._options = options = options or GroupOptions(**settings)
        security = security or ClientSecurity()
        self._local = LocalOffsets(options.offsets_file) if options.broadcast else None
        self._places: Places
        if name_servers:
            self._places = KnownToNameServers(name_servers, options.timeout_s, security)
        else:
            self._places = GivenBrokers(addresses, options.timeout_s, security)
        self._tags: dict[str, str] = {}
        self._shares = Shares(
            ordered=options.ordered,
            pending_max=options.pending_messages_max,
            pending_bytes_max=options.pending_bytes_max,
            span_max=options.pending_span_max,
            failed=self._cannot_read,
        )
        self._division: Division | None = None
        self._life = threading.RLock()  # guards start and end; a signal's handler may close it while it starts
        self._returning: deque[tuple[GroupDelivery, int]] = deque()  # what no broker has taken back yet
        self._told: set[str] = set()  # errors that were said already
        self._late_told_at = float("-inf")
        self._keeper = threading.Thread(target=self._keep, name=f"rocketstore-keeper-{group}", daemon=True)
        self._closing = threading.Event()
        self._workers: list[threading.Thread] = []

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
        if self._division is not None:
            raise ConfigError(
                ["subscribe before start: the members of a group are told the subscriptions when joining"]
            )
        tags_of_expression(tags)
        self._tags[topic] = tags

    def start(self, handler: Handler | None = None, workers: int = WORKERS) -> None:
        """Join the group; returns when this member knows its queues, which may be none.

        ``handler`` is called with every message on one of ``workers`` threads: when it returns, the message is done,
        and if it raises, sent back. Raises ``NotFoundError`` for a topic that does not exist, and what keeps this
        member from joining. Some brokers may be unavailable: their queues follow.
        """
        if not self._tags:
            raise ConfigError(["subscribe to a topic before starting"])
        with self._life:
            if self._closing.is_set() or self._division is not None:
                raise UnavailableError("the consumer was started before, or is closed")
            for topic in self._tags:
                if self._places.find(topic) is None:
                    raise self._places.missing(topic)
            identity = Identity(self.group, self.client_id, self._options, dict(self._tags))
            division = self._division = Division(self._places, identity, self._shares, self._local)
            division.begin()
            self._keeper.start()
        try:
            division.wait_settled(self._options.timeout_s)
        except DLedgerError:
            self.close()
            raise
        for number in range(workers if handler is not None else 0):
            name = f"rocketstore-worker-{self.group}-{number}"
            worker = threading.Thread(target=self._work, args=(handler,), name=name, daemon=True)
            with self._life:  # it is started, or never in the list, whenever somebody closes
                if self._closing.is_set():
                    raise UnavailableError("the consumer is closed")
                worker.start()
                self._workers.append(worker)

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
        branch = None if self._division is None else self._division.branch(delivery.share.name)
        if branch is not None:
            branch.message_done()

    def send_back(self, delivery: GroupDelivery, delay_level: int = 0) -> None:
        """The message failed: deliver it again later (1 to 18: after that delay; 0: later each time; -1: never).

        In order, it is tried again in place first. To a broadcast it does not come again. Returns when the master has
        it, or after ``timeout_s``: it is sent back again in the background then, and if the consumer is closed
        meanwhile, the message stays uncommitted. One that no broker accepts back is tried again here, later each time,
        as often as ``retries_max`` says; then it is given up, which is logged as an error.
        """
        if self._shares.claim(delivery):
            self._send_back(delivery, delay_level)

    def _send_back(self, delivery: GroupDelivery, delay_level: int = 0) -> None:
        options = self._options
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
        """Commit what is done now, at all brokers; then raise the first error, if there was one."""
        errors: list[DLedgerError] = []
        for one in () if self._division is None else self._division.branches():
            try:
                one.commit()
            except DLedgerError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def lag(self) -> dict[QueueName, int]:
        """For each queue of this member, how many messages follow those that are all done; -1: unknown."""
        branches = () if self._division is None else self._division.branches()
        lags = {name: -1 for one in branches for name in one.planned}
        with self._shares.changed:
            for name, one in self._shares.queues.items():
                known = one.source.max_offset >= 0
                lags[name] = max(one.source.max_offset - one.progress.done, 0) if known else -1
        return lags

    @property
    def queues(self) -> list[QueueName]:
        """The queues that this member has now, in Java's order."""
        with self._shares.changed:
            return queues_in_java_order(self._shares.queues)

    def close(self) -> None:
        """Wait for running handlers, commit what is done, and leave the group. Idempotent.

        Raises if the commit failed.
        """
        if self._shares.is_left_behind:
            return
        with self._life:
            if self._closing.is_set():
                return
            self._closing.set()
        self._shares.close()
        try:
            for thread in self._workers:
                if thread is not threading.current_thread():
                    thread.join()
            if self._keeper.ident is not None and self._keeper is not threading.current_thread():
                self._keeper.join()
            if self._division is not None:
                self._division.close()
        finally:
            self._places.close()

    # --- handlers -----------------------------------------------------------------------------------------------------

    def _work(self, handler: Handler) -> None:
        while not self._closing.is_set():
            delivery = self._shares.receive(LOOK_S)
            if delivery is None:
                continue
            try:
                try:
                    handler(delivery)
                except BaseException as error:  # noqa: BLE001  # also SystemExit: whatever it is, the message comes again
                    self.failed(delivery, error)
                else:
                    self.ack(delivery)
            except Exception as error:  # noqa: BLE001  # else a worker would end without a word
                unexpected(self.group, f"settle {delivery!r}", error)

    def failed(self, delivery: GroupDelivery, error: BaseException) -> None:
        """The handler raised this: log it, and send the message back."""
        if isinstance(error, UnreadableBodyError):  # sending it back would make it no more readable
            self._hold(delivery, error)
            return
        _log.warning("group %s: the handler failed with %r", self.group, delivery, exc_info=error)
        self.send_back(delivery)

    def _hold(self, delivery: GroupDelivery, error: UnreadableBodyError) -> None:
        if self._shares.claim(delivery):
            self._say_once(f"{delivery!r} and others like it are kept until they can be read", error)
            self._shares.deliver_again(delivery, AGAIN_S_MAX, counts=False)

    def _say_once(self, what: str, error: DLedgerError) -> None:
        """Not for every message that meets the same error."""
        if str(error) not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(str(error))
            _log.error("group %s: %s: %s", self.group, what, error)

    def _put_back(self, delivery: GroupDelivery, delay_level: int) -> None:
        try:
            self._offer(delivery, delay_level)
        except DLedgerError as error:
            if delivery.progress.abandoned:
                self._finish(delivery)  # it comes again anyway
            elif is_retried_read(error):
                self._say_once(f"{delivery!r} is not taken back, and is sent back again until it is", error)
                self._returning.append((delivery, delay_level))
            else:
                self._try_here(delivery, delay_level, error)

    def _offer(self, delivery: GroupDelivery, delay_level: int) -> None:
        """Send it back once. Raises ``DLedgerError``."""
        limit = self._options.retries_max
        branch = None if self._division is None else self._division.branch(delivery.share.name)
        if branch is None:  # its brokers are being left: it stays in use, so that the last commit is not behind it
            return
        message = delivery.message.decode()
        request = pb.SendBackRequest(
            group=self.group,
            topic=message.topic,
            offset=message.offset,
            delay_level=-1 if self._has_had_its_tries(delivery) else delay_level,
            retries_max=-1 if limit is None else limit,
        )
        if not delivery.progress.abandoned:
            branch.put_back(request)
        self._finish(delivery)

    def _has_had_its_tries(self, delivery: GroupDelivery) -> bool:
        """Whether it was tried here as often as allowed. What was sent back is the brokers' to count."""
        limit = self._options.retries_max
        return delivery.tries_here > 0 and (
            delivery.tries_here >= RETRIES if limit is None else delivery.attempts >= limit
        )

    def _try_here(self, delivery: GroupDelivery, delay_level: int, error: DLedgerError) -> None:
        """No broker will ever accept it back: the handler gets it again here, but not without end."""
        if delay_level < 0 or self._options.retries_max == 0 or self._has_had_its_tries(delivery):
            _log.error(
                "group %s: %r is given up after %d attempts: it is neither retried nor a dead letter, because it is "
                "refused: %s",
                self.group,
                delivery,
                delivery.attempts + 1,
                error,
            )
            self._finish(delivery)
            return
        pause_s = min(AGAIN_S_MIN * 3.0**delivery.tries_here, AGAIN_S_MAX)
        _log.warning(
            "group %s: %r is not taken back, and is tried again here in %g s: %s", self.group, delivery, pause_s, error
        )
        self._shares.deliver_again(delivery, pause_s)

    # --- what takes long ----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_LATE_S):
            try:
                for _ in range(len(self._returning)):
                    self._put_back(*self._returning.popleft())
                    if self._closing.is_set():
                        return
                self._look_for_late_ones()
            except Exception as error:  # noqa: BLE001  # as in the workers
                unexpected(self.group, "look after its messages", error)

    def _look_for_late_ones(self) -> None:
        timeout_s = self._options.consume_timeout_s
        now = time.monotonic()
        for one in self._shares.overdue(now - min(LATE_S, timeout_s)):
            in_use_s = now - one.since
            holds_up = one.message.queue_offset == one.progress.done
            if holds_up and not one.told and now >= self._late_told_at + LATE_AGAIN_S:
                one.told, self._late_told_at = True, now
                _log.warning(
                    "group %s: %r has been in use for %.0f s; the group's position in %s stays before it",
                    self.group,
                    one,
                    in_use_s,
                    one.share.name,
                )
            if in_use_s >= timeout_s and not self._options.ordered and self._shares.claim(one):
                _log.warning(
                    "group %s: %r is sent back, because it is not done after %.0f s (consume_timeout_s)",
                    self.group,
                    one,
                    in_use_s,
                )
                self._send_back(one)

    def _cannot_read(self, share: Share, error: DLedgerError) -> None:
        _log.warning("group %s: %s: %s", self.group, share.name, error)
        self._shares.remove(share)
        share.progress.abandoned = True
        share.source.stop()
