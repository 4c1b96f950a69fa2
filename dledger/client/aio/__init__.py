"""The client for asyncio, over remoting: ``DLedgerClient``. Its arguments and errors are in ``dledger.client``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.late_names import late_names

if TYPE_CHECKING:
    from dledger.client.aio.client import DLedgerClient

__all__ = ["DLedgerClient"]

__getattr__ = late_names(__name__, {"DLedgerClient": "dledger.client.aio.client"})
