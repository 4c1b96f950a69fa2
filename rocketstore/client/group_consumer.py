"""``GroupConsumer``: a member of a consumer group, which shares the group's queues with the other members."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self, Unpack

from dledger.backoff import Backoff
from dledger.client.security import ClientSecurity
from dledger.client.shared import RETRY_WAIT_S_MIN
from dledger.errors import ConfigError, DLedgerError, UnavailableError
from rocketstore.client.allocation import queues_in_java_order
from rocketstore.client.errors import is_retried_read
from rocketstore.client.group_branch import LOOK_S, Identity
from rocketstore.client.group_division import Division
from rocketstore.client.group_offsets import LocalOffsets
from rocketstore.client.group_options import GroupOptions, GroupSettings
from rocketstore.client.group_places import GivenBrokers, KnownToNameServers, Places
from rocketstore.client.memberships import new_client_id
from rocketstore.client.received import tags_of_expression
from rocketstore.client.shares import GroupDelivery, QueueName, Share, Shares
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger(__name__)
ORDERED_PAUSE_S: Final = 1.0
"""Before a message that failed in order is tried again."""
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
            failed=self._cannot_read,
        )
        self._division: Division | None = None
        self._life = threading.Lock()  # guards start and end
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
        try:
            division.wait_settled(self._options.timeout_s)
        except DLedgerError:
            self.close()
            raise
        if handler is not None:
            for number in range(workers):
                name = f"rocketstore-worker-{self.group}-{number}"
                worker = threading.Thread(target=self._work, args=(handler,), name=name, daemon=True)
                self._workers.append(worker)
                worker.start()

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
        """For each queue of this member, how many messages follow those handed out; -1: unknown."""
        branches = () if self._division is None else self._division.branches()
        lags = {name: -1 for one in branches for name in one.planned}
        with self._shares.changed:
            for name, one in self._shares.queues.items():
                known = one.source.max_offset >= 0
                lags[name] = max(one.source.max_offset - one.progress.next, 0) if known else -1
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
        with self._life:
            if self._closing.is_set():
                return
            self._closing.set()
        self._shares.close()
        try:
            for thread in self._workers:
                if thread is not threading.current_thread():
                    thread.join()
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
        branch = None if self._division is None else self._division.branch(delivery.share.name)
        backoff = Backoff(RETRY_WAIT_S_MIN, LOOK_S)
        if branch is None:  # its brokers are being left: it stays in use, so that the last commit is not behind it
            return
        while not delivery.progress.abandoned:  # otherwise it comes again anyway
            try:
                branch.put_back(request)
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

    def _cannot_read(self, share: Share, error: DLedgerError) -> None:
        _log.warning("group %s: %s: %s", self.group, share.name, error)
        self._shares.remove(share)
        share.progress.abandoned = True
        share.source.stop()
