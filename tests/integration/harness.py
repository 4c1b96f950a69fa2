"""Groups of real processes for the tests, and what every test asks of them in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from dledger.config import Member, ServerConfig, StoreConfig
from dledger.rpc.ports import NodeStatus
from dledger.types import NodeId, Role, Term
from dledger_cli.commands.demo import digest_of
from dledger_cli.local.group import HOST, LocalGroup
from dledger_cli.local.tcp_proxy import LocalProxiedGroup
from tests.support.history import AppendOp, History, Outcome, check
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.workload import Workload, read_log

SMALL_SEGMENTS: Final = {"segment_bytes": "1m", "index_segment_bytes": "64k"}
STEADY: Final = {"election_timeout_ms_min": "3000", "election_timeout_ms_max": "4500"}
"""Settings of groups whose leader must stay the same: a busy machine may keep it from running for a second."""
SILENCE_S: Final = 8.0
DEAF: Final = {
    "election_timeout_ms_min": f"{1000 * SILENCE_S:.0f}",
    "election_timeout_ms_max": f"{1000 * SILENCE_S + 1000:.0f}",
    "fast_failover": "false",
}
"""Settings of groups that notice a leader's end only by its silence for ``SILENCE_S``: if it hands over, it shows."""
FATAL_WORDS: Final = ("stopping the node:", "Traceback (most recent call last)")
APPEND_BATCH: Final = 100
N0, N1, N2, N3, N4 = (NodeId(f"n{number}") for number in range(5))


class WatchedGroup(LocalGroup):
    """Any local group of a test: what its nodes are asked, and what is looked at when the test is over."""

    allowed_to_fail: Collection[NodeId] = ()
    """Nodes whose logs may hold a fatal error or a traceback."""

    def status(self, node: NodeId) -> NodeStatus:
        """What one node says of itself, once it answers."""
        return self.told_by(node)[node]

    def told_by(self, *nodes: NodeId) -> dict[NodeId, NodeStatus]:
        """What nodes say of themselves, once these (all) answer: on a busy machine some may take too long to."""
        answers: dict[NodeId, NodeStatus] = {}

        def have_answered() -> bool:
            answers.update(self.statuses())
            return set(nodes or self.nodes) <= answers.keys()

        wait_until(have_answered, f"{', '.join(nodes) or 'all nodes'} answer")
        return answers

    def term(self) -> Term:
        """The highest term that any node knows."""
        terms: list[Term] = []

        def somebody_answers() -> bool:
            terms[:] = [one.term for one in self.statuses().values()]
            return bool(terms)

        wait_until(somebody_answers, "a node answers")
        return max(terms)

    def followers(self, leader: NodeId) -> list[NodeId]:
        """All others."""
        return [node for node in self.nodes if node != leader]

    def wait_for(
        self, condition: Callable[[dict[NodeId, NodeStatus]], bool], what: str, timeout_s: float = PATIENCE_S
    ) -> None:
        """Wait until the statuses of the nodes that answer satisfy ``condition``, which may name some that do not."""

        def holds() -> bool:
            try:
                return condition(self.statuses())
            except KeyError:  # on a busy machine one may take too long to answer
                return False

        wait_until(holds, what, timeout_s)

    def wait_deposed(self, node: NodeId) -> None:
        """Wait until a leader whom no quorum answers has stopped to lead (check-quorum, dissertation §6.2)."""
        self.wait_for(lambda all_: node in all_ and all_[node].role is not Role.LEADER, f"{node} steps down")

    def data_dir(self, node: NodeId) -> Path:
        """Where the node's segments are."""
        return self.store_dir(node) / "data"

    def segments(self, node: NodeId) -> list[Path]:
        """The node's data files, oldest first."""
        return sorted(path for path in self.data_dir(node).iterdir() if path.name.isdigit())

    def hard_kill(self) -> None:
        """SIGKILL to everything that still runs: nothing that a test may have done can keep this from ending."""
        for node in self.nodes:
            if self.is_running(node):
                self.kill(node)
        self.close()

    def complaints(self) -> list[str]:
        """Fatal errors and tracebacks in the logs of nodes that were not expected to fail."""
        found = []
        for node in self.nodes:
            text = self.logs(node)
            if node not in self.allowed_to_fail and any(words in text for words in FATAL_WORDS):
                found.append(f"{node} reports a failure:\n" + "\n".join(text.splitlines()[-60:]))
        return found

    def digests(self) -> dict[NodeId, str]:
        """Of each node's log, once all have converged and hold the same entries; each must begin at the same one.

        Somebody leads by then: the next leader would add an entry.
        """
        self.leader()
        statuses = self.wait_converged()
        position = max(one.begin_position for one in statuses.values())
        return {node: digest_of(self.data_dir(node), position, one.end_position) for node, one in statuses.items()}


class Group(WatchedGroup):
    """A local group with small segments, whose nodes' command lines and member lists a test may change."""

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 3,
        settings: Mapping[str, str] | None = None,
        name: str = "default",
        tls: bool = False,
    ) -> None:
        super().__init__(directory, size=size, name=name, settings={**SMALL_SEGMENTS, **(settings or {})}, tls=tls)
        self.history = History()
        self._batches = 0
        self.prefixes: dict[NodeId, list[str]] = {}
        """Words before a node's command line: a tracer, a network namespace."""
        self.overrides: dict[NodeId, dict[str, str]] = {}
        """Flags of one node that replace the group's, for example ``{"-g": "other"}``."""
        self.allowed_to_fail: set[NodeId] = set()

    def command(self, node: NodeId) -> list[str]:
        """As ``LocalGroup.command``, with the node's own prefix, members and flags."""
        words = super().command(node)
        for flag, value in self.overrides.get(node, {}).items():
            words[words.index(flag) + 1] = value
        return [*self.prefixes.get(node, []), *words]

    # -- what a test asks ----------------------------------------------------------------------------------------

    def workload(self, *, pipelines: int = 1, value_bytes: int = 64, timeout_s: float = 3.0) -> Workload:
        """A background load on all nodes, recorded in this group's history; at most one per group."""
        return Workload(
            self.addresses,
            self.history,
            group=self.name,
            pipelines=pipelines,
            value_bytes=value_bytes,
            timeout_s=timeout_s,
            security=self.security,
        )

    def append(self, count: int, *, size: int = 100) -> None:
        """Append ``count`` entries, all of which must be acknowledged."""
        with closing(self.client(timeout_s=60.0)) as client:
            for _ in range(0, count, APPEND_BATCH):
                self._batches += 1
                values = [b"batch-%d/%d " % (self._batches, n) + b"." * size for n in range(min(count, APPEND_BATCH))]
                began = time.monotonic()
                results = client.append_many(values)
                ended = time.monotonic()
                for value, result in zip(values, results, strict=True):
                    self.history.record(AppendOp(value, began, ended, Outcome.ACKED, result.index))

    def verify(self) -> dict[int, bytes | None]:
        """The verdict: all nodes converge, are byte-identical, and one log explains the history; gives that log."""
        digests = self.digests()
        assert len(set(digests.values())) == 1, f"the replicas differ: {digests}"
        statuses = self.told_by()
        begin = max(one.begin_index for one in statuses.values())
        end = min(one.committed_index for one in statuses.values())  # the leader may add entries of its own meanwhile
        logs = {}
        with closing(self.client(timeout_s=60.0)) as client:
            for node in statuses:
                logs[node] = read_log(client, begin, end, self.nodes[node].client_address)
        first = next(iter(logs.values()))
        assert all(log == first for log in logs.values()), "the nodes answer reads differently"
        self.history.dump(self.directory / "history.jsonl")
        if begin == 0:
            complaints = check(self.history.appends, self.history.reads, first)
            assert not complaints, "the history is not linearizable:\n" + "\n".join(complaints)
        return first


@contextmanager
def undisturbed(group: Group) -> Iterator[None]:
    """Appends go on meanwhile, in one term, and nobody fails."""
    term, leader = group.term(), group.leader()
    with group.workload(pipelines=0) as load:
        load.history.wait_for_acks(20)
        yield
        load.history.wait_for_acks(20)
    assert group.term() == term, "the abuse cost an election"
    assert group.leader() == leader
    group.verify()


def like_the_members(group: Group, target: NodeId) -> ServerConfig:
    """The configuration of a node of these tests' groups, as far as its peers compare it with theirs."""
    members = tuple(Member(one.node_id, HOST, one.peer_port) for one in group.nodes.values())
    store = StoreConfig(segment_bytes=1 << 20)
    return ServerConfig(node_id=target, members=members, group=group.name, client_port=0, store=store)


class ProxiedGroup(LocalProxiedGroup, Group):
    """Nodes that reach each other only through a ``ProxyNetwork``."""
