"""A group's members in words, for log lines, conditions and commands."""

from __future__ import annotations

from dledger.members import ClusterMember, Configuration, MemberRole
from dledger.values import address_text


def member_text(member: ClusterMember) -> str:
    """``n4``, ``n4 (learner)`` or ``n4 (learner, replaces n3)``."""
    words = ["learner"] if member.role is MemberRole.LEARNER else []
    if member.replaces:
        words.append(f"replaces {member.replaces}")
    elif member.promote:
        words.append("becomes a voter")
    return f"{member.node_id} ({', '.join(words)})" if words else member.node_id


def members_text(configuration: Configuration) -> str:
    """All of them; ``nobody`` if there are none."""
    return ", ".join(map(member_text, configuration.members)) or "nobody"


def difference_text(old: Configuration, new: Configuration) -> str:
    """The difference: ``+n4 (learner), -n3``."""
    found: list[str] = []
    for one in new.members:
        before = old.find(one.node_id)
        if before is None:
            found.append(f"+{member_text(one)}")
        elif before.role is not one.role:
            found.append(f"{one.node_id}: {before.role.name.lower()} → {one.role.name.lower()}")
        elif (before.host, before.port) != (one.host, one.port):
            found.append(f"{one.node_id} at {address_text(one.host, one.port)}")
        elif member_text(before) != member_text(one):
            found.append(member_text(one))
        elif before.uid != one.uid:
            found.append(f"{one.node_id} with a new memory")
    found += [f"-{one.node_id}" for one in old.members if new.find(one.node_id) is None]
    return ", ".join(found) or "the same members"


def peers_setting(configuration: Configuration) -> str:
    """These members as the setting ``dLegerPeers`` names them."""
    return ";".join(f"{one.node_id}-{address_text(one.host, one.port)}" for one in configuration.members)
