"""Clients of a group: ``DLedgerClient`` for threads, ``AsyncDLedgerClient`` for asyncio."""

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
