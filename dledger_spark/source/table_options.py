"""The options of a table: ``CREATE TABLE … USING dledger OPTIONS (…)``.

Spark passes a table's options to a Python source only once, when it requests the schema for its catalog; readers and
writers of the table later get the schema but not the options. So the options are stored in the schema, as the comment
of its first column, which ``DESCRIBE`` also shows. Secrets are refused: a comment is not the place for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from dledger_spark.errors import OptionError
from dledger_spark.options import READ_OPTIONS, WRITE_OPTIONS, Option

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_TABLE_MARK: Final = "provider"
"""Present among the options only when a table is created."""
_OF_SPARK: Final = frozenset(
    ("provider", "owner", "location", "comment", "external", "is_managed_location", "collation")
)
_PREFIX: Final = "option."
_COMMENT: Final = "comment"
_BEGIN: Final = "dledger options: "
_NOTHING: Final[Mapping[str, str]] = {}
_SECRETS: Final = frozenset(("secretkey",))


def options_of_table(options: Mapping[str, str]) -> dict[str, str] | None:
    """The user's options if a table is being created, otherwise None. Raises ``OptionError`` for a secret."""
    if _TABLE_MARK not in options:
        return None
    own = {name: text for name, text in options.items() if name not in _OF_SPARK and not name.startswith(_PREFIX)}
    refuse_secrets(own)
    return own


def refuse_secrets(options: Mapping[str, str]) -> None:
    """Raises ``OptionError`` for options that no table may have."""
    if _SECRETS & {name.lower() for name in options}:
        raise OptionError(
            "a table would expose its secretKey to everybody: create a temporary view (CREATE TEMPORARY VIEW … "
            "USING dledger OPTIONS …), or name its file (secretKeyFile)"
        )


def with_options(columns: Sequence[str], options: Mapping[str, str]) -> str:
    """A schema in Spark's DDL, of these columns, that contains the options."""
    comment = _BEGIN + json.dumps(dict(options), sort_keys=True)
    quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
    first, *others = columns
    return ", ".join([f"{first} COMMENT '{quoted}'", *others])


def options_in(schema: StructType) -> dict[str, str]:
    """The options in a table's schema; their names are in lower case."""
    for field in schema.fields:
        comment = (field.metadata or {}).get(_COMMENT, "")
        if isinstance(comment, str) and comment.startswith(_BEGIN):
            found: dict[str, str] = json.loads(comment.removeprefix(_BEGIN))
            return found
    return {}


def for_reads(options: Mapping[str, str], given: Mapping[str, str] = _NOTHING) -> dict[str, str]:
    """A table's options without those for writing, overridden by the query's options."""
    return _merged(_without(options, WRITE_OPTIONS, READ_OPTIONS), given, READ_OPTIONS)


def for_writes(options: Mapping[str, str], given: Mapping[str, str] = _NOTHING) -> dict[str, str]:
    """A table's options without those for reading, overridden by the query's options."""
    return _merged(_without(options, READ_OPTIONS, WRITE_OPTIONS), given, WRITE_OPTIONS)


def _merged(of_table: Mapping[str, str], given: Mapping[str, str], table: Iterable[Option]) -> dict[str, str]:
    """Merge by option, because each has several names; duplicates within the query are kept, to be refused later."""
    meanings = {name.lower(): one.attribute for one in table for name in (one.name, *one.aliases)}
    said = {meanings.get(name.lower(), name.lower()) for name in given}
    left = {name: text for name, text in of_table.items() if meanings.get(name.lower(), name.lower()) not in said}
    return left | dict(given)


def _without(options: Mapping[str, str], others: Iterable[Option], own: Iterable[Option]) -> dict[str, str]:
    unwanted = _names(others) - _names(own)
    return {name: text for name, text in options.items() if name.lower() not in unwanted}


def _names(table: Iterable[Option]) -> frozenset[str]:
    return frozenset(name.lower() for one in table for name in (one.name, *one.aliases))
