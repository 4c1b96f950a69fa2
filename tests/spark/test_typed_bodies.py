"""Bodies as columns in Spark: batches of a directory and of a running group, streams, and SQL."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fastavro
import pytest
from google.protobuf import descriptor_pb2, wrappers_pb2

from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message
from tests.support.log_bytes import DiskLog, write_disk_log
from tests.support.spark_nodes import BrokerNode, broker_node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNT = 60
ORDERS = {
    "bodyFormat": "json",
    "bodySchema": "id long, total decimal(8,2), item struct<name: string, sizes: array<int>>, at timestamp",
}
LAST = "2026-11-30T12:00:00Z"
TYPES = [
    ("id", "bigint"),
    ("total", "decimal(8,2)"),
    ("item", "struct<name:string,sizes:array<int>>"),
    ("at", "timestamp"),
]


def order(number: int) -> bytes:
    """An order; every tenth is bad."""
    if number % 10 == 9:
        return b"{"
    item = {"name": f"thing {number % 3}", "sizes": [number, None]}
    return json.dumps({"id": number, "total": number / 4, "item": item, "at": LAST, "note": "x"}).encode()


def messages() -> list[Message]:
    """Orders between messages of another topic."""
    return [
        Message(topic, body, number % 4, {"KEYS": f"k{number}"}, store_timestamp=1_700_000_000_000 + number)
        for number in range(COUNT)
        for topic, body in (("orders", order(number)), ("other", b"\xff"))
    ]


@pytest.fixture(scope="module")
def disk_log(tmp_path_factory: pytest.TempPathFactory) -> DiskLog:
    return write_disk_log(tmp_path_factory.mktemp("node"), messages(), noop_every=16)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerNode]:
    with broker_node(tmp_path_factory.mktemp("live") / "broker") as node:
        with Producer(node.server.address) as producer:
            producer.send_many([Message(one.topic, one.body, keys=one.properties["KEYS"]) for one in messages()])
        yield node


def check(frame: DataFrame) -> None:
    """Every good order has its values, every bad one nulls and a reason; the log's columns stand beside them."""
    assert frame.dtypes[:5] == [*TYPES, ("badBody", "string")]
    assert "body" not in frame.columns
    rows = frame.select("id", "total", "item.sizes", "at", "badBody", "keys").toArrow().to_pylist()
    rows.sort(key=lambda row: int(row["keys"][1:]))
    assert [row["keys"] for row in rows] == [f"k{number}" for number in range(COUNT)]
    for number, row in enumerate(rows):
        if number % 10 == 9:
            assert (row["id"], row["sizes"], row["badBody"]) == (None, None, "Input data was truncated")
        else:
            assert (row["id"], float(row["total"]), row["sizes"]) == (number, number / 4, [number, None])
            assert (row["at"].isoformat(), row["badBody"]) == ("2026-11-30T12:00:00+00:00", None)


def test_a_directory_and_a_group_have_the_columns_of_their_bodies(
    spark: SparkSession, disk_log: DiskLog, broker: BrokerNode
) -> None:
    """With filters and splits as ever."""
    read = spark.read.format("dledger").options(subscribe="orders", **ORDERS)

    check(read.option("splitBytes", "4k").load(str(disk_log.directory)))
    check(spark.read.format("dledger").options(**broker.options, subscribe="orders", **ORDERS).load())


def test_a_stream_has_them(spark: SparkSession, broker: BrokerNode, tmp_path: Path) -> None:
    """The same rows, in several batches."""
    stream = spark.readStream.format("dledger").options(
        **broker.options, subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger="40", **ORDERS
    )
    query = (
        stream.load()
        .writeStream.format("memory")
        .queryName("typed_orders")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    check(spark.table("typed_orders"))


def test_sql_has_them(spark: SparkSession, disk_log: DiskLog) -> None:
    """A temporary view and a table, whose schema Spark's catalog keeps with its options."""
    given = ", ".join(f"{name} '{text}'" for name, text in {**ORDERS, "subscribe": "orders"}.items())
    source = f"USING dledger OPTIONS (path '{disk_log.directory}', {given})"
    spark.sql(f"CREATE TEMPORARY VIEW typed_view {source}")
    spark.sql(f"CREATE TABLE typed_table {source}")
    try:
        check(spark.table("typed_view"))
        check(spark.table("typed_table"))
        total = "SELECT sum(total) AS n FROM typed_table WHERE item.name = 'thing 0'"
        expected = sum(number / 4 for number in range(0, COUNT, 3) if number % 10 != 9)
        assert float(spark.sql(total).collect()[0].n) == expected
    finally:
        spark.sql("DROP TABLE typed_table")
        spark.catalog.dropTempView("typed_view")


def test_a_schema_chooses_columns_of_both_kinds(spark: SparkSession, disk_log: DiskLog) -> None:
    """A row is bad whichever columns are read; ``body`` can be read beside them, for bad ones to be kept."""
    reader = spark.read.format("dledger").options(subscribe="orders", **ORDERS)

    rows = reader.schema("badBody string, ID bigint, body binary, queueId int").load(str(disk_log.directory))
    bad = rows.where("badBody IS NOT NULL").collect()
    assert [bytes(row.body) for row in bad] == [b"{"] * (COUNT // 10)
    assert reader.schema("badBody string").load(str(disk_log.directory)).where("badBody IS NULL").count() == 54
    with pytest.raises(Exception, match=r"column total is decimal\(8,2\), not double"):
        reader.schema("total double").load(str(disk_log.directory)).count()
    with pytest.raises(Exception, match="there is no column totl: did you mean total"):
        reader.schema("totl double").load(str(disk_log.directory)).count()


def test_avro_and_protobuf_are_read_with_schemas_in_files(spark: SparkSession, tmp_path: Path) -> None:
    """The driver reads the files; the tasks get what is in them."""
    avro_schema = {"type": "record", "name": "R", "fields": [{"name": "n", "type": {"type": "map", "values": "long"}}]}
    (tmp_path / "r.avsc").write_text(json.dumps(avro_schema))
    file = descriptor_pb2.FileDescriptorProto.FromString(wrappers_pb2.DESCRIPTOR.serialized_pb)
    (tmp_path / "r.pb").write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    body = io.BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(avro_schema), {"n": {"k": 5}})
    log = write_disk_log(
        tmp_path / "log",
        [
            Message("avro", body.getvalue()),
            Message("avro", b""),
            Message("proto", wrappers_pb2.UInt64Value(value=5).SerializeToString()),
            Message("proto", b"\xff"),
        ],
    )

    def rows(topic: str, **options: str) -> list[tuple[object, ...]]:
        frame = spark.read.format("dledger").options(subscribe=topic, **options).load(str(log.directory))
        return [tuple(row.values()) for row in frame.select(frame.columns[0], "badBody").toArrow().to_pylist()]

    avro = rows("avro", bodyFormat="avro", bodySchema=f"@{tmp_path}/r.avsc")
    proto = rows(
        "proto", bodyFormat="protobuf", bodySchema=f"@{tmp_path}/r.pb", bodyMessage="google.protobuf.UInt64Value"
    )
    assert (avro[0], avro[1][0]) == (([("k", 5)], None), None)
    assert (proto[0], proto[1][0]) == ((5, None), None)
    assert avro[1][1]
    assert proto[1][1]


def test_a_bad_body_fails_the_query_only_if_it_shall(spark: SparkSession, disk_log: DiskLog) -> None:
    """The driver gets the place and the reason."""
    frame = spark.read.format("dledger").options(subscribe="orders", badBodies="fail", **ORDERS)

    assert "badBody" not in frame.load(str(disk_log.directory)).columns
    with pytest.raises(Exception, match=r"the body at position \d+ of the log is not json of bodySchema: Input data"):
        frame.load(str(disk_log.directory)).collect()
