"""A group in this process, on loopback, whose members come and go."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from dledger.config import Member, SecurityConfig, ServerConfig, StoreConfig
from dledger.errors import (
    ChangeInProgressError,
    DLedgerError,
    InvalidRequestError,
    LeaderNotReadyError,
    LeaderTransferringError,
    MemberExistsError,
    MemberUnknownError,
    NotLeaderError,
    OutOfOrderSequenceError,
    RequestTimeoutError,
    ShutdownError,
    TermChangedError,
    UnavailableError,
    UnknownProducerError,
    WouldLoseQuorumError,
)
from dledger.runtime.threads import NodeFailedError
from dledger.server import DLedgerServer
from dledger.types import (
    AppendedBatch,
    ChangeKind,
    Configuration,
    LogIndex,
    Magic,
    MemberChange,
    NodeId,
    ProducerBatch,
    Role,
    Standing,
)
from dledger_cli import certs
from dledger_cli.local.group import free_ports
from tests.support.certificates import files
from tests.support.waiting import wait_until

NODES_MAX: Final = 8
WAIT_S: Final = 120.0
_AGAIN: Final = (
    NotLeaderError,
    LeaderNotReadyError,
    LeaderTransferringError,
    ChangeInProgressError,
    TermChangedError,
    RequestTimeoutError,
    UnavailableError,
    ShutdownError,
    WouldLoseQuorumError,  # a member that a busy machine kept silent counts again once it is heard
)
"""After these a change, which has an id, is asked for again."""
_FINAL: Final = (InvalidRequestError, OutOfOrderSequenceError, UnknownProducerError, NodeFailedError)
"""After these a producer cannot go on."""


class RunningMembers:
    """Nodes n0 to n7, each of which a test starts with the seeds that it names; ``stop`` them."""

    def __init__(self, path: Path, *, tls: bool = False, **store: Any) -> None:  # noqa: ANN401 - one per setting
        self._path = path
        self._store = {"segment_bytes": 1 << 20, "index_segment_bytes": 1 << 16, **store}
        self._members = [
            Member(NodeId(f"n{number}"), "127.0.0.1", port) for number, port in enumerate(free_ports(NODES_MAX))
        ]
        self._certificates = path / "certs" if tls else None
        if self._certificates is not None:
            certs.make_authority(self._certificates)
        self._change_ids = itertools.count(1)
        self.nodes: dict[int, DLedgerServer] = {}
        """Those that run."""

    def start(self, number: int, *seeds: int, join: bool = False) -> DLedgerServer:
        """Start a node whose conf names ``seeds`` and itself."""
        members = tuple(self._members[one] for one in (number, *seeds))
        store = StoreConfig(self._path, **self._store)
        config = ServerConfig(
            node_id=members[0].node_id,
            members=members,
            client_port=0,
            store=store,
            join=join,
            security=self._security(members[0].node_id),
        )
        self.nodes[number] = node = DLedgerServer(config)
        return node.start()

    def _security(self, node_id: NodeId) -> SecurityConfig:
        if self._certificates is None:
            return SecurityConfig()
        if not (self._certificates / f"{node_id}.crt").exists():
            certs.make_node(self._certificates, node_id)
        found = files(self._certificates, node_id)
        return SecurityConfig(tls_cert_path=found.cert, tls_key_path=found.key, tls_trust_cert_path=found.ca)

    def member(self, number: int) -> Member:
        """Its id and address."""
        return self._members[number]

    def move(self, number: int) -> Member:
        """Give a node that does not run another address, that of the last of those that a test does not use."""
        self._members[number] = replace(self._members[number], port=self._members.pop().port)
        return self._members[number]

    def found(self, *numbers: int) -> None:
        """Start a new group of these, and wait until it knows that all of them have been there."""
        for number in numbers:
            self.start(number, *(one for one in numbers if one != number))
        states = [self.nodes[number]._node.state for number in numbers]
        wait_until(lambda: all(one.standing is Standing.FULL for one in states), "all have standing", WAIT_S)

    def kill(self, number: int) -> None:
        """Stop a node without a word to the others."""
        self.nodes.pop(number).stop(graceful=False)

    def leader(self) -> DLedgerServer | None:
        """Who leads, if somebody does."""
        leading = [
            (node.status().term, number, node)
            for number, node in list(self.nodes.items())  # a test takes one away while another thread looks
            if node.fatal is None and node.status().role is Role.LEADER
        ]
        return max(leading, key=lambda one: one[:2])[2] if leading else None

    def wait_for_leader(self) -> DLedgerServer:
        """Who leads, once somebody does."""
        wait_until(lambda: self.leader() is not None, "a leader", WAIT_S)
        return self.leader() or self.wait_for_leader()

    def change(self, kind: ChangeKind, number: int, **details: Any) -> Configuration:  # noqa: ANN401  # fields by name
        """Change the members, whoever leads meanwhile; returns the configuration once it is committed.

        Of a request without a certain answer, a later leader may have done more already than was asked for.
        """
        member = self._members[number]
        where = {"host": member.host, "port": member.port} if kind is ChangeKind.ADD else {}
        change = MemberChange(kind, member.node_id, next(self._change_ids), **{**where, **details})
        answers: list[Configuration] = []
        in_doubt = False

        def ask() -> bool:
            nonlocal in_doubt
            leader = self.wait_for_leader()
            try:
                answers.append(leader.change_members(change, WAIT_S))
            except _AGAIN as error:
                in_doubt = in_doubt or error.outcome == "unknown"
                return False
            except (MemberExistsError, MemberUnknownError):
                if not in_doubt:
                    raise
                answers.append(leader._node.state.membership.committed)
            return True

        wait_until(ask, f"{kind} {member.node_id}", 2 * WAIT_S)
        return answers[-1]

    def uids(self) -> set[int]:
        """Those of the members, as the leader knows them to be committed."""
        return {one.uid for one in self.wait_for_leader()._node.state.membership.committed.members}

    def move_leadership(self, number: int) -> None:
        """Until this node leads."""

        def ask() -> bool:
            leader = self.wait_for_leader()
            if leader is self.nodes[number]:
                return True
            leader.submit_transfer(NodeId(f"n{number}"), lambda _result: None)
            return False

        wait_until(ask, f"n{number} leads", WAIT_S)

    def wait_for_voters(self, *numbers: int) -> None:
        """Until these, all of whom run, are the voters, and know it, and have standing."""
        wanted = {NodeId(f"n{number}") for number in numbers}

        def settled() -> bool:
            states = [self.nodes[number]._node.state for number in numbers]
            leader = self.leader()
            return (
                leader is not None
                and all(set(one.membership.committed.voters) == wanted and one.has_standing for one in states)
                and all(one.membership.is_committed for one in states)
            )

        wait_until(settled, f"the voters {', '.join(sorted(wanted))}", 2 * WAIT_S)

    def stop(self) -> None:
        """Stop all."""
        for node in self.nodes.values():
            node.stop(graceful=False)

    def append(self, count: int) -> None:
        """Append so many entries and wait for them."""
        with self.load() as load:
            wait_until(lambda: load.acknowledged >= count, f"{count} entries", WAIT_S)

    def wait_converged(self) -> None:
        """Until all nodes know all entries as committed; nobody appends meanwhile."""

        def same() -> bool:
            leader = self.leader()
            ends = {one.log.committed_index for one in self.nodes.values()}
            return leader is not None and ends == {leader.log.last.index}

        wait_until(same, "all have all", WAIT_S)

    def bodies(self, number: int) -> list[bytes]:
        """What a node's log holds of the application's."""
        log = self.nodes[number].log
        first = LogIndex(log.begin.index + 1)
        entries = log.read_range(first, log.last.index, 1 << 30) if log.last.index >= first else []
        return [entry.body for entry in entries if entry.magic is Magic.NORMAL]

    @contextmanager
    def load(self) -> Iterator[Load]:
        """Appends one after the other, as a producer who repeats what has no answer, until the block ends."""
        load = Load(self, f"p{next(self._change_ids)}")
        load.thread.start()
        try:
            yield load
        finally:
            load.stopping.set()
            load.thread.join()
        assert load.failures == []


@dataclass
class Load:
    """A producer."""

    group: RunningMembers
    name: str
    acknowledged: int = 0
    failures: list[DLedgerError] = field(default_factory=list)
    """Refusals after which it could not go on."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="load")

    def body(self, number: int) -> bytes:
        """Of its entries."""
        return f"{self.name}/{number}".encode()

    def check(self, bodies: list[bytes]) -> None:
        """Each entry that was acknowledged is there once, in its order; of the last one, that may be so."""
        mine = [body for body in bodies if body.startswith(f"{self.name}/".encode())]
        assert mine == [self.body(number) for number in range(len(mine))]
        assert self.acknowledged <= len(mine) <= self.acknowledged + 1

    def more(self, count: int = 20) -> None:
        """Until so many more are acknowledged."""
        wanted = self.acknowledged + count
        wait_until(lambda: self.acknowledged >= wanted or bool(self.failures), f"{count} more entries", WAIT_S)

    def _run(self) -> None:
        while not self.stopping.is_set():
            answers: queue.SimpleQueue[AppendedBatch | DLedgerError] = queue.SimpleQueue()
            leader = self.group.leader()
            if leader is None:
                continue
            producer = ProducerBatch(self.name, self.acknowledged)
            leader.submit_append([self.body(self.acknowledged)], answers.put, producer)
            answer = answers.get(timeout=WAIT_S)
            if isinstance(answer, DLedgerError):
                if isinstance(answer, _FINAL):
                    self.failures.append(answer)
                    return
                continue
            self.acknowledged += 1
