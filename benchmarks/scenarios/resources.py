"""A node's resources when it is idle, and when very much is waiting in it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.process_facts import resident_of, threads_of
from benchmarks.processes import ChildError
from benchmarks.registry import Scenario
from dledger.client import DLedgerClient
from dledger_cli.local.group import LocalGroup

IDLE_SECONDS: Final = 3.0
PENDING_APPENDS: Final = 10_000
PENDING_SETTINGS: Final = {
    # The appends must stay pending while they are counted: the leader must neither time out nor step down.
    "election_timeout_ms_min": "8000",
    "election_timeout_ms_max": "12000",
    "ack_timeout_ms": "60000",
    # One client may have half of the limit.
    "pending_entries_max": str(3 * PENDING_APPENDS),
}
SUBMIT_TIMEOUT_SECONDS: Final = 30.0
PENDING_SECONDS_MAX: Final = 7.0
"""How long they may take to arrive: less than an election timeout, after which the leader steps down."""
_IMPORT_GRPC: Final = "import grpc, sys; sys.stdout.write('ready'); sys.stdout.flush(); sys.stdin.read()"


def bare_grpc_megabytes(directory: Path) -> float:
    """Resident memory of a Python that has imported grpc and nothing else."""
    with subprocess.Popen(
        [sys.executable, "-c", _IMPORT_GRPC], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        if process.stdout is None or process.stdout.read(5) != b"ready":
            raise ChildError("a bare Python could not import grpc")
        return resident_of(process.pid, directory).own / 1e6


def measure_idle(context: Context, _names: frozenset[str]) -> Iterator[Figure]:
    """The largest of three idle nodes; its mapped segments are page cache."""
    directory = context.directory / "group-idle"
    with LocalGroup(directory) as group, closing(group.client()) as client:
        client.append(b"one entry, so that every path was walked once")
        time.sleep(IDLE_SECONDS)
        largest = max(resident_of(group.pid(node), directory).own for node in group.nodes)
    yield Figure("idle_rss", largest / 1e6, "MB", "bare Python importing grpc", bare_grpc_megabytes(context.directory))


def most_pending(client: DLedgerClient, address: str) -> int:
    """How many appends are waiting at the node, once all do or ``PENDING_SECONDS_MAX`` have passed."""
    deadline = time.monotonic() + PENDING_SECONDS_MAX
    most = 0
    while most < PENDING_APPENDS and time.monotonic() < deadline:
        most = max(most, client.metadata(address=address).pending_entries)
        time.sleep(0.05)
    return most


def measure_pending(context: Context, _names: frozenset[str]) -> Iterator[Figure]:
    """Threads of a leader whose followers are stopped, so that no append can be acknowledged."""
    with LocalGroup(context.directory / "group-pending", settings=PENDING_SETTINGS) as group:
        leader = group.leader(timeout_s=60.0)
        idle_threads = threads_of(group.pid(leader))
        address = group.nodes[leader].client_address
        followers = [node for node in group.nodes if node != leader]
        with (
            LoadClient(group.addresses, group.name, context.directory / "pending.log") as load,
            closing(group.client()) as client,
        ):
            load.appends_per_second(0.1, 0.1, 1024, 1)  # it is loaded, and the client knows the leader
            client.metadata(address=address)
            for node in followers:
                group.pause(node)
            load.submit_singles(address, PENDING_APPENDS, 1024, SUBMIT_TIMEOUT_SECONDS)
            pending = most_pending(client, address)
            threads = threads_of(group.pid(leader))
            for node in followers:
                group.resume(node)
            outcome = load.hear(SUBMIT_TIMEOUT_SECONDS + 30.0)
    if pending < PENDING_APPENDS or outcome["failed"]:
        raise ChildError(f"only {pending:,} of {PENDING_APPENDS:,} appends became pending, which ended as {outcome}")
    yield Figure("pending_threads", threads, "threads", "the same leader idle", idle_threads)


IDLE: Final = Scenario("memory of an idle node", ("idle_rss",), measure_idle)
PENDING: Final = Scenario(f"{PENDING_APPENDS:,} appends pending", ("pending_threads",), measure_pending)
