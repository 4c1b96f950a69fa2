"""What a running broker says of itself in its answer to GET_BROKER_RUNTIME_INFO, ours or RocketMQ's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Self

from dledger.records import record
from rocketstore.remoting.bodies.ha import HaFacts
from rocketstore.remoting.bodies.routes import KVTable

MEMBERS_MAX: Final = 32
TEXT_MAX: Final = 300
_RELEASE: Final = "dledgerVersion"
_NODE: Final = "dledgerNode"
_ROLE: Final = "dledgerRole"
_TERM: Final = "dledgerTerm"
_MEMBERS: Final = "dledgerMembers"
_CONDITIONS: Final = "dledgerConditions"


@record(frozen=True, slots=True)
class RuntimeInfo:
    """A broker's version and rates (messages per second over the last ten), and what only our brokers add.

    A rate is None if the broker does not tell it. ``release`` is empty for a broker of another program.
    """

    version: str = ""
    put_tps: float | None = None
    get_tps: float | None = None
    release: str = ""
    """This project's version."""
    node: str = ""
    role: str = ""
    """The role in its group; empty for a broker that replicates no log."""
    term: int = 0
    members: tuple[tuple[str, str], ...] = ()
    """Node ids and addresses of the group; an address is empty until that node has answered."""
    conditions: tuple[str, ...] = ()
    """The kinds of its present problems."""
    end: int | None = None
    """The end of its log; None if it does not tell."""
    ha: HaFacts | None = None
    """Classic replication; None for a broker that has none, or does not tell."""

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Raises ``RequestError``. What cannot be understood counts as not told; texts and members are bounded."""
        table = KVTable.decode(body).table
        text = {name: value[:TEXT_MAX] for name, value in table.items() if name != _MEMBERS}
        term = text.get(_TERM, "")
        return cls(
            version=text.get("brokerVersionDesc", ""),
            put_tps=_rate(text.get("putTps", "")),
            get_tps=_rate(text.get("getTransferredTps", text.get("getTransferedTps", ""))),  # RocketMQ 5's, and 4's
            release=text.get(_RELEASE, ""),
            node=text.get(_NODE, ""),
            role=text.get(_ROLE, ""),
            term=int(term) if term.isascii() and term.isdigit() and len(term) <= 19 else 0,
            members=tuple(_members(table.get(_MEMBERS, ""))),
            conditions=tuple(text.get(_CONDITIONS, "").split()),
            end=_offset(text.get("commitLogMaxOffset", "")),
            ha=HaFacts.of(table),
        )


def own_table(
    release: str, node: str, role: str, term: int, members: Mapping[str, str], conditions: Iterable[str]
) -> dict[str, str]:
    """What our brokers add to RocketMQ's table. Members are written as in ``dLegerPeers``."""
    found = {_RELEASE: release, _NODE: node, _CONDITIONS: " ".join(sorted(set(conditions)))}
    if role:
        told = ";".join(f"{name}-{address}" for name, address in sorted(members.items()))
        found |= {_ROLE: role, _TERM: str(term), _MEMBERS: told}
    return found


def _members(text: str) -> Iterable[tuple[str, str]]:
    for one in text.split(";", MEMBERS_MAX)[:MEMBERS_MAX]:
        node, _, address = one[:TEXT_MAX].partition("-")
        if node:
            yield node, address


def _offset(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else None


def _rate(text: str) -> float | None:
    """The first of the three rates; a text that is no number counts as none."""
    try:
        rate = float(text.partition(" ")[0])
    except ValueError:
        return None
    return rate if 0 <= rate < float("inf") else None
