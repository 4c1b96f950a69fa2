"""``dledger ha``: classic master and slave: how they stand, and making a slave the master."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from dledger.command_line import flag_values
from dledger.values import address_text, parse_address
from dledger_cli import process, terminal
from dledger_cli.targets import BrokerTarget, CommandSecurity, broker_options, security_options
from dledger_cli.terminal import ErrorReportingGroup
from rocketstore.ha.promotion import Loss, Master, OtherSlave, PromotionCheck, checks
from rocketstore.remoting.runtime import NEVER, HaFacts
from rocketstore.types import BrokerRole

if TYPE_CHECKING:
    from rocketstore.broker_config import BrokerConfig
    from rocketstore.client.blocking import Admin
    from rocketstore.remoting.runtime import RuntimeInfo

_COLUMNS: Final = ("broker", "id", "address", "role", "epoch", "end", "lag", "behind", "contact", "notes")
_LEAST: Final = ("epoch", "broker", "contact", "end", "behind")
_STYLES: Final = {"master": "green", "unreachable": "red"}
_ASKED_AT_ONCE: Final = 16
_ANY_HOST: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@click.group(
    cls=ErrorReportingGroup,
    short_help="Classic masters and slaves.",
    epilog="""\b
Examples:
  dledger ha status --namesrv 10.0.0.1:9876
  dledger ha promote -c broker-a-s.conf""",
)
def ha() -> None:
    """Show classic masters and slaves, and make a slave the master."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A broker's answer."""

    address: str
    broker: str = ""
    broker_id: int | None = None
    """As registered; None if no name server was asked."""
    info: RuntimeInfo | None = None
    error: str = ""

    @property
    def facts(self) -> HaFacts | None:
        return None if self.info is None else self.info.ha


@ha.command(
    epilog="""\b
Examples:
  dledger ha status -b 10.0.0.1:10911,10.0.0.2:10921
  dledger ha status --namesrv 10.0.0.1:9876 --broker-name broker-a
  dledger ha status --json | jq '.brokers[].ha.lag_bytes'

Both sides are shown: a slave's own line, and below its master the one of how that sees it. lag: bytes; behind: for how
long it has not had everything; contact: since its master said anything. Exit code 1 if a slave does not follow, a
master lacks copies, or a broker does not answer."""
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@broker_options
def status(as_json: bool, target: BrokerTarget) -> None:
    """Show masters, slaves, and how far they are behind."""
    found = _ask_all(target)
    if as_json:
        brokers = [
            {
                "address": one.address,
                "broker": one.broker,
                "broker_id": one.broker_id,
                "reachable": one.info is not None,
                "error": one.error,
                "ha": None if one.facts is None else asdict(one.facts),
            }
            for one in found
        ]
        terminal.print_json({"brokers": brokers})
    else:
        rows = [tuple(terminal.printable(cell.encode()) for cell in row) for one in found for row in _rows(one)]
        terminal.print_table(_COLUMNS, rows, _STYLES, least=_LEAST, below=("address", "notes"))
    problems = [f"{one.address}: {problem}" for one in found if (problem := _problem(one))]
    if problems:
        raise click.ClickException("; ".join(problems))


def _ask_all(target: BrokerTarget) -> list[_Asked]:
    with target.brokers() as brokers:
        if target.name_servers:
            chosen = [
                _Asked(address, one.name, number)
                for one in sorted(brokers.found(), key=lambda one: (one.cluster, one.name))
                for number, address in sorted(one.addresses.items())
            ]
        else:
            chosen = [_Asked(one) for one in target.addresses]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
            return list(threads.map(partial(_ask, brokers.admin), chosen))


def _ask(admin: Admin, one: _Asked) -> _Asked:
    from rocketstore.client.aio.errors import ClientError  # here, so that --help does not load it

    try:
        return replace(one, info=admin.status(one.address).runtime)
    except ClientError as error:
        return replace(one, error=str(error))


def _rows(one: _Asked) -> Iterator[tuple[str, ...]]:
    facts, info = one.facts, one.info
    number = "" if one.broker_id is None else str(one.broker_id)
    if facts is None or info is None:
        role = "unreachable" if info is None else info.role.lower() or "?"
        end = "" if info is None or info.end is None else str(info.end)
        note = one.error or "it tells nothing of classic replication"
        if info is not None and info.role:
            note = "member of a group that elects its master: see dledger cluster list"
        yield (one.broker, number, one.address, role, "", end, "", "", "", note)
        return
    number = number or info.node
    epoch, end = str(facts.epoch), str(facts.end)
    if facts.is_slave:
        note = f"follows {facts.master}" if facts.is_connected else f"does not follow: {facts.problem or 'not yet'}"
        lag = str(facts.lag_bytes)
        yield one.broker, number, one.address, "slave", epoch, end, lag, _s(facts.lag_ms), _s(facts.contact_ms), note
        return
    copies = f"{facts.copies} of {facts.copies_wanted} copies" if facts.copies_wanted > 1 else ""
    yield one.broker, number, one.address, "master", epoch, end, "", "", "", facts.problem or copies
    for slave in facts.followers:
        who = str(slave.broker_id) if slave.broker_id >= 0 else "?"
        note = "in sync" if slave.in_sync else "too far behind to count"
        lag, behind = str(slave.lag_bytes), _s(slave.lag_ms)
        yield one.broker, who, slave.address, "  seen by master", "", str(slave.acknowledged), lag, behind, "", note


def _s(span_ms: int) -> str:
    return "never" if span_ms == NEVER else f"{span_ms / 1000:.1f} s"


def _problem(one: _Asked) -> str:
    facts = one.facts
    if one.info is None:
        return one.error
    if facts is None:
        return ""
    if facts.is_slave:
        return "" if facts.is_connected else f"this slave does not follow: {facts.problem or 'not yet'}"
    if not facts.problem and facts.copies < facts.copies_wanted:
        return f"{facts.copies} of {facts.copies_wanted} brokers have what is sent"
    return facts.problem


# -- promote -----------------------------------------------------------------------------------------------------------


@ha.command(
    epilog="""\b
Examples:
  dledger ha promote -c broker-a-s.conf
  dledger ha promote -c broker-a-s.conf --others 10.0.0.3:10911 --role SYNC_MASTER --yes
  dledger ha promote -c broker-a-s.conf --force missing-bytes     lose what only the old master has
  dledger ha promote -c broker-a-s.conf --undo                    be a slave again, from the next start on

\b
Run it where the slave runs, with the conf file it was started with. It asks this slave, the old master, its port for
slaves, the name servers, and the other slaves; it promotes nobody if one of them gives a reason not to, unless --force
names what is lost:
  two-masters      the old master answers, or another one does: what one of the two takes is lost
  missing-bytes    this slave lacks what its master is known to have
  unknown-bytes    it is not known what this slave lacks
  bytes-of-others  another slave has more
  unasked          a name server or another slave does not answer, and might know better

\b
The role is kept in the slave's store, stands above its conf file, and takes effect at the next start.""",
)
@click.option(
    "-c",
    "--config",
    "config_file",
    envvar="DLEDGER_CONFIG",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The slave's conf file.",
)
@click.option("-s", "--store", "store_path_root_dir", metavar="DIR", help="Directory of its data, if set by a flag.")
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other setting given by a flag.")
@click.option(
    "--others",
    metavar="HOST:PORT,…",
    callback=flag_values.addresses,
    help="Other slaves; those that the name servers know are asked anyway.",
)
@click.option(
    "--role",
    type=click.Choice([BrokerRole.ASYNC_MASTER.value, BrokerRole.SYNC_MASTER.value]),
    default=BrokerRole.ASYNC_MASTER.value,
    show_default=True,
    help="What it becomes.",
)
@click.option(
    "--force",
    "accepted",
    multiple=True,
    type=click.Choice([one.value for one in Loss]),
    help="Promote it though this is lost; may be repeated.",
)
@click.option("--undo", is_flag=True, help="Forget an earlier promotion instead: the conf file applies again.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--timeout",
    "timeout_s",
    type=flag_values.Seconds(min=0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each of them may take to answer.",
)
@security_options
def promote(  # noqa: PLR0913  # one parameter per option
    config_file: Path | None,
    store_path_root_dir: str | None,
    assignments: Sequence[str],
    others: tuple[str, ...] | None,
    role: str,
    accepted: Sequence[str],
    undo: bool,
    yes: bool,
    timeout_s: float,
    security: CommandSecurity,
) -> None:
    """Make a slave the master, if nothing speaks against it."""
    from rocketstore.settings import (
        RoleOverride,
        load_broker_settings,
        override_path,
        read_override,
        remove_override,
        write_override,
    )

    flags = {} if store_path_root_dir is None else {"store_path_root_dir": store_path_root_dir}
    config, _ = load_broker_settings(
        config_file, os.environ, flags | process.assigned(assignments, flags), promoted=False
    )
    if undo:
        now = _asked_itself(config, timeout_s, security).facts
        there = remove_override(config)
        click.echo(f"{'forgotten' if there else 'there was no promotion'}: {override_path(config)}")
        if there and now is not None and not now.is_slave:
            click.echo(
                f"This broker runs as master (epoch {now.epoch}, its log ends at {now.end}), and does so until it is "
                "restarted. A slave follows only a master that has everything that is in its log: what this broker has "
                "taken since its promotion must be in the next master's."
            )
        return
    if config.dledger is not None or config.store.broker_role is not BrokerRole.SLAVE:
        raise click.UsageError("these are not the settings of a slave (brokerRole=SLAVE): nothing to promote")
    earlier = read_override(config)
    if earlier is not None:
        text = (
            f"it was promoted at {earlier.made_text} ({override_path(config)}): start it again if it is still a slave"
        )
        raise click.ClickException(text)
    found, own = _look_around(config, others or (), timeout_s, security)
    open_losses = _tell(found, accepted)
    if open_losses:
        raise click.ClickException(f"not promoted. To promote it nevertheless: {' '.join(open_losses)}")
    if not yes:
        terminal.confirm(f"Make this slave {role} of {config.name} from offset {own.end} on?")
    path = write_override(config, RoleOverride(BrokerRole(role), config.broker_id, int(time.time() * 1000)))
    click.echo(
        f"promoted: restart this broker, and it is {role} of {config.name} (epoch {own.epoch + 1}), from offset "
        f"{own.end} on. {path} says so, above its conf file.\n"
        "The old master must not be started as master again: as slave (brokerRole=SLAVE) it follows this one, or says "
        "what only it has."
    )


def _tell(found: Sequence[PromotionCheck], accepted: Sequence[str]) -> list[str]:
    """Print the checks; returns the options that would be needed beyond those given."""
    needed: list[str] = []
    for one in found:
        is_accepted = one.loss is not None and one.loss.value in accepted
        mark = "ok  " if one.loss is None else "LOSS" if is_accepted else "NO  "
        about = "" if one.loss is None else f" [{one.loss}]"
        click.echo(f"{mark} {one.text}{about}")
        option = f"--force {one.loss}"
        if one.loss is not None and not is_accepted and option not in needed:
            needed.append(option)
    return needed


def _own_address(config: BrokerConfig) -> str:
    return address_text(_ANY_HOST.get(config.bind_host, config.bind_host), config.listen_port)


def _asked_itself(config: BrokerConfig, timeout_s: float, security: CommandSecurity) -> _Asked:
    """The runtime information of the broker with these settings, if it runs."""
    from rocketstore.client.blocking import Admin

    address = _own_address(config)
    with Admin(address, timeout_s=timeout_s, security=security.for_client()) as admin:
        return _ask(admin, _Asked(address))


def _look_around(
    config: BrokerConfig, others: Sequence[str], timeout_s: float, security: CommandSecurity
) -> tuple[tuple[PromotionCheck, ...], HaFacts]:
    """Ask everybody. Raises ``ClickException`` if this slave itself does not answer."""
    from rocketstore.client.blocking import Admin

    own_address = _own_address(config)
    own_names = {own_address, config.address(config.listen_port)}
    given = set(others) - own_names
    with Admin([own_address, *sorted(given)], timeout_s=timeout_s, security=security.for_client()) as admin:
        own = _ask(admin, _Asked(own_address))
        if own.facts is None:
            raise click.ClickException(
                f"this slave does not answer at {own_address} ({own.error or 'it tells nothing'}): start it. It needs "
                "no master for that, and only it can say what it has"
            )
        if not own.facts.is_slave:
            raise click.ClickException(f"the broker at {own_address} is a master already")
        registered, unanswered = _registered(config, timeout_s, security)
        masters = {address for broker_id, address in registered if broker_id == 0} - own_names
        slaves = {address for broker_id, address in registered if broker_id} - own_names - masters
        ask = partial(_ask, admin)
        ports = {own.facts.master, config.store.ha_master_address} - {""}
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
            by_master = list(threads.map(ask, [_Asked(one) for one in sorted(masters)]))
            by_slave = list(threads.map(ask, [_Asked(one) for one in sorted(slaves | given - masters)]))
            by_port = list(threads.map(partial(_knock, timeout_s), sorted(ports)))
    told = [
        *map(_registered_master, by_master),
        *(Master(one.address, True, "says that it is master") for one in by_slave if _is_master(one)),
        *by_port,
    ]
    rest = [_other(one) for one in by_slave if not _is_master(one)]
    return checks(own.facts, told, rest, unanswered), own.facts


def _registered(
    config: BrokerConfig, timeout_s: float, security: CommandSecurity
) -> tuple[list[tuple[int, str]], list[str]]:
    """Ids and addresses of this broker's name, of all name servers; and those that do not answer, with the reason."""
    from rocketstore.client.aio.errors import ClientError, NoBrokersError
    from rocketstore.client.blocking import Admin

    unsigned = replace(security, access_key="", secret_key="").for_client()  # name servers ask for no account
    found: dict[tuple[int, str], None] = {}
    unanswered = []
    for one in config.name_servers:
        try:
            with Admin(name_servers=one, timeout_s=timeout_s, security=unsigned) as admin:
                brokers = admin.brokers()
        except NoBrokersError:
            continue
        except ClientError as error:
            unanswered.append(f"{one} does not answer ({error})")
            continue
        for known in brokers:
            if known.name == config.name:
                found |= dict.fromkeys(known.addresses.items())
    return list(found), unanswered


def _registered_master(one: _Asked) -> Master:
    """Whether a broker runs there: also one that refuses to answer, or that answers something else."""
    if one.info is not None:
        return Master(one.address, one.facts is None or not one.facts.is_slave, _how(one))
    host, port = parse_address(one.address)
    try:
        socket.create_connection((host, port), timeout=1).close()
    except ConnectionRefusedError:  # its machine says that nothing listens
        return Master(one.address, False, _how(one))
    except OSError:
        return Master(one.address, False, _how(one), may_live=True)
    return Master(one.address, True, _how(one))


def _how(one: _Asked) -> str:
    facts = one.facts
    return "it is a slave now" if facts is not None and facts.is_slave else one.error or "registered as master"


def _is_master(one: _Asked) -> bool:
    return one.facts is not None and not one.facts.is_slave


def _other(one: _Asked) -> OtherSlave:
    if one.info is None:
        return OtherSlave(one.address, error=one.error)
    end = one.facts.end if one.facts is not None else one.info.end
    if one.facts is None:
        return OtherSlave(one.address, end)
    return OtherSlave(one.address, end, one.facts.epoch, is_promoted=one.facts.is_promoted)


def _knock(timeout_s: float, address: str) -> Master:
    """Whether the old master's port for slaves is open."""
    host, port = parse_address(address)
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        return Master(address, False, f"port for slaves: {error}")
    return Master(address, True, "its port for slaves is open")
