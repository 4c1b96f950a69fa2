"""The audit log stays readable, and small, whatever is refused."""

from __future__ import annotations

import logging

import pytest

from dledger.access.audit import LINES_MAX, SOURCE_LINES_MAX, SOURCES_MAX, AuditEvent, AuditLog


def refuse(log: AuditLog, caller: str, host: str, port: int = 1) -> None:
    log.denied(AuditEvent(caller, f"{host}:{port}", "Append", "", "unknown key"))


def test_made_up_keys_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A source has a few lines per second; what is left out is counted."""
    caplog.set_level(logging.INFO, "dledger.audit")
    log = AuditLog()
    for number in range(5000):
        refuse(log, f"key-{number}?", "10.0.0.7", number)
    refuse(log, "key?", "10.0.0.8")
    log.flush()

    assert len(caplog.messages) == SOURCE_LINES_MAX + 2
    assert any("10.0.0.8" in line for line in caplog.messages)
    assert (
        f'from=10.0.0.7 reason="too many distinct refusals to log each one" others={5000 - SOURCE_LINES_MAX}'
        in (caplog.messages[-1])
    )
    caplog.clear()
    refuse(log, "key-1?", "10.0.0.7")
    assert len(caplog.messages) == 1


def test_a_proved_account_is_heard_whoever_shouts_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    """Its refusals are not lost among those of others at its address."""
    log = AuditLog()
    for number in range(100):
        refuse(log, f"key-{number}?", "10.0.0.7")
    refuse(log, "alice", "10.0.0.7")

    assert "caller=alice" in caplog.messages[-1]


def test_many_sources_together_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """In lines and in what is remembered, whatever addresses they have."""
    log = AuditLog()
    for number in range(10_000):
        refuse(log, "key?", f"10.0.{number // 256}.{number % 256}")
    log.flush()

    assert len(caplog.messages) == LINES_MAX + SOURCES_MAX + 1
    assert 'from=elsewhere reason="too many distinct refusals to log each one" others=' in caplog.messages[-1]
