"""What looks after a log: the order of its work, whom it asks, what it tells, and who is fenced.

What a store lets others compare with their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.errors import (
    CorruptLogError,
    DiskFullError,
    DLedgerError,
    InvalidRequestError,
    LackingError,
    UnavailableError,
    WrongBytesError,
)
from dledger.monitoring import Conditions
from dledger.rpc.peers.exchanges import PeerLogClient
from dledger.store.repair import ReadSegment, Repaired, ScrubStep
from dledger.types import NO_INDEX, Boundary, LogIndex, NodeId, Position, Term
from dledger.watch import (
    COMPARE_INTERVAL_MS,
    FIRST_COMPARE_MS,
    RETRY_MS_MAX,
    RETRY_MS_MIN,
    LogWatch,
    ScrubbedStore,
    WatchSettings,
)
from tests.unit.dledger.store.support import fill, open_store, small_config

N1, N2 = NodeId("n1"), NodeId("n2")
SEGMENT = Path("/data/00000000000000004096")


@dataclass
class StillClock(Clock):
    now_ms: int = 0

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


@dataclass
class Log(ScrubbedStore):
    """The own log."""

    steps: list[ScrubStep] = field(default_factory=list)
    damage: CorruptLogError | None = None
    crcs: dict[LogIndex, int] = field(default_factory=dict)
    committed_index: LogIndex = NO_INDEX
    unproven: CorruptLogError | None = None
    """What looking up chain CRCs meets."""
    verified: int = 0
    repaired: int = 0
    together: tuple[int, ...] = ()
    """The segments that one repair mends, if it mends more than the one asked for."""

    def verify(self, max_bytes: int) -> ScrubStep:
        self.verified += 1
        return self.steps.pop(0) if self.steps else ScrubStep(min(1000, max_bytes))

    def repair(self, base: int, read: ReadSegment, pause: Callable[[], None]) -> Repaired:
        pause()
        if self.repaired and base in self.together:
            return Repaired((), None)
        if read(base, 10) is None:
            raise LackingError("it does not hold it")
        self.repaired, self.damage = self.repaired + 1, None
        return Repaired(self.together or (base,), Path("/damaged-1"))

    def find(self, _base: int, _pause: Callable[[], None]) -> CorruptLogError | None:
        return self.damage

    def base_of(self, path: Path) -> int | None:
        return int(path.name) if path.name.isdecimal() else None

    def chain_crcs(self, indexes: Sequence[LogIndex]) -> dict[LogIndex, int]:
        if self.unproven is not None:
            raise self.unproven
        return {index: self.crcs[index] for index in indexes if index in self.crcs}


@dataclass
class Peers(PeerLogClient):
    """The others."""

    answers: dict[NodeId, bytes | DLedgerError | None] = field(default_factory=dict)
    crcs: dict[NodeId, dict[LogIndex, int] | DLedgerError] = field(default_factory=dict)
    peers: tuple[NodeId, ...] = (N1, N2)
    voting_peers: tuple[NodeId, ...] = (N1, N2)
    quorum: int = 2
    asked: list[NodeId] = field(default_factory=list)

    def read_log(self, peer: NodeId, _position: int, _length: int) -> bytes | None:
        self.asked.append(peer)
        answer = self.answers[peer]
        if isinstance(answer, DLedgerError):
            raise answer
        return answer

    def chain_crcs(self, peer: NodeId, indexes: Sequence[LogIndex]) -> dict[LogIndex, int]:
        known = self.crcs.get(peer, {})
        if isinstance(known, DLedgerError):
            raise known
        return {index: known[index] for index in indexes if index in known}


@dataclass
class World:
    """A watch and what is around it."""

    watch: LogWatch
    log: Log
    peers: Peers
    clock: StillClock
    conditions: Conditions
    diverged: list[str] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    """What the watch said of itself each time that it told of being whole."""
    wakes: list[int] = field(default_factory=list)
    """When the thread was woken."""
    hidden: list[CorruptLogError] = field(default_factory=list)
    """What is met by whoever reads the log when it is told to be whole."""

    def held(self) -> dict[str, str]:
        """Conditions by kind and subject."""
        return {f"{one.kind} {one.subject}": one.message for one in self.conditions.now()}


def world(*, rate: int = 0, auto_repair: bool = True) -> World:
    """A member of three."""
    log, peers, clock = Log(), Peers(), StillClock()
    conditions = Conditions("n0", clock)
    diverged, whole, wakes, hidden = list[str](), list[bool](), list[int](), list[CorruptLogError]()

    def told_whole() -> bool:
        whole.append(watch.is_whole)
        for damage in hidden:
            watch.note_damage(damage)
        return not hidden

    watch = LogWatch(
        NodeId("n0"),
        log,
        peers,
        WatchSettings(rate, auto_repair),
        conditions,
        clock,
        wake=lambda: wakes.append(clock.now_ms),
        on_diverged=diverged.append,
        on_whole=told_whole,
    )
    return World(watch, log, peers, clock, conditions, diverged, whole, wakes, hidden)


def damaged(offset: int = 100, path: Path = SEGMENT) -> CorruptLogError:
    """What somebody met."""
    return CorruptLogError(path, offset, "it is wrong", "advice", 7)


def test_the_log_is_verified_at_the_rate_that_is_set() -> None:
    """A step's bytes take their time; 0 is not at all."""
    one = world(rate=1000)
    assert one.watch.step() == 1000
    one.clock.now_ms = 999
    one.watch.step()
    assert one.log.verified == 1
    one.clock.now_ms = 1000
    one.watch.step()
    assert one.log.verified == 2

    off = world(rate=0)
    off.watch.step()
    assert off.log.verified == 0


def test_a_pass_over_the_log_is_followed_by_a_pause() -> None:
    """However fast it may read: a small log would otherwise be verified without end."""
    one = world(rate=1 << 30)
    one.log.steps = [ScrubStep(1000, finished=True)]

    assert one.watch.step() == 1000


def test_damage_wakes_the_thread_that_repairs_it_once() -> None:
    """It may sleep until the next comparison; damage that is known already is no reason."""
    one = world()

    one.watch.note_damage(damaged())
    one.watch.note_damage(damaged(200))

    assert one.wakes == [0]


def test_what_the_scrubber_finds_is_repaired_with_the_first_peer_that_has_it() -> None:
    """Told while it lasts, and over afterwards."""
    one = world(rate=1000)
    one.log.steps, one.log.damage = [ScrubStep(1000, damage=damaged())], damaged()
    one.peers.answers = {N1: UnavailableError("n1 does not answer"), N2: b"bytes"}

    one.watch.step()
    assert one.held() == {f"damaged {SEGMENT}": "damaged at offset 100 (entry 7): it is wrong"}
    assert not one.watch.is_whole
    one.watch.step()

    assert one.log.repaired == 1
    assert one.peers.asked == [N1, N2]
    assert one.held() == {}
    assert one.watch.is_whole


def test_a_repair_that_fails_says_why_and_is_tried_again_less_and_less_often() -> None:
    """Wrong bytes, an old version, a full disk: each is named."""
    one = world()
    one.log.damage = damaged()
    one.peers.answers = {N1: WrongBytesError("the fetched part is wrong"), N2: UnavailableError("n2 does not answer")}
    one.watch.note_damage(damaged())
    one.watch.note_damage(damaged(200))

    waits = []
    for _ in range(3):
        due = one.watch.step()
        assert due is not None
        waits.append(due - one.clock.now_ms)
        one.clock.now_ms = due
    assert waits == [500, 1000, 500]  # the last one is the comparison's
    assert set(one.held()) == {f"damaged {SEGMENT}"}
    assert one.held()[f"damaged {SEGMENT}"].endswith("n1: the fetched part is wrong; n2 does not answer")
    assert not one.watch.is_whole

    one.peers.answers[N1] = DiskFullError("no room for another copy")
    one.clock.now_ms += 60_000
    one.watch.step()
    assert one.held()[f"damaged {SEGMENT}"].endswith("no room for another copy")


def test_damage_that_is_met_again_waits_for_its_next_attempt() -> None:
    """Every read that meets it tells of it: the peers are not asked each time, nor is it forgotten that none has it."""
    one = world()
    one.log.damage = damaged()
    one.peers.answers = {N1: None, N2: None}
    one.watch.note_damage(damaged())
    one.watch.step()

    one.watch.note_damage(damaged(200))
    one.watch.step()

    assert one.peers.asked == [N1, N2]
    assert one.watch.is_whole


def test_each_segment_has_pauses_of_its_own() -> None:
    """One that was just found damaged is not made to wait because another one's repair fails."""
    one = world()
    one.log.damage = damaged()
    one.peers.answers = dict.fromkeys((N1, N2), UnavailableError("it does not answer"))
    one.watch.note_damage(damaged())
    one.watch.note_damage(damaged(path=SEGMENT.with_name("8192")))
    one.watch.step()
    asked = len(one.peers.asked)
    one.clock.now_ms = RETRY_MS_MIN

    one.watch.step()

    assert len(one.peers.asked) == 2 * asked


@pytest.mark.parametrize("noted_ms", [0, 100], ids=["at once", "while the other one waits"])
def test_a_repair_that_mends_neighbours_ends_their_damage_too(noted_ms: int) -> None:
    """It is over there and then, and nothing is said to be fetched for what is whole."""
    one = world()
    one.log.damage = damaged()
    one.peers.answers = dict.fromkeys((N1, N2), UnavailableError("it does not answer"))
    one.watch.note_damage(damaged())
    if noted_ms:
        one.watch.step()
    one.clock.now_ms = noted_ms
    one.log.together, one.peers.answers = (4096, 8192), {N1: b"bytes", N2: b"bytes"}
    one.watch.note_damage(damaged(path=SEGMENT.with_name("8192")))

    one.watch.step()

    assert one.held() == {}
    assert one.whole == [True]


def test_a_repair_ends_when_the_node_stops() -> None:
    """The stop waits for this thread, and fetching a segment takes its time."""
    one = world()
    one.log.damage = damaged()
    one.peers.answers = {N1: b"bytes", N2: b"bytes"}
    one.watch.note_damage(damaged())

    one.watch.stop()

    assert one.watch.step() is None
    assert one.peers.asked == []


def test_a_repair_is_tried_again_within_half_a_minute_for_ever() -> None:
    """The peer that has it may be back at any time."""
    one = world()
    one.log.damage = damaged()
    one.peers.answers = dict.fromkeys((N1, N2), UnavailableError("it does not answer"))
    one.watch.note_damage(damaged())
    for _ in range(20):
        one.watch.step()
        one.clock.now_ms += RETRY_MS_MAX
    asked = len(one.peers.asked)

    one.watch.step()

    assert len(one.peers.asked) == asked + 2


def test_what_no_member_holds_any_more_keeps_nobody_from_being_whole() -> None:
    """Retention has removed it elsewhere: it stays damaged, is told, and nothing waits for it."""
    one = world()
    one.log.damage = damaged()
    one.peers.answers = {N1: None, N2: UnavailableError("n2 does not answer")}
    one.watch.note_damage(damaged())

    one.watch.step()

    assert one.whole == [True]
    assert "n1: it does not hold it" in one.held()[f"damaged {SEGMENT}"]


def test_a_member_that_may_hold_it_keeps_this_one_from_being_whole() -> None:
    """Its answer was no good this time, but it did not say that it lacks it."""
    one = world()
    one.log.damage = damaged()
    one.peers.answers = {N1: None, N2: WrongBytesError("the fetched part is wrong")}
    one.watch.note_damage(damaged())

    one.watch.step()

    assert not one.watch.is_whole


def test_one_segment_that_a_peer_may_still_mend_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """That nobody holds another one any more does not make this member whole."""
    one = world()
    one.log.damage = damaged()

    def read_log(_peer: NodeId, position: int, _length: int) -> bytes | None:
        if position == 4096:
            return None
        raise UnavailableError("it does not answer")

    monkeypatch.setattr(one.peers, "read_log", read_log)
    one.watch.note_damage(damaged())
    one.watch.note_damage(damaged(path=SEGMENT.with_name("8192")))

    one.watch.step()

    assert (one.whole, one.watch.is_whole) == ([], False)


def test_damage_that_has_gone_by_itself_is_forgotten() -> None:
    """Retention removed it here, or a report came late."""
    one = world()
    one.peers.answers = {N1: None, N2: None}
    one.watch.note_damage(damaged())
    one.watch.step()

    assert one.held() == {}


def test_damage_behind_the_committed_part_is_not_looked_for_without_a_pause() -> None:
    """It cannot be mended yet, and whoever reads meets it again: the thread would do nothing else, at full speed."""
    one = world()
    one.log.repaired, one.log.together = 1, (int(SEGMENT.name),)  # nothing is wrong with what may be mended
    one.hidden.append(damaged())
    one.watch.note_damage(damaged())

    for one.clock.now_ms in (0, 0, 1, 2, RETRY_MS_MIN - 1):
        assert one.watch.step() in (0, RETRY_MS_MIN)
    assert len(one.whole) == 1
    one.hidden.clear()  # it is committed, and mended
    one.clock.now_ms = RETRY_MS_MIN
    one.watch.step()

    assert one.whole == [True, True]
    assert one.watch.step() != RETRY_MS_MIN


def test_without_auto_repair_damage_is_told_only() -> None:
    """And nobody is asked."""
    one = world(auto_repair=False)
    one.log.damage = damaged()
    one.watch.note_damage(damaged())
    one.watch.step()

    assert one.peers.asked == []
    assert "no peer to fetch it from" in one.held()[f"damaged {SEGMENT}"]


def test_damage_of_another_file_is_told_for_a_while() -> None:
    """It is no segment: others mend it."""
    one = world()
    one.watch.note_damage(damaged(path=Path("/index/x")))
    assert "damaged /index/x" in one.held()
    one.clock.now_ms += 120_000
    assert one.held() == {}


SAME = {LogIndex(0): 5, LogIndex(32): 6, LogIndex(40): 7}
OTHER = {LogIndex(0): 5, LogIndex(32): 16, LogIndex(40): 17}


def compared(
    own: dict[LogIndex, int],
    n1: dict[LogIndex, int],
    n2: dict[LogIndex, int] | DLedgerError,
    *,
    voters: tuple[NodeId, ...] = (N1, N2),
) -> World:
    """A round of comparing."""
    one = world()
    one.log.crcs, one.log.committed_index = own, LogIndex(40)
    one.peers.crcs = {N1: n1, N2: n2}
    one.peers.voting_peers = voters
    one.clock.now_ms = FIRST_COMPARE_MS
    assert one.watch.step() == FIRST_COMPARE_MS + COMPARE_INTERVAL_MS
    return one


def test_damage_met_while_comparing_is_repaired_and_compared_again() -> None:
    """The thread goes on: without it nothing would be verified, compared or repaired any more."""
    one = world()
    one.log.crcs, one.log.committed_index = SAME, LogIndex(40)
    one.log.unproven = one.log.damage = damaged()
    one.peers.crcs = {N1: OTHER, N2: OTHER}
    one.peers.answers = {N1: b"bytes"}
    one.clock.now_ms = FIRST_COMPARE_MS

    due = one.watch.step()
    assert due == FIRST_COMPARE_MS + RETRY_MS_MIN
    assert set(one.held()) == {f"damaged {SEGMENT}"}
    assert not one.watch.is_whole
    one.log.unproven, one.clock.now_ms = None, due
    one.watch.step()
    assert one.log.repaired == 1
    one.clock.now_ms = FIRST_COMPARE_MS + COMPARE_INTERVAL_MS
    one.watch.step()

    assert len(one.diverged) == 1


def test_equal_histories_are_no_news() -> None:
    """Also where a peer is behind, or says nothing."""
    for n1, n2 in ((SAME, SAME), ({LogIndex(0): 5}, {}), (SAME, UnavailableError("away"))):
        one = compared(SAME, dict(n1), n2 if isinstance(n2, DLedgerError) else dict(n2))
        assert (one.held(), one.diverged) == ({}, [])


def test_an_answer_that_cannot_be_read_is_no_reason_to_stop_the_node() -> None:
    """A member of another version: it is asked again next time, and the others meanwhile."""
    one = compared(SAME, OTHER, InvalidRequestError("malformed answer"))

    assert set(one.held()) == {"diverged n1"}


def test_the_one_that_differs_from_the_majority_is_fenced() -> None:
    """Where it began is named."""
    one = compared(SAME, OTHER, OTHER)

    assert one.diverged == ["2 members hold a different entry 40, or a different one before it"] or one.diverged == [
        "2 members hold a different entry 32, or a different one before it"
    ]
    assert set(one.held()) == {"diverged n1", "diverged n2"}
    assert one.held()["diverged n1"].startswith("n1 holds a different entry 32")


@pytest.mark.parametrize("third", [SAME, {}, UnavailableError("away")], ids=["equal", "behind", "away"])
def test_the_majority_tells_who_differs_and_is_not_fenced(third: dict[LogIndex, int] | DLedgerError) -> None:
    """Nor is anybody while it is one against one."""
    one = compared(SAME, OTHER, third)

    assert one.diverged == []
    assert set(one.held()) == {"diverged n1"}


def test_a_difference_is_told_until_the_peer_agrees() -> None:
    """One that has nothing in common to compare by now has not taken it back."""
    one = compared(SAME, OTHER, {})

    one.peers.crcs[N1] = {}
    one.clock.now_ms += COMPARE_INTERVAL_MS
    one.watch.step()
    told = set(one.held())
    one.peers.crcs[N1] = dict(SAME)
    one.clock.now_ms += COMPARE_INTERVAL_MS
    one.watch.step()

    assert (told, one.held()) == ({"diverged n1"}, {})


def test_learners_fence_nobody() -> None:
    """Most voters would differ if most members held another history: a learner has no voice in that."""
    one = compared(SAME, OTHER, OTHER, voters=(N1,))

    assert one.diverged == []
    assert set(one.held()) == {"diverged n1", "diverged n2"}


def test_nobody_is_fenced_where_no_two_agree() -> None:
    """Members that differ from this one and from each other are no majority for another history."""
    one = compared(SAME, OTHER, {LogIndex(0): 5, LogIndex(32): 26, LogIndex(40): 27})

    assert one.diverged == []
    assert set(one.held()) == {"diverged n1", "diverged n2"}


def test_a_difference_that_has_gone_is_over() -> None:
    """The other member was repaired."""
    one = compared(SAME, OTHER, SAME)
    one.peers.crcs[N1] = SAME
    one.clock.now_ms += COMPARE_INTERVAL_MS
    one.watch.step()

    assert one.held() == {}


def test_only_what_is_committed_and_kept_is_compared(tmp_path: Path) -> None:
    """What is not committed yet may differ between members, and is no reason to fence anybody."""
    store = open_store(small_config(tmp_path))
    store.reset(Boundary(LogIndex(9), Term(1), Position(0), 7))
    fill(store, 20)
    store.flush()
    store.set_committed(LogIndex(15))

    found = ScrubbedStore(store).chain_crcs([LogIndex(index) for index in range(40)])

    assert found == {LogIndex(index): store.chain_crc_at(LogIndex(index)) for index in range(9, 16)}
    store.close()
