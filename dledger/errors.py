"""Every error a caller can meet, one class for each different reaction.

``code`` is DLedger's response code (kept for those who know it); ``outcome`` says whether the request may have taken
effect: ``"not_applied"`` is safe to retry, ``"unknown"`` may have been or may still be applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

if TYPE_CHECKING:  # every command loads this module, --help too
    from dledger.types import NodeId

Outcome = Literal["not_applied", "unknown"]


class ResponseCode(IntEnum):
    """DLedger's response codes, as its Java clients know them; an unknown number reads as ``UNKNOWN``."""

    UNKNOWN = -1
    NO_PERMISSION = 16
    """RocketMQ's; DLedger has no access control."""
    SUCCESS = 200
    TIMEOUT = 300
    METADATA_ERROR = 301
    NETWORK_ERROR = 302
    UNSUPPORTED = 303
    UNKNOWN_GROUP = 400
    UNKNOWN_MEMBER = 401
    UNEXPECTED_MEMBER = 402
    EXPIRED_TERM = 403
    NOT_LEADER = 404
    NOT_FOLLOWER = 405
    INCONSISTENT_STATE = 406
    INCONSISTENT_TERM = 407
    INCONSISTENT_INDEX = 408
    INCONSISTENT_LEADER = 409
    INDEX_OUT_OF_RANGE = 410
    UNEXPECTED_ARGUMENT = 411
    REPEATED_REQUEST = 412
    REPEATED_PUSH = 413
    DISK_ERROR = 414
    DISK_FULL = 415
    TERM_NOT_READY = 416
    FALL_BEHIND_TOO_MUCH = 417
    TAKE_LEADERSHIP_FAILED = 418
    INDEX_LESS_THAN_LOCAL_BEGIN = 419
    REQUEST_WITH_EMPTY_BODYS = 420
    PUSH_REQUEST_IS_FULL = 421
    NEWER_INSTALL_SNAPSHOT_REQUEST_EXIST = 422
    INTERNAL_ERROR = 500
    TERM_CHANGED = 501
    WAIT_QUORUM_ACK_TIMEOUT = 502
    LEADER_PENDING_FULL = 503
    ILLEGAL_MEMBER_STATE = 504
    LEADER_NOT_READY = 505
    LEADER_TRANSFERRING = 506
    LOAD_SNAPSHOT_ERROR = 507
    INSTALL_SNAPSHOT_ERROR = 508
    OUT_OF_ORDER_SEQUENCE = 601
    """From here on, codes of this project: DLedger has no producers."""
    UNKNOWN_PRODUCER = 602
    TOO_MANY_PRODUCERS = 603
    OTHER_HISTORY = 604
    """The asked member has proof that its committed entries differ from the push."""
    CHANGE_IN_PROGRESS = 605
    NOT_READY_TO_PROMOTE = 606
    WOULD_LOSE_QUORUM = 607
    MEMBER_EXISTS = 608
    MEMBER_UNKNOWN = 609
    STALE_CONFIGURATION = 610
    TOO_MANY_MEMBERS = 612
    MEMBER_REMOVED = 613

    @classmethod
    def _missing_(cls, _value: object) -> ResponseCode:
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class LeaderHint:
    """The leader known to the answering node; ``address`` is its client address or empty."""

    node_id: NodeId
    address: str = ""


TOLD_CHARS_MAX: Final = 1000
"""Limit for error texts sent to clients: longer than any of ours, shorter than gRPC's limit."""
_CUT: Final = " […] "


def told(error: Exception | str) -> str:
    """The text of an error for a client; the middle of a long text (it may quote client input) is cut."""
    text = str(error)
    if len(text) <= TOLD_CHARS_MAX:
        return text
    kept = TOLD_CHARS_MAX - len(_CUT)
    return text[: kept - kept // 3] + _CUT + text[-(kept // 3) :]


class DLedgerError(Exception):
    """The base class of every error of this project."""

    code: ClassVar[ResponseCode] = ResponseCode.INTERNAL_ERROR
    outcome: Outcome = "not_applied"

    def __init__(self, message: str, *, leader: LeaderHint | None = None) -> None:
        super().__init__(message)
        self.leader = leader

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as it is, because arguments of constructors differ: worker processes return errors in this way."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[DLedgerError], arguments: tuple[object, ...], fields: Mapping[str, object]) -> DLedgerError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class InvariantError(DLedgerError):
    """Raised when an invariant is violated, by a bug or memory damage. The node must stop."""

    outcome: Outcome = "unknown"


class ConfigError(DLedgerError):
    """Raised when settings are unknown, inconsistent or missing; ``problems`` lists all of them."""

    code = ResponseCode.UNEXPECTED_ARGUMENT

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class NotLeaderError(DLedgerError):
    """Raised when a request that needs the leader reached another node; follow ``leader``."""

    code = ResponseCode.NOT_LEADER


class LeaderNotReadyError(DLedgerError):
    """Raised when the leader has not yet committed an entry of its term; retry shortly."""

    code = ResponseCode.LEADER_NOT_READY


class LeaderTransferringError(DLedgerError):
    """Raised when leadership is being transferred and appends are refused; retry shortly."""

    code = ResponseCode.LEADER_TRANSFERRING


class PendingFullError(DLedgerError):
    """Raised when too many entries or bytes are waiting for a quorum; slow down and retry."""

    code = ResponseCode.LEADER_PENDING_FULL


class QuorumAckTimeoutError(DLedgerError):
    """Raised when a quorum did not acknowledge in time; the entry may still be committed."""

    code = ResponseCode.WAIT_QUORUM_ACK_TIMEOUT
    outcome: Outcome = "unknown"


class TermChangedError(DLedgerError):
    """Raised when leadership was lost after the entry was written; it may or may not survive."""

    code = ResponseCode.TERM_CHANGED
    outcome: Outcome = "unknown"


class DiskFullError(DLedgerError):
    """Raised when there is no disk space for the entry; appends resume once there is."""

    code = ResponseCode.DISK_FULL


class DiskError(DLedgerError):
    """Raised when the store failed (a flush, a write, a wrong position); the node stops acknowledging."""

    code = ResponseCode.DISK_ERROR
    outcome: Outcome = "unknown"


class MisplacedRunError(DiskError):
    """Raised when a run does not follow the end of the log; nothing was written, and the store is intact."""

    outcome: Outcome = "not_applied"


class CorruptLogError(DLedgerError):
    """Raised when stored bytes are damaged: names the file, the offset in it and what to do.

    ``index`` is the damaged entry of the log, if it is one.
    """

    code = ResponseCode.DISK_ERROR
    outcome: Outcome = "unknown"

    def __init__(self, path: Path, offset: int, reason: str, advice: str, index: int | None = None) -> None:
        self.path = path
        self.offset = offset
        self.index = index
        self.reason = reason
        self.advice = advice
        super().__init__(f"{path}: damaged at offset {offset}: {reason}. {advice}")


class FencedError(DLedgerError):
    """Raised when a member serves nothing because its history differs from most members': ask another one."""

    code = ResponseCode.INCONSISTENT_STATE


class DamagedSnapshotError(DLedgerError):
    """Raised when a snapshot is damaged, or not there any more: use an older one, or another member's."""

    code = ResponseCode.LOAD_SNAPSHOT_ERROR


class SnapshotFormatError(DLedgerError):
    """Raised when a snapshot was written by a later version of a program or of its state machine: run that version."""

    code = ResponseCode.LOAD_SNAPSHOT_ERROR


class SnapshotBusyError(DLedgerError):
    """Raised when a snapshot cannot be begun: another one is being written, or a newer one is there."""

    code = ResponseCode.NEWER_INSTALL_SNAPSHOT_REQUEST_EXIST


class StateMachineError(DLedgerError):
    """Raised when a state machine fails to apply or load, which ends its node; or when its result is lost here."""

    code = ResponseCode.INTERNAL_ERROR
    outcome: Outcome = "unknown"


class ResultForgottenError(DLedgerError):
    """Raised for a repeated command that was applied and whose result is not kept any more: look at the state."""

    code = ResponseCode.REPEATED_REQUEST
    outcome: Outcome = "unknown"


class LackingError(DLedgerError):
    """Raised when a peer does not hold the part that is damaged or missing here."""


class WrongBytesError(DLedgerError):
    """Raised when a part fetched from a peer does not fit this log's CRC chain on both sides."""


class DirectoryLockedError(DLedgerError):
    """Raised when another process has the store directory open."""

    code = ResponseCode.DISK_ERROR


class IdentityError(DLedgerError):
    """Raised when a directory or a request belongs to another cluster, group or node."""

    code = ResponseCode.UNKNOWN_GROUP


class UnknownMemberError(DLedgerError):
    """Raised when a named node is not a member of the group."""

    code = ResponseCode.UNKNOWN_MEMBER


class InvalidRequestError(DLedgerError):
    """Raised when a request is invalid: an empty batch, a negative count, garbage bytes."""

    code = ResponseCode.UNEXPECTED_ARGUMENT


class AccessDeniedError(DLedgerError):
    """Raised when the caller is unknown or lacks the permission; retrying does not help."""

    code = ResponseCode.NO_PERMISSION


class AppendsNotServedError(InvalidRequestError):
    """Raised when a client appends to a log that belongs to an application (a broker): send to the application."""

    code = ResponseCode.UNSUPPORTED


class NoStateMachineError(InvalidRequestError):
    """Raised when a command or query is sent to a log without a state machine: append and read instead."""

    code = ResponseCode.UNSUPPORTED


class UntimedLogError(InvalidRequestError):
    """Raised when entries without timestamps are requested by time: use an index or a position."""

    code = ResponseCode.UNSUPPORTED


class RequestTooLargeError(InvalidRequestError):
    """Raised when a server refused a request for its size, before it was read: nothing was done. Send less at once."""


class EntryTooLargeError(InvalidRequestError):
    """Raised when an entry is larger than the configured maximum."""


class EmptyBatchError(InvalidRequestError):
    """Raised when an append holds no entry."""

    code = ResponseCode.REQUEST_WITH_EMPTY_BODYS


class EarlierRequestFailedError(DLedgerError):
    """Raised for an ordered append after a failed one of its stream; open a new stream and retry in order."""

    code = ResponseCode.INCONSISTENT_STATE


class OutOfOrderSequenceError(DLedgerError):
    """Raised when a producer's append leaves a gap: send the missing entries first."""

    code = ResponseCode.OUT_OF_ORDER_SEQUENCE


class UnknownProducerError(DLedgerError):
    """Raised when a producer is unknown to the log, or was forgotten: start at 0 under a new name."""

    code = ResponseCode.UNKNOWN_PRODUCER


class TooManyProducersError(DLedgerError):
    """Raised when there is no room for another producer because all remembered ones were active recently."""

    code = ResponseCode.TOO_MANY_PRODUCERS


class IndexOutOfRangeError(DLedgerError):
    """Raised when an index is negative or beyond the readable end."""

    code = ResponseCode.INDEX_OUT_OF_RANGE


class IndexBeforeBeginError(DLedgerError):
    """Raised when an entry was already removed by retention; start reading at the log's begin index."""

    code = ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN


class TransferFailedError(DLedgerError):
    """Raised when leadership was not transferred in time; the old leader carries on."""

    code = ResponseCode.TAKE_LEADERSHIP_FAILED


class FallBehindError(TransferFailedError):
    """Raised when the transfer's target lags too far behind."""

    code = ResponseCode.FALL_BEHIND_TOO_MUCH


class ChangeInProgressError(DLedgerError):
    """Raised when an earlier change of the members is not committed yet; retry when it is."""

    code = ResponseCode.CHANGE_IN_PROGRESS


class NotReadyToPromoteError(DLedgerError):
    """Raised when a learner may not become a voter yet: it lags, or has no standing."""

    code = ResponseCode.NOT_READY_TO_PROMOTE


class WouldLoseQuorumError(DLedgerError):
    """Raised when too few of the voters that a change would leave are reachable and have standing."""

    code = ResponseCode.WOULD_LOSE_QUORUM


class MemberExistsError(DLedgerError):
    """Raised when a new member's id or address belongs to a member already, or a member has the asked role."""

    code = ResponseCode.MEMBER_EXISTS


class MemberUnknownError(DLedgerError):
    """Raised when a change names a member that the group does not have."""

    code = ResponseCode.MEMBER_UNKNOWN


class StaleConfigurationError(DLedgerError):
    """Raised when the members changed since the caller looked: look again, and decide anew."""

    code = ResponseCode.STALE_CONFIGURATION


class TooManyMembersError(DLedgerError):
    """Raised when a group would have more voters or learners than it may."""

    code = ResponseCode.TOO_MANY_MEMBERS


class MemberRemovedError(DLedgerError):
    """Raised by a member that was removed from its group: ask another one."""

    code = ResponseCode.MEMBER_REMOVED


class ShutdownError(DLedgerError):
    """Raised when the node is stopping; entries already written may still be committed by the others."""

    code = ResponseCode.ILLEGAL_MEMBER_STATE
    outcome: Outcome = "unknown"


class NodeBusyError(DLedgerError):
    """The node's lock is not free within the time given."""


class UnavailableError(DLedgerError):
    """Raised by the client when no node, or no leader, could be reached before the deadline."""

    code = ResponseCode.NETWORK_ERROR


class TlsError(DLedgerError):
    """Raised when two sides do not trust each other's certificates, or one does not use TLS: fix the setup."""

    code = ResponseCode.NETWORK_ERROR


class RequestTimeoutError(DLedgerError):
    """Raised by the client when an answer did not arrive before the deadline; the request may have been applied."""

    code = ResponseCode.TIMEOUT
    outcome: Outcome = "unknown"


def invariant(condition: bool, message: str, **values: object) -> None:
    """Raise ``InvariantError`` with ``values`` unless ``condition`` holds; unlike ``assert`` it survives ``-O``."""
    if not condition:
        facts = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise InvariantError(f"{message} ({facts})" if facts else message)
