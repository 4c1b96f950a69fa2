"""Shared by the sync and the asyncio client: results, limits, deadlines, the meaning of errors, and retries.

``ClientSecurity`` (TLS and access keys) is the same record for every client of this project, whatever protocol it
speaks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dledger.errors import (
    ConfigError,
    DLedgerError,
    EarlierRequestFailedError,
    InvalidRequestError,
    LeaderNotReadyError,
    LeaderTransferringError,
    MemberRemovedError,
    NotLeaderError,
    PendingFullError,
    RequestTimeoutError,
    ShutdownError,
    TlsError,
    UnavailableError,
)
from dledger.records import record
from dledger.rpc.ports import NodeStatus
from dledger.rpc.tls import TlsFiles
from dledger.types import (
    ANY_CONFIGURATION,
    NO_INDEX,
    NO_TERM,
    AppendedBatch,
    ChangeKind,
    LogIndex,
    MemberChange,
    NodeId,
    Position,
    StoredRun,
    Term,
)
from dledger.values import MIB, parse_address

REQUEST_BYTES_MAX: Final = MIB
"""The limit for the bodies in one request of ``append_many`` (at least one entry)."""
REQUEST_ENTRIES_MAX: Final = 1024
RETRY_WAIT_S_MIN: Final = 0.02
RETRY_WAIT_S_MAX: Final = 0.1
"""A longer pause would outlast the election it waits for: clients found the new leader 0.5 s late."""


_RETRIED: Final = (
    NotLeaderError,
    LeaderNotReadyError,
    LeaderTransferringError,
    MemberRemovedError,
    PendingFullError,
    EarlierRequestFailedError,
    ShutdownError,
    UnavailableError,
)
_CHANGE_ID_BITS = 62


class ReadFrom(StrEnum):
    """Which member answers a large read."""

    LEADER = "leader"
    FOLLOWER = "follower"
    """One of the followers, to spare the leader; the leader if there are none."""
    ANY = "any"


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


class TimeLimit:
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


def is_retried(error: BaseException) -> bool:
    """Whether trying again, perhaps elsewhere, is safe and may help."""
    return isinstance(error, _RETRIED) and error.outcome == "not_applied"


def is_elsewhere(error: BaseException) -> bool:
    """Whether another node may answer a read that this one did not."""
    return is_retried_read(error) or isinstance(error, TlsError)


def is_retried_read(error: BaseException) -> bool:
    """``is_retried`` for requests that change nothing: a lost answer does no harm."""
    return isinstance(error, (*_RETRIED, RequestTimeoutError))


def members_by_id(
    statuses: Sequence[NodeStatus], failures: dict[str, DLedgerError]
) -> dict[NodeId, NodeStatus | DLedgerError]:
    """The result of ``members_status``: for every member, as those with the newest configuration know them, its status
    or its error; and the status of other nodes that answer.
    """
    found: dict[NodeId, NodeStatus | DLedgerError] = {status.node_id: status for status in statuses}
    newest = max((status.configuration_index for status in statuses), default=NO_INDEX)
    current = [status for status in statuses if status.configuration_index == newest]
    for member in [member for status in current for member in status.members]:
        if not isinstance(found.get(member.node_id), NodeStatus) and member.client_address in failures:
            found[member.node_id] = failures[member.client_address]
        elif member.node_id not in found:  # another one may know it
            found[member.node_id] = UnavailableError(f"{member.node_id}: its client address is not known yet")
    return dict(sorted(found.items()))


def member_change(
    kind: ChangeKind | str,
    node_id: str,
    address: str = "",
    *,
    learner: bool = False,
    replaces: str = "",
    expected_index: int | None = None,
) -> MemberChange:
    """A request to ``add``, ``promote``, ``demote``, ``remove`` or ``update`` a member. Its id makes it a new one.

    ``address``: where the other members reach it, ``host:port``; for ``add`` and ``update``. ``learner``: an added
    member stays one. ``replaces``: the voter that leaves for it. ``expected_index``: the
    ``NodeStatus.configuration_index`` on which you decided; if the members have changed since, nothing is done. Raises
    ``InvalidRequestError``.
    """
    try:
        found = ChangeKind(kind)
        host, port = parse_address(address) if address else ("", 0)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    if (found in (ChangeKind.ADD, ChangeKind.UPDATE)) != bool(address):
        raise InvalidRequestError(f"to {found} a member {'takes no' if address else 'needs its'} address")
    return MemberChange(
        found,
        NodeId(node_id),
        1 + secrets.randbits(_CHANGE_ID_BITS),
        host,
        port,
        not learner,
        replaces,
        ANY_CONFIGURATION if expected_index is None else LogIndex(expected_index),
    )


__all__ = ["ClientSecurity", "TlsFiles"]

NOT_SIGNED_FOR: Final = (
    "was not given to this client, and without TLS gets no signature, which anyone who answers there could use for "
    "ever: give this address, too, or use TLS"
)
"""The problem of an address outside ``signed_for``."""


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """TLS files and access key of a client. The default is plaintext, which is allowed for loopback addresses only.

    ``tls``: use TLS. ``insecure``: allow plaintext to other machines. ``access_key`` and ``secret_key``: sign every
    request with them. ``trust_name_servers``: sign in RocketMQ's way also for addresses that name servers, or brokers,
    tell, without TLS. Raises ``ConfigError`` if one of the two keys is missing.
    """

    tls: TlsFiles | None = None
    insecure: bool = False
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    trust_name_servers: bool = False

    def __post_init__(self) -> None:
        if bool(self.access_key) != bool(self.secret_key):
            raise ConfigError(["access key and secret key must be given together: one of them is missing"])


def signed_for(security: ClientSecurity | None, given: Iterable[str]) -> frozenset[str] | None:
    """The only addresses that requests signed in RocketMQ's way may go to; None if there is no such limit.

    Such a signature says neither what is asked, nor whom, nor when, so who gets one may use it anywhere, for ever. One
    wrong answer, from a process that had a broker's port for a moment, names any addresses as the other brokers, and is
    believed until these are asked again. With TLS, who answers there must have a certificate for that address.
    """
    if security is None or not security.access_key or security.tls is not None or security.trust_name_servers:
        return None
    return frozenset(given)
