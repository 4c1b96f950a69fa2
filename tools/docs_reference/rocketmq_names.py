"""The effect of every name of RocketMQ's and DLedger's settings here: one table of all, and the reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from dledger import settings as node
from dledger.java_names import ALARMS, FAMILIES, UNUSED, Idleness, family_of
from dledger.setting_sources import SettingTarget
from rocketstore import settings as broker
from rocketstore.nameserver import settings as name_server

_NOTHING: Final = "\N{EN DASH}"
TITLE: Final = "Names that change nothing"
_HEAD: Final = f"""
## {TITLE}

RocketMQ 4.9, RocketMQ 5 and DLedger have settings that nothing here needs, or that are not supported. Their files work
unchanged: a server says at its start which names changed nothing and what that means, in a line for each subject below
that is not supported and one for all others; `--log-level debug` lists every name with its place. What asks for
protection that is not given comes first, marked with the risk. Only a name that is not in this reference is an error.

"""
_REFUSED: Final = """
Two settings stop a plain `dledger broker`, which would otherwise be another broker than its file describes:
`enableControllerMode=true` and `brokerConfigPaths`.
"""
_NAMES: Final = """
### All names

A link leads to the setting that the name sets; "plain" and "replicated" say which brokers use it. A dash means that it
changes nothing there, for the reason in the last column.

| name | `broker` | `serve` | `nameserver` | subject |
|---|---|---|---|---|
"""
_JAVA_TIMERS: Final = """
DLedger's timers `maxHeartBeatLeak`, `minVoteIntervalMs`, `maxVoteIntervalMs` and `heartBeatTimeIntervalMs` are
combined: [election_timeout_ms_min](#election_timeout_ms_min) is the leak times the heartbeat, and
[election_timeout_ms_max](#election_timeout_ms_max) adds the difference between the two vote intervals.
"""


def names() -> list[str]:
    """Every name of theirs that a server knows. Ours are in snake case; each of them has a heading or a row above."""
    found = {*UNUSED, *node.TARGETS, *broker.TARGETS, *name_server.TARGETS}
    return sorted(found - node.OWN_NAMES - {one for one in found if "_" in one}, key=lambda one: (one.lower(), one))


def section() -> str:
    """The part of the reference about them."""
    return "".join((_HEAD, *_subjects(), _alarms(), _REFUSED, _NAMES, *map(_row, names()), _JAVA_TIMERS))


def _subjects() -> Iterator[str]:
    yield "| subject | | what it means |\n|---|---|---|\n"
    for idleness in Idleness:
        for family in FAMILIES:
            if family.idleness is idleness:
                yield f"| {family.subject} | {idleness} | {family.means} |\n"


def _alarms() -> str:
    rows = (f"| `{name}` | {alarm.risk} | {alarm.means} |\n" for name, alarm in ALARMS.items())
    return "".join(("\n| switched on | risk | it |\n|---|---|---|\n", *rows))


def _row(name: str) -> str:
    cells = [
        _setting(name, broker.TARGETS, _mode(name)),
        _setting(name, node.TARGETS, ""),
        _setting(name, name_server.TARGETS, "", linked=broker.TARGETS),
    ]
    return f"| `{name}` | {' | '.join(cells)} | {family_of(name).subject if _NOTHING in cells else ''} |\n"


def _mode(name: str) -> str:
    target = broker.TARGETS.get(name)
    if target is None:
        return ""
    return (
        " (plain)" if target.setting in broker.PLAIN_ONLY else " (replicated)" * (target.setting in broker.DLEDGER_ONLY)
    )


def _setting(name: str, targets: Mapping[str, SettingTarget], mode: str, linked: Collection[str] | None = None) -> str:
    target = targets.get(name)
    if target is None:
        return _NOTHING
    has_heading = target.setting.islower() and (linked is None or target.setting in linked)
    return (f"[{target.setting}](#{target.setting})" if has_heading else f"`{target.setting}`") + mode
