"""Whether two members' old logs let them replicate with each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.types import BaseLog, why_apart

OURS = BaseLog(begin=200, end=500, file_bytes=100, digests=(2, 3, 4), kept_from=200)
GONE = replace(OURS, kept_from=500)


def both(ours: BaseLog | None, theirs: BaseLog | None) -> str:
    """What either side says, which must be the same verdict."""
    said = why_apart(ours, theirs, "n0", "n1")
    assert bool(said) == bool(why_apart(theirs, ours, "n1", "n0"))
    return said


@pytest.mark.parametrize(
    "theirs",
    [
        OURS,
        GONE,
        replace(OURS, kept_from=400),
        replace(OURS, begin=0, digests=(0, 1, 2, 3, 4), kept_from=200),
        replace(OURS, begin=400, digests=(4,), kept_from=400),
    ],
    ids=["equal", "all expired", "some expired", "older files expired", "began later"],
)
def test_equal_logs_agree_whatever_has_expired(theirs: BaseLog) -> None:
    """Each member's files expire by itself; one that began later lacks only what has expired on the other."""
    assert both(replace(OURS, kept_from=400), theirs) == ""


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (replace(OURS, end=600, digests=(2, 3, 4, 5)), "ends at 600"),
        (replace(OURS, file_bytes=50), "files of 50 bytes"),
        (replace(OURS, digests=(2, 9, 4)), "differ in file 00000000000000000300"),
        (replace(OURS, digests=(2, 9, 4), kept_from=500), "differ in file 00000000000000000300"),
        (replace(OURS, begin=300, digests=(3, 4), kept_from=300), "the old log of n1 begins at 300"),
        (None, "n1 has no old log"),
    ],
    ids=["longer", "other files", "other content", "other content, expired", "lacks a file", "none"],
)
def test_differences_keep_members_apart(theirs: BaseLog | None, said: str) -> None:
    """The reason names what differs, and what to do."""
    reason = both(OURS, theirs)
    assert said in reason
    assert "dledger upgrade check" in reason


def test_a_member_without_an_old_log_joins_once_it_has_expired() -> None:
    """Then there is nothing that it lacks."""
    assert both(GONE, None) == both(None, None) == ""


def test_only_what_both_have_digests_of_is_compared() -> None:
    """Of very long logs a handshake has the newest files only."""
    long = BaseLog(0, 500, 100, (3, 4), 0)
    assert both(long, BaseLog(0, 500, 100, (0, 1, 2, 3, 4), 0)) == ""
    assert both(long, BaseLog(0, 500, 100, (0, 1, 2, 3, 5), 0)) != ""
