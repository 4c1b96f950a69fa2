"""What a member of a consumer group does at one group of brokers: joins, takes and leaves queues, locks, commits.

Each has a thread of its own, so that brokers without a master hold up nothing but their own queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from dledger.errors import DLedgerError, UnavailableError
from dledger.records import record
from rocketstore.client.aio.received import sent_expression, tags_of_expression
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import NotAllowedNowError, NotFoundError, OtherIncarnationError, is_retried_read
from rocketstore.client.fetcher import PullOptions, QueueFetcher
from rocketstore.client.group_offsets import LOOKS_MAX, Beginnings, OffsetStore
from rocketstore.client.group_options import GroupOptions
from rocketstore.client.memberships import MemberStreams
from rocketstore.client.methods import LOCK_QUEUES, SEND_BACK, UNLOCK_QUEUES
from rocketstore.client.shares import QueueName, Share, Shares
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger(__name__)
REBALANCE_S: Final = 20.0
"""How often a member takes its queues without being told to: those that it had to leave may be readable again."""
LOOK_S: Final = 1.0
"""How often it checks on pulls, streams and the master, and retries what failed."""
SETTLE_S: Final = 0.2
"""How long a member that loses queues waits for messages in use before it commits."""
TAKE_OVER_S: Final = 0.3
"""How long a member that gains queues waits before it asks where to begin, so that the one before can commit."""
RENEW_S: Final = 20.0
"""How often locks are renewed."""
COMMIT_PAUSE_S: Final = 0.05
"""Before a commit looks again whether a broker that has become master still has what was read."""
LOCK_VALID_S: Final = 30.0
"""How long a lock counts without a renewal; the broker's lasts a minute."""


@record(frozen=True, slots=True)
class Identity:
    """Which member of which group this is, and what it subscribed to: tag expressions by topic."""

    group: str
    client_id: str
    options: GroupOptions
    tags: Mapping[str, str]

    def heartbeat(self) -> pb.MembershipRequest:
        """What brokers are told."""
        return pb.MembershipRequest(
            group=self.group,
            client_id=self.client_id,
            subscriptions=[
                pb.Subscription(topic=one, tag_expression=sent_expression(tags)) for one, tags in self.tags.items()
            ],
            broadcast=self.options.broadcast,
        )


@record(frozen=True, slots=True)
class Assignment:
    """Which queues of a branch are this member's. ``alone``: no other member may have had them."""

    wanted: frozenset[QueueName] = frozenset()
    alone: bool = True


class Branch:
    """Owns its connection. ``changed`` is called, on any thread, when the members may have changed."""

    def __init__(
        self,
        name: str,
        connection: BrokerConnection,
        identity: Identity,
        shares: Shares,
        store: OffsetStore,
        changed: Callable[[], None],
    ) -> None:
        self.name: Final = name
        self.beginnings: Final = Beginnings(connection, store, name)
        self.failure: DLedgerError | OSError | None = None
        """Why the plan has not been carried out, or in the end the last offsets not committed."""
        self._connection = connection
        self._identity = identity
        self._options = identity.options
        self._shares = shares
        self._store = store
        self._streams = MemberStreams(connection, identity.heartbeat(), changed)
        self._locks = identity.options.ordered and not identity.options.broadcast
        self._plan: Assignment | None = None
        self._carried_out: Assignment | None = None
        self._news = threading.Event()  # there is a plan
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._committing = threading.Lock()
        # Of the thread alone:
        self._apply_at = float("inf")
        self._leaving: list[Share] = []
        self._master: str | None = None
        self._told: dict[str, str] = {}
        thread_name = f"rocketstore-group-{identity.group}-{name}".removesuffix("-")
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._thread.start()

    # --- for the member -----------------------------------------------------------------------------------------------

    def members(self) -> list[str] | None:
        """The group's members according to the master; None if that is unknown now."""
        return self._streams.members()

    def membership_error(self) -> DLedgerError | None:
        """Why the members are unknown, if so."""
        return None if self.members() is not None else self._streams.error()

    @property
    def is_settled(self) -> bool:
        """Whether the plan has been carried out."""
        return self._plan is not None and self._carried_out is self._plan

    @property
    def is_handling(self) -> bool:
        """Whether the application may still be at work on a message of an ordered queue that this branch is to leave.

        The next member must not begin before, so the lock is renewed, however long it takes.
        """
        if not self._locks:
            return False
        shares = [*self._held().values(), *self._leaving]
        return any(one.out for one in shares) or not (self.is_settled or self.failure is not None)

    @property
    def planned(self) -> frozenset[QueueName]:
        """The queues that are this member's, though it may not have them yet."""
        plan = self._plan
        return frozenset() if plan is None else plan.wanted

    def assign(self, plan: Assignment) -> None:
        """Take these queues, and leave all others."""
        if plan != self._plan:
            self._plan = plan
            self._news.set()
            self._wake.set()

    def message_done(self) -> None:
        """Perhaps it was the last one that a queue waits for."""
        if self._leaving:
            self._wake.set()

    def put_back(self, request: pb.SendBackRequest) -> None:
        """Send a message back. Raises ``DLedgerError``."""
        self._connection.ask_master(SEND_BACK, request, self._connection.deadline())

    def commit(self) -> None:
        """Commit what is done now. Raises ``DLedgerError``, and ``OSError`` of a file."""
        self._commit_all(list(self._held().values()))

    def stop(self) -> None:
        """Commit, leave the group at these brokers and end; ``join`` waits for it."""
        self._closing.set()
        self._wake.set()

    def join(self) -> None:
        """Wait until the thread has ended; ``failure`` says whether the last commit failed."""
        self._thread.join()

    @property
    def has_ended(self) -> bool:
        """Whether ``join`` would return at once."""
        return not self._thread.is_alive()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        look_at, renew_at, commit_at = 0.0, 0.0, time.monotonic() + self._options.commit_s
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= look_at:
                look_at = now + LOOK_S
                self._try("check on the brokers", self._look_after)
            master, self._master = self._master, self._connection.directory.leader
            if self._locks and (now >= renew_at or master != self._master):
                renew_at = now + (RENEW_S if self._try("renew the locks", self._renew) is None else LOOK_S)
            if self._news.is_set() or now >= self._apply_at:
                self._news.clear()
                self._apply_at = now + REBALANCE_S
                self.failure = self._try("take its queues", self._apply)
                if self.failure is not None:
                    self._apply_in(LOOK_S)
            if now >= commit_at:
                commit_at = now + self._options.commit_s
                self._try("commit", self._adopt_and_commit)
            if self._leaving:
                self._try("give queues back", self._finish_leaving)
            self._wake.wait(max(min(self._apply_at, commit_at, look_at) - time.monotonic(), 0))
            self._wake.clear()
        self._leave()

    def _leave(self) -> None:
        shares = [*self._held().values(), *self._leaving]
        self.failure = None
        try:
            self._commit_all(shares)
            self._unlock([one.name for one in shares])
        except (DLedgerError, OSError) as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001  # told by ``close``
            self.failure = unexpected(self._identity.group, "leave", error)
        finally:
            self._streams.stop()
            for share in shares:
                self._shares.remove(share)
                share.progress.abandoned = True
                share.source.stop()
            self._connection.close()
            for share in shares:
                share.source.join()

    def _apply_in(self, seconds: float) -> None:
        self._apply_at = min(self._apply_at, time.monotonic() + seconds)

    def _try(self, what: str, action: Callable[[], None]) -> DLedgerError | OSError | None:
        """Its error, if it failed. The same one is logged once."""
        try:
            action()
        except (DLedgerError, OSError) as error:
            if self._told.get(what) != str(error) and not self._closing.is_set():
                self._told[what] = str(error)
                at = f" at {self.name}" if self.name else ""
                _log.warning("group %s: cannot %s%s: %s; retrying", self._identity.group, what, at, error)
            return error
        except Exception as error:  # noqa: BLE001  # else locks, commits and rebalancing would end without a word
            return unexpected(self._identity.group, what, error)
        self._told.pop(what, None)
        return None

    def _look_after(self) -> None:
        self._connection.seeker.look()
        self._streams.look_after()
        master = self._connection.directory.leader
        for share in self._held().values():
            share.source.look_after(master)

    def _held(self) -> dict[QueueName, Share]:
        with self._shares.changed:
            return {name: one for name, one in self._shares.queues.items() if name.broker_name == self.name}

    # --- taking and leaving queues ------------------------------------------------------------------------------------

    def _apply(self) -> None:
        plan = self._plan
        if plan is None:
            return
        held = self._held()
        self._release([share for name, share in held.items() if name not in plan.wanted])
        leaving = {one.name for one in self._leaving}
        gained = plan.wanted - held.keys() - leaving
        if gained:
            if not plan.alone and self._closing.wait(TAKE_OVER_S):
                return
            self._gain(plan, gained)
        if leaving & plan.wanted:
            self._apply_in(LOOK_S)
        self._carried_out = plan

    def _gain(self, plan: Assignment, gained: Collection[QueueName]) -> None:
        began = time.monotonic()
        if self._locks:
            gained = self._lock(gained)
        added: set[QueueName] = set()
        try:
            offsets, incarnation = self.beginnings.of(gained)
            for name in sorted(offsets):
                if self._plan is not plan:  # it took long: perhaps others have them by now
                    break
                self._add(name, offsets[name], incarnation, began + LOCK_VALID_S if self._locks else float("inf"))
                added.add(name)
        finally:
            self._unlock([one for one in gained if one not in added])

    def _add(self, name: QueueName, offset: int, incarnation: int, usable_until: float) -> None:
        identity, options = self._identity, self._options
        expression = identity.tags.get(name.topic, "*")
        pulls = PullOptions(
            group=identity.group,
            topic=name.topic,
            tag_expression=sent_expression(expression),
            max_messages=options.pull_messages,
            max_bytes=options.pull_bytes,
            wait_ms=options.pull_wait_ms,
            stock_bytes_max=options.stock_bytes_max,
        )
        share = Share(name, offset, offset, tags_of_expression(expression))
        share.usable_until = usable_until
        share.source = QueueFetcher(self._connection, name.queue_id, offset, pulls, self._shares.arrived, incarnation)
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
            _log.warning(
                "group %s: the offsets of queues that it leaves are not committed: %s", self._identity.group, error
            )
        with self._shares.changed:
            for share in ready:
                share.progress.abandoned = True
        self._leaving = [one for one in self._leaving if one not in ready]
        self._unlock([one.name for one in ready])

    # --- locks --------------------------------------------------------------------------------------------------------

    def _lock(self, names: Collection[QueueName]) -> list[QueueName]:
        """Those that are ours now."""
        request = pb.LockQueuesRequest(
            group=self._identity.group, client_id=self._identity.client_id, queues=_on_wire(names)
        )
        answer = self._connection.ask_master(LOCK_QUEUES, request, self._connection.deadline())
        got = [QueueName(one.topic, one.queue_id, self.name) for one in answer.queues]
        if len(got) < len(names):  # another member is not done with them yet
            self._apply_in(LOOK_S)
        return got

    def _renew(self) -> None:
        began = time.monotonic()
        held = self._held()
        names = [*held, *(one.name for one in self._leaving)]
        got = set(self._lock(names) if names else ())
        with self._shares.changed:
            for share in held.values():
                if share.name in got:
                    share.usable_until = began + LOCK_VALID_S
            self._shares.changed.notify_all()
        self._release([share for name, share in held.items() if name not in got])

    def _unlock(self, names: Collection[QueueName]) -> None:
        """Best effort: an old lock ends by itself."""
        if not names or not self._locks:
            return
        request = pb.UnlockQueuesRequest(
            group=self._identity.group,
            client_id=self._identity.client_id,
            queues=_on_wire(names),
        )
        try:
            self._connection.ask_master(UNLOCK_QUEUES, request, self._connection.deadline())
        except DLedgerError as error:
            _log.info("group %s: queues stay locked for a minute: %s", self._identity.group, error)

    # --- offsets ------------------------------------------------------------------------------------------------------

    def _adopt_and_commit(self) -> None:
        """Adopt offsets that were changed elsewhere (reset, or committed by the member before), then commit."""
        self._commit(list(self._held().values()))

    def _adopt_changes(self, shares: Sequence[Share]) -> int:
        """Returns the incarnation of the broker for which ours may be committed then."""
        stored, incarnation = self._store.fetch({one.name.topic for one in shares})
        gone: list[Share] = []
        for share in shares:
            same = self._has_what_was_read(share, incarnation)
            share.awaits_look = same is False and not share.source.has_looked_at(incarnation)
            unsure = share.source.has_nothing_to_compare
            offset = stored.get(share.name)
            first = self._first(share) if unsure and offset is None else None
            with self._shares.changed:
                told = offset is not None or first is not None
                share.in_doubt = not (same or (unsure and told))
                if first is not None:
                    self._shares.go_to(share, first, incarnation)
                elif offset is not None:
                    self._adopt(share, offset, incarnation, unsure=unsure)
                if unsure and told:
                    share.source.confirm(incarnation)
                if offset is not None:
                    share.committed = offset
                elif share.committed is not None and not share.in_doubt:
                    share.committed = share.offered = None
                    gone.append(share)
        if gone:
            _log.warning(
                "group %s: its offsets are gone: the group or a topic was deleted, or the broker lost its disk; they "
                "are stored again (%s)",
                self._identity.group,
                ", ".join(f"{one.name}: {one.progress.done}" for one in gone),
            )
        return incarnation

    def _adopt(self, share: Share, offset: int, incarnation: int, *, unsure: bool) -> None:
        """Go there if it is not ours; requires the lock of the shares."""
        progress = share.progress
        if unsure:
            before = offset < progress.done
        elif offset in (share.committed, share.offered) or share.rewind:
            return
        else:
            before = share.committed is not None and offset < share.committed
        if offset > progress.next or before:
            _log.warning(
                "group %s: its offset in %s was changed to %d elsewhere; continuing there",
                self._identity.group,
                share.name,
                offset,
            )
            self._shares.go_to(share, offset, incarnation)
            share.in_doubt = False

    def _has_what_was_read(self, share: Share, incarnation: int) -> bool | None:
        """None: it may not be read now, perhaps later."""
        try:
            return share.source.is_at(incarnation)
        except (NotAllowedNowError, NotFoundError):
            return None

    def _first(self, share: Share) -> int | None:
        """Where the queue begins; None if it may not be read."""
        return self.beginnings.offsets_at([share.name], "first").get(share.name)

    def _commit_all(self, shares: Sequence[Share]) -> None:
        """Commit, once it is known that the broker still has what was read.

        Raises ``DLedgerError`` if that is not known soon.
        """
        deadline = self._connection.deadline()
        while True:
            self._commit(shares)
            with self._shares.changed:
                waiting = [
                    one.name
                    for one in shares
                    if one.in_doubt
                    and one.awaits_look
                    and not one.progress.abandoned
                    and one.progress.done != one.committed
                ]
            if not waiting:
                return
            if deadline.expired:
                raise UnavailableError(
                    f"group {self._identity.group}: the offsets of {', '.join(map(str, waiting))} are not committed: "
                    "their broker was restarted or replaced, and it is not known yet whether it still has what was read"
                )
            time.sleep(COMMIT_PAUSE_S)

    def _commit(self, shares: Sequence[Share]) -> None:
        """Also of queues that are left: a position that was reset, or is gone, is not overwritten."""
        if not shares:
            return
        with self._committing:  # from before the look on: a commit after it would seem to have been undone
            for left in reversed(range(LOOKS_MAX)):
                incarnation = self._adopt_changes(shares)
                try:
                    self._commit_once(shares, incarnation)
                except OtherIncarnationError:
                    if not left:
                        raise
                else:
                    return

    def _commit_once(self, shares: Sequence[Share], incarnation: int) -> None:
        with self._shares.changed:
            places = {
                one: (one.progress.done, one.rewind)
                for one in shares
                if not (one.progress.abandoned or one.in_doubt) and (one.rewind or one.progress.done != one.committed)
            }
            for share, (offset, _) in places.items():
                share.offered = offset
        for rewind in (False, True):
            chosen = {share: offset for share, (offset, back) in places.items() if back is rewind}
            if not chosen:
                continue
            self._store.commit({share.name: offset for share, offset in chosen.items()}, incarnation, rewind=rewind)
            with self._shares.changed:
                for share, offset in chosen.items():
                    share.committed = offset
                    share.rewind = share.rewind and not rewind


def unexpected(group: str, what: str, error: Exception) -> UnavailableError:
    """Log a defect with its traceback; returns what the member is told."""
    _log.error("group %s: cannot %s, unexpectedly: %r", group, what, error, exc_info=error)
    return UnavailableError(f"group {group}: cannot {what}: unexpected {error!r}")


def _on_wire(names: Iterable[QueueName]) -> list[pb.GroupQueue]:
    return [pb.GroupQueue(topic=one.topic, queue_id=one.queue_id) for one in names]
