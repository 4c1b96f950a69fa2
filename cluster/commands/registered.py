"""``dledger cluster list --namesrv``: lists the brokers registered with a name server, ours or Java's."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from cluster import terminal
from cluster.security_options import CommandSecurity
from dledger.config import plaintext_problems
from dledger.errors import ConfigError
from rocketstore.nameserver.lookups import NameServers
from rocketstore.nameserver.tables import MASTER_ID
from rocketstore.remoting.blocking import BlockingRemotingClient
from rocketstore.remoting.bodies.routes import ClusterInfo, KVTable
from rocketstore.remoting.client import UnreachableError
from rocketstore.remoting.codes import RequestCode, ResponseCode
from rocketstore.remoting.connection import DisconnectedError
from rocketstore.remoting.errors import RequestError
from rocketstore.remoting.frame import Frame

if TYPE_CHECKING:
    from dledger.rpc.tls import TlsFiles

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


def show(name_servers: Sequence[str], timeout_s: float, security: CommandSecurity, *, as_json: bool) -> None:
    """Print the brokers. Raises ``ClickException`` if a broker has no master, or there are no brokers."""
    with closing(BlockingRemotingClient(tls=_context_of(name_servers, security))) as frames:
        clusters = NameServers(name_servers, frames, timeout_s=timeout_s).clusters()
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
            found = list(threads.map(partial(_ask, frames, timeout_s), _addresses(clusters)))
    if as_json:
        terminal.print_json({"brokers": [{**asdict(one), "is_master": one.is_master} for one in found]})
    else:
        terminal.print_table(_COLUMNS, [_row(one) for one in found], _STYLES)
    without = sorted({one.broker for one in found} - {one.broker for one in found if one.is_master})
    if not found:
        raise click.ClickException("no broker has registered")
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
        if answer.code != ResponseCode.SUCCESS:
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


def _context_of(addresses: Sequence[str], security: CommandSecurity) -> _MakeContext | None:
    """Raises ``ConfigError`` for unusable files, and for plaintext to other machines."""
    wanted = security.for_client()
    if wanted.tls is not None:
        return _MakeContext(wanted.tls)
    problems = plaintext_problems(addresses, "use --tls-ca (DLEDGER_TLS_CA)", "--insecure")
    if problems and not wanted.insecure:
        raise ConfigError(problems)
    return None


class _MakeContext:
    """Created once, after checking the servers' names."""

    def __init__(self, files: TlsFiles) -> None:
        from dledger.rpc import tls  # here, so that a command without TLS does not load gRPC

        self._context = tls.client_context(tls.read(files))
        self._context.check_hostname = True

    def __call__(self) -> ssl.SSLContext:
        return self._context
