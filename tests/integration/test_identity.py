"""Wrong names, ids, addresses and ports: said clearly, and harmless to everybody else (trap 31)."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing

import pytest

from dledger.types import NodeId, Role
from dledger_cli.local.group import HOST, free_ports
from tests.integration.harness import N0, N1, N2, STEADY, Group
from tests.support.waiting import wait_until


class Stranger(Group):
    """``n2`` is configured differently from the others, once it is ``odd``."""

    odd = False

    def command(self, node: NodeId) -> list[str]:
        words = [*super().command(node), *self.common_words]
        if node == N2 and self.odd:
            old, new = self.replaced_words
            words = [new if word == old else word for word in [*words, *self.extra_words]]
        return words

    common_words: tuple[str, ...] = ()
    extra_words: tuple[str, ...] = ()
    replaced_words = ("", "")


class Swapped(Group):
    """``n2``'s process, once it is ``odd``, believes to be ``n1`` (its directory is new): the same id runs twice."""

    odd = False

    def command(self, node: NodeId) -> list[str]:
        words = super().command(node)
        if node == N2 and self.odd:
            words[words.index("-i") + 1] = N1
            words[words.index("-s") + 1] = str(self.directory / "impostor")
        return words

    def members_of(self, node: NodeId) -> str:
        if node != N2 or not self.odd:
            return super().members_of(node)
        ports = {one.node_id: one.peer_port for one in self.nodes.values()}
        ports[N1], ports[N2] = ports[N2], ports[N1]
        return ";".join(f"{one}-{HOST}:{port}" for one, port in ports.items())


@pytest.mark.parametrize("kind", ["group", "cluster id", "node id", "members", "segment size"])
def test_misconfigured_node_takes_no_part_and_harms_nobody(
    adopt: Callable[[Group], Group], tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """It neither replicates nor votes, the two others serve in one term, and the logs name the difference."""
    directory = tmp_path_factory.mktemp("group")
    group: Swapped | Stranger = (
        Swapped(directory, settings=STEADY) if kind == "node id" else Stranger(directory, settings=STEADY)
    )
    if isinstance(group, Stranger) and kind == "members":
        group.common_words = ("--set", "cluster_id=one")
    adopt(group).start_all()  # a group begins with all its members, which must have heard of that
    group.leader()
    group.wait_for(lambda all_: all(one.voter for one in all_.values()), "all have standing")
    group.stop(N2)
    shutil.rmtree(group.store_dir(N2))
    group.odd = True
    if isinstance(group, Stranger):
        stranger = group
        if kind == "group":
            stranger.overrides[N2] = {"-g": "another"}
        elif kind == "members":
            stranger.overrides[N2] = {"-p": stranger.members_of(N2) + f";n3-{HOST}:{free_ports(1)[0]}"}
        elif kind == "cluster id":
            stranger.extra_words = ("--set", "cluster_id=another")
        else:
            stranger.replaced_words = ("segment_bytes=1m", "segment_bytes=2m")

    group.start(N2)
    leader = group.leader()
    term = group.status(leader).term
    group.append(200)
    wait_until(
        lambda: any("n2" in line and "talk" in line for node in (N0, N1, N2) for line in group.logs(node).splitlines()),
        "the difference is logged",
    )

    group.wait_for(
        lambda all_: {all_[node].committed_index for node in (N0, N1)} == {all_[leader].end_index}, "both have it all"
    )
    statuses = group.told_by(leader)
    assert leader in (N0, N1)
    assert statuses[leader].term == term
    if N2 in statuses:
        assert statuses[N2].end_index == -1
        assert statuses[N2].role is not Role.LEADER


def run_once(group: Group, node: NodeId, *extra: str) -> subprocess.CompletedProcess[str]:
    """Run a node's command line that is expected to end by itself."""
    return subprocess.run(
        [*group.command(node), *extra],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("-p", "n0-127.0.0.1:4000;n0-127.0.0.1:4001", "'n0' appears more than once"),
        ("-p", "n1-127.0.0.1:4000;n2-127.0.0.1:4001", "'n0' is not among the members"),
        ("-p", "n0-127.0.0.1:4000;n1-127.0.0.1:4000", "appears more than once"),
        ("-p", "n0=127.0.0.1:4000", "must have the form"),
        ("-i", "n7", "'n7' is not among the members"),
        ("--client-port", "70000", "client_port"),
    ],
    ids=["same-id-twice", "self-missing", "same-address-twice", "no-member-list", "unknown-id", "no-port"],
)
def test_impossible_configuration_is_refused_before_anything_is_opened(
    make_group: Callable[..., Group], flag: str, text: str, words: str
) -> None:
    """One clear sentence, an exit code, no directory."""
    group = make_group()
    group.overrides[N0] = {flag: text}

    ended = run_once(group, N0)

    assert ended.returncode not in (0, 70)
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not group.store_dir(N0).exists()


@pytest.mark.parametrize("which", ["peer", "client"])
def test_port_in_use_is_said(make_group: Callable[..., Group], which: str) -> None:
    """A taken port ends the start with the address in the message."""
    group = make_group()
    node = group.nodes[N0]
    port = node.peer_port if which == "peer" else node.client_port
    with closing(socket.create_server((HOST, port))):
        ended = run_once(group, N0)

    assert ended.returncode not in (0, 70)
    assert f"{which} address {HOST}:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("flag", "text"), [("-g", "another"), ("--cluster", "another")])
def test_directory_of_another_group_is_refused(group: Group, flag: str, text: str) -> None:
    """What is on disk says whose it is: it cannot be taken into another group by mistake."""
    group.stop(N0)
    extra = ["--set", f"cluster_id={text}"] if flag == "--cluster" else []
    if not extra:
        group.overrides[N0] = {flag: text}

    ended = run_once(group, N0, *extra)
    group.overrides.clear()
    group.start(N0)

    assert ended.returncode not in (0, 70)
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr
    group.append(10)
    group.verify()
