"""Many clients in one process while the members that they talk to stop and die, one after the other."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from tests.integration.harness import Group
from tests.support.workload import Workload

ROUNDS = int(os.environ.get("ROUNDS", "20"))
ENDS_PER_ROUND = 4


@pytest.mark.soak
def test_no_client_hangs_however_often_members_stop_and_die(make_group: Callable[..., Group]) -> None:
    """gRPC rarely never says that a call is over: one of six such rounds once left a client waiting for ever."""
    dice = random.Random(0)
    group = make_group()
    group.start_all()
    for number in range(ROUNDS):
        with Workload(group.addresses, group.history, name=f"w{number}", pipelines=6) as load:
            load.history.wait_for_acks(100)
            for _ in range(ENDS_PER_ROUND):
                leader = group.leader()
                victim = leader if dice.random() < 0.7 else dice.choice(group.followers(leader))
                (group.stop if dice.random() < 0.7 else group.kill)(victim)
                group.start(victim)
                load.history.wait_for_acks(100)
    group.verify()
