"""What an engine changes of the machine's packet filter, and how it is put back when our own engine ends.

Docker adds chains to iptables and never takes them away; where forwarding is off it switches it on and drops whatever
is forwarded that is not its own, other programs' bridges included. So forwarding is switched on before, which leaves
others' packets alone, and afterwards everything is as it was.
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
    """Before an engine starts: note how things are in ``memory``, and switch forwarding on.

    What an engine that was killed left there is from before its changes, and stays.
    """
    if not memory.exists():
        memory.write_text(json.dumps({str(switch): switch.read_text() for switch in _SWITCHES if switch.exists()}))
    _SWITCHES[0].write_text("1\n")


def restore(memory: Path) -> None:
    """After an engine ended: remove its chains, and put the switches back."""
    for table in _TABLES:
        rules = [shlex.split(line) for line in _iptables(table, "-S").splitlines()]
        for command in undoing(rules):
            _iptables(table, *command)
    for switch, text in json.loads(memory.read_text()).items():
        Path(switch).write_text(text)
    memory.unlink()


def undoing(rules: list[list[str]]) -> list[list[str]]:
    """The commands that remove an engine's chains from a table, given its rules as ``iptables -S`` lists them."""
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
