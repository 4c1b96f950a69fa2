"""The settings of a name server: a table of their own, for they share names with those of a broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dledger.values import Unit
from rocketstore.nameserver.settings import TARGETS, NameServerConfig
from tools.docs_reference.records import Field, default_text, fields_of

TITLE: Final = "Name server"
_HEAD: Final = """
## Name server

Settings of `dledger nameserver` ([brokers.md](brokers.md#name-servers)), from the same sources as the others, with
the settings under [TLS](#tls).

| setting | default | limits | meaning |
|---|---|---|---|
"""


def section() -> str:
    """The table."""
    fields = fields_of(NameServerConfig(), lambda one: one.problems(), without=frozenset({"security"}))
    return "".join((_HEAD, *map(_row, fields)))


def _row(field: Field) -> str:
    unit = "size" if field.unit is Unit.BYTES else ""
    names = ", ".join(_names(field))
    limits = field.limits[0] if field.kind == "int" else ""
    default = "unset" if field.default is None else default_text(field, unit)
    return f"| {names} | {default} | {limits} | {field.meaning.replace('``', '`')} |\n"


def _names(field: Field) -> Iterator[str]:
    for name, target in TARGETS.items():
        if target.setting == field.name:
            yield f"`{name}`"
