"""The client of a group: ``DLedgerClient`` for threads; the same for asyncio is ``dledger.client.aio.DLedgerClient``.

Everything that an application needs is imported from here, errors included; a name's module is loaded when the name is
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.late_names import late_names

if TYPE_CHECKING:
    from dledger.client.blocking import AppendFuture, DLedgerClient
    from dledger.client.security import ClientSecurity, TlsFiles
    from dledger.client.shared import AppendResult, ReadFrom
    from dledger.errors import (
        AccessDeniedError,
        AppendsNotServedError,
        ConfigError,
        DiskFullError,
        DLedgerError,
        EmptyBatchError,
        EntryTooLargeError,
        FallBehindError,
        IndexBeforeBeginError,
        IndexOutOfRangeError,
        InvalidRequestError,
        LeaderNotReadyError,
        NotLeaderError,
        OutOfOrderSequenceError,
        PendingFullError,
        QuorumAckTimeoutError,
        RequestTimeoutError,
        RequestTooLargeError,
        TermChangedError,
        TlsError,
        TooManyProducersError,
        TransferFailedError,
        UnavailableError,
        UnknownMemberError,
        UnknownProducerError,
        UntimedLogError,
    )
    from dledger.rpc.clients.codec import ReadMode
    from dledger.types import Entry, LogIndex, Magic

__all__ = [
    "AccessDeniedError",
    "AppendFuture",
    "AppendResult",
    "AppendsNotServedError",
    "ClientSecurity",
    "ConfigError",
    "DLedgerClient",
    "DLedgerError",
    "DiskFullError",
    "EmptyBatchError",
    "Entry",
    "EntryTooLargeError",
    "FallBehindError",
    "IndexBeforeBeginError",
    "IndexOutOfRangeError",
    "InvalidRequestError",
    "LeaderNotReadyError",
    "LogIndex",
    "Magic",
    "NotLeaderError",
    "OutOfOrderSequenceError",
    "PendingFullError",
    "QuorumAckTimeoutError",
    "ReadFrom",
    "ReadMode",
    "RequestTimeoutError",
    "RequestTooLargeError",
    "TermChangedError",
    "TlsError",
    "TlsFiles",
    "TooManyProducersError",
    "TransferFailedError",
    "UnavailableError",
    "UnknownMemberError",
    "UnknownProducerError",
    "UntimedLogError",
]

__getattr__ = late_names(
    __name__,
    {
        "AccessDeniedError": "dledger.errors",
        "AppendFuture": "dledger.client.blocking",
        "AppendResult": "dledger.client.shared",
        "AppendsNotServedError": "dledger.errors",
        "ClientSecurity": "dledger.client.security",
        "ConfigError": "dledger.errors",
        "DLedgerClient": "dledger.client.blocking",
        "DLedgerError": "dledger.errors",
        "DiskFullError": "dledger.errors",
        "EmptyBatchError": "dledger.errors",
        "Entry": "dledger.types",
        "EntryTooLargeError": "dledger.errors",
        "FallBehindError": "dledger.errors",
        "IndexBeforeBeginError": "dledger.errors",
        "IndexOutOfRangeError": "dledger.errors",
        "InvalidRequestError": "dledger.errors",
        "LeaderNotReadyError": "dledger.errors",
        "LogIndex": "dledger.types",
        "Magic": "dledger.types",
        "NotLeaderError": "dledger.errors",
        "OutOfOrderSequenceError": "dledger.errors",
        "PendingFullError": "dledger.errors",
        "QuorumAckTimeoutError": "dledger.errors",
        "ReadFrom": "dledger.client.shared",
        "ReadMode": "dledger.rpc.clients.codec",
        "RequestTimeoutError": "dledger.errors",
        "RequestTooLargeError": "dledger.errors",
        "TermChangedError": "dledger.errors",
        "TlsError": "dledger.errors",
        "TlsFiles": "dledger.client.security",
        "TooManyProducersError": "dledger.errors",
        "TransferFailedError": "dledger.errors",
        "UnavailableError": "dledger.errors",
        "UnknownMemberError": "dledger.errors",
        "UnknownProducerError": "dledger.errors",
        "UntimedLogError": "dledger.errors",
    },
)
