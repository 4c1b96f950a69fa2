"""How commands choose between the brokers and the name servers that they were given."""

from __future__ import annotations

from collections.abc import Sequence

import click
import pytest
from click.testing import CliRunner

from dledger_cli.targets import BrokerTarget, broker_options

BROKERS, NAME_SERVERS = ("-b", "127.0.0.1:1"), ("-n", "127.0.0.1:2")


@click.command()
@broker_options
def _probe(target: BrokerTarget) -> None:
    click.echo(f"name servers: {len(target.name_servers)}")


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        ((), (), 0),
        (NAME_SERVERS, (), 1),
        ((), ("DLEDGER_NAMESRV",), 1),
        ((*NAME_SERVERS, *BROKERS), (), 0),
        ((), ("DLEDGER_NAMESRV", "DLEDGER_BROKER"), 0),
        (NAME_SERVERS, ("DLEDGER_BROKER",), 1),
        (BROKERS, ("DLEDGER_NAMESRV",), 0),
    ],
)
def test_options_precede_variables_and_brokers_name_servers(
    options: Sequence[str], variables: Sequence[str], expected: int
) -> None:
    """A variable of the environment must not redirect a command that says where it goes."""
    environ: dict[str, str | None] = {"DLEDGER_NAMESRV": None, "DLEDGER_BROKER": None}
    found = CliRunner().invoke(_probe, list(options), env=environ | dict.fromkeys(variables, "127.0.0.1:3"))
    assert (found.exit_code, found.output) == (0, f"name servers: {expected}\n")
