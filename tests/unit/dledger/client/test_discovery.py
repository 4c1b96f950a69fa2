"""Who is believed to lead: each test feeds one round of answers to a search that asks nobody itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from dledger.client.discovery import Directory, Search, ServerReport, parse_addresses
from dledger.errors import (
    AccessDeniedError,
    ConfigError,
    DLedgerError,
    InvalidRequestError,
    LeaderHint,
    NotLeaderError,
    PendingFullError,
    RequestTimeoutError,
    TlsError,
    UnavailableError,
)
from dledger.types import NodeId

NAMES = ("n0", "n1", "n2")
GIVEN = tuple(f"{name}:1" for name in NAMES)


def report(
    name: str, *, term: int = 1, leads: bool = False, leader: str = "", at: Mapping[str, str] | None = None
) -> ServerReport:
    """Of a member of a group of three; ``at``: where it says that others are."""
    leader = name if leads else leader
    hint = LeaderHint(NodeId(leader), "") if leader else None
    return ServerReport(name, leads, term, hint, {one: (at or {}).get(one, "") for one in NAMES})


def heard(search: Search, *answers: tuple[str, ServerReport | DLedgerError]) -> bool:
    """Whether one of the answers settled it."""
    return any(search.take(address, answer) for address, answer in answers)


@pytest.fixture
def directory() -> Directory:
    return Directory(GIVEN)


def test_the_first_who_says_that_it_leads_is_believed(directory: Directory) -> None:
    search = Search(directory)
    assert search.whom_to_ask() == list(GIVEN)
    assert not search.take(GIVEN[0], report("n0"))
    assert search.take(GIVEN[1], report("n1", leads=True))
    assert directory.leader == GIVEN[1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_leader_of_an_older_term_is_not_believed_again_after_it_failed(
    directory: Directory, order: tuple[int, ...]
) -> None:
    """In whatever order the answers come."""
    directory.set_leader(GIVEN[0])
    directory.note_failure(GIVEN[0], RequestTimeoutError("silent"))
    search = Search(directory)
    search.whom_to_ask()
    answers = (report("n0", leads=True), report("n1", term=2, leads=True), report("n2", term=2, leader="n1"))
    assert heard(search, *((GIVEN[one], answers[one]) for one in order))
    assert directory.leader == GIVEN[1]


def test_a_leader_that_failed_is_believed_when_a_majority_follows_it(directory: Directory) -> None:
    """Without waiting for who is silent."""
    directory.set_leader(GIVEN[0])
    directory.note_failure(GIVEN[0], UnavailableError("for a moment"))
    assert (directory.leader, directory.suspect) == (None, GIVEN[0])
    search = Search(directory)
    search.whom_to_ask()
    assert not search.take(GIVEN[0], report("n0", leads=True))
    assert search.take(GIVEN[2], report("n2", leader="n0"))
    assert (directory.leader, directory.suspect) == (GIVEN[0], None)


def test_who_follows_in_another_term_agrees_to_nothing(directory: Directory) -> None:
    search = Search(directory, doubting=True)
    search.whom_to_ask()
    assert not heard(search, (GIVEN[0], report("n0", leads=True)), (GIVEN[1], report("n1", term=2, leader="n0")))
    assert search.conclude() is None
    assert directory.leader is None


def test_half_of_a_group_is_no_majority() -> None:
    """The other half may follow another one."""
    names = ("n0", "n1", "n2", "n3")
    directory = Directory(tuple(f"{name}:1" for name in names))
    search = Search(directory, doubting=True)
    search.whom_to_ask()
    n0, n1, n2 = (
        ServerReport(name, name == "n0", 1, LeaderHint(NodeId("n0"), ""), dict.fromkeys(names, ""))
        for name in names[:3]
    )
    assert not heard(search, ("n0:1", n0), ("n1:1", n1))
    assert search.take("n2:1", n2)


def test_learners_are_no_part_of_a_majority() -> None:
    """Neither do they make it larger, nor do they belong to it."""
    members = dict.fromkeys(("n0", "n1", "n2", "n3", "n4"), "")

    def settled(*followers: str) -> bool:
        search = Search(Directory(("n0:1",)), doubting=True)
        reports = [
            ServerReport(one, one == "n0", 1, LeaderHint(NodeId("n0"), ""), members, frozenset({"n3", "n4"}))
            for one in ("n0", *followers)
        ]
        return [search.take(f"{one.node}:1", one) for one in reports][-1]

    assert not settled("n3", "n4")
    assert settled("n1")


def test_whom_to_ask_first_changes_and_is_the_leader_if_there_is_one(directory: Directory) -> None:
    """Not all clients go to the first address, nor one client again and again to one that hangs."""
    asked = [directory.candidates() for _ in range(3)]
    assert {one[0] for one in asked} == set(GIVEN)
    assert all(sorted(one) == sorted(GIVEN) for one in asked)
    directory.set_leader(GIVEN[2])
    asked = [directory.candidates() for _ in range(3)]
    assert {one[0] for one in asked} == {GIVEN[2]}
    assert {one[1] for one in asked} == set(GIVEN[:2])


def test_an_old_leader_alone_is_none_and_whoever_answers_can_be_read_from(directory: Directory) -> None:
    directory.set_leader(GIVEN[0])
    directory.note_failure(GIVEN[0], UnavailableError("silent"))
    search = Search(directory)
    search.whom_to_ask()
    assert not heard(search, (GIVEN[2], report("n2", term=3)), (GIVEN[0], report("n0", leads=True)))
    assert search.conclude() is None
    assert search.answering == GIVEN[2]
    assert "no leader found: nobody" in str(search.failure("nobody"))


def test_doubt_is_over_when_a_newer_leader_answers_and_not_when_the_present_one_does(directory: Directory) -> None:
    directory.set_leader(GIVEN[0])
    search = Search(directory, doubting=True)
    search.whom_to_ask()
    assert not search.take(GIVEN[0], report("n0", leads=True))
    assert not search.take(GIVEN[1], report("n1", term=2, leads=True))
    assert search.conclude() == GIVEN[1]
    assert directory.leader == GIVEN[1]


def test_the_present_leader_stays_where_another_one_claims_the_same_term(directory: Directory) -> None:
    """Brokers without a group know no terms."""
    directory.set_leader(GIVEN[1])
    search = Search(directory, doubting=True)
    search.whom_to_ask()
    alone = ServerReport("", True, 0, None, {})
    assert not heard(search, (GIVEN[0], alone), (GIVEN[1], alone), (GIVEN[2], alone))
    assert search.conclude() == GIVEN[1]


def test_servers_that_answers_tell_of_are_asked_in_the_same_round(directory: Directory) -> None:
    search = Search(Directory(GIVEN[:1]))
    assert search.whom_to_ask() == [GIVEN[0]]
    search.take(GIVEN[0], report("n0", leader="n1", at={"n1": "n1:9", "n2": "n2:9"}))
    assert sorted(search.whom_to_ask()) == ["n1:9", "n2:9"]
    search.take("n2:9", report("n2"))
    assert search.whom_to_ask() == []


@pytest.mark.parametrize("hopeless", [InvalidRequestError("no client port"), AccessDeniedError("no account")])
def test_what_makes_asking_hopeless_is_told_before_anything_else(directory: Directory, hopeless: DLedgerError) -> None:
    search = Search(directory)
    search.whom_to_ask()
    heard(search, (GIVEN[0], UnavailableError("down")), (GIVEN[1], hopeless), (GIVEN[2], TlsError("plaintext")))
    with pytest.raises(type(hopeless)):
        search.conclude()


def test_a_tls_error_is_told_as_such_only_if_everybody_has_one(directory: Directory) -> None:
    search = Search(directory)
    search.whom_to_ask()
    heard(search, (GIVEN[0], TlsError("plaintext")), (GIVEN[1], TlsError("plaintext")))
    assert isinstance(search.failure(""), UnavailableError)
    search.take(GIVEN[2], TlsError("plaintext"))
    assert isinstance(search.failure(""), TlsError)


def test_failures_of_requests_move_the_leader(directory: Directory) -> None:
    """A hint is followed; who is busy or refuses still leads; what another one failed says nothing of the leader."""
    directory.set_leader(GIVEN[0])
    for harmless in (PendingFullError("busy"), InvalidRequestError("too large"), AccessDeniedError("not yours")):
        directory.note_failure(GIVEN[0], harmless)
        assert directory.leader == GIVEN[0]
    directory.note_failure(GIVEN[2], UnavailableError("down"))
    assert directory.leader == GIVEN[0]
    directory.learn(GIVEN[1], report("n1"))
    directory.note_failure(GIVEN[0], NotLeaderError("moved", leader=LeaderHint(NodeId("n1"), "elsewhere:1")))
    assert directory.leader == GIVEN[1], "where it answered us, not where it says it is"


def test_a_leader_that_fails_and_names_itself_is_left_all_the_same(directory: Directory) -> None:
    """It says who led when it could still say so."""
    itself = LeaderHint(NodeId("n0"), GIVEN[0])
    directory.learn(GIVEN[0], report("n0", leads=True))
    directory.set_leader(GIVEN[0])

    directory.note_failure(GIVEN[0], UnavailableError("it stops", leader=itself))

    assert (directory.leader, directory.suspect) == (None, GIVEN[0])


def test_who_was_silent_is_asked_after_the_others_for_a_while(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it costs every third read half of its time; a server that refuses does not."""
    directory.note_failure(GIVEN[1], RequestTimeoutError("no answer"))
    directory.note_failure(GIVEN[0], UnavailableError("refused"))

    assert {directory.candidates()[-1] for _ in range(6)} == {GIVEN[1]}
    directory.set_leader(GIVEN[1])
    assert directory.candidates()[0] == GIVEN[1]

    monkeypatch.setattr("dledger.client.discovery.SILENT_S", 0.0)
    again = Directory(GIVEN)
    again.note_failure(GIVEN[1], RequestTimeoutError("no answer"))
    assert {again.candidates()[-1] for _ in range(6)} == set(GIVEN)


@pytest.mark.parametrize("address", ["localhost", "localhost:", "localhost:http", "localhost:0", ["a:1", "b"]])
def test_what_cannot_be_an_address_is_refused_at_once(address: str | list[str]) -> None:
    """Not by the first request."""
    with pytest.raises(ConfigError, match="invalid address"):
        parse_addresses(address)


def test_the_kinds_of_addresses_that_grpc_knows_are_taken() -> None:
    assert parse_addresses("unix:/run/node,dns:///a:1,[::1]:1;b:2") == (
        "unix:/run/node",
        "dns:///a:1",
        "[::1]:1",
        "b:2",
    )
