"""Contexts: named addresses and security options of commands, kept in the user's configuration directory.

The file is ``$XDG_CONFIG_HOME/dledger/contexts.json`` (``~/.config`` by default). It holds no secret keys, only the
names of their files. An option wins over its environment variable, and that over the context.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from dledger.errors import ConfigError

SETTINGS: Final = (
    "bootstrap",
    "group",
    "broker",
    "namesrv",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "insecure",
    "access_key",
    "secret_key_file",
    "trust_name_servers",
)
"""The options a context may hold, by their parameters' names."""
_PLACES: Final = ("bootstrap", "broker", "namesrv")
FILES: Final = frozenset({"tls_ca", "tls_cert", "tls_key", "secret_key_file"})
FLAGS: Final = frozenset({"insecure", "trust_name_servers"})
"""Their value is ``true``."""
CHOSEN: Final = "dledger.context"
"""In click's ``meta``: the name given with ``--context``, or None."""
USED: Final = "dledger.context.used"
"""In click's ``meta``: the name of the context that an option's value came from."""
CONTEXTS_MAX: Final = 1000
_FILE_BYTES_MAX: Final = 1 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def contexts_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the contexts are; None for a user without a home directory."""
    configured = environment.get("XDG_CONFIG_HOME", "")
    home = environment.get("HOME", "")
    if Path(configured).is_absolute():
        return Path(configured) / "dledger" / "contexts.json"
    return Path(home) / ".config" / "dledger" / "contexts.json" if Path(home).is_absolute() else None


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts: the values of ``SETTINGS`` by name, and the name used without ``--context`` (or "")."""

    known: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    current: str = ""

    def named(self, name: str) -> Mapping[str, str]:
        """One context. Raises ``ConfigError``, which lists the known ones."""
        if name not in self.known:
            there = f"there are: {', '.join(sorted(self.known))}" if self.known else "there is none yet"
            raise ConfigError([f"unknown context {name!r}; {there} (dledger context add {name} …)"])
        return self.known[name]


def check_name(name: str) -> str:
    """A name for a context. Raises ``ConfigError`` if it is none."""
    if not _NAME.fullmatch(name):
        raise ConfigError([f"invalid context name {name!r}: use up to 64 of A-Z a-z 0-9 _ . -, no . or - first"])
    return name


def load(path: Path | None) -> Contexts:
    """Read the contexts; none if there is no file. Raises ``ConfigError`` for a damaged one, and ``OSError``."""
    if path is None:
        return Contexts()
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    try:
        return _parsed(content)
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise ConfigError([f"{path} is damaged ({problem}): correct or remove it"])


def _parsed(content: bytes) -> Contexts:
    if len(content) > _FILE_BYTES_MAX:
        raise ValueError(f"more than {_FILE_BYTES_MAX} bytes")
    match json.loads(content):
        case {"contexts": dict(known), "current": str(current)}:
            pass
        case _:
            raise ValueError('not of the form {"current": "…", "contexts": {…}}')
    for name, values in known.items():
        if not _NAME.fullmatch(name) or not isinstance(values, dict):
            raise ValueError(f"{name!r} is not a context")
        for setting, text in values.items():
            if setting not in SETTINGS or not isinstance(text, str):
                raise ValueError(f"context {name}: {setting!r} is not a setting, or its value no text")
    if current and current not in known:
        raise ValueError(f"the current context {current!r} is not among them")
    return Contexts(known, current)


@contextmanager
def changing(path: Path | None) -> Iterator[_Change]:
    """The contexts, to be replaced: what ``put`` was given is written at the end. Others who change them wait.

    Raises ``ConfigError`` and ``OSError``.
    """
    from dledger.store.fs import FileSystem, make_dirs_durably, replace_durably  # here: reading needs no disk of ours

    if path is None:
        raise ConfigError(["there is no place for contexts: set HOME or XDG_CONFIG_HOME"])
    files = FileSystem()
    make_dirs_durably(files, path.parent)
    with open(path.with_suffix(".lock"), "a", opener=_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = load(path)
        change = _Change(before)
        yield change
        if change.contexts != before:
            replace_durably(files, path, _written(change.contexts))


def _written(contexts: Contexts) -> bytes:
    """The file. Raises ``ConfigError`` instead of making one that cannot be read again."""
    document = {"current": contexts.current, "contexts": contexts.known}
    try:
        content = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError as error:
        text = f"{error.object[max(error.start - 32, 0) : error.end]!a}"
        raise ConfigError([f"contexts hold only UTF-8, and {text} is not"]) from error
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError([f"the contexts would take more than {_FILE_BYTES_MAX:,} bytes: remove one first"])
    return content


class _Change:
    """The contexts as they are, and as they shall be."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts

    def put(self, name: str, values: Mapping[str, str], *, replace: bool, use: bool) -> None:
        """Add a context. Raises ``ConfigError`` if it is there already, unless ``replace``."""
        known = self.contexts.known
        if name in known and not replace:
            raise ConfigError([f"context {name} exists already: --force replaces it"])
        if name not in known and len(known) >= CONTEXTS_MAX:
            raise ConfigError([f"there are {CONTEXTS_MAX} contexts already: remove one first"])
        current = name if use or not known else self.contexts.current
        self.contexts = Contexts({**known, name: dict(values)}, current)

    def use(self, name: str) -> None:
        """Make one the current one; "" none. Raises ``ConfigError`` for an unknown one."""
        if name:
            self.contexts.named(name)
        self.contexts = Contexts(self.contexts.known, name)

    def remove(self, name: str) -> None:
        """Forget a context. Raises ``ConfigError`` for an unknown one."""
        self.contexts.named(name)
        rest = {one: values for one, values in self.contexts.known.items() if one != name}
        self.contexts = Contexts(rest, "" if self.contexts.current == name else self.contexts.current)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class ContextOption(click.Option):
    """An option whose value may come from the context, if neither it nor its variable is given."""

    def consume_value(
        self, ctx: click.Context, opts: Mapping[str, Any]
    ) -> tuple[Any, ParameterSource]:  # Any: click's own
        """The value and where it comes from; ``DEFAULT_MAP`` stands for the context. Raises ``ConfigError``."""
        value, source = super().consume_value(ctx, opts)
        if source is not ParameterSource.DEFAULT or self.name is None or ctx.resilient_parsing:
            return value, source
        name, values = chosen_in(ctx)
        if self.name not in values:
            return value, source
        ctx.meta[USED] = name
        return values[self.name], ParameterSource.DEFAULT_MAP


def chosen_in(ctx: click.Context) -> tuple[str, Mapping[str, str]]:
    """The name and the values of the context in force ("" and none without one), read once. Raises ``ConfigError``."""
    found: tuple[str, Mapping[str, str]] | None = ctx.meta.get(f"{CHOSEN}.values")
    if found is None:
        given = ctx.meta.get(CHOSEN)
        contexts = Contexts() if given == "" else load(contexts_path())  # "" works beside a damaged file, too
        name = contexts.current if given is None else given
        found = ctx.meta[f"{CHOSEN}.values"] = (name, contexts.named(name) if name else {})
    return found


def check_place(ctx: click.Context, *names: str) -> None:
    """Raises ``ConfigError`` if the context is of some place, but of those options of a command that say where, none.

    The command would go to the default of its options, which is another place.
    """
    there = {one.name for one in ctx.command.params}
    own = [one for one in names if one in there]
    if any(ctx.get_parameter_source(one) is not ParameterSource.DEFAULT for one in own):
        return
    name, values = chosen_in(ctx)
    if any(one in values for one in _PLACES):
        options = " or ".join(f"--{one}" for one in own)
        raise ConfigError([f"context {name} has no addresses for this command: give {options}"])


def complete_name(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """The names that a shell offers; none if the file cannot be read."""
    try:
        return sorted(name for name in load(contexts_path()).known if name.startswith(begun))
    except (ConfigError, OSError):
        return []
