"""Topics as tables of Spark's catalog: ``SELECT … FROM dledger.orders``.

A catalog of Spark's is a class in its JVM, which Python cannot add. So each topic becomes a table of a database in the
session's own catalog, with the options to read it. In a session without a metastore the tables end with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from dledger_spark.errors import OptionError
from dledger_spark.options import ReadOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASE: Final = "dledger"
TABLES_MAX: Final = 1000
"""Spark asks a Python process for the columns of each."""
_FORMAT: Final = "dledger"
_OTHERS: Final = re.compile(r"\W", re.ASCII)
"""Characters that Spark allows in no name of a table."""
_BROKERS_OWN: Final = "%"
"""How the names of topics for retries and dead letters begin."""
_PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"


def register_topics(
    spark: SparkSession,
    options: Mapping[str, str],
    bodies: Mapping[str, Mapping[str, str]] | None = None,
    *,
    topics: Iterable[str] | None = None,
    database: str = DATABASE,
) -> dict[str, str]:
    """Makes topics tables of a database, and returns the tables' names by topic.

    ``options``: those of the format ``dledger`` that say where the log is and how it is read. ``bodies``: more of them
    by topic, usually ``bodyFormat`` and ``bodySchema``. ``topics``: by default, all of a running group. Tables of this
    format that exist are made anew. Raises ``OptionError``, ``SchemaError`` before any table is made.
    """
    from dledger_spark.decode.typed_bodies import body_format  # loads Arrow
    from dledger_spark.source.datasource import options_in, refuse_secrets

    if _OTHERS.search(database) or not database:
        raise OptionError(f"invalid name of a database {database!r}: use letters, digits and _")
    bodies = bodies or {}
    given = dict(options)
    if spark.conf.get(_PUSHDOWN, "false") == "true" and not any(name.lower() == "pushfilters" for name in given):
        given["pushFilters"] = "true"
    names = table_names(_topics(given) if topics is None else topics)
    if unknown := [one for one in bodies if one not in names]:
        raise OptionError(f"there is no topic {' or '.join(unknown)} whose bodies could have columns")
    tables = {topic: given | dict(bodies.get(topic, {})) | {"topic": topic} for topic in names}
    for each in tables.values():
        refuse_secrets(each)
        body_format(ReadOptions.parse(each))
    places = {topic: f"{database}.`{name}`" for topic, name in names.items()}
    spark.sql(f"CREATE DATABASE IF NOT EXISTS {database}")
    for place in places.values():
        if spark.catalog.tableExists(place) and not options_in(spark.table(place).schema):
            raise OptionError(f"table {place} exists and is not one of a topic: use another database")
    for topic, place in places.items():
        texts = ", ".join(f"{_literal(key)} {_literal(text)}" for key, text in tables[topic].items())
        spark.sql(f"DROP TABLE IF EXISTS {place}")
        spark.sql(f"CREATE TABLE {place} USING {_FORMAT} OPTIONS ({texts})")
    return {topic: f"{database}.{name}" for topic, name in names.items()}


def table_names(topics: Iterable[str]) -> dict[str, str]:
    """The table of each topic: its name, with ``_`` for what Spark's names cannot hold. Raises ``OptionError``."""
    names = {topic: _OTHERS.sub("_", topic) for topic in topics}
    if not names or len(names) > TABLES_MAX:
        raise OptionError(f"{len(names)} topics: name 1 to {TABLES_MAX} of them in topics")
    topic_of: dict[str, str] = {}
    for topic, name in names.items():
        other = topic_of.setdefault(name.lower(), topic)
        if other != topic:
            raise OptionError(f"topics {other} and {topic} would be one table, {name}: name one of them in topics")
    return names


def _topics(options: Mapping[str, str]) -> list[str]:
    """All topics of users of a running group."""
    from dledger_spark.source.client_log import shared_admin

    parsed = ReadOptions.parse(options)
    if not parsed.is_live:
        raise OptionError("name the topics: a directory has no list of them")
    found = {one.name for one in shared_admin(parsed.servers, parsed.security).topics()}
    return sorted(name for name in found if not name.startswith(_BROKERS_OWN))


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
