"""Whether a slave may become the master: what a person would look at before. Pure; ``dledger ha`` asks around.

Each check that fails has a name for the loss it is about, and anyone who promotes nevertheless must give it.

Two files of the store keep what must outlast a restart: ``EpochFile`` counts how often the log has changed its master
(an old one that comes back is known by its lower number), and ``SlaveMemory`` holds what a slave knew of its master,
to tell what is lost with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError
from dledger.records import record
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably, replace_durably
from rocketstore.remoting.runtime import NEVER, HaFacts

CONTACT_MS_MAX: Final = 600_000
"""After so long without a word of the master, nobody can say what it has taken since."""


class Loss(StrEnum):
    """The possible losses by a promotion, as they must be named to have it nevertheless."""

    TWO_MASTERS = "two-masters"
    """The old master lives, or another one does: messages that one of the two takes from now on are lost."""
    MISSING_BYTES = "missing-bytes"
    """This slave lacks what its master is known to have."""
    UNKNOWN_BYTES = "unknown-bytes"
    """It is not known what this slave lacks."""
    BYTES_OF_OTHERS = "bytes-of-others"
    """Another slave has more, which would be lost with this promotion."""
    UNASKED = "unasked"
    """Somebody who might know better does not answer."""


@dataclass(frozen=True, slots=True)
class Master:
    """Where a master was, or is registered, and whether something answers there. ``how``: for people.

    ``may_live``: name servers still have it, and from here nothing answers or refuses, as if the network were cut.
    """

    address: str
    answers: bool
    how: str
    may_live: bool = False


@dataclass(frozen=True, slots=True)
class OtherSlave:
    """Another slave of the same name. ``end``: of its log; None if it does not answer (``error``) or tell.

    ``is_promoted``: it is the master from its next start on.
    """

    name: str
    end: int | None = None
    epoch: int = 0
    error: str = ""
    is_promoted: bool = False


@dataclass(frozen=True, slots=True)
class PromotionCheck:
    """One check. ``loss``: what is at stake if it is wrong, None if it is right."""

    text: str
    loss: Loss | None = None


def checks(
    own: HaFacts, masters: Sequence[Master], others: Sequence[OtherSlave], unanswered: Sequence[str]
) -> tuple[PromotionCheck, ...]:
    """All checks, in the order in which a person would make them. ``unanswered``: name servers, and why."""
    return (
        *_of_masters(masters, unanswered),
        _of_lag(own),
        *_of_others(own, others),
    )


def _of_masters(masters: Sequence[Master], unanswered: Sequence[str]) -> Iterable[PromotionCheck]:
    for one in masters:
        if one.answers:
            text = (
                f"{one.address} answers ({one.how}). Stop that broker, and make sure that it does not come back as "
                "master: what one of two masters takes is lost"
            )
            yield PromotionCheck(text, Loss.TWO_MASTERS)
        elif one.may_live:
            text = (
                f"{one.address} does not answer ({one.how}), but name servers have it as master, as when only the "
                "network from here to it is cut. If its machine is dead, they forget it in two minutes: try again then"
            )
            yield PromotionCheck(text, Loss.TWO_MASTERS)
        else:
            yield PromotionCheck(f"no master at {one.address} ({one.how})")
    if not masters:
        yield PromotionCheck("nobody knows where the old master was, so nobody can say that it is gone", Loss.UNASKED)
    for name_server in unanswered:
        yield PromotionCheck(f"the name server {name_server}: another master may be registered there", Loss.UNASKED)


def _of_lag(own: HaFacts) -> PromotionCheck:
    if own.contact_ms == NEVER:
        return PromotionCheck("this slave has never followed a master: it cannot say what it lacks", Loss.UNKNOWN_BYTES)
    if own.is_connected:
        text = f"this slave follows {own.master} at this moment: promote it when that master is gone"
        return PromotionCheck(text, Loss.TWO_MASTERS)
    ago = _span(own.contact_ms)
    if own.lag_bytes:
        text = (
            f"it lacks {own.lag_bytes} bytes that its master had: its log ends at {own.end}, the master's at "
            f"{own.master_end} or later. They exist only on the master's disk, as does what it took since it was last "
            f"heard, {ago} ago"
        )
        return PromotionCheck(text, Loss.MISSING_BYTES)
    rest = f"it had everything when the master was last heard, {ago} ago; what that took since exists only on its disk"
    return PromotionCheck(rest, Loss.UNKNOWN_BYTES if own.contact_ms > CONTACT_MS_MAX else None)


def _of_others(own: HaFacts, others: Sequence[OtherSlave]) -> Iterable[PromotionCheck]:
    for one in others:
        if one.error:
            yield PromotionCheck(f"the slave {one.name} does not tell ({one.error}): it may have more", Loss.UNASKED)
        elif one.is_promoted:
            text = (
                f"the slave {one.name} has been promoted, and is the master once it is started. Do that, or take it "
                "back with `dledger ha promote --undo` there"
            )
            yield PromotionCheck(text, Loss.TWO_MASTERS)
        elif one.epoch > own.epoch:
            text = f"{one.name} has followed a later master (epoch {one.epoch}, here {own.epoch}): promote that one"
            yield PromotionCheck(text, Loss.BYTES_OF_OTHERS)
        elif one.end is None:
            yield PromotionCheck(
                f"the slave {one.name} does not say where its log ends: it may have more", Loss.UNASKED
            )
        elif one.end > own.end:
            yield PromotionCheck(
                f"{one.name} has {one.end - own.end} bytes more: promote that one", Loss.BYTES_OF_OTHERS
            )
        else:
            behind = f", {own.end - one.end} bytes behind this one" if one.end < own.end else ", as this one"
            yield PromotionCheck(f"the slave {one.name} ends at {one.end}{behind}")


def _span(span_ms: int) -> str:
    if span_ms < 120_000:
        return f"{span_ms / 1000:.1f} s"
    minutes = span_ms // 60_000
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"


EPOCH_FILE: Final = "haEpoch.json"
_MASTER: Final = "master"
_SLAVE: Final = "slave"


class EpochFile:
    """The number, and where its master began. Not thread-safe."""

    def __init__(self, fs: FileSystem, directory: Path) -> None:
        """Raises ``CorruptLogError``, ``OSError``."""
        self._fs = fs
        self._path = directory / EPOCH_FILE
        self.now = 0
        """The number; 0 before the first master."""
        self.begin_offset = -1
        """Where this broker began as master of that number; -1: it did not, or it is not known."""
        self._role = ""
        self._read()

    def _read(self) -> None:
        try:
            found = json.loads(self._path.read_bytes())
            epoch, begin, role = found["epoch"], found.get("begin", -1), found.get("role", "")
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError):
            epoch, begin, role = -1, -1, ""
        if type(epoch) is not int or epoch < 0 or type(begin) is not int or role not in ("", _MASTER, _SLAVE):
            advice = "Restore it from a copy, or remove it if no other broker has this log"
            raise CorruptLogError(self._path, 0, "it does not hold an epoch", advice)
        self.now, self.begin_offset, self._role = epoch, begin, role

    def begin(self, offset: int) -> None:
        """A master starts, whose log ends at ``offset``. Raises ``OSError``."""
        if self._role != _MASTER:
            self._write(self.now + 1, offset, _MASTER)

    def follow(self, epoch: int) -> None:
        """Keep the master's; never a lower one. Raises ``OSError``."""
        if epoch > self.now or self._role != _SLAVE:
            self._write(max(epoch, self.now), -1, _SLAVE)

    def _write(self, epoch: int, begin: int, role: str) -> None:
        make_dirs_durably(self._fs, self._path.parent)
        keep_private(self._path.parent)
        content = json.dumps({"epoch": epoch, "begin": begin, "role": role})
        replace_durably(self._fs, self._path, content.encode())
        self.now, self.begin_offset, self._role = epoch, begin, role


MEMORY_FILE: Final = "haMaster.json"


@record(frozen=True, slots=True)
class KnownMaster:
    """The master that a slave followed last. Times are Unix time in ms; 0: never."""

    address: str = ""
    """For slaves."""
    end: int = 0
    """The end of its log, as far as it was heard."""
    own_end: int = 0
    """The end of the slave's log, when this was written."""
    heard_ms: int = 0
    """When it last said anything."""
    complete_ms: int = 0
    """When the slave last had everything that the master was known to have."""


class SlaveMemory:
    """The file."""

    def __init__(self, fs: FileSystem, config_dir: Path) -> None:
        self._fs = fs
        self._path = config_dir / MEMORY_FILE

    def read(self) -> KnownMaster:
        """Empty if there is none. Raises ``CorruptLogError``, ``OSError``."""
        try:
            found = json.loads(self._path.read_bytes())
            known = KnownMaster(**{one.name: found[one.name] for one in fields(KnownMaster)})
        except FileNotFoundError:
            return KnownMaster()
        except (ValueError, KeyError, TypeError) as error:
            advice = "Remove it: it is only needed to say what a promotion of this slave would lose"
            raise CorruptLogError(self._path, 0, "it does not say which master this slave had", advice) from error
        wanted = {"int": int, "str": str}
        if any(type(getattr(known, one.name)) is not wanted[str(one.type)] for one in fields(KnownMaster)):
            advice = "Remove it: it is only needed to say what a promotion of this slave would lose"
            raise CorruptLogError(self._path, 0, "it has values of other types", advice)
        return known

    def write(self, known: KnownMaster) -> None:
        """Replace it. Raises ``OSError``."""
        make_dirs_durably(self._fs, self._path.parent)
        keep_private(self._path.parent)
        replace_durably(self._fs, self._path, json.dumps(asdict(known)).encode())
