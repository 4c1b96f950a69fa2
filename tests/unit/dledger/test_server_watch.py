"""Running members look after their logs: what is damaged is found, told, fetched from the others, and put aside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, FencedError, UnavailableError
from dledger.monitoring import ConditionKind
from dledger.rpc.peers import exchanges as peer_log
from dledger.rpc.peers.exchanges import PeerLogClient
from dledger.rpc.peers.identity import PeerIdentity
from dledger.types import LogIndex, NodeId
from tests.support.damage import turn
from tests.support.running_group import RunningGroup
from tests.support.waiting import wait_until

SEGMENT_BYTES = 64 * 1024


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RunningGroup]:
    """Three members with several small segments, scrubbed as fast as they can."""
    made = RunningGroup(tmp_path, segment_bytes=SEGMENT_BYTES, scrub_bytes_per_s=1 << 30)
    made.append(300, 1000)
    made.wait_converged()
    yield made
    made.stop()


def follower(group: RunningGroup) -> int:
    """Who does not lead."""
    return (group.wait_for_leader() + 1) % 3


@pytest.mark.parametrize("who", ["leader", "follower"])
@pytest.mark.parametrize("segment", [0, 2, -1], ids=["first", "middle", "being written"])
def test_a_turned_bit_is_found_told_and_mended_while_the_group_works(
    group: RunningGroup, who: str, segment: int
) -> None:
    """Nobody asks for it: the scrubber does; the bytes are what they were, the damaged file is kept."""
    number = group.wait_for_leader() if who == "leader" else follower(group)
    node = group.nodes[number]
    segment = segment if segment >= 0 else node.log.committed_position // SEGMENT_BYTES
    path = group.segment(number, segment)
    sound = path.read_bytes()

    turn(path, 100)

    aside = node.log.directory / "damaged-1" / "data" / path.name
    wait_until(aside.exists, "it is repaired")
    wait_until(lambda: node.conditions.now() == (), "nothing is the matter any more")
    assert path.read_bytes() == sound
    assert aside.read_bytes()[:200] != sound[:200]
    group.append(5)
    assert [one.fatal for one in group.nodes] == [None] * 3


def test_damage_that_nobody_can_mend_yet_is_told_until_somebody_can(group: RunningGroup) -> None:
    """The others are away: the member says what is damaged and why it is not repaired, and repairs it later."""
    number = follower(group)
    node = group.nodes[number]
    others = [one for one in range(3) if one != number]
    for other in others:
        group.nodes[other].stop(graceful=False)

    turn(group.segment(number, 1), 100)

    def told() -> str:
        return next((one.message for one in node.status().conditions if one.kind == ConditionKind.DAMAGED), "")

    wait_until(lambda: "cannot be asked about its log" in told(), "it says so")
    assert "damaged at offset" in told()
    for other in others:
        group.restart(other)
    wait_until(lambda: not node.conditions.holds(ConditionKind.DAMAGED), "it is repaired")
    assert not node.conditions.holds(ConditionKind.REPAIRING)


def test_a_read_that_meets_damage_begins_its_repair(tmp_path: Path) -> None:
    """Also where nothing is scrubbed."""
    group = RunningGroup(tmp_path, segment_bytes=SEGMENT_BYTES, scrub_bytes_per_s=0)
    try:
        group.append(300, 1000)
        group.wait_converged()
        number = follower(group)
        node = group.nodes[number]
        turn(group.segment(number, 1), 100)
        first = node.log.last_index_before(SEGMENT_BYTES) + 1

        with pytest.raises(CorruptLogError):
            node.read(LogIndex(first), LogIndex(first), 1 << 20)

        wait_until((node.log.directory / "damaged-1").exists, "it is repaired")
        wait_until(lambda: node.conditions.now() == (), "nothing is the matter any more")
        assert node.read(LogIndex(first), LogIndex(first), 1 << 20)[0].index == first
    finally:
        group.stop()


def test_members_read_each_others_logs_and_nobody_else_does(group: RunningGroup) -> None:
    """Only committed bytes of one segment, only as much as is allowed, one at a time, only for members."""
    asking, asked = group.nodes[0], group.nodes[1]
    learnt: dict[NodeId, str] = {}
    client = PeerLogClient(PeerIdentity.of(asking.config), None, learn=learnt.__setitem__)
    try:
        data = client.read_log(NodeId("n1"), 0, 5000)
        assert data == group.segment(1, 0).read_bytes()[:5000]
        assert client.read_log(NodeId("n1"), asked.log.committed_position, 1) is None
        assert client.read_log(NodeId("n1"), SEGMENT_BYTES - 10, 20) is None
        known = {LogIndex(index): asked.log.chain_crc_at(LogIndex(index)) for index in (3, 300)}
        assert client.chain_crcs(NodeId("n1"), [*known, LogIndex(10_000)]) == known
        assert learnt == {NodeId("n1"): asked.client_address}
        with pytest.raises(UnavailableError, match="the limit is"):
            client.read_log(NodeId("n1"), 0, peer_log.READ_LOG_BYTES_MAX + 1)
    finally:
        client.close()
    with pytest.raises(UnavailableError, match="stopping"):
        client.read_log(NodeId("n1"), 0, 1)


def stopped_with(group: RunningGroup, ruin: Callable[[Path], None], segment: int) -> int:
    """Stop a follower, damage one of its segments; gives its number."""
    number = follower(group)
    path = group.segment(number, segment)
    group.nodes[number].stop(graceful=False)
    ruin(path)
    return number


@pytest.mark.parametrize(
    "ruin", [Path.unlink, lambda path: path.write_bytes(b"\xff" * 1000)], ids=["missing", "misshapen"]
)
def test_a_member_starts_without_a_segment_fetches_it_and_counts_again(
    tmp_path: Path, ruin: Callable[[Path], None]
) -> None:
    """It remembers what it said, and keeps the rest of its log; its vote counts once it is whole."""
    group = RunningGroup(tmp_path, segment_bytes=SEGMENT_BYTES, scrub_bytes_per_s=0, recovery_verify_bytes=0)
    try:
        group.append(300, 1000)
        group.wait_converged()
        number = stopped_with(group, ruin, 1)
        sound = group.segment(group.wait_for_leader(), 1).read_bytes()
        returned = group.make(number)
        group.nodes[number] = returned
        assert returned.log.last.index >= 300
        assert not returned.status().voter
        assert returned.conditions.holds(ConditionKind.DAMAGED)

        returned.start()

        wait_until(lambda: returned.status().voter, "it counts again")
        wait_until(lambda: returned.conditions.now() == (), "nothing is the matter any more")
        assert group.segment(number, 1).read_bytes() == sound
        group.append(5)
        group.wait_converged()
    finally:
        group.stop()


def test_a_member_with_a_damaged_end_keeps_what_is_sound_and_is_refilled_by_its_leader(group: RunningGroup) -> None:
    """It starts in doubt, with the log before the damage, and is readmitted once it has all."""
    number = stopped_with(group, lambda path: turn(path, 5_000), 2)

    returned = group.make(number)
    group.nodes[number] = returned
    assert 0 < returned.log.last.index < 200
    assert not returned.status().voter
    returned.start()

    wait_until(lambda: returned.status().voter, "it counts again")
    group.append(5)
    group.wait_converged()
    aside = returned.log.directory / "damaged-1" / "data"
    assert {path.name for path in aside.iterdir()} >= {group.segment(number, 2).name, group.segment(number, 3).name}
    leader = group.wait_for_leader()
    assert group.segment(number, 2).read_bytes() == group.segment(leader, 2).read_bytes()


def test_a_member_whose_history_most_others_contradict_serves_and_counts_for_nothing(group: RunningGroup) -> None:
    """It stays up and says so; the others go on."""
    number = follower(group)
    node = group.nodes[number]

    node._fence("2 members hold a different entry 7")

    with pytest.raises(FencedError, match="2 members hold a different entry 7"):
        node.read(LogIndex(1), LogIndex(1), 1000)
    with pytest.raises(FencedError):
        node.bulk.committed_range()
    assert not node.status().voter
    (told,) = [one for one in node.status().conditions if one.kind == ConditionKind.FENCED]
    assert "--repair" in told.message
    group.append(5)
    assert [one.fatal for one in group.nodes] == [None] * 3


def test_a_fenced_member_serves_nothing_after_a_restart_until_its_log_is_set_aside(group: RunningGroup) -> None:
    """It says so before it has heard of anybody; ``repair`` keeps its log, and it fetches the group's."""
    number = follower(group)
    node = group.nodes[number]
    node._fence("2 members hold a different entry 7")
    node.stop()

    again = group.make(number)
    with pytest.raises(FencedError, match="2 members hold a different entry 7"):
        again.read(LogIndex(1), LogIndex(1), 1000)
    assert [one.kind for one in again.conditions.now()] == [ConditionKind.FENCED]
    again.stop()
    repaired = group.nodes[number] = group.make(number, repair=True)
    assert repaired.log.last.index == -1
    assert (repaired.log.directory / "damaged-1" / "data").exists()
    repaired.start()

    wait_until(lambda: repaired.status().voter, "it counts again")
    assert not repaired.fenced
    group.append(5)
    group.wait_converged()
