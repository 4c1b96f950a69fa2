"""What several members say of each other, taken together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.client.shared import members_by_id
from dledger.errors import RequestTimeoutError, UnavailableError
from dledger.rpc.ports import MemberStatus
from dledger.types import NodeId
from tests.support.fake_node import FakeNode

SILENT = RequestTimeoutError("no answer from h:2 in time")


def member(number: int, address: str) -> MemberStatus:
    return MemberStatus(NodeId(f"n{number}"), f"peer:{number}", address)


@pytest.mark.parametrize("knowing", [0, 1])
def test_why_a_member_does_not_answer_is_told_by_the_address_that_any_other_knows(knowing: int) -> None:
    """Whoever answers first: a member that has just started knows no addresses yet."""
    statuses = [
        replace(
            FakeNode().status(),
            node_id=NodeId(f"n{number}"),
            members=tuple(member(one, f"h:{one}" if number == knowing else "") for one in range(4)),
        )
        for number in range(2)
    ]

    found = members_by_id(statuses, {"h:2": SILENT})

    assert list(found) == ["n0", "n1", "n2", "n3"]
    assert found[NodeId("n2")] is SILENT
    assert isinstance(found[NodeId("n3")], UnavailableError)
