"""The client for threads on an event loop of its own: threads, futures, forks, interruptions, and a program's end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dledger.client import ReadMode, blocking, member_change
from dledger.client.blocking import SUBMITTED_BYTES_MAX, AppendFuture, DLedgerClient
from dledger.errors import DLedgerError, EntryTooLargeError, IndexOutOfRangeError, PendingFullError, UnavailableError
from dledger.types import Role
from dledger_cli.local.group import free_ports
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.running_group import RunningGroup
from tests.support.waiting import wait_until


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    """Three nodes."""
    with fake_group() as made:
        yield made


@pytest.fixture
def client(group: FakeGroup) -> Iterator[DLedgerClient]:
    """Of all their addresses."""
    with DLedgerClient(group.addresses) as made:
        yield made


def test_every_call_does_what_the_asyncio_one_does(group: FakeGroup, client: DLedgerClient) -> None:
    """With the same results."""
    assert client.append(b"a").index == 0
    assert [one.index for one in client.append_many([b"b", b"c"])] == [1, 2]
    assert client.append_as("p", 0, [b"d"])[0].index == 3
    assert client.producer_sequence("p") == 1
    assert [one.body for one in client.read(0, mode=ReadMode.LINEARIZABLE)] == [b"a", b"b", b"c", b"d"]
    assert client.metadata().role is Role.LEADER
    assert set(client.members_status()) == {"n0", "n1", "n2"}
    assert client.leader_status().node_id == "n0"
    assert client.change_members(member_change("add", "n4", "h:9")).learners == ("n4",)
    assert client.transfer_leadership().node_id == "n1"
    with pytest.raises(IndexOutOfRangeError):
        client.read(99, address=group.addresses[0])
    with pytest.raises(EntryTooLargeError):
        client.append(bytes(5 << 20))


def test_appends_of_many_threads_share_requests(group: FakeGroup, client: DLedgerClient) -> None:
    """Each gets its own place."""
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda number: client.append(b"%d" % number).index, range(500)))
    assert sorted(found) == list(range(500))
    bodies = group.nodes[0].bodies()
    assert [bodies[index] for index in found] == [b"%d" % number for number in range(500)]


def test_submitted_entries_are_stored_in_order(group: FakeGroup, client: DLedgerClient) -> None:
    """In few requests; ``flush`` waits for all of them."""
    futures = [client.submit(b"%d" % number) for number in range(5000)]
    client.flush()
    assert all(one.done() for one in futures)
    assert [one.result().index for one in futures] == list(range(5000))
    assert group.nodes[0].bodies() == [b"%d" % number for number in range(5000)]
    assert len(group.nodes[0].batches) < 1000


def test_a_callback_may_submit_and_must_not_wait(client: DLedgerClient) -> None:
    """It runs on the client's thread, where a wait would be for itself."""
    refused: list[DLedgerError] = []
    more: list[AppendFuture] = []
    called = threading.Event()

    def on_done(_: AppendFuture) -> None:
        more.append(client.submit(b"b"))
        for wait in (lambda: client.append(b"c"), lambda: client.read(0)):
            try:
                wait()
            except UnavailableError as error:
                refused.append(error)
        called.set()

    client.submit(b"a").add_done_callback(on_done)
    assert called.wait(30)
    assert len(refused) == 2
    assert more[0].result(30).index == 1


def test_a_future_that_is_not_done_times_out(group: FakeGroup, client: DLedgerClient) -> None:
    """And can be asked again."""
    group.nodes[0].hold = True
    future = client.submit(b"a")
    with pytest.raises(TimeoutError):
        future.result(0.05)
    wait_until(lambda: bool(group.nodes[0].held), "it was sent")
    group.nodes[0].release()
    assert future.result(30).index == 0
    assert future.exception() is None


def test_what_is_submitted_is_bounded(group: FakeGroup) -> None:
    """Who submits faster than entries are stored has to wait, and none is lost."""
    group.nodes[0].hold = True
    futures: list[AppendFuture] = []
    with DLedgerClient(group.addresses, timeout_s=30) as client:

        def submit() -> None:
            futures.extend(client.submit(bytes(100_000)) for _ in range(300))

        submitting = threading.Thread(target=submit)
        submitting.start()
        wait_until(lambda: client._queue._bytes >= SUBMITTED_BYTES_MAX, "the queue is full")
        assert client._queue._bytes < SUBMITTED_BYTES_MAX + 200_000
        assert submitting.is_alive()
        group.nodes[0].hold = False
        group.nodes[0].release()
        submitting.join(30)
        client.flush()
    assert [one.result(0).index for one in futures] == list(range(300))


def test_who_waits_for_room_in_vain_is_told(group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry was not queued."""
    monkeypatch.setattr(blocking, "SUBMITTED_BYTES_MAX", 0)
    with DLedgerClient(group.addresses, timeout_s=0.1) as client, pytest.raises(PendingFullError) as error:
        client.submit(b"a")
    assert error.value.outcome == "not_applied"
    assert not group.nodes[0].batches


def test_a_follower_and_a_watcher_end_with_their_iterators(group: FakeGroup, client: DLedgerClient) -> None:
    """Or with the client, with an error."""
    client.append_many([b"a", b"b"])
    entries, roles = client.follow(0), client.watch_role(group.addresses[0])
    assert [next(entries).body, next(entries).body] == [b"a", b"b"]
    assert next(roles).role is Role.LEADER
    client.append(b"c")
    assert next(entries).body == b"c"
    group.elect(1)
    assert next(roles).role in (Role.LEADER, Role.FOLLOWER)
    roles.close()
    failed: list[BaseException] = []

    def follow() -> None:
        try:
            next(entries)
        except DLedgerError as error:
            failed.append(error)

    following = threading.Thread(target=follow)
    following.start()
    client.close()
    following.join(30)
    assert len(failed) == 1


def test_a_closed_client_says_so(client: DLedgerClient) -> None:
    """Whatever it is asked; closing it again does nothing."""
    client.append(b"a")
    client.close()
    client.close()
    for use in (lambda: client.append(b"b"), lambda: client.submit(b"b"), lambda: client.read(0)):
        with pytest.raises(UnavailableError, match="closed"):
            use()


def test_a_client_that_was_not_used_starts_no_thread(group: FakeGroup) -> None:
    """Nor does its end."""
    before = set(threading.enumerate())
    with DLedgerClient(group.addresses):
        begun = set(threading.enumerate()) - before
        assert not [one.name for one in begun if one.name.startswith("dledger-client")]


def test_everything_acknowledged_is_there_once_whoever_leads(tmp_path: Path) -> None:
    """Real members; the leader stops while thousands of entries are on their way."""
    group = RunningGroup(tmp_path)
    try:
        group.wait_for_leader()
        with DLedgerClient([node.client_address for node in group.nodes], timeout_s=30) as client:
            client.append(b"the first")
            wait_until(lambda: all(node.status().voter for node in group.nodes), "all are voters")
            futures = [client.submit(b"%d" % number) for number in range(2000)]
            group.nodes[group.leader()].stop()
            futures += [client.submit(b"%d" % number) for number in range(2000, 4000)]
            indexes = [one.result(60).index for one in futures]
            entries = client.follow(0)
            found: list[bytes] = []
            while len(found) < 4000:
                entry = next(entries)
                if entry.body.isdigit():
                    found.append(entry.body)
        assert found == [b"%d" % number for number in range(4000)]
        assert indexes == sorted(set(indexes))
    finally:
        group.stop()


# --- programs ---------------------------------------------------------------------------------------------------------

SUBMITTING = """
import sys
from dledger.client import DLedgerClient
client = DLedgerClient(sys.argv[1])
for number in range(100):
    client.submit(b"%d" % number)
"""
FORKING = """
import os, signal, sys
from dledger.client import DLedgerClient
from dledger.errors import UnavailableError
client = DLedgerClient(sys.argv[1])
client.append(b"a")
pid = os.fork()
if not pid:
    signal.alarm(20)
    for use in (lambda: client.append(b"b"), lambda: client.submit(b"b"), lambda: client.read(0)):
        try:
            use()
        except UnavailableError as error:
            assert "fork" in str(error), error
        else:
            os._exit(3)
    client.close()
    mine = DLedgerClient(sys.argv[1])
    mine.append(b"child")
    mine.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
client.append(b"b")
client.close()
"""
PENDING_AT_A_FORK = """
import asyncio, os, signal, sys, threading
from dledger.client import DLedgerClient
from dledger.errors import UnavailableError
client = DLedgerClient(sys.argv[1], timeout_s=60)
sent = client.submit(b"a")
client._runner.run(lambda: asyncio.sleep(0))  # it is in a batch now
client._runner.post(threading.Event().wait)
waiting = client.submit(b"b")
pid = os.fork()
if not pid:
    signal.alarm(20)
    for future in (sent, waiting):
        called = []
        future.add_done_callback(called.append)
        assert future.done() and called == [future]
        assert future.exception().outcome == "unknown"
        try:
            future.result()
        except UnavailableError as error:
            assert "fork" in str(error), error
        else:
            os._exit(3)
    os._exit(0)
status = os.waitpid(pid, 0)[1]
assert not (sent.done() or waiting.done())
os._exit(status and 1)
"""
INTERRUPTED = """
import os, signal, sys, threading, time
from dledger.client import DLedgerClient
client = DLedgerClient(sys.argv[1], timeout_s=60)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    for entry in client.follow(0):
        pass
except KeyboardInterrupt:
    print("interrupted")
client.close()
"""


def run(program: str, address: str) -> subprocess.CompletedProcess[str]:
    """A program, and what it printed."""
    return subprocess.run(
        [sys.executable, "-c", program, address], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)])
def test_what_was_submitted_is_stored_at_a_programs_end(group: FakeGroup, end: str, code: int) -> None:
    """However it ends."""
    done = run(SUBMITTING + end, group.addresses[0])
    assert (done.returncode, group.nodes[0].bodies()) == (code, [b"%d" % number for number in range(100)])


def test_a_forked_child_is_told_to_make_its_own(group: FakeGroup) -> None:
    """The parent's goes on."""
    done = run(FORKING, group.addresses[0])
    assert (done.returncode, done.stderr) == (0, "")
    assert group.nodes[0].bodies() == [b"a", b"child", b"b"]


def test_what_is_pending_at_a_fork_has_failed_in_the_child() -> None:
    """In a batch or on its way to one: with the fork's error at once, where nobody would ever settle it."""
    done = run(PENDING_AT_A_FORK, f"127.0.0.1:{free_ports(1)[0]}")
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_ends_a_wait(group: FakeGroup) -> None:
    """And the client can be closed."""
    done = run(INTERRUPTED, group.addresses[0])
    assert (done.returncode, done.stdout) == (0, "interrupted\n")
