"""Divides a group's queues: finds out where they are and who the members are, and tells each branch which are ours.

Every member does so by the same rule, RocketMQ's clients included: the queues of all groups of brokers that have the
topic, in Java's order, go to the members in Java's order, in equal runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

from dledger.access.permissions import RETRY_PREFIX
from dledger.client.shared import Deadline
from dledger.errors import ConfigError, DLedgerError, UnavailableError
from rocketstore.client.allocation import allocate, queues_in_java_order
from rocketstore.client.errors import is_retried_read
from rocketstore.client.group_branch import LOOK_S, Assignment, Branch, Identity, unexpected
from rocketstore.client.group_offsets import BrokerOffsets, OffsetStore
from rocketstore.client.group_places import Places
from rocketstore.client.shares import QueueName, Shares
from rocketstore.nameserver.groups import BrokerGroup, TopicShare

_log = logging.getLogger(__name__)
MISSING_TOPIC_S: Final = 5.0
"""How often it looks for a topic that does not exist: the one of retries is made when a member joins."""
RETIRE_S: Final = 60.0
"""How long a member stays at brokers without a topic of its own: they may have it again soon."""
POLL_S: Final = 0.05
_T = TypeVar("_T")


class Division:
    """Owns the branches, one for each group of brokers. ``local`` keeps the offsets; None: the brokers do."""

    def __init__(self, places: Places, identity: Identity, shares: Shares, local: OffsetStore | None) -> None:
        self._places = places
        self._identity = identity
        self._shares = shares
        self._local = local
        self._branches: dict[str, Branch] = {}  # replaced, never changed
        self._news = threading.Event()
        self._closing = threading.Event()
        self._failure: DLedgerError | OSError | None = None
        self._refused: dict[str, ConfigError] = {}  # brokers that may not be connected to; replaced, never changed
        self._is_divided = False
        # Of the thread alone:
        self._retired: list[Branch] = []
        self._named_at: dict[str, float] = {}
        self._has_begun = False
        self._missing: dict[str, float] = {}
        self._told = ""
        name = f"rocketstore-division-{identity.group}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # --- for the member -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Join."""
        if not self._closing.is_set():
            self._thread.start()

    def wait_settled(self, timeout_s: float) -> None:
        """Wait until this member has its queues; for brokers that do not answer, not longer than ``timeout_s``.

        Raises what keeps it from joining.
        """
        deadline = Deadline(timeout_s)
        while True:
            branches = self.branches()
            denied = [error for one in branches if (error := one.membership_error()) and not is_retried_read(error)]
            for refusal in (*self._refused.values(), *denied):
                raise refusal
            settled = [one for one in branches if one.is_settled]
            tried = [one for one in branches if one.is_settled or one.failure is not None]
            if self._is_divided and settled and (len(tried) == len(branches) or deadline.expired):
                return
            if deadline.expired:
                raise self._why_late(deadline)
            self._closing.wait(POLL_S)
            if self._closing.is_set():
                raise UnavailableError("the consumer is closed")

    def _why_late(self, deadline: Deadline) -> DLedgerError:
        errors = [one.membership_error() or one.failure for one in self.branches()]
        known = next((one for one in (*errors, self._failure) if isinstance(one, DLedgerError)), None)
        return known or UnavailableError(
            f"group {self._identity.group}: no share of the queues within {deadline.timeout_s:g} s"
        )

    def branches(self) -> list[Branch]:
        """One for each group of brokers."""
        return list(self._branches.values())

    def branch(self, queue: QueueName) -> Branch | None:
        """Where this queue is; None if it is not consumed any more."""
        return self._branches.get(queue.broker_name)

    def close(self) -> None:
        """Commit, and leave the group everywhere. Raises the first error, after all have had their turn."""
        self._closing.set()
        self._news.set()
        self._places.stop()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        branches = [*self._branches.values(), *self._retired]
        for one in branches:
            one.stop()
        for one in branches:
            one.join()
        for one in self._branches.values():
            if one.failure is not None:
                raise one.failure

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._divide()
                self._failure, self._told = None, ""
            except (DLedgerError, OSError) as error:
                self._failure = error
                if str(error) != self._told and not self._closing.is_set():
                    self._told = str(error)
                    _log.warning("group %s: cannot divide the queues: %s; retrying", self._identity.group, error)
            except Exception as error:  # noqa: BLE001  # else nothing would ever be divided again
                self._failure = unexpected(self._identity.group, "divide the queues", error)
            self._news.wait(LOOK_S)
            self._news.clear()

    def _divide(self) -> None:
        places = self._find(self._identity.tags)
        groups = {share.group.name: share.group for shares in places.values() for share in shares}
        self._open(groups)
        self._retire(groups)
        members = self._members(groups)
        if self._identity.client_id not in members:
            return  # the answer to our next heartbeat names us
        if not self._has_begun:
            self._begin(places)
            self._has_begun = True
        if not self._identity.options.broadcast:  # made when a member joins
            places |= self._find([f"{RETRY_PREFIX}{self._identity.group}"])
        wanted = self._ours(places, members)
        for one in self.branches():
            mine = frozenset(name for name in wanted if name.broker_name == one.name)
            one.assign(Assignment(mine, alone=len(members) == 1 or self._identity.options.broadcast))
        self._is_divided = True

    def _find(self, topics: Iterable[str]) -> dict[str, tuple[TopicShare, ...]]:
        answering = {one.name for one in self.branches() if one.members() is not None}
        places: dict[str, tuple[TopicShare, ...]] = {}
        for topic in topics:
            now = time.monotonic()
            if now < self._missing.get(topic, now):
                continue
            found = self._places.find(topic, answering)
            if found is None:
                self._missing[topic] = now + MISSING_TOPIC_S
            else:
                self._missing.pop(topic, None)
                places[topic] = found
        return places

    def _open(self, groups: Mapping[str, BrokerGroup]) -> None:
        for one in self._retired:
            if one.has_ended and one.failure is not None:
                _log.warning("group %s: left %s without a last commit: %s", self._identity.group, one.name, one.failure)
        self._retired = [one for one in self._retired if not one.has_ended]
        leaving = {one.name for one in self._retired}
        refused: dict[str, ConfigError] = {}
        for name, group in groups.items():
            self._named_at[name] = time.monotonic()
            if name not in self._branches and name not in leaving:
                try:
                    connection = self._places.connect(group)
                except ConfigError as error:  # an address that needs TLS: the others' queues are divided all the same
                    refused[name] = error
                    if name not in self._refused:
                        _log.warning("group %s: cannot connect to %s: %s", self._identity.group, name, error)
                    continue
                identity = self._identity
                store = self._local or BrokerOffsets(connection, identity.group, name)
                branch = Branch(name, connection, identity, self._shares, store, self._news.set)
                self._branches = {**self._branches, name: branch}
        self._refused = refused

    def _retire(self, groups: Mapping[str, BrokerGroup]) -> None:
        """Leave brokers that have no topic of ours any more, unless there can be no others: these have no name."""
        for name in self._branches.keys() - groups.keys() - {""}:
            if time.monotonic() > self._named_at[name] + RETIRE_S:
                branch = self._branches[name]
                branch.assign(Assignment())
                self._retired.append(branch)
                self._branches = {one: kept for one, kept in self._branches.items() if one != name}
        for one in self._retired:
            if not one.is_handling:  # until then it keeps its locks
                one.stop()

    def _members(self, groups: Mapping[str, BrokerGroup]) -> set[str]:
        """All that any master knows: one that has just started knows few, and who left is soon unknown to all."""
        return {client_id for one in self.branches() if one.name in groups for client_id in one.members() or ()}

    def _ours(self, places: Mapping[str, tuple[TopicShare, ...]], members: set[str]) -> set[QueueName]:
        wanted: set[QueueName] = set()
        for topic, shares in places.items():
            queues = queues_in_java_order(
                QueueName(topic, queue_id, one.group.name)
                for one in shares
                if one.is_readable
                for queue_id in range(one.read_queues)
            )
            if self._identity.options.broadcast:
                wanted.update(queues)
            else:
                wanted.update(allocate(queues, members, self._identity.client_id))
        return wanted

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _begin(self, places: Mapping[str, tuple[TopicShare, ...]]) -> None:
        """If the group is new in a topic, store everywhere where it begins. It is not if any brokers have an offset.

        Brokers that do not answer soon are left out: their queues begin with the first message, so nothing is missed.
        """
        by_branch: dict[str, dict[str, int]] = {}
        for topic, shares in places.items():
            for one in shares:
                if one.is_readable:
                    by_branch.setdefault(one.group.name, {})[topic] = one.read_queues
        branches = [one for one in self.branches() if one.name in by_branch]
        start = self._identity.options.start
        surveys = self._at_all(branches, lambda one: one.beginnings.survey(by_branch[one.name], start))
        begun = {topic for found in surveys.values() for topic, offsets in found.items() if offsets is None}
        made = {
            one: {name: at for topic in found.keys() - begun for name, at in (found[topic] or {}).items()}
            for one, found in surveys.items()
        }
        self._at_all([one for one in made if made[one]], lambda one: one.beginnings.begin(made[one]))

    def _at_all(self, branches: Sequence[Branch], ask: Callable[[Branch], _T]) -> dict[Branch, _T]:
        """The answers of those that answer soon. Raises the first error if none does."""
        timeout_s = self._identity.options.timeout_s / min(len(branches) or 1, 2)
        pool = ThreadPoolExecutor(len(branches) or 1, f"rocketstore-begin-{self._identity.group}")
        asked = {one: pool.submit(ask, one) for one in branches}
        wait(asked.values(), timeout_s)
        pool.shutdown(wait=False, cancel_futures=True)
        answers: dict[Branch, _T] = {}
        errors: list[DLedgerError] = []
        for one, future in asked.items():
            try:
                answers[one] = future.result(0)
            except DLedgerError as error:
                errors.append(error)
            except TimeoutError:
                errors.append(UnavailableError(f"no answer from {one.name or 'the brokers'} within {timeout_s:g} s"))
        if errors and not answers:
            raise errors[0]
        for why in errors:
            _log.warning(
                "group %s: it may be new at some brokers, and begins there with the first message: %s",
                self._identity.group,
                why,
            )
        return answers
