"""Which address a client takes for a node: from inside the network, from outside, through a balancer."""

from __future__ import annotations

from dledger.client.discovery import KNOWN_MAX, AddressBook

PUBLISHED = ("127.0.0.1:10911", "127.0.0.1:10921", "127.0.0.1:10931")


def published() -> AddressBook:
    """Three containers behind published ports, each saying the name that it has in its own network."""
    found = AddressBook(PUBLISHED)
    for node in range(3):
        found.record_advertised(f"n{node}", f"n{node}:109{node + 1}1")
    return found


def test_a_node_is_where_it_answered_not_where_it_says() -> None:
    """The advertised-address problem: what a container says of itself cannot be resolved on its host."""
    found = published()
    for node, address in enumerate(PUBLISHED):
        found.record_answer(address, f"n{node}")

    assert found.find("n1", "n1:10921") == PUBLISHED[1]
    assert found.find_advertised("n2:10931") == PUBLISHED[2]
    assert found.addresses == PUBLISHED


def test_a_node_may_be_behind_an_address_that_was_not_tried() -> None:
    """So its own word is not followed yet: whoever asks all given addresses finds out."""
    found = published()
    found.record_answer(PUBLISHED[0], "n0")

    assert found.find("n2", "n2:10931") is None
    assert found.find_advertised("n2:10931") is None
    assert found.find_advertised("x:1") is None
    assert found.addresses == PUBLISHED


def test_a_node_that_is_behind_none_is_where_it_says() -> None:
    """One bootstrap address is enough inside the network; an unreachable one does not hold anybody up."""
    found = AddressBook(("n0:10911", "gone:1"))
    found.record_answer("n0:10911", "n0")
    found.record_tried("gone:1")

    assert found.find("n1", "n1:10921") == "n1:10921"
    assert found.find_advertised("n2:10931") == "n2:10931"
    assert found.find("n3") is None
    assert found.addresses == ("n0:10911", "gone:1", "n2:10931")


def test_a_given_address_is_followed_at_once() -> None:
    """A hint that names one of the given addresses is the usual case, and needs no round of questions."""
    found = AddressBook(("a:1", "b:1"))
    found.record_tried("a:1")

    assert found.find("n1", "b:1") == "b:1"
    assert found.find_advertised("b:1") == "b:1"


def test_a_hint_is_asked_about_only_once() -> None:
    """Also when the node says later that this is its address, or has answered elsewhere."""
    found = AddressBook(("a:1",))
    found.record_tried("a:1")
    found.find_advertised("b:1")
    assert list(found.addresses) == ["a:1", "b:1"]

    found.record_advertised("n1", "b:1")
    assert list(found.addresses) == ["a:1", "b:1"]

    found.record_answer("a:1", "n1")
    assert list(found.addresses) == ["a:1"]


def test_a_balancer_is_nobodys_address() -> None:
    """Where two nodes answered, the next connection may lead to either: their own words count then."""
    found = AddressBook(("balancer:10911",))
    found.record_advertised("n0", "n0:10911")
    found.record_answer("balancer:10911", "n0")
    assert found.find("n0", "n0:10911") == "balancer:10911"

    found.record_answer("balancer:10911", "n1")

    assert found.find("n0", "n0:10911") == "n0:10911"
    assert found.find("n1") == "balancer:10911"  # better than nothing
    assert found.addresses == ("balancer:10911", "n0:10911")


def test_of_ever_new_nodes_and_addresses_only_the_last_are_remembered() -> None:
    """Every restart may bring a new address, and a server may make names up; whoever is heard of again stays."""
    found = AddressBook(("n0:1",))
    found.record_tried("n0:1")
    for number in range(1000):
        found.record_advertised("n1", "n1:1")
        found.record_advertised(f"made-up-{number}", f"made-up:{number}")
        found.record_answer(f"met:{number}", f"met-{number}")
        assert found.find_advertised(f"hinted:{number}") == f"hinted:{number}"

    assert len(found.addresses) == 1 + 3 * KNOWN_MAX
    assert {"n0:1", "n1:1", "made-up:999", "met:999", "hinted:999"} <= set(found.addresses)
    for node in ("a", "b"):
        found.record_answer("balancer:1", node)
    for number in range(1000):
        found.record_answer("met:1", f"another-{number}")
    assert found.find("a", "a:1") == "a:1"
