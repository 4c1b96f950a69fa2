"""A group's members, as ``dledger member`` and the console show them, from one status, preferably the leader's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dledger.rpc.ports import MemberStatus, NodeStatus, PeerStatus
from dledger.types import NO_INDEX, MemberRole, Role
from dledger.values import MIB

COLUMNS: Final = ("node", "role", "number", "address", "state", "committed", "lag", "rate", "last contact", "notes")
_UNITS: Final = (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", 1024))


@dataclass(frozen=True, slots=True)
class VoterTally:
    """How many voters there are, and how many of them may fail."""

    voters: int

    @property
    def majority(self) -> int:
        """How many must agree."""
        return self.voters // 2 + 1

    @property
    def tolerates(self) -> int:
        """How many may fail."""
        return self.voters - self.majority

    def __str__(self) -> str:
        failures = "1 failure" if self.tolerates == 1 else f"{self.tolerates} failures"
        return f"majority {self.majority} of {_count(self.voters, 'voter')}; tolerates {failures}"


def tally_of(status: NodeStatus) -> VoterTally:
    """Of these members."""
    return VoterTally(sum(one.role is MemberRole.VOTER for one in status.members))


def find_member(status: NodeStatus, node_id: str) -> MemberStatus | None:
    """The member with this id, if there is one."""
    return next((one for one in status.members if one.node_id == node_id), None)


def find_peer(status: NodeStatus, node_id: str) -> PeerStatus | None:
    """How far the leader has brought a member, if it tells."""
    return next((one for one in status.peers if one.node_id == node_id), None)


def summary(status: NodeStatus) -> str:
    """The line below the table."""
    if status.configuration_index == NO_INDEX:
        which = "members as configured"
    else:
        committed = "committed" if status.configuration_committed else "not committed yet"
        which = f"configuration {status.configuration_index} ({committed})"
    return f"{which}, {tally_of(status)}"


def member_rows(status: NodeStatus) -> list[Sequence[str]]:
    """One row of ``COLUMNS`` per member."""
    return [_row(status, one) for one in status.members]


def _row(status: NodeStatus, member: MemberStatus) -> Sequence[str]:
    leads = status.leader is not None and status.leader.node_id == member.node_id
    role = "leader" if leads else member.role.name.lower()
    start = (member.node_id, role, str(member.number), member.peer_address)
    if member.node_id == status.node_id:
        return (*start, "-", str(status.committed_index), "-", "-", "-", "")
    peer = find_peer(status, member.node_id)
    if peer is None:
        return (*start, *("?",) * 5, intent_text(member))
    rate = f"{size_text(peer.rate)}/s" if peer.rate else "-"
    unheard = peer.last_contact_ms < 0 or peer.health == "never seen"
    contact = "never" if unheard else f"{peer.last_contact_ms} ms"
    lag = size_text(peer.lag_bytes) if peer.lag_bytes else str(peer.lag_entries)
    return (*start, peer.health, str(peer.match_index), lag, rate, contact, _notes(member, peer))


def _notes(member: MemberStatus, peer: PeerStatus) -> str:
    parts = [intent_text(member)]
    if member.role is MemberRole.LEARNER:
        seconds = ready_in_s(peer)
        parts.append("ready" if seconds == 0 else peer.not_ready if seconds is None else f"ready in ~{seconds} s")
    return ", ".join(filter(None, parts))


def intent_text(member: MemberStatus) -> str:
    """The intent for a learner; empty: none."""
    if member.replaces:
        return f"replaces {member.replaces}"
    return "becomes a voter" if member.promote else ""


def ready_in_s(peer: PeerStatus) -> int | None:
    """When a learner will have caught up at its present rate: 0 if it could be promoted now, None if nobody knows."""
    if not peer.not_ready:
        return 0
    return max(1, round(peer.lag_bytes / peer.rate)) if peer.rate and peer.lag_bytes else None


def members_json(status: NodeStatus) -> dict[str, object]:
    """The whole as JSON; numbers that programs might round are strings, unknown ones null."""
    tally = tally_of(status)
    return {
        "configuration": {
            "index": status.configuration_index,
            "term": status.configuration_term,
            "committed": status.configuration_committed,
            "change_id": str(status.change_id) if status.change_id else None,
        },
        "leader": status.leader.node_id if status.leader is not None else None,
        "majority": tally.majority,
        "tolerates": tally.tolerates,
        "members": [_member_json(status, one) for one in status.members],
    }


def _member_json(status: NodeStatus, member: MemberStatus) -> dict[str, object]:
    peer = find_peer(status, member.node_id)
    is_learner = member.role is MemberRole.LEARNER
    known: dict[str, object] = dict.fromkeys(
        ("state", "match_index", "lag_entries", "lag_bytes", "rate_bytes_per_s", "last_contact_ms")
    )
    if peer is not None:
        known |= {
            "state": peer.health,
            "match_index": peer.match_index,
            "lag_entries": peer.lag_entries,
            "lag_bytes": peer.lag_bytes,
            "rate_bytes_per_s": peer.rate,
            "last_contact_ms": peer.last_contact_ms if peer.last_contact_ms >= 0 else None,
        }
    elif member.node_id == status.node_id:
        known["match_index"] = status.committed_index
    return {
        "id": member.node_id,
        "uid": f"{member.uid:016x}" if member.uid else None,
        "number": member.number,
        "role": member.role.name.lower(),
        "leads": status.role is Role.LEADER and member.node_id == status.node_id,
        "intent": "promote" if member.promote else None,
        "replaces": member.replaces or None,
        "peer_address": member.peer_address,
        "client_address": member.client_address or None,
        **known,
        "ready": not peer.not_ready if peer is not None and is_learner else None,
        "ready_in_s": ready_in_s(peer) if peer is not None and is_learner else None,
        "not_ready_because": (peer.not_ready or None) if peer is not None and is_learner else None,
    }


@dataclass(frozen=True, slots=True)
class CatchUpView:
    """How far a new member has come."""

    node_id: str
    state: str
    done_bytes: int
    total_bytes: int
    rate: int
    why: str

    @property
    def percent(self) -> int:
        """Of the leader's log, rounded down: 100 means all of it."""
        return 100 if self.done_bytes >= self.total_bytes else self.done_bytes * 100 // self.total_bytes

    def __str__(self) -> str:
        if not self.state or self.state in ("never seen", "unreachable"):
            return f"{self.node_id}: {self.state or 'not known yet'}: start it, or see whether its peers reach it"
        text = f"{self.node_id}: {self.state}, {self.percent} % of {size_text(self.total_bytes)}"
        if self.rate:
            left = (self.total_bytes - self.done_bytes) / self.rate
            text += f", {size_text(self.rate)}/s" + (f", {duration_text(left)} left" if left >= 1 else "")
        return f"{text} ({self.why})" if self.why and self.percent == 100 else text

    def json(self) -> dict[str, object]:
        """The same as JSON."""
        return {
            "node": self.node_id,
            "state": self.state or None,
            "percent": self.percent,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "rate_bytes_per_s": self.rate,
            "not_ready_because": self.why or None,
        }


def catch_up_of(status: NodeStatus, node_id: str) -> CatchUpView:
    """How far a new member has come, by the leader's status."""
    peer = find_peer(status, node_id)
    total = status.end_position - status.begin_position
    if peer is None:
        return CatchUpView(node_id, "", 0, total, 0, "")
    done = max(0, total - peer.lag_bytes)
    return CatchUpView(node_id, peer.health, done, total, peer.rate, peer.not_ready)


def size_text(size: int) -> str:
    """Bytes for people: ``3.1 GiB``."""
    for unit, factor in _UNITS:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def duration_text(seconds: float) -> str:
    """Seconds for people: ``2 min 05 s``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _count(number: int, thing: str) -> str:
    return f"1 {thing}" if number == 1 else f"{number} {thing}s"
