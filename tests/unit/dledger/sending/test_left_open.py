"""Programs that end without closing what they send with."""

from __future__ import annotations

import subprocess
import sys

from tests.support.fake_group import fake_group

APPENDER = """
import sys
from dledger.client import DLedgerClient
appender = DLedgerClient(sys.argv[1]).appender(linger_ms=60_000)
for number in range(100):
    appender.append(b"%d" % number)
"""


def run(program: str, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, address], capture_output=True, text=True, timeout=60, check=False
    )


def test_what_lingers_in_an_appender_is_sent_and_told() -> None:
    """However the program ends, with the number."""
    with fake_group(1) as group:
        done = run(APPENDER, group.addresses[0])
        stored = [one.body for one in group.nodes[0].entries]
    assert done.returncode == 0, done.stderr
    assert [one for one in stored if one] == [b"%d" % number for number in range(100)]
    assert "100 items were still in dledger-appender" in done.stderr


def test_nothing_is_told_of_what_was_closed_or_has_been_sent() -> None:
    """Standard error stays empty."""
    for end in ("appender.close()", "appender.flush()"):
        with fake_group(1) as group:
            done = run(APPENDER + end, group.addresses[0])
            assert (done.returncode, done.stderr) == (0, "")
