"""The options of a table: ``CREATE TABLE … USING dledger OPTIONS (…)``.

Spark hands a table's options to a source in Python only once, when it asks for the schema to put into its catalog;
readers and writers of the table later get the schema and none of the options. So the options travel in the schema, as
the comment of its first column, where ``DESCRIBE`` shows them too. Secrets do not: a comment is no place for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from dledger_spark.errors import OptionError
from dledger_spark.options import READ_OPTIONS, WRITE_OPTIONS, Option

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_TABLE_MARK: Final = "provider"
"""Among the options only when a table is made."""
_OF_SPARK: Final = frozenset(
    ("provider", "owner", "location", "comment", "external", "is_managed_location", "collation")
)
_PREFIX: Final = "option."
_COMMENT: Final = "comment"
_BEGIN: Final = "dledger options: "
_NOTHING: Final[Mapping[str, str]] = {}
_SECRETS: Final = frozenset(("secretkey",))


def options_of_table(options: Mapping[str, str]) -> dict[str, str] | None:
    """The user's options if this is the making of a table, else None. Raises ``OptionError`` for a secret."""
    if _TABLE_MARK not in options:
        return None
    own = {name: text for name, text in options.items() if name not in _OF_SPARK and not name.startswith(_PREFIX)}
    if _SECRETS & {name.lower() for name in own}:
        raise OptionError(
            "a table would expose its secretKey to everybody: create a temporary view (CREATE TEMPORARY VIEW … "
            "USING dledger OPTIONS …), or give it in the query (SELECT … FROM t WITH ('secretKey' = …))"
        )
    return own


def with_options(ddl: str, options: Mapping[str, str]) -> str:
    """A schema, as Spark's DDL of one line per column, with the options in it."""
    comment = _BEGIN + json.dumps(dict(options), sort_keys=True)
    quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
    first, *others = ddl.split(", ", 1)
    return ", ".join([f"{first} COMMENT '{quoted}'", *others])


def options_in(schema: StructType) -> dict[str, str]:
    """The options that the schema of a table carries; their names are in lower case."""
    for field in schema.fields:
        comment = (field.metadata or {}).get(_COMMENT, "")
        if isinstance(comment, str) and comment.startswith(_BEGIN):
            found: dict[str, str] = json.loads(comment.removeprefix(_BEGIN))
            return found
    return {}


def for_reads(options: Mapping[str, str], given: Mapping[str, str] = _NOTHING) -> dict[str, str]:
    """A table's options without those that concern writing only, and what a query says, which wins."""
    return _merged(_without(options, WRITE_OPTIONS, READ_OPTIONS), given, READ_OPTIONS)


def for_writes(options: Mapping[str, str], given: Mapping[str, str] = _NOTHING) -> dict[str, str]:
    """A table's options without those that concern reading only, and what a query says, which wins."""
    return _merged(_without(options, READ_OPTIONS, WRITE_OPTIONS), given, WRITE_OPTIONS)


def _merged(of_table: Mapping[str, str], given: Mapping[str, str], table: Iterable[Option]) -> dict[str, str]:
    """By what options mean, as each has several names; what a query says twice stays there, to be refused."""
    meanings = {name.lower(): one.attribute for one in table for name in (one.name, *one.aliases)}
    said = {meanings.get(name.lower(), name.lower()) for name in given}
    left = {name: text for name, text in of_table.items() if meanings.get(name.lower(), name.lower()) not in said}
    return left | dict(given)


def _without(options: Mapping[str, str], others: Iterable[Option], own: Iterable[Option]) -> dict[str, str]:
    unwanted = _names(others) - _names(own)
    return {name: text for name, text in options.items() if name.lower() not in unwanted}


def _names(table: Iterable[Option]) -> frozenset[str]:
    return frozenset(name.lower() for one in table for name in (one.name, *one.aliases))
