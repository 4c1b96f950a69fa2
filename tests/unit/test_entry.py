"""Where the ``dledger`` command begins."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("pid", "handler"), [("1", "cluster.entry"), ("os.getpid()", None)])
def test_the_first_process_of_a_container_ends_on_a_signal(pid: str, handler: str | None) -> None:
    """It has no default reaction (pid_namespaces(7)); every other process keeps the default until a server runs."""
    script = f"""
import atexit, os, signal, sys
os.getpid = lambda pid={pid}: pid
sys.argv = ["dledger", "--version"]
atexit.register(lambda: print(getattr(signal.getsignal(signal.SIGTERM), "__module__", None)))
from cluster.entry import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.startswith("dledger ")
    assert done.stdout.splitlines()[-1] == (handler or "signal")


def test_the_command_line_itself_loads_no_client_server_or_spark() -> None:
    """Every command and every node begins with it, and starts in half the time for what it leaves to others."""
    heavy = {"numpy", "grpc", "pyspark", "pyarrow", "dledger.client", "dledger.server", "rocketstore.client"}
    script = f"import sys, cluster.cli; print(sorted({heavy} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout == "[]\n"
