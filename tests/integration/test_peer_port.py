"""Who holds connections of the peer port and says nothing: members go on, and elect when they must."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from dledger.rpc import tls
from dledger.rpc.listening import UNKNOWN_MAX
from dledger.types import NodeId
from dledger_cli.local.group import HOST
from tests.integration.harness import STEADY, Group, undisturbed
from tests.support.certificates import files
from tests.support.waiting import wait_until


def secured(make_group: Callable[..., Group]) -> Group:
    """Three nodes that speak TLS and have a leader."""
    made = make_group(tls=True, settings={"segment_bytes": "16m"})
    made.start_all()
    made.leader()
    return made


def test_a_client_s_certificate_takes_no_place_of_a_member(make_group: Callable[..., Group]) -> None:
    """It is good for a connection, and for nothing else: many that stay silent keep nodes neither from electing nor
    from finding their way to one that comes back.
    """
    group = secured(make_group)
    assert group.tls is not None
    context = tls.client_context(tls.read(files(group.tls.directory, "client")))
    leader = group.leader()
    victim, _ = group.followers(leader)
    with ExitStack() as held, crowding(group.nodes[victim].peer_port, held, context):
        group.append(10)
        group.kill(leader)
        assert group.leader(other_than=leader)
        group.append(10)
        group.start(leader)
        group.stop(victim)
        group.start(victim)
        group.append(10)
        group.wait_for(lambda all_: len({one.end_index for one in all_.values()}) == 1 and len(all_) == 3, "all agree")


def test_members_that_are_stopped_for_a_while_find_a_handful_of_messages(make_group: Callable[..., Group]) -> None:
    """Heartbeats, votes and pushes for a process that is stopped (SIGSTOP) do not pile up: it continues at once."""
    group = make_group(settings=STEADY)
    group.start_all()
    leader = group.leader()
    victim = group.followers(leader)[0]
    term = group.term()
    os.kill(group.pid(victim), signal.SIGSTOP)
    try:
        group.append(500)
    finally:
        os.kill(group.pid(victim), signal.SIGCONT)
    group.wait_for(lambda all_: len({one.committed_index for one in all_.values()}) == 1, "it has caught up")

    assert group.term() == term
    group.verify()


@contextmanager
def crowding(port: int, held: ExitStack, context: object) -> Iterator[None]:
    """Somebody begins connections all the time."""
    over = threading.Event()

    def crowd() -> None:
        while not over.is_set():
            try:
                link = held.enter_context(closing(socket.create_connection((HOST, port), timeout=60)))
                held.enter_context(context.wrap_socket(link))  # type: ignore[attr-defined]
            except OSError:
                continue

    thread = threading.Thread(target=crowd)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def descriptors(group: Group, node: NodeId) -> int:
    return len(os.listdir(f"/proc/{group.pid(node)}/fd"))


def test_connections_cost_a_bounded_number_of_descriptors(make_group: Callable[..., Group]) -> None:
    """Neither those that say nothing nor those that say a part of a handshake; else the log would find none for its
    next segment.

    And a process has as many as it may have, whatever its shell was content with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        group = make_group(settings={**STEADY, "segment_bytes": "1m", "max_entry_bytes": "256k"})
        group.start_all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    victim = group.followers(group.leader())[0]
    before = descriptors(group, victim)
    with undisturbed(group), ExitStack() as held:
        for number in range(1500):
            link = held.enter_context(closing(socket.create_connection((HOST, group.nodes[victim].peer_port), 60)))
            if number % 2:
                link.sendall(b"\x01\x00\x00\x01\x00part of it")
        wait_until(lambda: descriptors(group, victim) < before + UNKNOWN_MAX + 100, "a bounded number of descriptors")
        group.append(100)

    limits = Path(f"/proc/{group.pid(victim)}/limits").read_text()
    (line,) = (one for one in limits.splitlines() if one.startswith("Max open files"))
    assert int(line.split()[3]) == min(hard, 65_536)
