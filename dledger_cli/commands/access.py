"""``dledger access``: creates and checks accounts for access control, without a server."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import click

from dledger.errors import ConfigError
from dledger_cli import terminal

SECRET_BYTES = 24


@click.group(
    short_help="Create and check access control accounts.",
    epilog="""\b
Examples:
  dledger access new billing --topic 'orders=SUB' --group billing=SUB
  dledger access check /etc/dledger/plain_acl.yml""",
)
def access() -> None:
    """Accounts and permissions for clients, in the format of RocketMQ's plain_acl.yml. See docs/security.md."""


@access.command(
    short_help="Check a rules file.",
    epilog="""\b
Examples:
  dledger access check /etc/dledger/plain_acl.yml""",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object, without secret keys.")
def check(file: Path, as_json: bool) -> None:
    """Read FILE as a server would, and print what it allows or everything that is wrong with it."""
    from dledger.access.rules import load_rules, permission_text

    rules = load_rules(file)
    if as_json:
        accounts = [
            {
                "access_key": one.access_key,
                "admin": one.admin,
                "topics": {name: permission_text(may) for name, may in one.topics.items()},
                "other_topics": permission_text(one.default_topic),
                "groups": {name: permission_text(may) for name, may in one.groups.items()},
                "other_groups": permission_text(one.default_group),
                "unsigned_from": [address.text for address in one.addresses],
            }
            for one in rules.accounts.values()
        ]
        terminal.print_json({"accounts": accounts, "trusted": [address.text for address in rules.trusted]})
        return
    for account in rules.accounts.values():
        words = ["an administrator"] if account.admin else []
        if not account.admin:
            words += [f"topic {name}={permission_text(one)}" for name, one in account.topics.items()]
            words.append(f"other topics={permission_text(account.default_topic)}")
            words += [f"group {name}={permission_text(one)}" for name, one in account.groups.items()]
            words.append(f"other groups={permission_text(account.default_group)}")
        if account.addresses:
            words.append(f"without a signature from {', '.join(one.text for one in account.addresses)}")
        click.echo(f"{account.access_key}: {'; '.join(words)}")
    if rules.trusted:
        click.echo(f"full access without a key from {', '.join(one.text for one in rules.trusted)}")
    click.echo(f"{file} is valid: {len(rules.accounts)} accounts")


@access.command(
    short_help="Print a new account.",
    epilog="""\b
Examples:
  dledger access new billing --topic orders=SUB --group billing=SUB >> plain_acl.yml
  dledger access new ops --admin >> plain_acl.yml
  (umask 077; dledger access new ops --admin --secret-file ops.secret --file > plain_acl.yml)""",
)
@click.argument("name")
@click.option("--admin", is_flag=True, help="Allow everything, including creating and deleting topics.")
@click.option(
    "--topic", "topics", multiple=True, metavar="NAME=PUB|SUB", help="Permission on a topic; may be repeated."
)
@click.option("--group", "groups", multiple=True, metavar="NAME=SUB", help="Permission on a group; may be repeated.")
@click.option("--file", "whole_file", is_flag=True, help="Include the first line of a rules file.")
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the secret key to this new file, for clients (DLEDGER_SECRET_KEY_FILE).",
)
def new(
    name: str,
    admin: bool,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    whole_file: bool,
    secret_file: Path | None,
) -> None:
    """Print an account named NAME-… with a random secret key, to add under `accounts:` of a rules file."""
    from dledger.access.rules import parse_rules

    secret = secrets.token_urlsafe(SECRET_BYTES)
    lines = [
        f"- accessKey: {name}-{secrets.token_hex(4)}",
        f"  secretKey: {secret}",
        f"  admin: {str(admin).lower()}",
        "  defaultTopicPerm: DENY",
        "  defaultGroupPerm: DENY",
    ]
    for key, permissions in (("topicPerms", topics), ("groupPerms", groups)):
        if permissions:
            lines += [f"  {key}:", *(f'  - "{one}"' for one in permissions)]
    try:
        parse_rules("\n".join(("accounts:", *lines)))
    except ConfigError as error:  # without the numbers of lines that the user has not written
        raise ConfigError([one.partition(": ")[2] for one in error.problems]) from error
    if secret_file is not None:
        with open(secret_file, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(f"{secret}\n")
    click.echo("\n".join((*(["accounts:"] if whole_file else []), *lines)))
