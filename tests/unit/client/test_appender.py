"""The appender without a node: what it holds back while nothing can be sent."""

from __future__ import annotations

from dledger.client.appender import ENTRY_OVERHEAD_BYTES, Appender, AppenderOptions
from dledger.client.pipe import AppendPipe
from dledger.client.shared import Deadline
from dledger.errors import DLedgerError, UnavailableError


def _nobody(_deadline: Deadline) -> AppendPipe:
    raise UnavailableError("nobody is there")


def _ignore(_address: str, _error: DLedgerError) -> None:
    pass


def test_empty_entries_are_bounded_too() -> None:
    """Each costs memory whatever its body; counted by bodies alone, any number of empty ones could wait."""
    options = AppenderOptions(pending_bytes_max=10 * ENTRY_OVERHEAD_BYTES, timeout_s=0.2)

    with Appender(_nobody, _ignore, options) as appender:
        for _ in range(9):
            appender.append(b"")
        before = appender.full
        appender.append(b"")
        after = appender.full

    assert (before, after) == (False, True)
    assert appender.failed_entries == 10
    assert not appender.full
