"""Scenarios as texts: a script of commands, and below each the trace of what the group then did.

``tests/scenarios/scripts/*.txt`` are made of blocks like this one; lines that begin with ``#`` explain:

    append n0 a
    ----
    n0 -> n1 append 1..1 commit 0
    …

``test_scripts`` runs the commands and compares the traces. ``python -m tests.scenarios.script`` writes the traces anew;
``git diff`` then shows how the behaviour of the core has changed.

Commands, which ``_Run`` executes: the name of a method and its arguments; ``name=value`` are keywords. The trace has a
line for each message that arrives, for each that the network loses, for each change of a role, and for each request
that ends. Heartbeats are only shown on demand (``show heartbeats``); ``quietly elect n0`` shows no trace. A ``leader
check`` is a follower's question whether the sender of a heartbeat really leads (``dledger.core.log_matching``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal, TypeAlias

from dledger.core import messages
from dledger.core.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    Message,
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushResponse,
    PushTruncate,
    RoleChange,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
)
from dledger.errors import DLedgerError, ResponseCode
from dledger.types import (
    NO_ENTRY,
    AppendedBatch,
    ChangeKind,
    Configuration,
    EntryId,
    LogIndex,
    NodeId,
    Role,
    Standing,
    Term,
)
from tests.support.cluster import Cluster, Host, Outcome, Result, Sent, made_log

SCRIPTS: Final = Path(__file__).parent / "scripts"
SEPARATOR: Final = "----"
_Pending: TypeAlias = tuple[str, Callable[[], str | None]]


class TracedCluster(Cluster):
    """A cluster that writes down what happens."""

    trace: list[str]
    heartbeats = False

    def __init__(self, size: int, logs: dict[NodeId, str]) -> None:
        self.trace = []
        super().__init__(size, logs={one: made_log(*map(int, terms.split(","))) for one, terms in logs.items()})

    def deliver(self, sent: Sent) -> None:
        host = self.hosts.get(sent.target)
        gone = "" if host is not None and host.up else ": not running"
        self._tell(sent, gone)
        super().deliver(sent)

    def lose(self, sent: Sent) -> None:
        self._tell(sent, ": lost")

    def change_roles(self, host: Host, changes: Iterable[RoleChange]) -> None:
        for change in changes:
            leader = f", leader {change.leader}" if change.leader not in (None, host.node_id) else ""
            self.trace.append(f"{host.node_id} is {change.role.name.lower()} of term {change.term}{leader}")

    def _tell(self, sent: Sent, ending: str) -> None:
        if self.heartbeats or not isinstance(sent.message, HeartbeatRequest | HeartbeatResponse):
            self.trace.append(f"{sent.sender} -> {sent.target} {self._describe(sent)}{ending}")

    def _describe(self, sent: Sent) -> str:
        text = _describe(sent.message)
        if isinstance(sent.message, VoteRequest) and sent.message.pre_vote:
            host = self.hosts[sent.sender]
            if host.up and host.node.state.role_name is Role.FOLLOWER:
                return f"leader check? {text.partition(' ')[2]}"
        return text


class _Run:
    """One script's group, and the commands of scripts as methods."""

    def __init__(self) -> None:
        self._cluster: TracedCluster | None = None
        self._pending: list[_Pending] = []

    @property
    def cluster(self) -> TracedCluster:
        assert self._cluster is not None, "begin with: group SIZE"
        return self._cluster

    def execute(self, line: str) -> list[str]:
        """Run one command; returns its trace."""
        name, *words = line.removeprefix("quietly ").split()
        command = getattr(self, name.replace("-", "_"))
        named = dict(word.split("=", 1) for word in words if "=" in word)
        printed = command(*(word for word in words if "=" not in word), **named)
        trace, self.cluster.trace = self.cluster.trace, []
        if line.startswith("quietly "):
            trace = ["(not shown)"]
        for waiting in list(self._pending):
            if (end := waiting[1]()) is not None:
                trace.append(f"{waiting[0]}: {end}")
                self._pending.remove(waiting)
        return [*trace, *(printed or [])]

    # -- commands ------------------------------------------------------------------------------------------------

    def group(self, size: str, **logs: str) -> None:
        """``group 3 n0=1,1,2``: so many members; a log is given as the terms of its entries."""
        self._cluster = TracedCluster(int(size), {NodeId(one): terms for one, terms in logs.items()})

    def show(self, what: Literal["heartbeats"]) -> None:
        """From now on heartbeats are in the trace, too."""
        assert what == "heartbeats"
        self.cluster.heartbeats = True

    def hide(self, what: Literal["heartbeats"]) -> None:
        """No longer."""
        assert what == "heartbeats"
        self.cluster.heartbeats = False

    def advance(self, ms: str) -> None:
        """Let milliseconds pass."""
        self.cluster.advance(int(ms))

    def elect(self, node: str) -> None:
        """``elect n0``: wait until there is a leader, which must be this one."""
        self.cluster.elect(NodeId(node))

    def append(self, node: str, *bodies: str) -> None:
        """``append n0 a b``: a client's append."""
        outcome = self.cluster.append(NodeId(node), *(body.encode() for body in bodies))
        self._await(f"append {' '.join(bodies)}", outcome, _batch)

    def read(self, node: str) -> None:
        """A linearizable read at a member."""
        self._await(f"read at {node}", self.cluster.read(NodeId(node)), lambda index: f"up to {index}")

    def transfer(self, node: str, to: str) -> None:
        """``transfer n0 n1``: an operator's request to a leader."""
        outcome = self.cluster.transfer(NodeId(node), NodeId(to))
        self._await(f"transfer to {to}", outcome, lambda hint: f"{hint.node_id} leads")

    def change(self, node: str, kind: str, member: str) -> None:
        """``change n0 add n3``: a change of the members."""
        outcome = self.cluster.change(NodeId(node), ChangeKind(kind), NodeId(member))
        self._await(f"{kind} {member}", outcome, _members)

    def join(self, node: str) -> None:
        """Start a member that waits to be added."""
        self.cluster.join(NodeId(node))

    def crash(self, node: str) -> None:
        """Kill a member."""
        self.cluster.crash(NodeId(node))

    def start(self, node: str) -> None:
        """Start a member that was killed."""
        self.cluster.start(NodeId(node))

    def restart(self, node: str) -> None:
        """Kill a member and start it."""
        self.cluster.restart(NodeId(node))

    def wipe(self, node: str) -> None:
        """Kill a member and take its disk away."""
        self.cluster.wipe(NodeId(node))

    def expire(self, node: str, index: str) -> None:
        """``expire n0 3``: a member's entries up to this one are no longer kept."""
        self.cluster[NodeId(node)].log.expire(LogIndex(int(index)))

    def partition(self, some: str, others: str) -> None:
        """``partition n0 n1,n2``: nothing passes between the two sides."""
        self.cluster.partition(map(NodeId, some.split(",")), map(NodeId, others.split(",")))

    def one_way(self, sender: str, target: str) -> None:
        """``one-way n0 n1``: nothing that n0 sends reaches n1."""
        self.cluster.cut.append((NodeId(sender), NodeId(target)))

    def drop(self, kind: str, target: str) -> None:
        """``drop PushCommit n2``: messages of a class are lost on their way there."""
        self.cluster.drop(getattr(messages, kind), target=NodeId(target))

    def hold(self, kind: str, target: str) -> None:
        """Likewise, but until ``release``."""
        self.cluster.hold(getattr(messages, kind), target=NodeId(target))

    def release(self) -> None:
        """Deliver what was held."""
        self.cluster.release()

    def heal(self) -> None:
        """All links work again."""
        self.cluster.heal()

    def hear_of_term(self, node: str, term: str) -> None:
        """``hear-of-term n0 7``: it has taken part in that term, as a follower of nobody."""
        self.cluster[NodeId(node)].node.state.become_follower(Term(int(term)), None, self.cluster.now_ms)

    def campaign(self, node: str, voters: str) -> None:
        """``campaign n0 n1,n2``: these elect it, however well they still hear another leader."""
        self.cluster.deliver_election(NodeId(node), map(NodeId, voters.split(",")))

    def alarm(self, node: str, leader: str) -> None:
        """``alarm n1 n0``: a member is told that its leader's process has ended."""
        cluster = self.cluster
        state = cluster[NodeId(node)].node.state
        cluster[NodeId(node)].node.leader_lost(NodeId(leader), state.term, cluster.now_ms, gone=True)
        cluster.act(NodeId(node))

    def logs(self) -> list[str]:
        """Each member's entries as ``index@term``; a bar stands after the last one it knows to be committed."""
        return [f"{one}: {self._log(NodeId(one))}" for one in self.cluster.ids]

    def status(self) -> list[str]:
        """Each member's role, term and leader."""
        lines = []
        for one, host in self.cluster.hosts.items():
            if not host.up:
                lines.append(f"{one}: not running")
                continue
            state = host.node.state
            learner = "" if one in host.membership.current.voters else ", no voter"
            lines.append(
                f"{one}: {state.role_name.name.lower()} of term {state.term}, leader {state.leader_id}{learner}"
            )
        return lines

    def _log(self, node: NodeId) -> str:
        host = self.cluster[node]
        log, committed = host.log, host.node.state.commit_index if host.up else None
        words = [] if log.begin.index < 0 else [f"(begins after {log.begin.index})"]
        for index in range(log.begin.index + 1, log.last.index + 1):
            words.append(f"{index}@{log.term_at(LogIndex(index))}")
            words += ["|"] if index == committed else []
        return " ".join(words) or "empty"

    def _await(self, name: str, outcome: Outcome[Result], describe: Callable[[Result], str]) -> None:
        def end() -> str | None:
            if outcome.pending:
                return None
            (result,) = outcome.results
            if isinstance(result, DLedgerError):
                return f"{type(result).__name__} ({result.outcome})"
            return describe(result)

        self._pending.append((name, end))


def _batch(batch: AppendedBatch) -> str:
    return f"acknowledged, {batch.first_index}..{batch.last_index}"


def _members(configuration: Configuration) -> str:
    learners = [f"{one} (learner)" for one in configuration.learners]
    return f"members at {configuration.index}: {', '.join([*configuration.voters, *learners])}"


def _entry(entry: EntryId) -> str:
    return "none" if entry == NO_ENTRY else f"{entry.index}@{entry.term}"


def _describe(message: Message) -> str:
    """One line about a message, with what decides the next step."""
    match message:
        case VoteRequest():
            kind = "pre-vote" if message.pre_vote else "vote"
            return f"{kind}? term {message.term} last {_entry(message.last)}{' transfer' * message.transfer}"
        case VoteResponse():
            if message.leads:
                return f"leader check: leads term {message.term}"
            kind = "pre-vote" if message.pre_vote else "vote"
            answer = "granted" if message.granted else message.result.name.lower()
            blank = "" if message.standing is Standing.FULL else " without standing"
            return f"{kind}: {answer}, term {message.term}{blank}"
        case HeartbeatRequest():
            return f"heartbeat term {message.term}"
        case HeartbeatResponse():
            return f"heartbeat: term {message.term}"
        case TakeLeadership():
            return f"take leadership term {message.term}"
        case PushResponse():
            code = "" if message.code is ResponseCode.SUCCESS else f" {message.code.name.lower()}"
            conflict = "" if message.conflict == NO_ENTRY else f" conflict {_entry(message.conflict)}"
            return (
                f"{message.kind.name.lower()}:{code} verified {message.verified_index} "
                f"flushed {message.flushed_index} end {message.end_index}{conflict}"
            )
    return _describe_push(message)


def _describe_push(message: Message) -> str:
    match message:
        case PushCompare():
            return f"compare term {message.term} at {_entry(message.previous)}"
        case PushTruncate():
            return f"truncate term {message.term} from {_entry(message.conflict)}"
        case PushAppend():
            run = message.run
            return f"append term {message.term} {run.first_index}..{run.last_index} commit {message.commit_index}"
        case PushCommit():
            return f"commit term {message.term} {message.commit_index}"
        case PushInstall():
            return f"install term {message.term} after {_entry(message.before_begin)}"
    raise AssertionError(f"{type(message).__name__} is never on the wire")


def replay(text: str) -> str:
    """The script with the trace that its commands give now."""
    run, in_trace = _Run(), False
    out: list[str] = []
    for line in text.splitlines():
        if line == SEPARATOR:
            in_trace = True
        elif not line:
            in_trace = False
        elif not in_trace and line.startswith("#"):
            out += ["", line] if out and not out[-1].startswith("#") else [line]
        elif not in_trace:
            out += ["", line, SEPARATOR, *(run.execute(line) or ["(nothing)"])]
    return "\n".join(out) + "\n"


def main() -> None:
    """Write all traces anew."""
    for path in sorted(SCRIPTS.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        if (new := replay(text)) != text:
            path.write_text(new, encoding="utf-8")
            sys.stdout.write(f"{path.name} has changed\n")


if __name__ == "__main__":
    main()
