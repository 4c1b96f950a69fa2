"""Errors of name server lookups."""

from __future__ import annotations

from dledger.errors import DLedgerError, ResponseCode


class NameServerError(DLedgerError):
    """Raised when no name server responded, or one refused; the message says which and why. May be retried."""

    code = ResponseCode.NETWORK_ERROR
