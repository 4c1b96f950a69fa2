"""The values of classic replication in a plain broker's answer to GET_BROKER_RUNTIME_INFO: ``ha…``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dledger.records import record
from rocketstore.remoting.body import Body
from rocketstore.remoting.headers import Int32, Int64

SLAVES_MAX: Final = 64
TEXT_MAX: Final = 400
_NUMBER_MAX: Final = 1 << 63
NEVER: Final = -1
HA_PORT: Final = "haListenPort"
"""The value with a master's port for slaves, as it is now; 0: none."""
_ROLE: Final = "haRole"
_MASTER: Final = "master"
_SLAVE: Final = "slave"


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
            _ROLE: _SLAVE if self.is_slave else _MASTER,
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
        role = table.get(_ROLE)
        if role not in (_MASTER, _SLAVE):
            return None
        return cls(
            role == _SLAVE,
            _number(table, "haEpoch"),
            _number(table, "haEndOffset"),
            table.get("haProblem", "")[:TEXT_MAX],
            tuple(_followers(table.get("haSlaves", ""))),
            _number(table, "haCopies"),
            _number(table, "haCopiesWanted", 1),
            _number(table, "haBeginOffset", NEVER),
            table.get("haMaster", "")[:TEXT_MAX],
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
        parts = one[:TEXT_MAX].split(",")
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
