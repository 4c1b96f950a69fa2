"""A running broker's answer to GET_BROKER_RUNTIME_INFO, ours or RocketMQ's own; a plain broker's also has the values of
classic replication (``ha…``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Self

from dledger.monitoring import CONDITIONS_MAX, Condition
from dledger.records import record
from dledger.remoting.codes import RequestError
from dledger.remoting.fastjson import dumps_plain, loads
from dledger.values import PORT_MAX
from rocketstore.remoting.body import Body
from rocketstore.remoting.headers import Int32, Int64
from rocketstore.remoting.topics import KVTable

SLAVES_MAX: Final = 64
HA_TEXT_MAX: Final = 400
_NUMBER_MAX: Final = 1 << 63
NEVER: Final = -1
HA_PORT: Final = "haListenPort"
"""The value with a master's port for slaves, as it is now; 0: none."""
_HA_ROLE: Final = "haRole"
_HA_MASTER: Final = "master"
_HA_SLAVE: Final = "slave"


@record(frozen=True, slots=True)
class FollowerFacts:
    """A slave as its master sees it. ``broker_id``: -1 if it is RocketMQ's, which does not say."""

    broker_id: int
    address: str
    acknowledged: int
    """The end of what it has said to have."""
    lag_bytes: int
    lag_ms: int
    """How long ago the log was as it has acknowledged it; 0: it has everything."""
    in_sync: bool
    """Whether it counts as a copy."""


@record(frozen=True, slots=True)
class HaFacts:
    """One broker's side. Offsets are physical; values of the other role are empty or 0."""

    is_slave: bool
    epoch: int = 0
    """How often the log has changed its master."""
    end: int = 0
    """The end of its own log."""
    problem: str = ""
    """Why a slave does not follow; which successor a master has."""
    # a master's
    followers: tuple[FollowerFacts, ...] = ()
    copies: int = 0
    """How many brokers have what it answers PUT_OK for, itself included, as things are now."""
    copies_wanted: int = 1
    """How many of them there should be."""
    begin: int = NEVER
    """Where it took over as a slave that became master; ``NEVER`` if it did not."""
    # a slave's
    master: str = ""
    """Its master's address for slaves; empty if that is not known."""
    is_connected: bool = False
    master_end: int = 0
    """The end of its master's log, as far as it has heard."""
    lag_bytes: int = 0
    lag_ms: int = NEVER
    """For how long it has not had everything that its master is known to have; 0: it has. ``NEVER`` had it."""
    contact_ms: int = NEVER
    """How long ago its master said anything; ``NEVER``."""
    is_promoted: bool = False
    """Whether it is the master from its next start on."""

    @property
    def words(self) -> str:
        """For people: whether a slave follows, what is wrong with a master; empty if nothing is."""
        if not self.is_slave:
            lacks = f"{self.copies} of {self.copies_wanted} copies" if self.copies < self.copies_wanted else ""
            return self.problem or lacks
        if not self.is_connected:
            return f"does not follow: {self.problem or 'not yet'}"
        return f"follows, {self.lag_bytes} bytes behind" if self.lag_bytes else "follows"

    def table(self) -> dict[str, str]:
        """As values of the answer."""
        found = {
            _HA_ROLE: _HA_SLAVE if self.is_slave else _HA_MASTER,
            "haEpoch": str(self.epoch),
            "haEndOffset": str(self.end),
            "haProblem": self.problem,
        }
        if not self.is_slave:
            told = ";".join(
                f"{one.broker_id},{one.address},{one.acknowledged},{one.lag_bytes},{one.lag_ms},{_word(one.in_sync)}"
                for one in self.followers
            )
            return found | {
                "haSlaves": told,
                "haCopies": str(self.copies),
                "haCopiesWanted": str(self.copies_wanted),
                "haBeginOffset": str(self.begin),
            }
        return found | {
            "haMaster": self.master,
            "haConnected": _word(self.is_connected),
            "haMasterEndOffset": str(self.master_end),
            "haLagBytes": str(self.lag_bytes),
            "haLagMs": str(self.lag_ms),
            "haContactMs": str(self.contact_ms),
            "haPromoted": _word(self.is_promoted),
        }

    @classmethod
    def of(cls, table: Mapping[str, str]) -> HaFacts | None:
        """The facts in such an answer; None for a broker without any. Malformed values count as missing."""
        role = table.get(_HA_ROLE)
        if role not in (_HA_MASTER, _HA_SLAVE):
            return None
        return cls(
            role == _HA_SLAVE,
            _number(table, "haEpoch"),
            _number(table, "haEndOffset"),
            table.get("haProblem", "")[:HA_TEXT_MAX],
            tuple(_followers(table.get("haSlaves", ""))),
            _number(table, "haCopies"),
            _number(table, "haCopiesWanted", 1),
            _number(table, "haBeginOffset", NEVER),
            table.get("haMaster", "")[:HA_TEXT_MAX],
            table.get("haConnected") == _word(True),
            _number(table, "haMasterEndOffset"),
            _number(table, "haLagBytes"),
            _number(table, "haLagMs", NEVER),
            _number(table, "haContactMs", NEVER),
            table.get("haPromoted") == _word(True),
        )


@record(frozen=True, slots=True)
class HaConnectionInfo(Body):
    """A slave, as RocketMQ 5's master tells it."""

    addr: str
    slave_ack_offset: Int64
    diff: Int64
    in_sync: bool
    transferred_byte_in_second: Int64 = 0
    transfer_from_where: Int64 = 0


@record(frozen=True, slots=True)
class HaClientInfo(Body):
    """The status of a slave, as RocketMQ 5 tells it."""

    master_addr: str = ""
    transferred_byte_in_second: Int64 = 0
    max_offset: Int64 = 0
    last_read_timestamp: Int64 = 0
    last_write_timestamp: Int64 = 0
    master_flush_offset: Int64 = 0
    activated: bool = False


@record(frozen=True, slots=True)
class HaStatus(Body):
    """Answer to GET_BROKER_HA_STATUS."""

    master: bool
    master_commit_log_max_offset: Int64 = 0
    in_sync_slave_nums: Int32 = 0
    ha_connection_info: tuple[HaConnectionInfo, ...] = ()
    ha_client_runtime_info: HaClientInfo = HaClientInfo()


def status_of(facts: HaFacts, now_ms: int) -> HaStatus:
    """The same facts as RocketMQ 5's tools ask for them."""
    if not facts.is_slave:
        slaves = tuple(
            HaConnectionInfo(one.address, one.acknowledged, one.lag_bytes, one.in_sync, 0, one.acknowledged)
            for one in facts.followers
        )
        return HaStatus(True, facts.end, sum(one.in_sync for one in facts.followers), slaves)
    heard_ms = 0 if facts.contact_ms == NEVER else now_ms - facts.contact_ms
    client = HaClientInfo(facts.master, 0, facts.end, heard_ms, heard_ms, facts.master_end, facts.is_connected)
    return HaStatus(False, ha_client_runtime_info=client)


def _followers(text: str) -> Iterable[FollowerFacts]:
    for one in text.split(";", SLAVES_MAX)[:SLAVES_MAX]:
        parts = one[:HA_TEXT_MAX].split(",")
        if len(parts) == 6:
            broker_id, _, acknowledged, lag_bytes, lag_ms, _ = (_whole(part) for part in parts)
            yield FollowerFacts(broker_id, parts[1], acknowledged, lag_bytes, lag_ms, parts[5] == _word(True))


def _number(table: Mapping[str, str], name: str, otherwise: int = 0) -> int:
    return _whole(table.get(name, ""), otherwise)


def _whole(text: str, otherwise: int = NEVER) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
        return otherwise
    number = int(text)
    return number if -1 <= number < _NUMBER_MAX else otherwise


def _word(is_so: bool) -> str:
    return "true" if is_so else "false"


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
