"""The names of RocketMQ's and DLedger's settings that no server here uses, by subject, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dledger import settings as node
from dledger.java_names import ALARMS, FAMILIES, Idleness
from rocketstore import settings as broker
from rocketstore.nameserver import settings as name_server

TITLE: Final = "Names that change nothing"
_HEAD: Final = f"""
## {TITLE}

RocketMQ 4.9, RocketMQ 5 and DLedger have settings that nothing here needs, or that are not supported. Their files work
unchanged: at startup, a server lists the names that changed nothing, in a line for each unsupported subject and one
for all others; `--log-level debug` lists every name with its place. Settings that ask for protection that the server
does not give come first, marked with the risk. Names that only another kind of server reads change nothing either.
Only a name that is not in this reference is an error.

"""
_REFUSED: Final = """
Two settings stop a plain `dledger broker`, which would otherwise be another broker than its file describes:
`enableControllerMode=true` and `brokerConfigPaths`.
"""
_JAVA_TIMERS: Final = """
DLedger's timers `maxHeartBeatLeak`, `minVoteIntervalMs`, `maxVoteIntervalMs` and `heartBeatTimeIntervalMs` are
combined: `election_timeout_ms_min` is the leak times the heartbeat, and
`election_timeout_ms_max` adds the difference between the two vote intervals.
"""


def section() -> str:
    """The part of the reference about them."""
    return "".join((_HEAD, *_subjects(), _alarms(), _REFUSED, _JAVA_TIMERS))


def _subjects() -> Iterator[str]:
    used = {*node.TARGETS, *broker.TARGETS, *name_server.TARGETS}
    yield "| subject | | what it means | names |\n|---|---|---|---|\n"
    for idleness in Idleness:
        for family in FAMILIES:
            names = sorted(family.names - used, key=lambda name: (name.lower(), name))
            if family.idleness is idleness and names:
                shown = " ".join(f"`{name}`" for name in names)
                yield f"| {family.subject} | {idleness} | {family.means} | {shown} |\n"


def _alarms() -> str:
    rows = (f"| `{name}` | {alarm.risk} | {alarm.means} |\n" for name, alarm in ALARMS.items())
    return "".join(("\n| switched on | risk | it |\n|---|---|---|\n", *rows))
