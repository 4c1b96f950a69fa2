"""How a group of brokers does, and all groups together, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import MASTER_ID

_LEADER: Final = "LEADER"
_NAMES_SHOWN: Final = 3


class Level(StrEnum):
    """``NONE`` until somebody was asked."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    NONE = "none"


Verdict = tuple[Level, str, str]
"""A level, a title and a sentence."""


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member: as registered (``broker_id`` -1: never), and what it says. ``state``: answers, silent or unknown."""

    address: str
    broker_id: int
    is_registered: bool
    state: str
    info: RuntimeInfo | None = None
    error: str = ""
    since_ms: int = 0
    node: str = ""
    """Its id, for one that only others tell of."""

    @property
    def label(self) -> str:
        """Its node id, or its address."""
        return self.node or (self.info.node if self.info is not None and self.info.role else "") or self.address

    @property
    def shown_state(self) -> str:
        """The state in its row: master, slave, candidate, silent, missing or unknown."""
        if not self.is_registered:
            return "missing"
        if self.state != "answers":
            return self.state
        if self.info is not None and self.info.role == "CANDIDATE":
            return "candidate"
        return "master" if self.broker_id == MASTER_ID else "slave"

    @property
    def note(self) -> str:
        """The remark in its row; empty if there is none."""
        if not self.is_registered:
            return "answers, but is not registered" if self.state == "answers" else "not registered"
        if self.state == "silent":
            return self.error or "does not answer"
        if self.info is None:
            return self.error
        kinds = [kind.replace("_", " ") for kind in self.info.conditions]
        return ", ".join([*kinds, *([self.info.ha.words] if self.info.ha is not None and self.info.ha.words else [])])


def verdict_of(members: Sequence[MemberView]) -> Verdict:
    """How one group does; the worst is told first."""
    registered = [one for one in members if one.is_registered]
    if not registered:
        return Level.BAD, "not registered", "No broker of this name is registered any more: clients cannot find it."
    answering = [one for one in registered if one.state == "answers"]
    if any(one.state == "unknown" for one in registered):
        return Level.NONE, "asking", "Not all of its brokers have answered yet."
    if not answering:
        none = (
            "Its broker does not answer" if len(registered) == 1 else f"None of its {len(registered)} brokers answers"
        )
        return Level.BAD, "unreachable", f"{none}: {registered[0].error or 'silence'}."
    master = next((one for one in registered if one.broker_id == MASTER_ID), None)
    too_few = _too_few(members)
    if master is None:
        return Level.BAD, "no master", f"{too_few}Sends wait until a master has registered."
    if master.state == "silent":
        return Level.BAD, "master unreachable", f"The master {master.label} does not answer: {master.error}."
    if too_few:
        return Level.BAD, "no majority", f"{too_few}Sends wait until more of them do."
    if master.info is not None and master.info.role not in ("", _LEADER):
        told = f"{master.label}, which is registered as the master, says that it is a {master.info.role.lower()}."
        return Level.WARN, "changing master", told
    return _lesser(members, registered)


def _lesser(members: Sequence[MemberView], registered: Sequence[MemberView]) -> Verdict:
    """How a group with a master does."""
    missing = [one for one in members if not one.is_registered]
    silent = [one for one in registered if one.state == "silent"]
    spare = _spare(members)
    if missing:
        what = "a member is missing" if len(missing) == 1 else f"{len(missing)} members are missing"
        return Level.WARN, what, f"Not registered: {_names(missing)}.{spare}"
    if silent:
        what = "a member is unreachable" if len(silent) == 1 else f"{len(silent)} members are unreachable"
        return Level.WARN, what, f"No answer from {_names(silent)}.{spare}"
    secretive = [one for one in registered if one.state == "answers" and one.info is None]
    if secretive:
        return Level.WARN, "refuses to tell", f"{_names(secretive)}: {secretive[0].error}."
    troubled = [one for one in registered if one.info is not None and one.info.conditions]
    if troubled:
        kinds = sorted({kind.replace("_", " ") for one in troubled if one.info for kind in one.info.conditions})
        return Level.WARN, ", ".join(kinds[:_NAMES_SHOWN]), f"At {_names(troubled)}.{spare}"
    if len(registered) == 1:
        return Level.GOOD, "serving", "A single broker: no failover."
    everyone = "Both" if len(registered) == 2 else f"All {len(registered)}"
    return Level.GOOD, "serving", f"{everyone} brokers answer.{spare}"


def _majority(members: Sequence[MemberView]) -> tuple[int, int]:
    """How many brokers of a replicated group answer, and how many it needs; zeros if nobody tells of a group."""
    told = max((len(one.info.members) for one in members if one.info is not None), default=0)
    return sum(one.state == "answers" for one in members), told // 2 + 1 if told else 0


def _too_few(members: Sequence[MemberView]) -> str:
    alive, needed = _majority(members)
    if alive >= needed:
        return ""
    return f"{alive or 'None'} of its {len(members)} brokers answer{'s' if alive == 1 else ''}, {needed} are needed. "


def _spare(members: Sequence[MemberView]) -> str:
    alive, needed = _majority(members)
    if needed <= 1:
        return ""
    return f" {alive - needed} more may fail." if alive > needed else " No more may fail."


def overall(
    groups: Sequence[tuple[str, Level, str]], silent: Sequence[str], *, all_silent: bool, asking: bool
) -> Verdict:
    """How everything does: ``groups`` are names with their levels and titles, ``silent`` name servers."""
    several = len(silent) > 1
    mute = f"Name server{'s' if several else ''} {_listed(silent)} {'do' if several else 'does'} not answer."
    if all_silent:
        kept = " What is shown was registered before; the brokers are still asked." if groups else ""
        return Level.BAD, "No name server answers", f"{mute} Clients find no brokers.{kept}"
    mute = f" {mute}" if silent else ""
    if not groups:
        if asking:
            return Level.NONE, "Contacting the name servers…", "No answer yet."
        return Level.WARN, "No broker has registered", f"Brokers need namesrvAddr in their conf files.{mute}"
    bad = [f"{name}: {title}" for name, level, title in groups if level is Level.BAD]
    warned = [f"{name}: {title}" for name, level, title in groups if level is Level.WARN]
    if bad or warned:
        level, worst = (Level.BAD, bad) if bad else (Level.WARN, warned)
        what = "do not serve" if bad else "need attention"
        title = worst[0] if len(worst) == 1 else f"{len(worst)} of {len(groups)} groups {what}"
        more = "" if len(worst) == 1 else f"{_listed(worst)}. "
        return level, title, f"{more}{_rest(len(groups), len(bad), len(warned))}{mute}"
    if any(level is Level.NONE for _, level, _ in groups):
        return Level.NONE, "Contacting the brokers…", f"Not all have answered yet.{mute}"
    what = "The only group serves" if len(groups) == 1 else f"All {len(groups)} groups serve"
    return (Level.WARN if silent else Level.GOOD), what, mute.strip() or "Every broker answers."


def _rest(groups: int, bad: int, warned: int) -> str:
    """A sentence about the groups that are well, or at least serve."""
    if not bad:
        return "It serves." if groups == 1 else f"All {groups} groups serve."
    if groups == bad:
        return "No group serves." if groups > 1 else "It is the only group."
    others = "The other group serves" if groups - bad == 1 else f"The other {groups - bad} groups serve"
    return f"{others}, {warned} of them with problems." if warned else f"{others}."


def _names(members: Sequence[MemberView]) -> str:
    return _listed([one.label or "an unknown one" for one in members])


def _listed(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
