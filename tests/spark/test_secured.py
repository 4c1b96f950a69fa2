"""Groups with TLS and access rules: Spark reads and writes with a certificate and a key, and shows no secret."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from dledger.client import ClientSecurity
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from tests.integration.access_harness import ALICE, BOB, ROOT, Rules, SecuredGroup

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 30
READS_ENTRIES = ALICE
READS_BROKERS = ROOT
"""Their log holds the messages of all topics."""


class SealedBrokers(LocalBrokers):
    """A broker with TLS and rules; whatever this class asks, an administrator asks."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, size=1, settings=Rules(directory).settings, tls=True)

    @property
    def security(self) -> ClientSecurity:
        assert self.tls is not None
        return replace(ROOT, tls=self.tls.client().tls)


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredGroup]:
    """A node with both, and numbers from 0 in its log."""
    with SecuredGroup(tmp_path_factory.mktemp("secured") / "entries", size=1, tls=True) as group:
        group.leader()
        with group.client(20, security=ALICE) as client:
            client.append_many([b"%d" % number for number in range(ROWS)])
        yield group


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SealedBrokers]:
    with SealedBrokers(tmp_path_factory.mktemp("secured") / "brokers") as group:
        group.master()
        yield group


def options_of(group: LocalGroup, who: ClientSecurity) -> dict[str, str]:
    """What somebody tells Spark."""
    assert group.tls is not None
    here = group.tls.directory
    return {
        "bootstrap.servers": ",".join(group.addresses),
        "group": group.name,
        "tlsCa": str(here / "ca.crt"),
        "tlsCertificate": str(here / "client.crt"),
        "tlsKey": str(here / "client.key"),
        "accessKey": who.access_key,
        "secretKey": who.secret_key,
    }


def read(spark: SparkSession, options: dict[str, str]) -> DataFrame:
    return spark.read.format("dledger").schema("body binary").options(**options).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body)) for row in frame.collect())


def write(frame: DataFrame, options: dict[str, str]) -> None:
    frame.write.format("dledger").mode("append").options(**options).save()


@pytest.mark.soak
def test_a_stream_goes_from_one_secured_group_into_another(
    spark: SparkSession, entries: SecuredGroup, brokers: SealedBrokers, tmp_path: Path
) -> None:
    """Reading, following, sending; then a job writes into the group of entries. No plan tells a secret."""
    source, target = options_of(entries, READS_ENTRIES), {**options_of(brokers, ALICE), "topic": "orders"}
    frame = spark.readStream.format("dledger").schema("body binary")
    stream = frame.options(**source, startingOffsets="earliest").load()
    writer = stream.writeStream.format("dledger").options(**target)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    copied = read(spark, {**options_of(brokers, READS_BROKERS), "subscribe": "orders"})
    assert numbers(copied) == list(range(ROWS))

    rows = spark.range(ROWS, 2 * ROWS).selectExpr("cast(id AS string) AS body")
    write(rows, source)
    assert numbers(read(spark, source)) == list(range(2 * ROWS))

    pairs = ", ".join(f"'{name}' '{text}'" for name, text in source.items())
    spark.sql(f"CREATE TEMPORARY VIEW secured_entries USING dledger OPTIONS ({pairs})")
    making, reading, writing = (
        spark.sql(f"EXPLAIN EXTENDED {statement}").collect()[0][0]
        for statement in (
            f"CREATE TEMPORARY VIEW secured_again USING dledger OPTIONS ({pairs})",
            "SELECT * FROM secured_entries",
            "INSERT INTO secured_entries (body) VALUES (cast('x' AS binary))",
        )
    )
    plans = [
        making,
        reading,
        writing,
        copied._jdf.queryExecution().toString(),
        query._jsq.explainInternal(True),
        str(copied.schema.json()),
        *(path.read_text(errors="replace") for path in (tmp_path / "checkpoint").rglob("[0-9]*") if path.is_file()),
    ]
    assert "(redacted)" in making
    for plan in plans:
        assert ALICE.secret_key not in plan
        assert ROOT.secret_key not in plan


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"accessKey": "", "secretKey": ""}, "an access key and its secret"),
        ({"secretKey": "wrong-secret"}, "unknown access key, or"),
    ],
    ids=["no key", "wrong secret"],
)
def test_who_may_not_hears_why(spark: SparkSession, entries: SecuredGroup, changed: dict[str, str], said: str) -> None:
    """In reading and in writing, without a secret in what is said."""
    options = {**options_of(entries, ALICE), **changed}
    options = {name: text for name, text in options.items() if text}
    rows = spark.range(1).selectExpr("cast(id AS string) AS body")

    for attempt in (lambda: read(spark, options).collect(), lambda: write(rows, options)):
        with pytest.raises(PySparkException, match=said) as raised:
            attempt()
        assert options.get("secretKey", "-secret") not in str(raised.value)


def test_who_has_no_permission_hears_whose_key_it_is(spark: SparkSession, entries: SecuredGroup) -> None:
    """When the query is planned."""
    with pytest.raises(PySparkException, match="bob is not allowed to do this"):
        read(spark, options_of(entries, BOB)).collect()
