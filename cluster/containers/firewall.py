"""Undoes an engine's changes to the machine's packet filter when our own engine stops.

Docker adds chains to iptables and never removes them. If forwarding is off, Docker enables it and drops all forwarded
packets that are not its own, including those of other programs' bridges. So we enable forwarding first, which leaves
other packets alone, and restore everything afterwards.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Final

_SWITCHES: Final = (
    Path("/proc/sys/net/ipv4/ip_forward"),
    Path("/proc/sys/net/bridge/bridge-nf-call-iptables"),
    Path("/proc/sys/net/bridge/bridge-nf-call-ip6tables"),
)
_TABLES: Final = ("filter", "nat")
_PREFIX: Final = "DOCKER"


def prepare(memory: Path) -> None:
    """Before an engine starts: save the state in ``memory``, and enable forwarding.

    A state left there by a killed engine dates from before its changes, and is kept.
    """
    if not memory.exists():
        memory.write_text(json.dumps({str(switch): switch.read_text() for switch in _SWITCHES if switch.exists()}))
    _SWITCHES[0].write_text("1\n")


def restore(memory: Path) -> None:
    """After an engine stopped: remove its chains, and restore the switches."""
    for table in _TABLES:
        rules = [shlex.split(line) for line in _iptables(table, "-S").splitlines()]
        for command in undoing(rules):
            _iptables(table, *command)
    for switch, text in json.loads(memory.read_text()).items():
        Path(switch).write_text(text)
    memory.unlink()


def undoing(rules: list[list[str]]) -> list[list[str]]:
    """The commands that remove an engine's chains from a table, given its rules as listed by ``iptables -S``."""
    chains = [rule[1] for rule in rules if rule[0] == "-N" and rule[1].startswith(_PREFIX)]
    jumps = [
        ["-D", *rule[1:]]
        for rule in rules
        if rule[0] == "-A" and rule[1] not in chains and any(one in chains for one in rule[2:])
    ]
    return jumps + [["-F", chain] for chain in chains] + [["-X", chain] for chain in chains]


def _iptables(table: str, *arguments: str) -> str:
    done = subprocess.run(
        ["iptables", "--wait", "10", "-t", table, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout
