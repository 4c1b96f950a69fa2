"""What the sync and the asyncio client share: results, limits, the known nodes, what errors mean, when to retry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc
import tenacity

from dledger.client.signing import is_challenge
from dledger.client.whereabouts import Whereabouts
from dledger.config import CLIENT_PORT_OFFSET, MIB
from dledger.errors import (
    AccessDeniedError,
    ConfigError,
    DLedgerError,
    EarlierRequestFailedError,
    IdentityError,
    InvalidRequestError,
    LeaderHint,
    LeaderNotReadyError,
    LeaderTransferringError,
    NotLeaderError,
    OutOfOrderSequenceError,
    PendingFullError,
    RequestTimeoutError,
    ShutdownError,
    TlsError,
    TooManyProducersError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.records import record
from dledger.rpc import tls
from dledger.rpc.ports import NodeStatus
from dledger.types import NO_INDEX, NO_TERM, AppendedBatch, LogIndex, NodeId, Position, Role, StoredRun, Term

REQUEST_BYTES_MAX: Final = MIB
"""How many bytes of bodies ``append_many`` puts into one request (at least one entry)."""
REQUEST_ENTRIES_MAX: Final = 1024
DISCOVERY_TIMEOUT_S: Final = 1.0
"""How long one round of looking for the leader may take."""
RETRY_WAIT_S_MIN: Final = 0.02
RETRY_WAIT_S_MAX: Final = 0.1
"""A longer pause would be longer than the election that it waits for: clients found the new leader 0.5 s late."""

LOOK_AFTER_S: Final = 0.5
"""An answer that takes longer is overdue: then it is asked whether another node leads by now."""
LOOK_AGAIN_S: Final = 0.25
"""The pause between two such questions."""
LOOK_TIMEOUT_S: Final = 0.5
"""How long one of them waits for silent nodes."""

_RETRIED: Final = (
    NotLeaderError,
    LeaderNotReadyError,
    LeaderTransferringError,
    PendingFullError,
    EarlierRequestFailedError,
    ShutdownError,
    UnavailableError,
)
_OF_A_LEADER: Final = (
    LeaderNotReadyError,
    PendingFullError,
    OutOfOrderSequenceError,
    UnknownProducerError,
    TooManyProducersError,
)
"""Only who leads says so."""
_HOPELESS: Final = (InvalidRequestError, IdentityError, AccessDeniedError)


@record(frozen=True, slots=True)
class AppendResult:
    """Where an entry is: its index, the term it was appended in, and its record's first byte in the log.

    All three are -1 for an entry that is certainly stored, but that the leader was sent again so long after the first
    time that it does not remember where it is (many other appends of this client came between).
    """

    index: LogIndex
    term: Term
    position: Position


_SOMEWHERE: Final = AppendResult(NO_INDEX, NO_TERM, Position(-1))


def results_of(batch: AppendedBatch) -> list[AppendResult]:
    """One result per entry of a batch, those that were there before first."""
    results = [
        AppendResult(LogIndex(batch.first_index + offset), batch.term, Position(position))
        for offset, position in enumerate(batch.positions)
    ]
    return [one for run in batch.duplicates for one in _results_of_run(run)] + results if batch.duplicates else results


def _results_of_run(run: StoredRun) -> list[AppendResult]:
    if not run.first_index:
        return [_SOMEWHERE] * run.count
    positions = run.positions or (-1,) * run.count
    return [
        AppendResult(LogIndex(run.first_index + offset), run.term, Position(position))
        for offset, position in enumerate(positions)
    ]


def split(bodies: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Cut a sequence into requests of at most ``REQUEST_BYTES_MAX`` and ``REQUEST_ENTRIES_MAX``, in order."""
    part: list[bytes] = []
    size = 0
    for body in bodies:
        if part and (size + len(body) > REQUEST_BYTES_MAX or len(part) >= REQUEST_ENTRIES_MAX):
            yield part
            part, size = [], 0
        part.append(body)
        size += len(body)
    if part:
        yield part


def partly_appended(error: DLedgerError, done: int) -> DLedgerError:
    """The error of a split append of which ``done`` entries are in: repeating all of it would repeat those."""
    if done:
        error.outcome = "unknown"
        error.add_note(f"the first {done} entries were appended; the error is about the request after them")
    return error


class Deadline:
    """A moment on the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s
        self.timeout_s = timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._at


# --- what went wrong, and whether to try again ----------------------------------------------------------------------


def rpc_failure(error: grpc.RpcError, address: str, *, sent: bool) -> DLedgerError:
    """A gRPC failure as the error that says what to do. ``sent``: the request may have changed something."""
    code, details = error.code(), error.details() or ""
    failure: DLedgerError
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            failure = RequestTimeoutError(f"no answer of {address} in time")
        case grpc.StatusCode.UNIMPLEMENTED:
            return InvalidRequestError(
                f"{address} does not serve clients ({details}): is it a peer port? "
                f"Clients connect to the client port, by default the peer port + {CLIENT_PORT_OFFSET}"
            )
        case grpc.StatusCode.UNAUTHENTICATED if is_challenge(error):
            failure = UnavailableError(f"{address} wants to be addressed by another name: {details}")
            sent = False
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return AccessDeniedError(f"{address}: {details}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            return InvalidRequestError(f"the request is too large for {address}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            failure = PendingFullError(f"{address} is at a limit: {details}")
        case _ if problem := tls.explain_channel(details, address):
            failure = TlsError(problem)
        case _ if sent:
            failure = RequestTimeoutError(f"the connection to {address} broke before the answer came: {details}")
        case _:
            failure = UnavailableError(f"{address} cannot be reached: {details}")
    if not sent:
        failure.outcome = "not_applied"
    return failure


def is_retried(error: BaseException) -> bool:
    """Whether trying again, perhaps elsewhere, is safe and may help."""
    return isinstance(error, _RETRIED) and error.outcome == "not_applied"


def is_elsewhere(error: BaseException) -> bool:
    """Whether another node may answer a request that changes nothing, where this one did not."""
    return is_retried_read(error) or isinstance(error, TlsError)


def is_retried_read(error: BaseException) -> bool:
    """As ``is_retried``, for requests that change nothing: a lost answer is no harm."""
    return isinstance(error, (*_RETRIED, RequestTimeoutError))


def retry_options(deadline: Deadline, retried: Callable[[BaseException], bool] = is_retried) -> dict[str, Any]:
    """Arguments for tenacity's ``Retrying`` and ``AsyncRetrying``: until the deadline, backing off with jitter."""
    jitter = tenacity.wait_random(0, RETRY_WAIT_S_MIN)
    backoff = tenacity.wait_exponential(multiplier=RETRY_WAIT_S_MIN, max=RETRY_WAIT_S_MAX) + jitter

    def wait(state: tenacity.RetryCallState) -> float:
        # Never right up to the deadline: an attempt without time to answer turns "not applied" into "unknown".
        return min(backoff(state), deadline.remaining_s / 2)

    return {
        "stop": lambda _state: deadline.remaining_s < RETRY_WAIT_S_MIN,
        "wait": wait,
        "retry": tenacity.retry_if_exception(retried),
        "reraise": True,
    }


# --- which nodes there are ------------------------------------------------------------------------------------------


def parse_addresses(addresses: Sequence[str] | str) -> tuple[str, ...]:
    """One address, several separated by commas or semicolons, or a sequence. Raises ``ConfigError`` for none."""
    parts = addresses.replace(";", ",").split(",") if isinstance(addresses, str) else addresses
    found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not found:
        raise ConfigError(["no address given: expected host:port of at least one node"])
    return found


class Directory:
    """The nodes a client knows: those it was given, those it learnt of, and who leads. Thread-safe."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._lock = threading.Lock()  # guards all fields
        self._whereabouts = Whereabouts(addresses)
        self._leader: str | None = None
        self._turn = 0
        self._looked_at = float("-inf")

    @property
    def leader(self) -> str | None:
        """The address that most likely leads."""
        return self._leader

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address worth asking: given ones first, then learnt ones of nodes that answer at no given one."""
        with self._lock:
            return self._whereabouts.addresses

    def candidates(self) -> tuple[str, ...]:
        """``addresses``, the leader first and the others in turn, so that load and failures spread."""
        known, leader = self.addresses, self._leader
        with self._lock:
            self._turn += 1
            turn = self._turn % len(known)
        rotated = known[turn:] + known[:turn]
        return (leader, *(one for one in rotated if one != leader)) if leader is not None else rotated

    def learn(self, address: str, status: NodeStatus) -> None:
        """Take what the node at ``address`` said of itself and the others."""
        with self._lock:
            self._whereabouts.note_answer(address, status.node_id)
            for member in status.members:
                if member.client_address:
                    self._whereabouts.note_said(member.node_id, member.client_address)
            if status.role is Role.LEADER:
                self._leader = address

    def note_tried(self, address: str) -> None:
        """Remember that ``address`` was asked, and gave no answer."""
        with self._lock:
            self._whereabouts.note_tried(address)

    def resolve(self, hint: LeaderHint | None) -> str | None:
        """The address of a hinted leader: where that node answered us before, or what the hint says.

        None if it may be at a given address that was not asked yet.
        """
        if hint is None:
            return None
        with self._lock:
            return self._whereabouts.find(hint.node_id, hint.address)

    def set_leader(self, address: str) -> None:
        """Believe that ``address`` leads."""
        with self._lock:
            self._leader = address

    def is_elsewhere(self, address: str) -> bool:
        """Whether somebody else than the node at ``address`` is believed to lead."""
        return self._leader not in (None, address)

    def may_look(self, address: str) -> bool:
        """Whether to ask who leads instead of ``address``: not if that is known, nor if somebody has just asked."""
        with self._lock:
            now = time.monotonic()
            if self.is_elsewhere(address) or now - self._looked_at < LOOK_AGAIN_S:
                return False
            self._looked_at = now
            return True

    def note_failure(self, address: str, error: DLedgerError) -> None:
        """Draw the conclusion from a failed request: follow the hint, or forget a leader that does not answer."""
        with self._lock:
            self._whereabouts.note_tried(address)
            hint = error.leader
            hinted = self._whereabouts.find(hint.node_id, hint.address) if hint is not None else None
            if hinted is not None and hinted != address:
                self._leader = hinted
            elif self._leader == address and not isinstance(error, _OF_A_LEADER):
                self._leader = None


class Search:
    """One round of looking for the leader: feed it answers as they come."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._best: tuple[Term, LeaderHint] | None = None
        self._failures: dict[str, DLedgerError] = {}
        self.found: str | None = None
        """The address of the one that says it leads."""

    def take(self, address: str, answer: NodeStatus | DLedgerError) -> str | None:
        """The leader's address if this answer settles it."""
        if isinstance(answer, DLedgerError):
            self._failures[address] = answer
            self._directory.note_tried(address)
            return None
        self._directory.learn(address, answer)
        if answer.role is Role.LEADER:
            self.found = address
            return address
        if answer.leader is not None and (self._best is None or answer.term > self._best[0]):
            self._best = (answer.term, answer.leader)
        return None

    def conclude(self) -> str:
        """The best guess when no node said it leads. Raises ``UnavailableError``, or what makes asking hopeless."""
        address = self._directory.resolve(self._best[1]) if self._best is not None else None
        if address is not None and address not in self._failures:
            self._directory.set_leader(address)
            return address
        for failure in self._failures.values():
            if isinstance(failure, _HOPELESS):
                raise failure
        if self._failures and all(isinstance(failure, TlsError) for failure in self._failures.values()):
            raise next(iter(self._failures.values()))
        asked = "; ".join(str(failure) for failure in self._failures.values()) or "no node knows one"
        raise UnavailableError(f"no leader found: {asked}")


def members_by_id(
    statuses: Sequence[NodeStatus], failures: dict[str, DLedgerError]
) -> dict[NodeId, NodeStatus | DLedgerError]:
    """What ``members_status`` gives: an answer, or why there is none, for every member that somebody named."""
    found: dict[NodeId, NodeStatus | DLedgerError] = {status.node_id: status for status in statuses}
    for status in statuses:
        for member in status.members:
            if member.node_id not in found:
                unknown = UnavailableError(f"{member.node_id}: no node knows its client address yet")
                found[member.node_id] = failures.get(member.client_address, unknown)
    return dict(sorted(found.items()))
