"""A node's log lines: one per event, for people, with the same facts as fields.

The fields are attributes of the log record (``extra``), so that a formatter can write them as JSON: ``event`` names the
kind of line; none of them is secret.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dledger.core.membership import Membership
from dledger.core.outbox import RoleChange, RoleReason
from dledger.members import ClusterMember, Configuration, MemberRole
from dledger.types import NO_INDEX
from dledger.values import address_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_log = logging.getLogger("dledger")


class NodeLines:
    def __init__(self, name: str) -> None:
        self._name = name
        self._members = Configuration(), Configuration()

    def members_are(self, membership: Membership) -> None:
        """Those at the start."""
        self._members = membership.committed, membership.current

    def recovered(self, report: DataclassInstance) -> None:
        """Log the result of opening the log."""
        fields: dict[str, Any] = asdict(report)  # Any: numbers, texts and paths
        _log.info("%s: %s", self._name, report, extra={"event": "recovery", **fields})

    def members_changed(self, membership: Membership) -> None:
        """Log a configuration that was adopted, committed or reverted, with what became different."""
        before, after = self._members, (membership.committed, membership.current)
        self._members = after
        (old_committed, old), (committed, new) = before, after
        if new.index > old.index:
            self._tell_members("adopted", old, new)
        elif new.index < old.index:
            self._tell_members("reverted", old, new)
        if committed.index > old_committed.index:
            self._tell_members("committed", old_committed, committed)

    def _tell_members(self, what: str, old: Configuration, new: Configuration) -> None:
        which = "as configured" if new.index == NO_INDEX else f"of entry {new.index}, term {new.term}"
        change = difference_text(old, new)
        extra = {"event": "members", "change": what, "index": new.index, "term": new.term, "difference": change}
        text = "%s: members %s: %s, %s (%s)"
        _log.info(text, self._name, what, members_text(new), which, change, extra=extra)

    def role_changed(self, change: RoleChange) -> None:
        """Log a change of role, term or leader, and its reason."""
        leader, reason = change.leader or "unknown", change.reason or "unknown"
        extra = {"event": "role_change", "role": change.role, "term": change.term, "leader": leader, "reason": reason}
        text = "%s is %s in term %d, leader %s: %s"
        _log.info(text, self._name, change.role, change.term, leader, reason, extra=extra)
        if change.reason is RoleReason.UNREADABLE_PRODUCERS:
            text = "%s cannot lead: its log contains producer state from a later version. Run that version here"
            _log.error(text, self._name, extra=extra)


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
