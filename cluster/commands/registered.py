"""``dledger cluster list --namesrv``: lists the brokers registered with a name server, ours or Java's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final

import click

from cluster import terminal
from cluster.broker_target import BrokerTarget
from dledger.errors import ConfigError
from dledger.remoting.blocking import BlockingRemotingClient
from dledger.remoting.client import UnreachableError
from dledger.remoting.connection import DisconnectedError
from dledger.remoting.errors import RequestError
from rocketstore.client.name_server_tls import check_plaintext, context_maker
from rocketstore.client.runtime import question, read_answer
from rocketstore.nameserver.lookups import NameServers
from rocketstore.nameserver.tables import MASTER_ID
from rocketstore.remoting.bodies.routes import ClusterInfo

_COLUMNS: Final = ("cluster", "broker", "id", "address", "role", "term", "version", "in/s", "out/s", "notes")
_LEAST: Final = ("version", "id", "out/s", "in/s", "cluster", "term")
_STYLES: Final = {"master": "green"}
_ASKED_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Registered:
    """One address known to a name server, and the status of the broker there; empty if it does not respond."""

    cluster: str
    broker: str
    id: int
    address: str
    version: str = ""
    term: int | None = None
    """None if it replicates no log, or does not tell."""
    put_tps: float | None = None
    get_tps: float | None = None
    error: str = ""
    note: str = ""
    """How a master or slave of classic replication stands; empty if there is nothing to say."""

    @property
    def is_master(self) -> bool:
        """Whether clients send to it."""
        return self.id == MASTER_ID


def show(target: BrokerTarget, *, as_json: bool) -> None:
    """Print the brokers. Raises ``ClickException`` if a broker has no master, or there are no brokers."""
    name_servers, timeout_s, name = target.name_servers, target.timeout_s, target.broker_name
    with closing(BlockingRemotingClient(tls=context_maker(name_servers, target.security.for_client()))) as frames:
        clusters = NameServers(name_servers, frames, timeout_s=timeout_s).clusters()
        chosen = [one for one in _addresses(clusters) if name in ("", one.broker)]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
            found = list(threads.map(partial(_ask, frames, target), chosen))
    if as_json:
        terminal.print_json({"brokers": [{**asdict(one), "is_master": one.is_master} for one in found]})
    else:
        rows = [_row(one) for one in found]
        terminal.print_table(_COLUMNS, rows, _STYLES, least=_LEAST, below=("address", "notes"))
    without = sorted({one.broker for one in found} - {one.broker for one in found if one.is_master})
    if not found:
        raise click.ClickException("no broker has registered" + (f" as {name}" if name else ""))
    if without:
        raise click.ClickException(f"no master: {', '.join(without)}: sends wait until one has registered")


def _addresses(clusters: ClusterInfo) -> Iterator[Registered]:
    brokers = sorted(clusters.broker_addr_table.values(), key=lambda one: (one.cluster, one.broker_name))
    for one in brokers:
        for broker_id, address in sorted(one.broker_addrs.items()):
            yield Registered(one.cluster, one.broker_name, broker_id, address)


def _ask(frames: BlockingRemotingClient, target: BrokerTarget, one: Registered) -> Registered:
    """Request what mqadmin's clusterList requests."""
    security = target.security.for_client()
    try:
        check_plaintext([one.address], security)
        answer = frames.call(one.address, question(security, learned=True), target.timeout_s)
        found = read_answer(answer, security, learned=True)
    except (ConfigError, UnreachableError, DisconnectedError, TimeoutError, RequestError) as error:
        return replace(one, error=str(error))
    term = found.term if found.role else None
    note = "" if found.ha is None else found.ha.words
    return replace(one, version=found.version, term=term, put_tps=found.put_tps, get_tps=found.get_tps, note=note)


def _row(one: Registered) -> tuple[str, ...]:
    role = "master" if one.is_master else "slave"
    term = "" if one.term is None else str(one.term)
    rates = ["" if rate is None else f"{rate:.2f}" for rate in (one.put_tps, one.get_tps)]
    row = (one.cluster, one.broker, str(one.id), one.address, role, term, one.version, *rates, one.error or one.note)
    return tuple(terminal.printable(cell.encode()) for cell in row)  # anybody may have registered anything
