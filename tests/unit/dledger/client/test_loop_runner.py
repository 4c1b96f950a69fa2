"""Clients that were used before a fork, in the child: an error at once that says what to do, and the parent goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.fake_group import fake_group

PROGRAM = """
import faulthandler, os, signal, sys, time
from dledger.client import DLedgerClient
from dledger.errors import UnavailableError
{setup}
for _ in range(2):
    {use}
pid = os.fork()
if not pid:
    signal.alarm(20)
    try:
        for _ in range(2):
            try:
                {use}
            except UnavailableError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError("it worked")
        {close}
    except BaseException as error:
        sys.stderr.write(repr(error))
        os._exit(3)
    os._exit(0)
status = os.waitpid(pid, 0)[1]
{use}
{close}
assert status == 0, status
"""
CASES = {
    "submit": ("one = DLedgerClient(sys.argv[1])", "one.submit(b'x').result(60)", "one.close()"),
    "log": ("one = DLedgerClient(sys.argv[1])", "one.append(b'x')", "one.close()"),
}


def run(program: str, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, address], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", ["submit", "log"])
def test_clients_of_the_log(name: str) -> None:
    """Their locks may be held by threads that are not in the child, and gRPC's are not there, either."""
    setup, use, close = CASES[name]
    with fake_group(1) as group:
        done = run(PROGRAM.format(setup=setup, use=use, close=close), group.addresses[0])
    assert done.returncode == 0, done.stderr
