"""Several groups in one process: a node of each, at the same ports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.host import Host
from dledger.host_settings import check_together
from dledger.hosted_groups import HostedGroups
from dledger.instruments import SILENT, Instruments
from dledger.server import DLedgerServer
from dledger.statemachine.ports import StateMachine


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
