"""Producers' names where access control is on: nobody can use up, or read, another account's numbers."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from dledger.client import DLedgerClient
from dledger.core.noop_payload import NAME_BYTES_MAX, check_name, is_made_up, own_name, stream_batch, stream_task_name
from dledger.errors import InvalidRequestError
from dledger.sending.batch import new_producer_name
from tests.unit.dledger.rpc.test_limits import ALICE, BOB, shared


@pytest.mark.parametrize("single", [True, False])
def test_an_account_cannot_append_under_anothers_name(tmp_path: Path, *, single: bool) -> None:
    """Else the other one's entries would be answered as stored, and be lost."""
    with (
        shared(tmp_path, entries=64) as (node, server),
        DLedgerClient(server.address, security=ALICE) as alice,
        DLedgerClient(server.address, security=BOB) as bob,
    ):
        node.hold = False
        bodies = [b"bob's"] if single else [b"bob's", b"bob's too"]
        bob.append_as("job/0", 0, bodies)
        (real,) = node.producers

        assert alice.producer_sequence("job/0") == 0
        assert alice.producer_sequence(real) == 0
        alice.append_as("job/0", 0, [b"alice's"])
        alice.append_as(real, 0, [b"alice's own"])

        assert bob.producer_sequence("job/0") == len(bodies)
        assert node.bodies() == [*bodies, b"alice's", b"alice's own"]


def test_own_names_differ_and_are_short_enough() -> None:
    """However long the given ones are, and whatever they begin with."""
    names = ["p", "p/1", "n" * NAME_BYTES_MAX, "n" * (NAME_BYTES_MAX - 1), "n" * 111, "n" * 112]

    own = [own_name(account, name) for account in ("alice", "bob", "a" * 200) for name in names]

    assert len(set(own)) == len(own)
    for name in own:
        check_name(name)


def test_what_is_no_name_is_refused_under_any_account() -> None:
    """Also if it is so long that only its digest would be used."""
    with pytest.raises(InvalidRequestError, match="is not a valid producer name"):
        own_name("alice", "with space" * 20)


def test_names_that_clients_make_up_are_known_as_such() -> None:
    """Under any account, too; and no others, above all not those of Spark's tasks."""
    made_up = [new_producer_name(), new_producer_name()]
    given = ["job-7/0", "c-", "c-job", f"c-{'0' * 23}", f"{made_up[0]}/0", f"sink/{made_up[0]}", f"{uuid4()}/0"]

    assert all(is_made_up(name) and is_made_up(own_name("alice", name)) for name in made_up)
    assert not any(is_made_up(name) or is_made_up(own_name("alice", name)) for name in given)


def test_tasks_of_streams_are_known_by_their_batch() -> None:
    """Under any account, each account's by themselves; and no others, above all not those of jobs."""
    query = str(uuid4())
    name = stream_task_name(query, 12, 3)
    given = [
        f"{query}/3",
        f"{query}-12/3",
        f"s-{query}/3",
        f"s-{query}-12",
        f"s-{query}-x/3",
        "s-job-12/3",
        f"a/{name}",
    ]

    assert stream_batch(name) == (f"s-{query}", 12)
    assert stream_batch(own_name("alice", name)) == (own_name("alice", f"s-{query}"), 12)
    assert not any(stream_batch(one) or stream_batch(own_name("alice", one)) for one in given)
