"""What a plain broker says of classic replication in its answer to GET_BROKER_RUNTIME_INFO: ``ha…`` values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dledger.records import record

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
    """One broker's side. Offsets are physical; what only one role has is empty or 0 at the other."""

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
        """What such an answer says; None for a broker that says nothing of it. What is malformed counts as not said."""
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
            table.get("haMaster", "")[:TEXT_MAX],
            table.get("haConnected") == _word(True),
            _number(table, "haMasterEndOffset"),
            _number(table, "haLagBytes"),
            _number(table, "haLagMs", NEVER),
            _number(table, "haContactMs", NEVER),
            table.get("haPromoted") == _word(True),
        )


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
