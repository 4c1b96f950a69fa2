"""Configurations for tests, and no-ops that put them in force."""

from __future__ import annotations

from dledger.core.membership import encode_configuration
from dledger.core.ports import Log
from dledger.types import NO_INDEX, ClusterMember, Configuration, LogIndex, Magic, MemberRole, NodeId, Term


def configuration(voters: str, learners: str = "", *, index: int = -1, term: int = 1, **uids: int) -> Configuration:
    """Members named by single digits: ``"012"`` is n0, n1 and n2. ``uids`` by id."""
    chosen = sorted([(one, MemberRole.VOTER) for one in voters] + [(one, MemberRole.LEARNER) for one in learners])
    members = tuple(
        ClusterMember(
            NodeId(f"n{one}"), "127.0.0.1", 20911 + int(one), role, number=int(one), uid=uids.get(f"n{one}", 0)
        )
        for one, role in chosen
    )
    return Configuration(members, LogIndex(index), Term(term), next_number=len(members))


def put(log: Log, term: int, voters: str, learners: str = "", **uids: int) -> LogIndex:
    """Append a configuration to a log, as a leader of ``term`` does."""
    payload = encode_configuration(configuration(voters, learners, **uids))
    return log.append_as_leader(Term(term), [payload], Magic.NOOP).last_index


NONE = Configuration((), NO_INDEX)
"""That of a member which waits to be added."""
