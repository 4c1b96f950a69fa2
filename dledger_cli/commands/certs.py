"""``dledger certs``: certificates for a group and its clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from dledger.command_line import flag_values
from dledger.errors import ConfigError

# `dledger_cli.certs` is imported in the commands because it needs an optional package.


@click.group(
    short_help="Create certificates for TLS.",
    epilog="""\b
Examples:
  dledger certs init certs                                   a CA: certs/ca.crt, certs/ca.key
  dledger certs node n0 --host 10.0.0.1 --host db0.internal  certs/n0.crt, certs/n0.key
  dledger certs client billing                               certs/billing.crt, certs/billing.key
  dledger certs show certs/n0.crt
  dledger certs renew n0 n1 n2                               running nodes pick up the new ones

\b
Give every node its own two files and ca.crt:
  dledger serve -c n0.conf --set tls_cert_path=certs/n0.crt --set tls_key_path=certs/n0.key \\
                           --set tls_trust_cert_path=certs/ca.crt
and every client its own:
  dledger status -b 10.0.0.1:30911 --tls-ca certs/ca.crt --tls-cert certs/billing.crt --tls-key certs/billing.key

Anyone with ca.key can create a certificate for any node: keep it away from the nodes.""",
)
def certs() -> None:
    """Manage a certificate authority in a directory, and the certificates it signs: ECDSA P-256, for TLS 1.3."""


def _directory(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("certs"),
        show_default=True,
        help="Directory of the CA and of the created files.",
    )(command)


def _replacing(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--if-missing", is_flag=True, help="Do nothing if it already exists.")(command)
    return click.option("--force", is_flag=True, help="Replace an existing certificate and its key.")(command)


def _days(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--days", type=flag_values.Whole(min=1), default=default, show_default=True, help="Validity in days."
    )


@certs.command(
    "init",
    epilog="""\b
Examples:
  dledger certs init              the CA goes to certs/ca.crt, its key to certs/ca.key
  dledger certs init /etc/pki/orders --days 1825""",
)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), default=Path("certs"))
@_replacing
@_days(3650)
def init(directory: Path, days: int, force: bool, if_missing: bool) -> None:
    """Create a CA in DIRECTORY (default: certs)."""
    from dledger_cli.certs import CA_NAME, Pair, make_authority

    if if_missing and Pair.named(directory, CA_NAME).is_whole:
        return
    pair = make_authority(directory, days=days, force=force)
    click.echo(f"{pair.cert}: the CA, which every node and client trusts; {pair.key}: its key: keep it private")


@certs.command(
    "node",
    epilog="""\b
Examples:
  dledger certs node n0                                       for a group on this machine
  dledger certs node n0 --host 10.0.0.1 --host db0.internal    for clients that dial either""",
)
@click.argument("node_id")
@click.option("--host", "hosts", multiple=True, help="Name or address that clients dial; default: those of localhost.")
@_directory
@_replacing
@_days(365)
def node(node_id: str, hosts: tuple[str, ...], directory: Path, days: int, force: bool, if_missing: bool) -> None:
    """Create a certificate for the node NODE_ID."""
    from dledger_cli.certs import Pair, make_node

    if if_missing and Pair.named(directory, node_id).is_whole:
        return
    pair = make_node(directory, node_id, hosts, days=days, force=force)
    click.echo(f"{pair.cert}, {pair.key}")


@certs.command(
    "client",
    epilog="""\b
Examples:
  dledger certs client billing
  dledger status --tls-ca certs/ca.crt --tls-cert certs/billing.crt --tls-key certs/billing.key""",
)
@click.argument("name")
@_directory
@_replacing
@_days(365)
def client(name: str, directory: Path, days: int, force: bool, if_missing: bool) -> None:
    """Create a certificate for a client."""
    from dledger_cli.certs import Pair, make_client

    if if_missing and Pair.named(directory, name).is_whole:
        return
    pair = make_client(directory, name, days=days, force=force)
    click.echo(f"{pair.cert}, {pair.key}")


@certs.command(
    "renew",
    short_help="Renew certificates under the same names.",
    epilog="""\b
Examples:
  dledger certs renew n0 n1 n2 billing
  dledger certs renew n0 --new-key       its key was exposed""",
)
@click.argument("names", nargs=-1, required=True)
@_directory
@click.option("--new-key", is_flag=True, help="Create new keys to replace the old ones.")
@_days(365)
def renew(names: tuple[str, ...], directory: Path, new_key: bool, days: int) -> None:
    """Renew certificates with the same names and, unless --new-key is given, the same keys."""
    from dledger_cli.certs import look_at
    from dledger_cli.certs import renew as make_anew

    for name in names:
        pair = make_anew(directory, name, days=days, new_key=new_key)
        click.echo(f"{pair.cert}: {look_at(pair.cert).validity}")


@certs.command(
    "show",
    short_help="Show the owner, expiry and purpose of certificates.",
    epilog="""\b
Examples:
  dledger certs show certs
  dledger certs show certs/n0.crt --json""",
)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="(FILE|DIRECTORY)…")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per file.")
def show(files: tuple[Path, ...], as_json: bool) -> None:
    """Show the owner, expiry and purpose of certificates: those of files, or of all .crt files in a directory."""
    from dledger_cli.certs import look_at

    for file in [one for given in files for one in _certificates_in(given)]:
        facts = look_at(file)
        if as_json:
            click.echo(json.dumps({"file": str(file), **asdict(facts), "validity": facts.validity}, default=str))
            continue
        click.echo(f"{file}: {facts.validity}")
        for word, text in (
            ("subject", facts.subject),
            ("names", ", ".join(facts.names) or "none"),
            ("use", facts.use),
            ("issuer", facts.issuer),
            ("valid", f"{facts.begins:%Y-%m-%d %H:%M} to {facts.ends:%Y-%m-%d %H:%M} UTC"),
            ("serial", facts.serial),
            ("SHA-256", facts.fingerprint),
        ):
            click.echo(f"  {word:8} {text}")


def _certificates_in(given: Path) -> list[Path]:
    """A directory's certificates, or the file itself. Raises ``ConfigError`` for a directory without any."""
    if not given.is_dir():
        return [given]
    found = sorted(given.glob("*.crt"))
    if not found:
        raise ConfigError([f"{given}: contains no .crt file: give the certificate's file, or its directory"])
    return found
