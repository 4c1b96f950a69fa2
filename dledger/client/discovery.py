"""Who leads, and where everybody is: one search for the log's clients and for those of brokers.

``Directory`` is what a client knows; ``Search`` is one round of asking. Neither sends anything: whoever has channels
asks whom the search names and feeds it the answers as they come.

A server's word that it leads is believed at once, unless it has just failed as the leader, or is doubted because it is
silent or somebody may have replaced it. Then it takes a majority that follows it in its term, or that nobody who
answered knows of a newer term.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from dledger.client.whereabouts import AddressBook
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
from dledger.types import Role
from dledger.values import split

DISCOVERY_TIMEOUT_S: Final = 1.0
"""How long one round of looking for the leader may take."""
SILENT_S: Final = 30.0
"""How long a server that did not answer in time is asked after all others."""
LOOK_TIMEOUT_S: Final = 0.5
"""How long one waits for silent servers while there is a leader that is only doubted."""

_OF_A_LEADER: Final = (
    LeaderNotReadyError,
    PendingFullError,
    OutOfOrderSequenceError,
    UnknownProducerError,
    TooManyProducersError,
    InvalidRequestError,
    AccessDeniedError,
)
"""What says nothing against it that a server leads."""
_HOPELESS: Final = (InvalidRequestError, IdentityError, AccessDeniedError)


@record(frozen=True, slots=True)
class ServerReport:
    """What a server says of itself and its group."""

    node: str
    """Its name; empty if it has none: a broker without a group."""
    leads: bool
    term: int
    leader: LeaderHint | None
    members: Mapping[str, str]
    """Every member's name, and where it is said to be; empty if that is not known."""


def report_of_node(status: NodeStatus) -> ServerReport:
    """A node's metadata as a report."""
    members: dict[str, str] = {member.node_id: member.client_address for member in status.members}
    return ServerReport(status.node_id, status.role is Role.LEADER, status.term, status.leader, members)


def parse_addresses(addresses: Sequence[str] | str) -> tuple[str, ...]:
    """One address, several separated by commas or semicolons, or a sequence. Raises ``ConfigError`` for none."""
    parts = split(addresses, ",;") if isinstance(addresses, str) else addresses
    found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not found:
        raise ConfigError(["no address given: give host:port of at least one node"])
    return found


class Directory:
    """The servers a client knows: those it was given, those it learnt of, and who leads. Thread-safe.

    ``leader_is``: what its users call who leads.
    """

    def __init__(self, addresses: tuple[str, ...], leader_is: str = "leader") -> None:
        self.leader_is: Final = leader_is
        self._lock = threading.Lock()  # guards all fields
        self._whereabouts = AddressBook(addresses)
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
        """Who failed last as the leader: its own word is not enough to trust it again."""
        return self._suspect

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address worth asking: given ones first, then learnt ones of servers that answer at no given one."""
        with self._lock:
            return self._whereabouts.addresses

    def candidates(self) -> tuple[str, ...]:
        """``addresses``: the leader, the others in turn, so that load and failures spread, and last who was silent."""
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
        """Take what the server at ``address`` said of itself and the others."""
        with self._lock:
            if report.node:
                self._whereabouts.note_answer(address, report.node)
            for node, said in report.members.items():
                if said:
                    self._whereabouts.note_said(node, said)
            hint = report.leader
            if hint is not None and hint.node_id and hint.address:
                self._whereabouts.note_said(hint.node_id, hint.address)

    def note_tried(self, address: str) -> None:
        """Remember that ``address`` was asked, whatever became of it."""
        with self._lock:
            self._whereabouts.note_tried(address)

    def resolve(self, hint: LeaderHint | None) -> str | None:
        """The address of a hinted leader: where that server answered us before, or what the hint says.

        None if it may be at a given address that was not asked yet.
        """
        with self._lock:
            return self._resolve(hint)

    def _resolve(self, hint: LeaderHint | None) -> str | None:
        if hint is None:
            return None
        if not hint.node_id:  # brokers name it by its address alone
            return self._whereabouts.find_said(hint.address) if hint.address else None
        return self._whereabouts.find(hint.node_id, hint.address)

    def set_leader(self, address: str) -> None:
        """Believe that ``address`` leads."""
        with self._lock:
            self._leader, self._suspect = address, None

    def note_failure(self, address: str, error: DLedgerError) -> None:
        """Draw the conclusion from a failed request: follow the hint, or forget a leader that does not answer."""
        with self._lock:
            self._whereabouts.note_tried(address)
            if isinstance(error, RequestTimeoutError):
                self._still_silent()[address] = time.monotonic() + SILENT_S
            hinted = self._resolve(error.leader)
            if hinted is not None and hinted != address:
                self._leader = hinted
            elif self._leader == address and not isinstance(error, _OF_A_LEADER):
                self._leader, self._suspect = None, address


class Search:
    """One round of asking everybody who leads. ``doubting``: the present leader may have been replaced."""

    def __init__(self, directory: Directory, *, doubting: bool = False) -> None:
        self._directory = directory
        self._doubting = doubting
        self._asked: set[str] = set()
        self._failures: dict[str, DLedgerError] = {}
        self._reports: dict[str, ServerReport] = {}

    def whom_to_ask(self) -> list[str]:
        """All addresses that were not named before: answers tell of further ones. Empty: the round is over."""
        addresses = [one for one in self._directory.addresses if one not in self._asked]
        self._asked.update(addresses)
        return addresses

    def take(self, address: str, answer: ServerReport | DLedgerError) -> bool:
        """Note an answer; whether it settles who leads."""
        if isinstance(answer, DLedgerError):
            self._failures[address] = answer
            self._directory.note_tried(address)
            return False
        self._directory.learn(address, answer)
        self._reports[address] = answer
        believed = answer.leads and not self._doubting and address != self._directory.suspect
        settled = address if believed else _agreed_leader(self._reports)
        if settled is not None:
            self._directory.set_leader(settled)
        return settled is not None

    def conclude(self) -> str | None:
        """Who leads, after all have been asked; None if nobody does, or not certainly. Raises ``DLedgerError`` if
        nobody answered at all: what makes asking hopeless, or ``UnavailableError``."""
        if not self._reports:
            raise self.failure("nobody answers")
        leaders = {address: report.term for address, report in self._reports.items() if report.leads}
        if not leaders:
            return None
        present = self._directory.leader
        best = max(leaders, key=lambda address: (leaders[address], address == present))
        if leaders[best] < max(report.term for report in self._reports.values()):
            return None  # it has not noticed yet that others elect without it
        self._directory.set_leader(best)
        return best

    @property
    def answering(self) -> str | None:
        """Somebody who answered."""
        return next(iter(self._reports), None)

    def failure(self, otherwise: str) -> DLedgerError:
        """Why no leader was found: what makes asking hopeless, else ``UnavailableError``."""
        failures = list(self._failures.values())
        for failure in failures:
            if isinstance(failure, _HOPELESS):
                return failure
        if failures and len(failures) == len(self._asked) and all(isinstance(one, TlsError) for one in failures):
            return failures[0]
        return UnavailableError(f"no {self._directory.leader_is} found: {'; '.join(map(str, failures)) or otherwise}")


def _agreed_leader(reports: Mapping[str, ServerReport]) -> str | None:
    """Whom a majority of its group follows in its term: then nobody else can lead."""
    for address, one in reports.items():
        if not (one.leads and one.members):
            continue
        followers = {
            other.node
            for other in reports.values()
            if other.node and other.term == one.term and other.leader is not None and other.leader.node_id == one.node
        }
        if len(followers | {one.node}) > len(one.members) / 2:
            return address
    return None
