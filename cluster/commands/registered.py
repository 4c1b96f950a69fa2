"""``dledger cluster list --namesrv``: lists the brokers registered with a name server, ours or Java's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import click

from cluster import terminal
from cluster.broker_target import BrokerTarget
from rocketstore.client.name_server_tls import context_maker
from rocketstore.nameserver.lookups import NameServers
from rocketstore.nameserver.tables import MASTER_ID
from rocketstore.remoting.blocking import BlockingRemotingClient
from rocketstore.remoting.bodies.routes import ClusterInfo, KVTable
from rocketstore.remoting.client import UnreachableError
from rocketstore.remoting.codes import AnswerCode, RequestCode
from rocketstore.remoting.connection import DisconnectedError
from rocketstore.remoting.errors import RequestError
from rocketstore.remoting.frame import Frame

_COLUMNS: Final = ("cluster", "broker", "id", "address", "role", "version", "in/s", "out/s", "notes")
_STYLES: Final = {"master": "green"}
_ASKED_AT_ONCE: Final = 16
_ERROR_CHARS_MAX: Final = 200
"""Java's error responses include a position in its code."""


@dataclass(frozen=True, slots=True)
class Registered:
    """One address known to a name server, and the status of the broker there; empty if it does not respond."""

    cluster: str
    broker: str
    id: int
    address: str
    version: str = ""
    put_tps: str = ""
    get_tps: str = ""
    error: str = ""

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
            found = list(threads.map(partial(_ask, frames, timeout_s), chosen))
    if as_json:
        terminal.print_json({"brokers": [{**asdict(one), "is_master": one.is_master} for one in found]})
    else:
        terminal.print_table(_COLUMNS, [_row(one) for one in found], _STYLES)
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


def _ask(frames: BlockingRemotingClient, timeout_s: float, one: Registered) -> Registered:
    """Request what mqadmin's clusterList requests."""
    known = one.cluster, one.broker, one.id, one.address
    try:
        answer = frames.call(one.address, Frame(RequestCode.GET_BROKER_RUNTIME_INFO, 0), timeout_s)
        if answer.code != AnswerCode.SUCCESS:
            return Registered(*known, error=" ".join(answer.remark.split())[:_ERROR_CHARS_MAX])
        table = KVTable.decode(answer.body).table
    except (UnreachableError, DisconnectedError, TimeoutError, RequestError) as error:
        return Registered(*known, error=str(error))
    put, get = (table.get(name, "").partition(" ")[0] for name in ("putTps", "getTransferedTps"))
    return Registered(*known, table.get("brokerVersionDesc", ""), put, get)


def _row(one: Registered) -> tuple[str, ...]:
    role = "master" if one.is_master else "slave"
    rates = [_rate(one.put_tps), _rate(one.get_tps)]
    return (one.cluster, one.broker, str(one.id), one.address, role, one.version, *rates, one.error)


def _rate(text: str) -> str:
    try:
        return f"{float(text):.2f}"
    except ValueError:
        return ""
