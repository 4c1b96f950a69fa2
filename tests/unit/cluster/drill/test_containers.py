"""What a drill asks of Docker, without Docker."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import docker.errors
import pytest

from cluster.drill.containers import FREEZER_GAVE_UP, ContainerMembers, ContainerMigration, ContainerTarget
from cluster.drill.target import DrillError, MigrationForm
from dledger.types import NodeId

N0 = NodeId("n0")


def target_with(*answers: Exception | None) -> tuple[ContainerTarget, Any]:  # Any: a mock
    """A target whose one container answers so when it is asked to pause."""
    container = Mock()
    container.pause.side_effect = answers
    target = ContainerTarget(Mock(), "image", size=1)
    target._containers = {N0: container}
    return target, container


def test_a_freezer_that_gives_up_is_asked_again() -> None:
    """The kernel of a busy machine may not freeze a container in time."""
    gave_up = docker.errors.APIError(f"OCI runtime pause failed: {FREEZER_GAVE_UP}: unknown")
    target, container = target_with(gave_up, gave_up, None)

    target.pause(N0)

    assert container.pause.call_count == 3


def test_any_other_error_is_told_at_once() -> None:
    """Asking again would not help."""
    target, container = target_with(docker.errors.APIError("no such container"))

    with pytest.raises(DrillError, match="no such container"):
        target.pause(N0)

    assert container.pause.call_count == 1


def test_a_road_takes_each_form_with_its_own_settings_on_the_same_address() -> None:
    """A plain broker that is told of a group would be its member; the exported log is another directory."""
    target = ContainerMigration(Mock(), "image", size=3)
    target._hosts = {NodeId(f"n{number}"): f"10.0.0.{number}" for number in range(3)}
    forms = {form: [target._settings_as(form, node) for node in target.nodes] for form in MigrationForm}

    master, slave, _ = forms[MigrationForm.PAIR]
    assert (master["brokerRole"], slave["brokerRole"]) == ("SYNC_MASTER", "SLAVE")
    assert slave["haMasterAddress"] == f"10.0.0.0:{master['haListenPort']}"
    for form, has_group in ((MigrationForm.PAIR, False), (MigrationForm.GROUP, True), (MigrationForm.PLAIN, False)):
        for one in forms[form]:
            assert ("enableDLegerCommitLog" in one, "dLegerPeers" in one) == (has_group, has_group)
    roots = {form: {one["store_path_root_dir"] for one in several} for form, several in forms.items()}
    assert roots[MigrationForm.PAIR] == roots[MigrationForm.GROUP] != roots[MigrationForm.PLAIN]
    assert target.root_of(N0).startswith("/volumes/n0/")


def test_a_node_that_is_no_member_waits_to_be_added_by_those_that_are() -> None:
    """M12: one that is told of itself as of a founder would found a group of its own."""
    target = ContainerMembers(Mock(), "image", size=1)
    target._hosts = {NodeId(f"n{number}"): f"10.0.0.{number}" for number in range(3)}
    spare = target.spares[0]

    assert (target.nodes, target.spares) == ((N0,), ("n1", "n2"))
    assert "dLegerJoin" not in target._settings(N0)
    assert target._settings(N0)["dLegerPeers"] == "n0-10.0.0.0:20911"
    assert target._settings(spare)["dLegerJoin"] == "true"
    assert target._settings(spare)["dLegerPeers"] == "n0-10.0.0.0:20911;n1-10.0.0.1:20911"
