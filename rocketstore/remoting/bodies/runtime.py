"""A running broker's answer to GET_BROKER_RUNTIME_INFO, ours or RocketMQ's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Self

from dledger.conditions import CONDITIONS_MAX, Condition
from dledger.records import record
from dledger.remoting.codes import RequestError
from dledger.remoting.fastjson import dumps_plain, loads
from dledger.values import PORT_MAX
from rocketstore.remoting.bodies.ha import HaFacts
from rocketstore.remoting.bodies.routes import KVTable

GRPC_PORT: Final = "grpcServerPort"
MEMBERS_MAX: Final = 32
TEXT_MAX: Final = 300
_RELEASE: Final = "dledgerVersion"
_NODE: Final = "dledgerNode"
_ROLE: Final = "dledgerRole"
_TERM: Final = "dledgerTerm"
_MEMBERS: Final = "dledgerMembers"
_LEADER: Final = "dledgerLeader"
_CONDITIONS: Final = "dledgerConditions"
LOG_END: Final = "dledgerLogEnd"
"""The value with the end of what is written, committed or not."""
_SLAVE: Final = "SLAVE"


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
    leader: str = ""
    """The node id of its group's leader; empty if it knows none."""
    problems: tuple[Condition, ...] = ()
    """Its present conditions, oldest first."""
    store_role: str = ""
    """The broker's role: ``SLAVE``, ``SYNC_MASTER`` or ``ASYNC_MASTER``; in a group, it is none while it catches up."""
    begin: int | None = None
    """The beginning of its log; None if it does not tell."""
    end: int | None = None
    """The end of what can be read of its log; None if it does not tell."""
    written: int | None = None
    """The end of its log, committed or not; None if it does not tell."""
    dispatch_behind: int | None = None
    """How many bytes of the log are not in its queues yet; None if it does not tell."""
    grpc_port: int = 0
    """Its port of gRPC; 0: none, or it does not tell."""
    ha: HaFacts | None = None
    """Classic replication; None for a broker that has none, or does not tell."""

    @property
    def conditions(self) -> tuple[str, ...]:
        """The kinds of its present problems."""
        return tuple(sorted({one.kind for one in self.problems}))

    @property
    def is_master(self) -> bool:
        """Whether it says that it takes changes."""
        return self.store_role not in ("", _SLAVE)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Raises ``RequestError``. Values that cannot be understood count as absent; texts and members are bounded."""
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
            leader=text.get(_LEADER, ""),
            problems=tuple(_problems(table.get(_CONDITIONS, ""))),
            store_role=text.get("brokerRole", ""),
            begin=_offset(text.get("commitLogMinOffset", "")),
            end=_offset(text.get("commitLogMaxOffset", "")),
            written=_offset(text.get(LOG_END, "")),
            dispatch_behind=_offset(text.get("dispatchBehindBytes", "")),
            grpc_port=_port(text.get(GRPC_PORT, "")),
            ha=HaFacts.of(table),
        )


def own_table(
    release: str,
    node: str,
    role: str,
    term: int,
    members: Mapping[str, str],
    conditions: Iterable[Condition],
    *,
    leader: str = "",
) -> dict[str, str]:
    """The entries that our brokers add to RocketMQ's table. Members are written as in ``dLegerPeers``."""
    problems = [[one.kind, one.subject, one.since_ms, one.message] for one in conditions]
    found = {_RELEASE: release, _NODE: node, _CONDITIONS: dumps_plain(problems).decode()}
    if role:
        told = ";".join(f"{name}-{address}" for name, address in sorted(members.items()))
        found |= {_ROLE: role, _TERM: str(term), _LEADER: leader, _MEMBERS: told}
    return found


def _members(text: str) -> Iterable[tuple[str, str]]:
    for one in text.split(";", MEMBERS_MAX)[:MEMBERS_MAX]:
        node, _, address = one[:TEXT_MAX].partition("-")
        if node:
            yield node, address


def _problems(text: str) -> Iterable[Condition]:
    try:
        found = loads(text.encode())
    except RequestError:
        return
    for one in found[:CONDITIONS_MAX] if isinstance(found, list) else ():
        if isinstance(one, list) and len(one) == 4 and isinstance(one[2], int):
            kind, subject, message = (str(one[at])[:TEXT_MAX] for at in (0, 1, 3))
            yield Condition(kind, message, one[2], subject)


def _offset(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else None


def _port(text: str) -> int:
    port = _offset(text)
    return port if port is not None and port <= PORT_MAX else 0


def _rate(text: str) -> float | None:
    """The first of the three rates; a text that is no number counts as none."""
    try:
        rate = float(text.partition(" ")[0])
    except ValueError:
        return None
    return rate if 0 <= rate < float("inf") else None
