"""What goes wrong when a name server is asked."""

from __future__ import annotations

from dledger.errors import DLedgerError, ResponseCode


class NameServerError(DLedgerError):
    """Raised when no name server answered, or one refused; the message says which and why. May be tried again."""

    code = ResponseCode.NETWORK_ERROR
