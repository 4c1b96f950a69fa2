"""What a demo's buttons do to processes, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dledger.types import ChangeKind, NodeId
from dledger_cli.console.control import Action, ActionRefusedError, GroupControl, LocalControl
from dledger_cli.local.group import LocalGroupError
from dledger_cli.targets import GroupTarget
from tests.support.fake_group import fake_group

N0, N1 = NodeId("n0"), NodeId("n1")
TARGET = GroupTarget(("127.0.0.1:1",), "g", 1.0)


@dataclass
class FakeProcesses:
    """As much of a ``LocalGroup`` as the buttons need."""

    name: str = "g"
    nodes: dict[NodeId, object] = field(default_factory=lambda: {N0: None, N1: None})
    ended: set[NodeId] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    start_error: str = ""

    def is_running(self, node: NodeId) -> bool:
        return node not in self.ended

    def kill(self, node: NodeId) -> None:
        self.calls.append(f"kill {node}")
        self.ended.add(node)

    def pause(self, node: NodeId) -> None:
        self.calls.append(f"pause {node}")

    def resume(self, node: NodeId) -> None:
        self.calls.append(f"resume {node}")

    def stop(self, node: NodeId) -> int:
        self.calls.append(f"stop {node}")
        self.ended.add(node)
        return 0

    def start(self, node: NodeId) -> None:
        self.calls.append(f"start {node}")
        if self.start_error:
            raise LocalGroupError(self.start_error)
        self.ended.discard(node)


@pytest.fixture
def processes() -> FakeProcesses:
    return FakeProcesses()


@pytest.fixture
def control(processes: FakeProcesses) -> LocalControl:
    return LocalControl(TARGET, processes)  # type: ignore[arg-type]  # a fake


def test_each_button_does_what_it_says(control: LocalControl, processes: FakeProcesses) -> None:
    """In the order of a demonstration."""
    assert control.act(Action.PAUSE, N0) == "n0 is paused (SIGSTOP)"
    assert control.processes() == {N0: "paused", N1: "running"}
    assert control.act(Action.RESUME, N0) == "n0 is running again (SIGCONT)"
    assert control.act(Action.KILL, N0) == "n0 got SIGKILL"
    assert control.processes() == {N0: "ended", N1: "running"}
    assert control.act(Action.RESTART, N0) == "n0 was restarted"
    assert control.act(Action.RESTART, N0) == "n0 was stopped gracefully and restarted"
    assert processes.calls == ["pause n0", "resume n0", "kill n0", "start n0", "stop n0", "start n0"]


def test_a_paused_node_that_is_restarted_is_woken_first(control: LocalControl, processes: FakeProcesses) -> None:
    """Else it would never hear that it shall stop."""
    control.act(Action.PAUSE, N1)

    control.act(Action.RESTART, N1)

    assert processes.calls == ["pause n1", "resume n1", "stop n1", "start n1"]
    assert control.processes()[N1] == "running"


def test_a_node_that_was_killed_while_paused_is_not_paused_when_it_runs_again(
    control: LocalControl, processes: FakeProcesses
) -> None:
    """SIGKILL reaches a stopped process."""
    control.act(Action.PAUSE, N1)
    control.act(Action.KILL, N1)
    control.act(Action.RESTART, N1)

    assert control.processes()[N1] == "running"


@pytest.mark.parametrize(
    ("before", "action", "why"),
    [
        ((Action.KILL,), Action.KILL, "is not running"),
        ((Action.KILL,), Action.PAUSE, "is not running"),
        ((), Action.RESUME, "not paused"),
        ((Action.PAUSE,), Action.PAUSE, "already paused"),
    ],
)
def test_what_makes_no_sense_is_refused(
    control: LocalControl, before: tuple[Action, ...], action: Action, why: str
) -> None:
    """With the reason."""
    for one in before:
        control.act(one, N0)

    with pytest.raises(ActionRefusedError, match=why):
        control.act(action, N0)


def test_only_nodes_of_the_group_can_be_named(control: LocalControl) -> None:
    """Nothing else is ever signalled."""
    with pytest.raises(ActionRefusedError, match="no node"):
        control.act(Action.KILL, NodeId("1"))


def test_a_start_that_fails_is_told_by_its_first_line(control: LocalControl, processes: FakeProcesses) -> None:
    """Not by the end of a log."""
    processes.start_error = "n0 is not ready within 30 s\nlog\nlog"
    control.act(Action.KILL, N0)

    with pytest.raises(ActionRefusedError, match=r"^n0 is not ready within 30 s$"):
        control.act(Action.RESTART, N0)
    assert control.processes()[N0] == "ended"


def test_a_group_of_others_can_only_be_told_to_hand_over_and_to_replace() -> None:
    """And that only once it is known what it is called."""
    control = GroupControl(TARGET, lambda: "")

    assert control.actions == {Action.TRANSFER, Action.REPLACE}
    with pytest.raises(ActionRefusedError, match="cannot kill"):
        control.act(Action.KILL, N0)
    with pytest.raises(ActionRefusedError, match="no node has answered"):
        control.transfer(N0)
    with pytest.raises(ActionRefusedError, match="no node has answered"):
        control.replace(N0, "n4", "h:1")


def test_a_lost_member_is_replaced_by_the_one_that_is_named() -> None:
    """What is no address is refused before anybody is asked."""
    with fake_group() as group:
        control = GroupControl(GroupTarget(tuple(group.addresses), "", 2.0), lambda: "default")
        with pytest.raises(ActionRefusedError, match="invalid address"):
            control.replace(NodeId("n2"), "n4", "nowhere")

        told = control.replace(NodeId("n2"), "n4", "10.0.0.4:20911")

        (change,) = group.nodes[0].changes
    assert "n4 was added: it replaces n2" in told
    assert (change.kind, change.node_id, change.replaces, change.port) == (ChangeKind.ADD, "n4", "n2", 20911)
