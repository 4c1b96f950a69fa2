"""The console's knowledge of all groups of brokers behind its name servers: registrations, and runtime information.

Pure: the watcher brings answers and the time, a page gets the groups that changed. Everything is bounded. A member that
is no longer registered, and a group that has none left, are remembered for ``REMEMBER_MS``. Times are milliseconds
since 1970 on the console's clock.

How a group of brokers does, and all groups together, is told in words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final

from dledger_cli.console.browse import safe_text
from dledger_cli.console.history import EVENTS_MAX, TEXT_MAX, ConsoleEvent
from dledger_cli.console.probe import figure
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import MASTER_ID, BrokerData, ClusterInfo

_LEADER: Final = "LEADER"
_NAMES_SHOWN: Final = 3


class Level(StrEnum):
    """``NONE`` until somebody was asked."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    NONE = "none"


Verdict = tuple[Level, str, str]
"""A level, a title and a sentence."""


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member: as registered (``broker_id`` -1: never), and what it says. ``state``: answers, silent or unknown."""

    address: str
    broker_id: int
    is_registered: bool
    state: str
    info: RuntimeInfo | None = None
    error: str = ""
    since_ms: int = 0
    node: str = ""
    """Its id, for one that only others tell of."""

    @property
    def label(self) -> str:
        """Its node id, or its address."""
        return self.node or (self.info.node if self.info is not None and self.info.role else "") or self.address

    @property
    def shown_state(self) -> str:
        """The state in its row: master, slave, candidate, silent, missing or unknown."""
        if not self.is_registered:
            return "missing"
        if self.state != "answers":
            return self.state
        if self.info is not None and self.info.role == "CANDIDATE":
            return "candidate"
        return "master" if self.broker_id == MASTER_ID else "slave"

    @property
    def note(self) -> str:
        """The remark in its row; empty if there is none."""
        if not self.is_registered:
            return "answers, but is not registered" if self.state == "answers" else "not registered"
        if self.state == "silent":
            return self.error or "does not answer"
        if self.info is None:
            return self.error
        kinds = [kind.replace("_", " ") for kind in self.info.conditions]
        return ", ".join([*kinds, *([self.info.ha.words] if self.info.ha is not None and self.info.ha.words else [])])


def verdict_of(members: Sequence[MemberView]) -> Verdict:
    """How one group does; the worst is told first."""
    registered = [one for one in members if one.is_registered]
    if not registered:
        return Level.BAD, "not registered", "No broker of this name is registered any more: clients cannot find it."
    answering = [one for one in registered if one.state == "answers"]
    if any(one.state == "unknown" for one in registered):
        return Level.NONE, "asking", "Not all of its brokers have answered yet."
    if not answering:
        none = (
            "Its broker does not answer" if len(registered) == 1 else f"None of its {len(registered)} brokers answers"
        )
        return Level.BAD, "unreachable", f"{none}: {registered[0].error or 'silence'}."
    master = next((one for one in registered if one.broker_id == MASTER_ID), None)
    too_few = _too_few(members)
    if master is None:
        return Level.BAD, "no master", f"{too_few}Sends wait until a master has registered."
    if master.state == "silent":
        return Level.BAD, "master unreachable", f"The master {master.label} does not answer: {master.error}."
    if too_few:
        return Level.BAD, "no majority", f"{too_few}Sends wait until more of them do."
    if master.info is not None and master.info.role not in ("", _LEADER):
        told = f"{master.label}, which is registered as the master, says that it is a {master.info.role.lower()}."
        return Level.WARN, "changing master", told
    return _lesser(members, registered)


def _lesser(members: Sequence[MemberView], registered: Sequence[MemberView]) -> Verdict:
    """How a group with a master does."""
    missing = [one for one in members if not one.is_registered]
    silent = [one for one in registered if one.state == "silent"]
    spare = _spare(members)
    if missing:
        what = "a member is missing" if len(missing) == 1 else f"{len(missing)} members are missing"
        return Level.WARN, what, f"Not registered: {_names(missing)}.{spare}"
    if silent:
        what = "a member is unreachable" if len(silent) == 1 else f"{len(silent)} members are unreachable"
        return Level.WARN, what, f"No answer from {_names(silent)}.{spare}"
    secretive = [one for one in registered if one.state == "answers" and one.info is None]
    if secretive:
        return Level.WARN, "refuses to tell", f"{_names(secretive)}: {secretive[0].error}."
    troubled = [one for one in registered if one.info is not None and one.info.conditions]
    if troubled:
        kinds = sorted({kind.replace("_", " ") for one in troubled if one.info for kind in one.info.conditions})
        return Level.WARN, ", ".join(kinds[:_NAMES_SHOWN]), f"At {_names(troubled)}.{spare}"
    if len(registered) == 1:
        return Level.GOOD, "serving", "A single broker: no failover."
    everyone = "Both" if len(registered) == 2 else f"All {len(registered)}"
    return Level.GOOD, "serving", f"{everyone} brokers answer.{spare}"


def _majority(members: Sequence[MemberView]) -> tuple[int, int]:
    """How many brokers of a replicated group answer, and how many it needs; zeros if nobody tells of a group."""
    told = max((len(one.info.members) for one in members if one.info is not None), default=0)
    return sum(one.state == "answers" for one in members), told // 2 + 1 if told else 0


def _too_few(members: Sequence[MemberView]) -> str:
    alive, needed = _majority(members)
    if alive >= needed:
        return ""
    return f"{alive or 'None'} of its {len(members)} brokers answer{'s' if alive == 1 else ''}, {needed} are needed. "


def _spare(members: Sequence[MemberView]) -> str:
    alive, needed = _majority(members)
    if needed <= 1:
        return ""
    return f" {alive - needed} more may fail." if alive > needed else " No more may fail."


def overall(
    groups: Sequence[tuple[str, Level, str]], silent: Sequence[str], *, all_silent: bool, asking: bool
) -> Verdict:
    """How everything does: ``groups`` are names with their levels and titles, ``silent`` name servers."""
    several = len(silent) > 1
    mute = f"Name server{'s' if several else ''} {_listed(silent)} {'do' if several else 'does'} not answer."
    if all_silent:
        kept = " What is shown was registered before; the brokers are still asked." if groups else ""
        return Level.BAD, "No name server answers", f"{mute} Clients find no brokers.{kept}"
    mute = f" {mute}" if silent else ""
    if not groups:
        if asking:
            return Level.NONE, "Contacting the name servers…", "No answer yet."
        return Level.WARN, "No broker has registered", f"Brokers need namesrvAddr in their conf files.{mute}"
    bad = [f"{name}: {title}" for name, level, title in groups if level is Level.BAD]
    warned = [f"{name}: {title}" for name, level, title in groups if level is Level.WARN]
    if bad or warned:
        level, worst = (Level.BAD, bad) if bad else (Level.WARN, warned)
        what = "do not serve" if bad else "need attention"
        title = worst[0] if len(worst) == 1 else f"{len(worst)} of {len(groups)} groups {what}"
        more = "" if len(worst) == 1 else f"{_listed(worst)}. "
        return level, title, f"{more}{_rest(len(groups), len(bad), len(warned))}{mute}"
    if any(level is Level.NONE for _, level, _ in groups):
        return Level.NONE, "Contacting the brokers…", f"Not all have answered yet.{mute}"
    what = "The only group serves" if len(groups) == 1 else f"All {len(groups)} groups serve"
    return (Level.WARN if silent else Level.GOOD), what, mute.strip() or "Every broker answers."


def _rest(groups: int, bad: int, warned: int) -> str:
    """A sentence about the groups that are well, or at least serve."""
    if not bad:
        return "It serves." if groups == 1 else f"All {groups} groups serve."
    if groups == bad:
        return "No group serves." if groups > 1 else "It is the only group."
    others = "The other group serves" if groups - bad == 1 else f"The other {groups - bad} groups serve"
    return f"{others}, {warned} of them with problems." if warned else f"{others}."


def _names(members: Sequence[MemberView]) -> str:
    return _listed([one.label or "an unknown one" for one in members])


def _listed(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


BROKERS_MAX: Final = 240
"""Addresses that are asked; of further ones only the number is told. The transport keeps 256 connections."""
REMEMBER_MS: Final = 600_000
SILENT_FAILURES: Final = 2
"""A broker that did not answer so many requests in a row is silent; one that accepts no connection is so at once."""
NAME_CHARS_MAX: Final = 255


@dataclass(slots=True)
class _Asked:
    """The newest answer of one address; ``info`` is kept when it stops answering."""

    info: RuntimeInfo | None = None
    answered_ms: int = 0
    failures: int = 0
    failing_since_ms: int = 0
    unreachable: bool = False
    error: str = ""

    @property
    def state(self) -> str:
        """``answers`` (perhaps with a refusal), ``silent`` or ``unknown``."""
        if self.failures and (self.unreachable or self.failures >= SILENT_FAILURES):
            return "silent"
        return "answers" if self.answered_ms else "unknown"


@dataclass(slots=True)
class _Member:
    """One address of a group, registered or remembered (``gone_ms``: since when it is not)."""

    address: str
    broker_id: int
    gone_ms: int = 0


@dataclass(slots=True)
class _Group:
    name: str
    cluster: str
    members: dict[str, _Member] = field(default_factory=dict)
    number: int = 0
    since_ms: int = 0
    shown: dict[str, object] = field(default_factory=dict)
    level: Level = Level.NONE
    title: str = ""
    master: str = ""


@dataclass(slots=True)
class _NameServer:
    """``clusters`` is None while it does not answer."""

    address: str
    clusters: ClusterInfo | None = None
    error: str = ""
    since_ms: int = 0


class Fleet:
    """Not thread-safe: everything is on the console's event loop."""

    def __init__(self, name_servers: Sequence[str]) -> None:
        self._name_servers = {address: _NameServer(address) for address in name_servers}
        self._groups: dict[str, _Group] = {}
        self._asked: dict[str, _Asked] = {}
        self._events: deque[ConsoleEvent] = deque(maxlen=EVENTS_MAX)
        self._number = 0
        self._names_number = 0
        self._left_out = 0
        self._registered_ms = 0

    # --- what the watcher brings -------------------------------------------------------------------------------------

    def heard(self, name_server: str, clusters: ClusterInfo, now_ms: int) -> None:
        """Record who has registered with a name server."""
        known = self._name_servers[name_server]
        if known.clusters is None:
            known.since_ms = now_ms
            if known.error:
                self._tell("plain", name_server, f"name server {name_server} answers again", now_ms)
        is_new = known.clusters != clusters
        known.clusters, known.error = clusters, ""
        self._registered_ms = now_ms
        if is_new or any(self._gone()):
            self._register(now_ms)

    def unheard(self, name_server: str, error: str, now_ms: int) -> None:
        """Record that a name server does not answer; as long as none does, the last registrations stay."""
        known = self._name_servers[name_server]
        if not known.error:
            known.since_ms = now_ms
            self._tell("unreachable", name_server, f"name server {name_server} does not answer", now_ms)
        known.clusters, known.error = None, safe_text(error)[:TEXT_MAX]
        if any(one.clusters is not None for one in self._name_servers.values()):
            self._register(now_ms)

    def answered(self, address: str, info: RuntimeInfo, now_ms: int) -> None:
        """Record what the broker at an address says of itself."""
        if address in self._asked:  # otherwise it was forgotten meanwhile
            self._asked[address] = _Asked(info, now_ms)
            self._draw_groups_with(address, now_ms)

    def refused(self, address: str, reason: str, now_ms: int) -> None:
        """Record that it answers, but not what it was asked: access control, for example."""
        if address in self._asked:
            self._asked[address] = _Asked(None, now_ms, error=safe_text(reason)[:TEXT_MAX])
            self._draw_groups_with(address, now_ms)

    def failed(self, address: str, error: str, now_ms: int, *, unreachable: bool) -> None:
        """Record that it did not answer; ``unreachable``: there was not even a connection."""
        asked = self._asked.get(address)
        if asked is not None:
            asked.failures += 1
            asked.failing_since_ms = asked.failing_since_ms or now_ms
            asked.unreachable, asked.error = unreachable, safe_text(error)[:TEXT_MAX]
            self._draw_groups_with(address, now_ms)

    # --- what it is asked --------------------------------------------------------------------------------------------

    def addresses(self) -> tuple[str, ...]:
        """All addresses to ask."""
        return tuple(self._asked)

    def addresses_of(self, name: str) -> tuple[str, ...] | None:
        """The registered addresses of a group, the master's first; None if it does not exist."""
        group = self._groups.get(name)
        if group is None:
            return None
        members = sorted(group.members.values(), key=lambda one: (one.gone_ms > 0, one.broker_id < 0, one.broker_id))
        return tuple(one.address for one in members)

    def names(self) -> frozenset[str]:
        """The names of all clusters and groups: brokers make topics of them."""
        return frozenset(name for one in self._groups.values() for name in (one.cluster, one.name))

    def is_foreign(self, name: str) -> bool:
        """Whether a group's brokers are another program's, such as RocketMQ's own."""
        group = self._groups.get(name)
        return group is not None and group.shown.get("kind") == "rocketmq"

    def master_of(self, name: str) -> str:
        """The address of a group's registered master; empty if there is none."""
        group = self._groups.get(name)
        return group.master if group is not None else ""

    def snapshot(self, now_ms: int) -> dict[str, object]:
        """The whole state, for a new page."""
        return self.update(-1, now_ms)

    def update(self, after: int, now_ms: int) -> dict[str, object]:
        """The news after number ``after``; ``names`` is None if no group came or went."""
        groups = sorted(self._groups.values(), key=lambda one: (one.cluster, one.name))
        return {
            "now_ms": now_ms,
            "number": self._number,
            "overall": self._overall(),
            "name_servers": [self._name_server_json(one) for one in self._name_servers.values()],
            "registered_ms": self._registered_ms,
            "left_out": self._left_out,
            "names": [one.name for one in groups] if self._names_number > after else None,
            "groups": [one.shown for one in groups if one.number > after],
            "events": [asdict(one) for one in self._events if one.number > after],
        }

    # --- registrations -----------------------------------------------------------------------------------------------

    def _register(self, now_ms: int) -> None:
        """Bring members up to what the name servers know together."""
        told, self._left_out = _within_bounds(self._told())
        for name, group in self._groups.items():
            addresses = set(told[name].broker_addrs.values()) if name in told else set()
            for member in group.members.values():
                if member.address not in addresses and not member.gone_ms:
                    member.gone_ms = now_ms
        for name, data in told.items():
            group = self._groups.setdefault(name, _Group(name, data.cluster, since_ms=now_ms))
            group.cluster = data.cluster
            for broker_id, address in data.broker_addrs.items():
                group.members[address] = _Member(address, broker_id)
        self._forget(now_ms)
        everywhere = dict.fromkeys(address for group in self._groups.values() for address in group.members)
        self._asked = {address: self._asked.get(address) or _Asked() for address in everywhere}
        for group in self._groups.values():
            self._draw(group, now_ms)

    def _told(self) -> dict[str, BrokerData]:
        """Each group as the name server tells it that knows most of its addresses; of several, the first."""
        told: dict[str, BrokerData] = {}
        for one in self._name_servers.values():
            for data in one.clusters.broker_addr_table.values() if one.clusters is not None else ():
                known = told.get(data.broker_name)
                if data.broker_addrs and (known is None or len(data.broker_addrs) > len(known.broker_addrs)):
                    told[data.broker_name] = data
        return told

    def _forget(self, now_ms: int) -> None:
        """Drop members that have been gone for long, and the longest gone if there are too many; then empty groups."""
        gone = sorted((one.gone_ms, name, address) for name, one, address in self._gone())
        excess = sum(len(group.members) for group in self._groups.values()) - BROKERS_MAX
        for place, (gone_ms, name, address) in enumerate(gone):
            if place < excess or now_ms - gone_ms > REMEMBER_MS:
                del self._groups[name].members[address]
        names = list(self._groups)
        for name in names:
            if not self._groups[name].members:
                del self._groups[name]
        if names != list(self._groups) or any(not group.number for group in self._groups.values()):
            self._number += 1
            self._names_number = self._number

    def _gone(self) -> Iterator[tuple[str, _Member, str]]:
        for name, group in self._groups.items():
            for address, one in group.members.items():
                if one.gone_ms:
                    yield name, one, address

    # --- what pages see ----------------------------------------------------------------------------------------------

    def _draw_groups_with(self, address: str, now_ms: int) -> None:
        for group in self._groups.values():
            if address in group.members:
                self._draw(group, now_ms)

    def _draw(self, group: _Group, now_ms: int) -> None:
        views = self._views(group)
        level, title, more = verdict_of(views)
        master = next((one for one in views if one.is_registered and one.broker_id == MASTER_ID), None)
        if (level, title) != (group.level, group.title):
            group.since_ms = now_ms
            self._tell_verdict(group, level, title, now_ms)
            group.level, group.title = level, title
        if master is not None and master.address != group.master:
            if group.master:
                self._tell("leader", group.name, f"{group.name}: {master.label} is the master now", now_ms)
            group.master = master.address
        elif master is None:
            group.master = ""
        shown = _group_json(group, views, master, more)
        if shown != group.shown:
            self._number += 1
            group.number, group.shown = self._number, shown

    def _views(self, group: _Group) -> list[MemberView]:
        """Registered members by broker id, then those that are not registered any more, or that others tell of."""
        views = []
        for one in sorted(
            group.members.values(), key=lambda one: (one.gone_ms > 0, one.broker_id < 0, one.broker_id, one.address)
        ):
            asked = self._asked.get(one.address) or _Asked()
            views.append(
                MemberView(
                    address=one.address,
                    broker_id=one.broker_id,
                    is_registered=not one.gone_ms,
                    state=asked.state,
                    info=asked.info,
                    error=asked.error,
                    since_ms=asked.failing_since_ms if asked.state == "silent" else one.gone_ms,
                )
            )
        return [*views, *_untold(views)]

    def _tell_verdict(self, group: _Group, level: Level, title: str, now_ms: int) -> None:
        worse = level in (Level.WARN, Level.BAD)
        if worse and (level, title) != (group.level, group.title):
            self._tell(
                "unreachable" if level is Level.BAD else "condition", group.name, f"{group.name}: {title}", now_ms
            )
        elif level is Level.GOOD and group.level in (Level.WARN, Level.BAD):
            self._tell("plain", group.name, f"{group.name}: {title}", now_ms)

    def _tell(self, kind: str, node: str, text: str, now_ms: int) -> None:
        self._number += 1
        self._events.append(ConsoleEvent(self._number, now_ms, kind, node, 0, safe_text(text)[:TEXT_MAX]))

    def _overall(self) -> dict[str, object]:
        servers = list(self._name_servers.values())
        silent = [one.address for one in servers if one.error]
        asking = any(one.clusters is None and not one.error for one in servers)
        groups = [(one.name, one.level, one.title) for one in self._groups.values()]
        level, title, more = overall(groups, silent, all_silent=len(silent) == len(servers), asking=asking)
        return {"level": level, "title": safe_text(title), "more": safe_text(more)}

    def _name_server_json(self, one: _NameServer) -> dict[str, object]:
        table = one.clusters.broker_addr_table.values() if one.clusters is not None else ()
        return {
            "address": one.address,
            "state": "answers" if one.clusters is not None else "silent" if one.error else "unknown",
            "brokers": sum(len(data.broker_addrs) for data in table),
            "since_ms": one.since_ms,
            "error": one.error,
        }


def _within_bounds(told: Mapping[str, BrokerData]) -> tuple[dict[str, BrokerData], int]:
    """Whole groups, by cluster and name, up to ``BROKERS_MAX`` addresses; and how many addresses were left out."""
    kept: dict[str, BrokerData] = {}
    room, left_out = BROKERS_MAX, 0
    for name, data in sorted(told.items(), key=lambda one: (one[1].cluster, one[0])):
        size = len(data.broker_addrs)
        if size <= room and len(name) <= NAME_CHARS_MAX and len(data.cluster) <= NAME_CHARS_MAX:
            kept[name] = data
            room -= size
        else:
            left_out += size
    return kept, left_out


def _untold(views: Sequence[MemberView]) -> Iterator[MemberView]:
    """Members that others name and that are not registered: as many as the group has more than it has registered."""
    told = max((one.info.members for one in views if one.info is not None), key=len, default=())
    nodes = {one.info.node for one in views if one.info is not None}
    addresses = {one.address for one in views}
    lacking = len(told) - len(views)
    for node, address in told:
        if lacking > 0 and node not in nodes and address not in addresses:
            lacking -= 1
            yield MemberView(address=address, broker_id=-1, is_registered=False, state="unknown", node=node)


def _group_json(group: _Group, views: Sequence[MemberView], master: MemberView | None, more: str) -> dict[str, object]:
    infos = [one.info for one in views if one.info is not None and one.state == "answers"]
    gets = [one.get_tps for one in infos if one.get_tps is not None]
    answers = master is not None and master.state == "answers" and master.info is not None
    known = [one.info for one in views if one.info is not None]
    return {
        "name": group.name,
        "title": safe_text(group.name),
        "cluster": safe_text(group.cluster),
        "kind": "unknown" if not known else "ours" if any(one.release for one in known) else "rocketmq",
        "level": group.level,
        "verdict": group.title,
        "more": safe_text(more),
        "since_ms": group.since_ms,
        "term": max((one.term for one in known if one.role), default=0),
        "puts": master.info.put_tps if answers and master is not None and master.info is not None else None,
        "gets": figure(sum(gets)) if gets else None,
        "members": [_member_json(one) for one in views],
    }


def _member_json(one: MemberView) -> dict[str, object]:
    info = one.info or RuntimeInfo()
    return {
        "address": safe_text(one.address)[:TEXT_MAX],
        "id": one.broker_id,
        "node": safe_text(one.node or info.node),
        "state": one.shown_state,
        "role": info.role,
        "term": info.term,
        "version": safe_text(info.release or info.version),
        "conditions": [safe_text(kind) for kind in info.conditions],
        "note": safe_text(one.note),
        "since_ms": one.since_ms,
    }
