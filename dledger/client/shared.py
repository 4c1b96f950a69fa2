"""Shared by the sync and the asyncio client: results, limits, deadlines, the meaning of errors, and retries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc
import tenacity

from dledger.client.signing import is_challenge
from dledger.errors import (
    AccessDeniedError,
    DLedgerError,
    EarlierRequestFailedError,
    InvalidRequestError,
    LeaderNotReadyError,
    LeaderTransferringError,
    NotLeaderError,
    PendingFullError,
    RequestTimeoutError,
    RequestTooLargeError,
    ShutdownError,
    TlsError,
    UnavailableError,
)
from dledger.records import record
from dledger.rpc import tls
from dledger.rpc.ports import NodeStatus
from dledger.types import NO_INDEX, NO_TERM, AppendedBatch, LogIndex, NodeId, Position, StoredRun, Term
from dledger.values import CLIENT_PORT_OFFSET, MIB

REQUEST_BYTES_MAX: Final = MIB
"""The limit for the bodies in one request of ``append_many`` (at least one entry)."""
REQUEST_ENTRIES_MAX: Final = 1024
RETRY_WAIT_S_MIN: Final = 0.02
RETRY_WAIT_S_MAX: Final = 0.1
"""A longer pause would outlast the election it waits for: clients found the new leader 0.5 s late."""

LOOK_AFTER_S: Final = 0.5
"""An answer that takes longer is overdue: the client then checks whether another node leads."""
LOOK_AGAIN_S: Final = 0.25
"""The pause between two such checks."""

_RETRIED: Final = (
    NotLeaderError,
    LeaderNotReadyError,
    LeaderTransferringError,
    PendingFullError,
    EarlierRequestFailedError,
    ShutdownError,
    UnavailableError,
)


@record(frozen=True, slots=True)
class AppendResult:
    """Where an entry is: its index, the term it was appended in, and its record's first byte in the log.

    All three are -1 for an entry that is certainly stored, but was repeated so late that the leader no longer remembers
    its place (many other appends of this client came between).
    """

    index: LogIndex
    term: Term
    position: Position


_SOMEWHERE: Final = AppendResult(NO_INDEX, NO_TERM, Position(-1))


def results_of(batch: AppendedBatch) -> list[AppendResult]:
    """One result per entry of a batch, those already stored first."""
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
    """The error of a split append after ``done`` entries were stored: repeating all of it would store those twice."""
    if done:
        error.outcome = "unknown"
        error.add_note(f"the first {done} entries were appended; the next request failed")
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
        """Whether the deadline has passed."""
        return time.monotonic() >= self._at


# --- errors and retries ---------------------------------------------------------------------------------------------


def rpc_failure(error: grpc.RpcError, address: str, *, sent: bool) -> DLedgerError:
    """Translate a gRPC failure. ``sent``: the request may have changed something."""
    code, details = error.code(), error.details() or ""
    failure: DLedgerError
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            failure = RequestTimeoutError(f"no answer from {address} in time")
        case _ if code is grpc.StatusCode.UNIMPLEMENTED or _FROM_PEER_PORT in details:
            return InvalidRequestError(
                f"{address} does not serve clients ({details}): is this a peer port? Clients connect to the client "
                f"port, by default the peer port + {CLIENT_PORT_OFFSET}"
            )
        case grpc.StatusCode.UNAUTHENTICATED if is_challenge(error):
            failure = UnavailableError(f"{address} refused the host name it was addressed by: {details}")
            sent = False
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return AccessDeniedError(f"{address}: {details}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            return RequestTooLargeError(f"the request is too large for {address}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            failure = PendingFullError(f"{address} has reached a limit: {details}")
        case _ if problem := tls.explain_channel(details, address):
            failure = TlsError(problem)
        case _ if sent:
            failure = RequestTimeoutError(
                f"the connection to {address} broke before the answer arrived: {reason_of(details)}"
            )
        case _:
            failure = UnavailableError(f"{address} is unreachable: {reason_of(details)}")
    if not sent:
        failure.outcome = "not_applied"
    return failure


_FROM_PEER_PORT: Final = "Expected SETTINGS frame as the first frame, got frame type 0"
"""What gRPC makes of the refusal of a peer port."""
_REASONS: Final = (
    ("Connection refused", "connection refused"),
    ("No route to host", "no route to host"),
    ("Network is unreachable", "the network is unreachable"),
    ("Host is down", "its machine is down"),
    ("DNS resolution failed", "its name cannot be resolved"),
    ("Failed parsing HTTP/2", "something other than a node or a broker listens there"),
    ("http1.x server", "something other than a node or a broker listens there"),
    ("Stream removed", "the connection broke"),
)
"""Parts of gRPC's messages, which name every address tried and every layer, and what they come to."""


def reason_of(details: str) -> str:
    """Why a connection failed, in few words; gRPC's own where there are none, or where TLS may be the reason."""
    if tls.is_silent_refusal(details):  # looked into by ``ChannelMaker.diagnose``
        return details
    return next((reason for part, reason in _REASONS if part in details), details)


def is_retried(error: BaseException) -> bool:
    """Whether trying again, perhaps elsewhere, is safe and may help."""
    return isinstance(error, _RETRIED) and error.outcome == "not_applied"


def is_elsewhere(error: BaseException) -> bool:
    """Whether another node may answer a read that this one did not."""
    return is_retried_read(error) or isinstance(error, TlsError)


def is_retried_read(error: BaseException) -> bool:
    """``is_retried`` for requests that change nothing: a lost answer does no harm."""
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


def members_by_id(
    statuses: Sequence[NodeStatus], failures: dict[str, DLedgerError]
) -> dict[NodeId, NodeStatus | DLedgerError]:
    """The result of ``members_status``: for every member known to any node, its status or its error."""
    found: dict[NodeId, NodeStatus | DLedgerError] = {status.node_id: status for status in statuses}
    for member in [member for status in statuses for member in status.members]:
        if not isinstance(found.get(member.node_id), NodeStatus) and member.client_address in failures:
            found[member.node_id] = failures[member.client_address]
        elif member.node_id not in found:  # another one may know it
            found[member.node_id] = UnavailableError(f"{member.node_id}: its client address is not known yet")
    return dict(sorted(found.items()))
