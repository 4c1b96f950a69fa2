"""Errors of requests to name servers."""

from __future__ import annotations

from dledger.errors import DLedgerError, ResponseCode


class NameServerError(DLedgerError):
    """Raised when no name server could answer; the message lists each with its reason. Retry later."""

    code = ResponseCode.NETWORK_ERROR
