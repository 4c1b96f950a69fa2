"""The members of several groups in one process, which share what ``dledger.host`` holds, and fail apart.

A member that fails stops alone: the others go on, tell of it (``group_failed``), and the process ends only when none is
left, or with the first one if ``exit_with_any_group`` is set.

Before they start, the settings in which groups of one process must agree, and those that must differ, are checked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from dledger.clock import Clock
from dledger.config import AccessConfig, ConnectionLimits, SecurityConfig, ServerConfig
from dledger.errors import ConfigError
from dledger.host import Host
from dledger.log_output import speaks_for
from dledger.monitoring import SILENT, ConditionKind, Conditions, Instruments
from dledger.runtime.threads import EXIT_FATAL, Supervisor
from dledger.server import DLedgerServer
from dledger.statemachine.ports import StateMachine
from dledger.store.identity import layout_of

_OF_THE_PROCESS: Final[Mapping[str, Callable[[ServerConfig], object]]] = {
    "the peer address": lambda config: f"{config.bind_host or config.self_member.host}:{config.self_member.port}",
    "pending_entries_max": lambda config: config.replication.pending_entries_max,
    "pending_bytes_max": lambda config: config.replication.pending_bytes_max,
    "client_streams_max": lambda config: config.client_streams_max,
    "metrics_port": lambda config: config.metrics_port,
    "metrics_host": lambda config: config.metrics_host,
    "exit_with_any_group": lambda config: config.exit_with_any_group,
}
_OF_SHARED_CLIENT_PORTS: Final[Mapping[str, Callable[[ServerConfig], object]]] = {
    "the address for clients": lambda config: f"{config.client_bind_host}:{config.client_bind_port}",
    "the port of gRPC": lambda config: config.grpc_bind_port or "none",
    "advertised_client_address": lambda config: config.advertised_client_address or "unset",
}
_PARTS_OF_THE_PROCESS: Final = {"security": SecurityConfig, "access": AccessConfig, "limits": ConnectionLimits}


def check_together(named: Sequence[tuple[str, ServerConfig]]) -> None:
    """Check the settings of the groups of one process, each with the name of its file.

    Raises ``ConfigError`` with everything that is wrong.
    """
    problems = problems_together(named)
    for (one_name, one), (other_name, other) in combinations(named, 2):
        problems += [
            f"{path} is a directory of group {one.group!r} in {one_name} and of {other.group!r} in {other_name}: each "
            f"group needs its own, for example base_dir={one.store.base_dir / other.group} for {other.group!r}"
            for path in sorted(_directories(one) & _directories(other))
        ]
    if problems:
        raise ConfigError(problems)


def problems_together(named: Sequence[tuple[str, ServerConfig]], *, client_ports: bool = True) -> list[str]:
    """Problems other than directories, as sentences.

    ``client_ports`` False: each group has ports for clients of its own.
    """
    problems: list[str] = []
    shared = {**_OF_THE_PROCESS, **(_OF_SHARED_CLIENT_PORTS if client_ports else {})}
    first_name, first = named[0]
    for name, config in named[1:]:
        for what, ours, theirs in _differences(shared, first, config):
            problems.append(
                f"{what} is {ours} in {first_name} and {theirs} in {name}: it is the process's, so make them equal"
            )
    for (one_name, one), (other_name, other) in combinations(named, 2):
        if one.group == other.group:
            problems.append(f"{one_name} and {other_name} are both of group {one.group!r}: give one for each group")
    return problems


def _differences(
    shared: Mapping[str, Callable[[ServerConfig], object]], one: ServerConfig, other: ServerConfig
) -> Iterator[tuple[str, object, object]]:
    for what, of in shared.items():
        if of(one) != of(other):
            yield what, of(one), of(other)
    for part, kind in _PARTS_OF_THE_PROCESS.items():
        for field in fields(kind):
            ours, theirs = (getattr(getattr(config, part), field.name) for config in (one, other))
            if ours != theirs:
                yield field.name, ours, theirs


def _directories(config: ServerConfig) -> set[Path]:
    layout = layout_of(config.store, config.node_id)
    return {path.absolute() for path in (layout.directory, *layout.data)}


_log = logging.getLogger("dledger")


class GroupMember(Protocol):
    """A group's member in this process: of the log, or a broker."""

    conditions: Conditions

    def start(self) -> object:
        """Join the group; the host is started, and accepts the connections of members later."""

    def stop(self, *, graceful: bool = True) -> None:
        """Close everything of its own. Idempotent."""

    def fail(self, error: BaseException) -> None:
        """Stop acknowledging."""


MemberT = TypeVar("MemberT", bound=GroupMember)


class HostedGroups(Generic[MemberT]):
    """Use ``start``, ``wait`` and ``stop``."""

    def __init__(
        self,
        configs: Sequence[ServerConfig],
        make: Callable[[int, Host], MemberT],
        clock: Clock,
        *,
        client_ports: bool = True,
    ) -> None:
        """``configs``: of the groups, which agree on what is the process's (``host_settings``).

        ``make``: opens the directory of the member with this number, and raises what its constructor does, before a
        port is open. ``client_ports`` False: members serve clients at ports of their own.
        """
        self._exits_with_any = configs[0].exit_with_any_group
        self._count = len(configs)
        self._client_ports = client_ports
        self._life_lock = threading.RLock()  # one start or stop at a time; a failed start stops
        self._lock = threading.Lock()  # guards what follows
        self._failures: dict[str, BaseException] = {}
        self._endings: list[threading.Thread] = []
        self._ended = threading.Event()
        self._supervisor = Supervisor(self._host_failed)
        self._host = Host(configs, clock, self._supervisor, self._member_failed)
        servers: dict[str, MemberT] = {}
        self.servers: Final[Mapping[str, MemberT]] = MappingProxyType(servers)
        """The groups' members, by the group's name."""
        try:
            for number, config in enumerate(configs):
                with speaks_for(config.group):
                    servers[config.group] = make(number, self._host)
        except BaseException:
            self.stop(graceful=False)
            raise

    def start(self) -> HostedGroups[MemberT]:
        """Open the ports and join the groups; does nothing after a stop. Raises ``ConfigError`` if a port is taken."""
        with self._life_lock:
            if self._ended.is_set():
                return self
            try:
                self._host.start(client_ports=self._client_ports)
                for group, server in self.servers.items():
                    with speaks_for(group):
                        server.start()
                self._host.accept()
            except BaseException:
                self.stop(graceful=False)
                raise
            return self

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Block until the process should end: its exit status (0, or 70 after a fatal error), None on timeout."""
        if not self._ended.wait(timeout_s):
            return None
        return EXIT_FATAL if self.fatal is not None else 0

    @property
    def fatal(self) -> BaseException | None:
        """Why the process should end, if not by a stop."""
        with self._lock:
            failures = list(self._failures.values())
        if self._supervisor.fatal is not None:
            return self._supervisor.fatal
        ends = failures and (self._exits_with_any or len(failures) == self._count)
        return failures[-1] if ends else None

    @property
    def failures(self) -> Mapping[str, BaseException]:
        """The groups whose members have stopped themselves, and why."""
        with self._lock:
            return dict(self._failures)

    def stop(self, *, graceful: bool = True) -> None:
        """Stop: leaders first transfer leadership (``graceful``), then everything is closed. Idempotent."""
        with self._life_lock:
            stopping = [
                threading.Thread(target=partial(self._stop, group, graceful=graceful), name=f"dledger-stop-{group}")
                for group in self.servers
            ]
            for thread in stopping:
                thread.start()
            with self._lock:
                endings = list(self._endings)
            for thread in (*stopping, *endings):
                thread.join()
            self._host.stop()
            self._ended.set()

    def _stop(self, group: str, *, graceful: bool) -> None:
        with speaks_for(group):
            self.servers[group].stop(graceful=graceful)

    def _member_failed(self, group: str, error: BaseException) -> None:
        """On any thread, also under the member's lock."""
        with self._lock:
            self._failures[group] = error
        if self.fatal is not None:
            self._ended.set()
            return
        ending = threading.Thread(target=self._end, args=(group, error), name=f"dledger-end-{group}")
        with self._lock:  # a stop joins those that it finds
            ending.start()
            self._endings.append(ending)

    def _end(self, group: str, error: BaseException) -> None:
        """Close what a failed member holds, so that its peers elect another leader, and tell of it."""
        opened, failed = list(self.servers.items()), self.failures  # others may be opened meanwhile
        others = [server for name, server in opened if name not in failed]
        text = "group %s stops in this process: %s. %d other groups go on; start the process again once that is mended"
        with speaks_for(group):
            _log.critical(text, group, error, len(others), extra={"event": "group_failed"})
        told = f"its member in this process has failed: {error}. Mend that, and start the process again"
        for _, server in opened:
            server.conditions.set(ConditionKind.GROUP_FAILED, told, subject=group)
        self._stop(group, graceful=False)

    def _host_failed(self, error: BaseException) -> None:
        """A part that all groups need is gone."""
        for server in list(self.servers.values()):
            server.fail(error)
        self._ended.set()


class GroupsServer(HostedGroups[DLedgerServer]):
    """The constructor opens every group's directory, and raises what ``DLedgerServer`` does, before a port is open."""

    def __init__(
        self,
        named: Sequence[tuple[str, ServerConfig]],
        *,
        repair: bool = False,
        clock: Clock | None = None,
        instruments: Callable[[str], Instruments] = lambda _group: SILENT,
        state_machine: Callable[[str], StateMachine | None] = lambda _group: None,
    ) -> None:
        """``named``: each group's configuration, with the name of its file. ``instruments``: of a group's member.

        ``state_machine``: a new one for a group, or None for a bare log.
        """
        check_together([(name, config.check()) for name, config in named])
        configs, clock = [config for _, config in named], clock or Clock()

        def make(number: int, host: Host) -> DLedgerServer:
            config = configs[number]
            return DLedgerServer(
                config,
                repair=repair,
                clock=clock,
                instruments=instruments(config.group),
                state_machine=state_machine(config.group),
                host=host,
            )

        super().__init__(configs, make, clock)
