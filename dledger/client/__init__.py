"""Clients of a group: ``DLedgerClient`` for threads, ``AsyncDLedgerClient`` for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.late_names import late_names

if TYPE_CHECKING:
    from dledger.client.aio import AsyncDLedgerClient
    from dledger.client.appender import Appender, AppendFuture, AppendManyFuture, AsyncAppender
    from dledger.client.bulk import ReadFrom
    from dledger.client.security import ClientSecurity, TlsFiles
    from dledger.client.shared import AppendResult
    from dledger.client.sync import DLedgerClient
    from dledger.rpc.clients.codec import ReadMode

__all__ = [
    "AppendFuture",
    "AppendManyFuture",
    "AppendResult",
    "Appender",
    "AsyncAppender",
    "AsyncDLedgerClient",
    "ClientSecurity",
    "DLedgerClient",
    "ReadFrom",
    "ReadMode",
    "TlsFiles",
]

__getattr__ = late_names(
    __name__,
    {
        "AppendFuture": "dledger.client.appender",
        "AppendManyFuture": "dledger.client.appender",
        "AppendResult": "dledger.client.shared",
        "Appender": "dledger.client.appender",
        "AsyncAppender": "dledger.client.appender",
        "AsyncDLedgerClient": "dledger.client.aio",
        "ClientSecurity": "dledger.client.security",
        "DLedgerClient": "dledger.client.sync",
        "ReadFrom": "dledger.client.bulk",
        "ReadMode": "dledger.rpc.clients.codec",
        "TlsFiles": "dledger.client.security",
    },
)
