"""The members of several groups in one process, which share what ``dledger.host`` holds, and fail apart.

A member that fails stops alone: the others go on, tell of it (``group_failed``), and the process ends only when none is
left, or with the first one if ``exit_with_any_group`` is set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from dledger.clock import Clock
from dledger.conditions import ConditionKind, Conditions
from dledger.config import ServerConfig
from dledger.host import Host
from dledger.host_settings import check_together
from dledger.instruments import SILENT, Instruments
from dledger.log_output import speaks_for
from dledger.runtime.supervisor import EXIT_FATAL, Supervisor
from dledger.server import DLedgerServer
from dledger.statemachine.ports import StateMachine

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
