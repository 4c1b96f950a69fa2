"""Finds the leader and the addresses of all servers, for clients of the log and of brokers.

``Directory`` is what a client knows; ``Search`` is one round of asking. Neither sends anything: their user asks the
addresses that the search names and feeds it the answers as they arrive.

A server that claims to lead is believed at once, unless it has just failed as the leader, or is doubted because it is
silent or may have been replaced. Then it is believed only if a majority follows it in its term, or no answer reports a
newer term.

Addresses of nodes are given to the client, or advertised by the nodes. A node's advertised address is right inside its
own network and may be useless elsewhere: a container advertises ``n1:10921``, which only other containers can resolve,
while the client reached it at a published port. So the address at which a node has answered comes first. A node that
has not answered is looked for at its advertised address only once every given address has been tried, because it may be
behind one of them.

``LeaderFinder`` asks all servers for their status.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Final, Generic, TypeVar

from dledger.client.shared import TimeLimit
from dledger.errors import (
    AccessDeniedError,
    ConfigError,
    DLedgerError,
    IdentityError,
    InvalidRequestError,
    LeaderHint,
    LeaderNotReadyError,
    OutOfOrderSequenceError,
    PendingFullError,
    RequestTimeoutError,
    TlsError,
    TooManyProducersError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.records import record
from dledger.rpc.ports import NodeStatus
from dledger.types import MemberRole, Role
from dledger.values import parse_address, split

KNOWN_MAX: Final = 64
"""The limit of remembered nodes of each kind, the most recent ones: addresses may change with every restart, for
years, and a server may report anything.
"""
_T = TypeVar("_T")


class AddressBook:
    """The known addresses of nodes. Not thread-safe: its owner's lock guards it."""

    def __init__(self, given: tuple[str, ...]) -> None:
        self._given = given
        self._untried = set(given)
        self._met: dict[str, str] = {}  # where each node answered last
        self._shared: dict[str, None] = {}  # where several nodes answer: a load balancer
        self._said: dict[str, str] = {}  # each node's advertised address
        self._hinted: dict[str, None] = {}  # advertised addresses without a node name; an ordered set

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address worth asking: the given ones, and once those were tried, the advertised ones of other nodes."""
        met = {node: at for node, at in self._met.items() if at not in self._shared}
        known = (*self._given, *met.values())
        if not self._untried:
            nodes_said = set(self._said.values())
            known += tuple(address for node, address in self._said.items() if node not in met)
            known += tuple(address for address in self._hinted if address not in nodes_said)
        return tuple(dict.fromkeys(known))

    def record_answer(self, address: str, node: str) -> None:
        """``node`` answered at ``address``."""
        self._untried.discard(address)
        if any(at == address and other != node for other, at in self._met.items()):
            _put_last(self._shared, address, None)
        _put_last(self._met, node, address)

    def record_tried(self, address: str) -> None:
        """``address`` was tried, whatever the outcome."""
        self._untried.discard(address)

    def record_advertised(self, node: str, address: str) -> None:
        """``node`` is advertised at ``address``."""
        _put_last(self._said, node, address)

    def find(self, node: str, said: str = "") -> str | None:
        """The address of a node advertised at ``said``; None if it may be behind a given one not yet tried."""
        at = self._met.get(node)
        if at is not None and at not in self._shared:
            return at
        said = said or self._said.get(node, "")
        if at is None and self._untried and said not in self._given:
            return None
        return said or at

    def find_advertised(self, said: str) -> str | None:
        """``find`` for a node known only by its advertised address."""
        for node, address in self._said.items():
            if address == said:
                return self.find(node, said)
        if self._untried and said not in self._given:
            return None
        _put_last(self._hinted, said, None)
        return said


def _put_last(known: dict[str, _T], key: str, value: _T) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > KNOWN_MAX:
        del known[next(iter(known))]


DISCOVERY_TIMEOUT_S: Final = 1.0
"""How long one round of searching for the leader may take."""
SILENT_S: Final = 30.0
"""How long a server that did not answer in time is asked last."""
_LOOK_TIMEOUT_S: Final = 0.5
"""How long to wait for silent servers while a leader is known but doubted."""

_OF_A_LEADER: Final = (
    LeaderNotReadyError,
    PendingFullError,
    OutOfOrderSequenceError,
    UnknownProducerError,
    TooManyProducersError,
    InvalidRequestError,
    AccessDeniedError,
)
"""Errors that do not speak against a server's leadership."""
_HOPELESS: Final = (InvalidRequestError, IdentityError, AccessDeniedError)
_SILENCE: Final = (UnavailableError, RequestTimeoutError)


@record(frozen=True, slots=True)
class ServerReport:
    """A server's report about itself and its group."""

    node: str
    """Its name; empty for a broker without a group."""
    leads: bool
    term: int
    leader: LeaderHint | None
    members: Mapping[str, str]
    """Every member's name and advertised address, which is empty if unknown."""
    learners: frozenset[str] = frozenset()
    """The members that do not count."""


def report_of_node(status: NodeStatus) -> ServerReport:
    """Convert a node's metadata."""
    members: dict[str, str] = {member.node_id: member.client_address for member in status.members}
    learners = frozenset(member.node_id for member in status.members if member.role is MemberRole.LEARNER)
    return ServerReport(status.node_id, status.role is Role.LEADER, status.term, status.leader, members, learners)


def most_telling(failures: Iterable[DLedgerError]) -> DLedgerError:
    """Of several servers' failures, the one to report: first a refusal, then a failed TLS handshake, silence last."""
    return min(failures, key=_silence_of)


def nobody_answers(failures: Iterable[DLedgerError]) -> DLedgerError:
    """The error to report if no server answered: the most telling failure; if all are silent, one that names each."""
    found = list(failures)
    telling = most_telling(found)
    if len(found) == 1 or not isinstance(telling, _SILENCE):
        return telling
    together = type(telling)("nobody answers: " + "; ".join(map(str, found)))
    together.outcome = "not_applied"
    return together


def _silence_of(failure: DLedgerError) -> int:
    return 0 if isinstance(failure, _HOPELESS) else 2 if isinstance(failure, _SILENCE) else 1


def parse_addresses(addresses: Sequence[str] | str) -> tuple[str, ...]:
    """Split one address, several separated by commas or semicolons, or a sequence.

    Raises ``ConfigError`` for none, and for one that cannot be an address.
    """
    parts = split(addresses, ",;") if isinstance(addresses, str) else addresses
    found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not found:
        raise ConfigError(["no address given: give host:port of at least one node"])
    if problems := [problem for one in found if (problem := _address_problem(one))]:
        raise ConfigError(problems)
    return found


def _address_problem(address: str) -> str:
    """Why it cannot be one; empty if it can. gRPC knows further kinds by their scheme."""
    if address.partition(":")[0] in ("unix", "unix-abstract", "dns", "ipv4", "ipv6"):
        return ""
    try:
        parse_address(address)
    except ValueError as error:
        return str(error)
    return ""


class Directory:
    """The servers a client knows: configured and learnt addresses, and the leader. Thread-safe.

    ``leader_is``: the word for the leader in error messages.
    """

    def __init__(self, addresses: tuple[str, ...], leader_is: str = "leader") -> None:
        self.leader_is: Final = leader_is
        self._lock = threading.Lock()  # guards all fields
        self._addresses = AddressBook(addresses)
        self._leader: str | None = None
        self._suspect: str | None = None
        self._silent: dict[str, float] = {}  # until when
        self._turn = 0

    @property
    def leader(self) -> str | None:
        """The address that most likely leads."""
        return self._leader

    @property
    def suspect(self) -> str | None:
        """The last server that failed as the leader: its own claim is not enough to trust it again."""
        return self._suspect

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address worth asking: the given ones, then learnt ones of servers that answer at no given one."""
        with self._lock:
            return self._addresses.addresses

    def candidates(self) -> tuple[str, ...]:
        """``addresses`` in the order to ask: the leader, the others in rotation to spread load, silent ones last."""
        known, leader = self.addresses, self._leader
        with self._lock:
            self._turn += 1
            turn = self._turn % len(known)
            silent = self._still_silent()
        rotated = sorted(known[turn:] + known[:turn], key=silent.__contains__)
        return (leader, *(one for one in rotated if one != leader)) if leader is not None else tuple(rotated)

    def _still_silent(self) -> dict[str, float]:
        if self._silent:
            now = time.monotonic()
            self._silent = {one: until for one, until in self._silent.items() if until > now}
        return self._silent

    def learn(self, address: str, report: ServerReport) -> None:
        """Take over the report of the server at ``address``."""
        with self._lock:
            if report.node:
                self._addresses.record_answer(address, report.node)
            for node, said in report.members.items():
                if said:
                    self._addresses.record_advertised(node, said)
            hint = report.leader
            if hint is not None and hint.node_id and hint.address:
                self._addresses.record_advertised(hint.node_id, hint.address)

    def record_tried(self, address: str) -> None:
        """Record an attempt at ``address``, whatever its outcome."""
        with self._lock:
            self._addresses.record_tried(address)

    def resolve(self, hint: LeaderHint | None) -> str | None:
        """The address of a hinted leader: where that server has answered before, or the one in the hint.

        None if it may be behind a given address not yet tried.
        """
        with self._lock:
            return self._resolve(hint)

    def _resolve(self, hint: LeaderHint | None) -> str | None:
        if hint is None:
            return None
        if not hint.node_id:  # brokers name it by its address alone
            return self._addresses.find_advertised(hint.address) if hint.address else None
        return self._addresses.find(hint.node_id, hint.address)

    def set_leader(self, address: str) -> None:
        """Believe that ``address`` leads."""
        with self._lock:
            self._leader, self._suspect = address, None

    def note_failure(self, address: str, error: DLedgerError) -> None:
        """React to a failed request: follow the hint, or forget a leader that does not answer."""
        with self._lock:
            self._addresses.record_tried(address)
            if isinstance(error, RequestTimeoutError):
                self._still_silent()[address] = time.monotonic() + SILENT_S
            hinted = self._resolve(error.leader)
            if hinted is not None and hinted != address:
                self._leader = hinted
            elif self._leader == address and not isinstance(error, _OF_A_LEADER):
                self._leader, self._suspect = None, address


class Search:
    """One round of asking all servers who leads. ``doubting``: the present leader may have been replaced."""

    def __init__(self, directory: Directory, *, doubting: bool = False) -> None:
        self._directory = directory
        self._doubting = doubting
        self._doubted = directory.leader if doubting else None
        self._asked: set[str] = set()
        self._failures: dict[str, DLedgerError] = {}
        self._reports: dict[str, ServerReport] = {}

    def whom_to_ask(self) -> list[str]:
        """All addresses not named before, because answers reveal further ones. Empty: the round is over."""
        addresses = [one for one in self._directory.addresses if one not in self._asked]
        self._asked.update(addresses)
        return addresses

    def take(self, address: str, answer: ServerReport | DLedgerError) -> bool:
        """Record an answer; returns whether it settles who leads."""
        if isinstance(answer, DLedgerError):
            self._failures[address] = answer
            self._directory.record_tried(address)
            return False
        self._directory.learn(address, answer)
        self._reports[address] = answer
        believed = answer.leads and not self._doubting and address != self._directory.suspect
        settled = address if believed else _agreed_leader(self._reports)
        if settled is not None:
            self._directory.set_leader(settled)
        return settled is not None

    @property
    def only_the_doubted_is_silent(self) -> bool:
        """Whether all others have answered: it is known to be silent, so nobody needs to wait for it."""
        return self._doubted is not None and self._asked - self._failures.keys() - self._reports.keys() == {
            self._doubted
        }

    def conclude(self) -> str | None:
        """The leader, after all have been asked; None if no server certainly leads.

        Raises ``DLedgerError`` if no server answered: the error that makes asking pointless, or ``UnavailableError``.
        """
        if not self._reports:
            raise self.failure("nobody answers")
        leaders = {address: report.term for address, report in self._reports.items() if report.leads}
        if not leaders:
            return None
        present = self._directory.leader
        best = max(leaders, key=lambda address: (leaders[address], address == present))
        if leaders[best] < max(report.term for report in self._reports.values()):
            return None  # it has not noticed yet that a majority works without it
        self._directory.set_leader(best)
        return best

    @property
    def answering(self) -> str | None:
        """A server that answered."""
        return next(iter(self._reports), None)

    def failure(self, otherwise: str) -> DLedgerError:
        """Why no leader was found: the error that makes asking pointless, or ``UnavailableError``."""
        failures = list(self._failures.values())
        if failures and isinstance(telling := most_telling(failures), _HOPELESS):
            return telling
        if failures and len(failures) == len(self._asked) and all(isinstance(one, TlsError) for one in failures):
            return failures[0]
        return UnavailableError(f"no {self._directory.leader_is} found: {'; '.join(map(str, failures)) or otherwise}")


def _agreed_leader(reports: Mapping[str, ServerReport]) -> str | None:
    """The server that a majority of its group follows in its term: no other can lead then."""
    for address, one in reports.items():
        voters = one.members.keys() - one.learners
        if not (one.leads and voters):
            continue
        followers = {
            other.node
            for other in reports.values()
            if other.node and other.term == one.term and other.leader is not None and other.leader.node_id == one.node
        }
        if len((followers | {one.node}) & voters) > len(voters) / 2:
            return address
    return None


_StatusT = TypeVar("_StatusT")


class LeaderFinder(Generic[_StatusT]):
    """Searches for the leader, one search at a time, whose result all waiting callers share."""

    def __init__(
        self,
        directory: Directory,
        ask_all: Callable[[Collection[str], TimeLimit], AsyncGenerator[tuple[str, _StatusT | DLedgerError], None]],
        report_of: Callable[[_StatusT], ServerReport],
    ) -> None:
        self._directory = directory
        self._ask_all = ask_all
        self._report_of = report_of
        self._seeking: asyncio.Task[tuple[str | None, Search]] | None = None
        self._failure: DLedgerError | None = None
        """Why the last search found nobody, for those who have no time for another one."""

    def close(self) -> None:
        """Cancel a search in progress."""
        if self._seeking is not None:
            self._seeking.cancel()

    async def leader(self, deadline: TimeLimit) -> str:
        """The leader's address, known or searched for. Raises ``DLedgerError``, at the latest at the deadline."""
        found = self._directory.leader
        if found is None:
            found, search = await self._sought(deadline)
            if found is None:
                self._failure = search.failure("no leader at present")
                raise self._failure
        self._failure = None
        return found

    async def look(self) -> str | None:
        """Look whether another node leads, because the present leader is silent; None if nobody is known to lead."""
        search = Search(self._directory, doubting=True)
        with suppress(DLedgerError):  # no server answers, or the client is closed
            if not await self._ask(search, TimeLimit(_LOOK_TIMEOUT_S)):
                search.conclude()
        return self._directory.leader

    async def _sought(self, deadline: TimeLimit) -> tuple[str | None, Search]:
        if self._seeking is None or self._seeking.done():
            self._seeking = asyncio.create_task(self._seek())
            # All waiting callers may have given up: then nobody reads the exception, and the loop would log it.
            self._seeking.add_done_callback(lambda done: done.cancelled() or done.exception())
        seeking = self._seeking  # shared by all waiting callers, such as thousands of appends
        await asyncio.wait((seeking,), timeout=deadline.remaining_s)
        if not seeking.done() or seeking.cancelled():
            nobody = f"no {self._directory.leader_is} found"
            why = "" if self._failure is None else f": {str(self._failure).removeprefix(f'{nobody}: ')}"
            raise UnavailableError(f"{nobody} within {deadline.timeout_s:.3g} s{why}")
        try:
            return seeking.result()
        except DLedgerError as error:
            self._failure = error
            raise

    async def _seek(self) -> tuple[str | None, Search]:
        search = Search(self._directory)
        settled = await self._ask(search, TimeLimit(DISCOVERY_TIMEOUT_S))
        return self._directory.leader if settled else search.conclude(), search

    async def _ask(self, search: Search, deadline: TimeLimit) -> bool:
        while addresses := search.whom_to_ask():
            async with aclosing(self._ask_all(addresses, deadline)) as answers:
                async for address, answer in answers:
                    if search.take(address, answer if isinstance(answer, DLedgerError) else self._report_of(answer)):
                        return True
                    if search.only_the_doubted_is_silent:
                        break
        return False
