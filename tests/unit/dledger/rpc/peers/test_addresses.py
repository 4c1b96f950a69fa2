"""``PeerAddresses``: whom a member can reach, and where, as the group's members change."""

from __future__ import annotations

from dledger.config import Member, ServerConfig
from dledger.core.membership import Membership
from dledger.rpc.peers.identity import PeerAddresses, Reachable
from dledger.types import ClusterMember, Configuration, LogIndex, NodeId, Term

N0, N1, N2, N3 = (NodeId(f"n{number}") for number in range(4))


def at(node_id: NodeId, port: int) -> Member:
    return Member(node_id, "h", port)


def configuration(index: int, **ports: int) -> Configuration:
    members = tuple(ClusterMember(NodeId(one), "h", port) for one, port in ports.items())
    return Configuration(members, LogIndex(index), Term(1))


def of_n0() -> tuple[PeerAddresses, list[Reachable]]:
    """Those of n0, configured with n1 and n2; and what a listener is told."""
    addresses = PeerAddresses.of(ServerConfig(node_id=N0, members=(at(N0, 1), at(N1, 2), at(N2, 3))))
    told: list[Reachable] = []
    addresses.listen(told.append)
    return addresses, told


def adopted(addresses: PeerAddresses, *configurations: Configuration, kept: frozenset[NodeId] = frozenset()) -> None:
    """The first is committed, the others are in the log."""
    membership = Membership(N0, configurations[0])
    for one in configurations[1:]:
        membership.adopt(one)
    addresses.adopt(membership, kept)


def test_at_first_the_members_are_the_configured_ones() -> None:
    """Peers must have configured the same ones: who counts is not a matter of the log yet."""
    addresses, told = of_n0()

    assert told == [{N1: (at(N1, 2),), N2: (at(N2, 3),)}]
    assert (addresses.peers, addresses.compared, addresses.committed) == ((N1, N2), (N0, N1, N2), None)


def test_a_configuration_says_who_the_members_are_and_where() -> None:
    """Configured peers stay reachable if it does not name them: they may know more than this member."""
    addresses, told = of_n0()
    explicit = configuration(4, n0=1, n1=20, n3=4)

    adopted(addresses, explicit)

    assert told[1:] == [{N1: (at(N1, 20), at(N1, 2)), N2: (at(N2, 3),), N3: (at(N3, 4),)}]
    assert (addresses.peers, addresses.compared, addresses.committed) == ((N1, N3), (), explicit)
    assert addresses.first(N3) == at(N3, 4)
    assert addresses.first(N0) is None


def test_what_is_not_committed_counts_here_and_is_told_to_nobody() -> None:
    """M2, M12: a peer that has not heard of the first change is not kept apart because of it."""
    addresses, _ = of_n0()

    adopted(addresses, configuration(-1, n0=1, n1=2), configuration(9, n0=1, n3=4))
    assert (addresses.peers, addresses.compared, addresses.committed) == ((N3,), (), None)
    adopted(addresses, configuration(4, n0=1, n1=2), configuration(9, n0=1, n3=4))
    assert (addresses.peers, addresses.committed) == ((N3,), configuration(4, n0=1, n1=2))


def test_an_address_is_tried_beside_the_old_one_until_its_change_is_committed() -> None:
    """The member may have moved already, or not yet."""
    addresses, told = of_n0()

    adopted(addresses, configuration(4, n0=1, n3=4), configuration(9, n0=1, n3=40))
    adopted(addresses, configuration(9, n0=1, n3=40))

    assert [one[N3] for one in told[1:]] == [(at(N3, 4), at(N3, 40)), (at(N3, 40),)]


def test_configured_addresses_are_tried_after_the_others() -> None:
    """All members of a group may have moved while it was stopped: none could tell the others, nor change its log."""
    addresses, _ = of_n0()

    adopted(addresses, configuration(4, n0=10, n1=20, n2=30))

    assert addresses.reachable == {N1: (at(N1, 20), at(N1, 2)), N2: (at(N2, 30), at(N2, 3))}


def test_a_member_that_leaves_is_reachable_as_long_as_the_node_speaks_with_it() -> None:
    """M9: it has yet to hear of its removal."""
    addresses, _ = of_n0()
    adopted(addresses, configuration(4, n0=1, n3=4))

    adopted(addresses, configuration(9, n0=1), kept=frozenset({N3}))
    assert addresses.first(N3) == at(N3, 4)
    adopted(addresses, configuration(9, n0=1))
    assert addresses.first(N3) is None


def test_what_others_say_of_members_is_for_connecting_alone() -> None:
    """M12: and only if it is newer than what this member knows; later words replace it, whatever it is."""
    addresses, told = of_n0()
    adopted(addresses, configuration(4, n0=1, n1=2))

    addresses.hear(configuration(3, n3=30))
    assert addresses.first(N3) is None
    addresses.hear(configuration(1 << 60, n1=66, n3=66))
    addresses.hear(configuration(7, n3=30, n1=20))

    assert addresses.first(N3) == at(N3, 30)
    assert addresses.reachable[N1] == (at(N1, 20), at(N1, 66), at(N1, 2))
    assert (addresses.peers, addresses.quorum) == ((N1,), 2)
    assert addresses.committed == configuration(4, n0=1, n1=2)
    count = len(told)
    addresses.hear(configuration(7, n3=30, n1=20))
    assert len(told) == count
    addresses.hear(configuration(6, n3=30))
    assert addresses.reachable[N1] == (at(N1, 20), at(N1, 2))


def test_two_members_that_say_different_things_do_not_undo_each_others_word() -> None:
    """Each change of addresses may end connections, and each connection brings another word."""
    addresses, told = of_n0()
    older, newer = configuration(5, n0=1, n1=20), configuration(8, n0=1, n1=21)
    addresses.hear(older)
    addresses.hear(newer)
    count = len(told)

    for _ in range(3):
        addresses.hear(older)
        addresses.hear(newer)

    assert len(told) == count
    assert addresses.reachable[N1] == (at(N1, 21), at(N1, 20), at(N1, 2))


def test_a_node_that_joins_knows_its_seeds_and_compares_nothing() -> None:
    """M12: it has no configuration."""
    addresses = PeerAddresses(N3, (at(N1, 2), at(N2, 3)), Membership(N3, Configuration()))

    assert set(addresses.reachable) == {N1, N2}
    assert (addresses.peers, addresses.compared, addresses.committed) == ((), (), None)
