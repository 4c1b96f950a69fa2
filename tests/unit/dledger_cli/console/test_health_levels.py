"""How groups of brokers do, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.monitoring import Condition
from dledger_cli.console.fleet import Level, MemberView, overall, verdict_of
from rocketstore.remoting.runtime import RuntimeInfo

GROUP = (("n0", "h:1"), ("n1", "h:2"), ("n2", "h:3"))


def member(number: int, **more: object) -> MemberView:
    """One of three that answers: n0 is the master."""
    role = "LEADER" if number == 0 else "FOLLOWER"
    info = RuntimeInfo("V4_9_8", 1.0, 1.0, "1.0", f"n{number}", role, 3, GROUP)
    broker_id = 0 if number == 0 else number + 1
    made = MemberView(f"h:{number + 1}", broker_id, is_registered=True, state="answers", info=info)
    return replace(made, **more)  # type: ignore[arg-type]  # of whatever field a test names


def java(number: int, **more: object) -> MemberView:
    """One of RocketMQ's own."""
    made = MemberView(f"j:{number}", number, is_registered=True, state="answers", info=RuntimeInfo("V4_9_7", 1.0, 1.0))
    return replace(made, **more)  # type: ignore[arg-type]  # of whatever field a test names


def of(number: int, role: str, *conditions: str) -> RuntimeInfo:
    info = member(number).info
    assert info is not None
    return replace(info, role=role, problems=tuple(Condition(kind, "", 0) for kind in conditions))


@pytest.mark.parametrize(
    ("members", "level", "title", "words"),
    [
        ([member(0), member(1), member(2)], Level.GOOD, "serving", "All 3 brokers answer. 1 more may fail."),
        ([java(0), java(1)], Level.GOOD, "serving", "Both brokers answer."),
        ([java(0)], Level.GOOD, "serving", "no failover"),
        ([member(0), member(1), member(2, state="silent")], Level.WARN, "a member is unreachable", "No more may fail"),
        ([java(0), java(1, state="silent")], Level.WARN, "a member is unreachable", "No answer from j:1."),
        (
            [member(0), member(1, is_registered=False), member(2, is_registered=False)],
            Level.WARN,
            "2 members are missing",
            "Not registered: n1, n2. 1 more may fail.",
        ),
        (
            [member(0), *(member(number, is_registered=False, state="silent") for number in (1, 2))],
            Level.BAD,
            "no majority",
            "1 of its 3 brokers answers, 2 are needed.",
        ),
        ([member(0), member(1, info=of(1, "FOLLOWER", "disk_full")), member(2)], Level.WARN, "disk full", "At n1."),
        ([member(0), java(1, info=None, error="no account")], Level.WARN, "refuses to tell", "j:1: no account."),
        ([member(0, info=of(0, "FOLLOWER")), member(1)], Level.WARN, "changing master", "it is a follower"),
        ([member(1), member(2)], Level.BAD, "no master", "Sends wait until a master has registered."),
        ([member(1)], Level.BAD, "no master", "1 of its 1 brokers answers, 2 are needed."),
        ([java(1)], Level.BAD, "no master", "Sends wait"),
        ([member(0, state="silent", error="e"), member(1)], Level.BAD, "master unreachable", "n0 does not answer: e."),
        ([member(0, state="silent"), member(1, state="silent")], Level.BAD, "unreachable", "None of its 2 brokers"),
        ([member(0, is_registered=False)], Level.BAD, "not registered", "clients cannot find it"),
        ([java(0), java(1, state="unknown", info=None)], Level.NONE, "asking", "Not all"),
    ],
)
def test_the_worst_of_a_group_is_told(members: list[MemberView], level: Level, title: str, words: str) -> None:
    """Nobody reads further than that."""
    found = verdict_of(members)

    assert found[:2] == (level, title)
    assert words in found[2]


def test_a_group_without_master_counts_whoever_could_vote() -> None:
    """A member that name servers forgot may still be one of a majority."""
    level, _, more = verdict_of([member(1), member(2, is_registered=False)])

    assert level is Level.BAD
    assert "are needed" not in more


GOOD, WARN, BAD = ("a", Level.GOOD, "serving"), ("b", Level.WARN, "disk full"), ("c", Level.BAD, "no master")


@pytest.mark.parametrize(
    ("groups", "silent", "level", "title", "words"),
    [
        ([GOOD], [], Level.GOOD, "The only group serves", "Every broker answers."),
        ([GOOD, GOOD], ["s:1"], Level.WARN, "All 2 groups serve", "Name server s:1 does not answer."),
        ([GOOD, WARN], [], Level.WARN, "b: disk full", "All 2 groups serve."),
        ([WARN, WARN], [], Level.WARN, "2 of 2 groups need attention", "b: disk full, b: disk full."),
        ([GOOD, WARN, BAD], [], Level.BAD, "c: no master", "The other 2 groups serve, 1 of them with problems."),
        ([BAD], ["s:1"], Level.BAD, "c: no master", "It is the only group. Name server s:1"),
        ([BAD] * 5, [], Level.BAD, "5 of 5 groups do not serve", "and 2 more. No group serves."),
        ([GOOD, ("d", Level.NONE, "asking")], [], Level.NONE, "Contacting the brokers…", "Not all"),
        ([], [], Level.WARN, "No broker has registered", "namesrvAddr"),
    ],
)
def test_all_groups_in_one_sentence(
    groups: list[tuple[str, Level, str]], silent: list[str], level: Level, title: str, words: str
) -> None:
    """The worst first, and what is well."""
    found = overall(groups, silent, all_silent=False, asking=False)

    assert found[:2] == (level, title)
    assert words in found[2]


def test_without_name_servers_nothing_is_called_well() -> None:
    """What they said last is still shown, and called old."""
    some = overall([GOOD], ["s:1", "s:2"], all_silent=True, asking=False)
    none = overall([], ["s:1"], all_silent=True, asking=False)

    assert some[:2] == none[:2] == (Level.BAD, "No name server answers")
    assert "Name servers s:1, s:2 do not answer" in some[2]
    assert "was registered before" in some[2]
    assert "was registered before" not in none[2]
    assert overall([], [], all_silent=False, asking=True)[0] is Level.NONE
