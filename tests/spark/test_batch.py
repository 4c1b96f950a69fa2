"""Reading a log directory with Spark: the same rows as the naive reader's, through every door."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger_spark.directory import open_directory
from dledger_spark.schema import COLUMN_NAMES, COLUMNS, ddl_of
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import BLANK, BLANK_MAGIC
from tests.support.log_bytes import DiskLog, write_disk_log
from tests.unit.rocketstore.bench import fill, running, small_config

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNT = 400


@pytest.fixture(scope="module")
def disk_log(tmp_path_factory: pytest.TempPathFactory) -> DiskLog:
    """Several segments of messages of three topics, with NOOPs in between."""
    rng = random.Random(5)
    messages = [
        Message(
            f"topic-{number % 3}",
            rng.randbytes(rng.randrange(800)),
            number % 4,
            {"TAGS": f"tag-{number % 5}", "KEYS": f"key-{number}"} if number % 7 else {},
            born_host=HostAddress(rng.randbytes(16 if number % 11 == 0 else 4), 1000 + number),
            store_timestamp=1_700_000_000_000 + number,
        )
        for number in range(COUNT)
    ]
    return write_disk_log(tmp_path_factory.mktemp("node"), messages, noop_every=64)


def load(spark: SparkSession, disk_log: DiskLog, schema: str = "", **options: str) -> DataFrame:
    """The directory as a data frame, in several splits."""
    reader = spark.read.format("dledger").options(splitBytes="32k", **options)
    return (reader.schema(schema) if schema else reader).load(str(disk_log.directory))


def test_a_batch_read_is_what_the_naive_reader_reads(spark: SparkSession, disk_log: DiskLog) -> None:
    """Every column but the raw bytes, of every row, under the exact schema, found without registration."""
    names = [name for name in COLUMN_NAMES if name != "raw"]
    columns = ddl_of([one for one in COLUMNS if one.name != "raw"])

    table = load(spark, disk_log, columns).toArrow().sort_by("index")

    rows = table.to_pylist()
    assert table.schema.names == names
    assert len(rows) == len(disk_log.rows)
    for row, naive in zip(rows, disk_log.rows, strict=True):
        row["properties"] = dict(row["properties"])
        for name in ("bornTimestamp", "storeTimestamp"):
            row[name] = round(row[name].timestamp() * 1_000_000)
        assert row == {name: naive[name] for name in names}


def test_a_user_schema_is_a_projection_and_filters_are_pushed(spark: SparkSession, disk_log: DiskLog) -> None:
    """A filtered query finds the same rows whether the reader filters or Spark does."""
    schema = "topic string, INDEX bigint, storeTimestamp timestamp, tags string"
    where = "topic IN ('topic-1', 'topic-2') AND index >= 50 AND storeTimestamp < timestamp'2023-11-14 22:13:20.3Z'"
    where += " AND NOT (tags = 'tag-2') AND topic LIKE 'topic%'"

    pushed = load(spark, disk_log, schema, pushFilters="true").where(where)
    plain = load(spark, disk_log, schema).where(where)

    expected = {
        row["index"]
        for row in disk_log.rows
        if row["topic"] != "topic-0"
        and int(str(row["index"])) >= 50
        and int(str(row["storeTimestamp"])) < 1_700_000_000_300_000
        and row["tags"] not in (None, "tag-2")
    }
    assert {row["INDEX"] for row in pushed.collect()} == expected
    assert {row["INDEX"] for row in plain.collect()} == expected
    assert len(expected) > 100


def test_topics_are_chosen_by_name_or_pattern(spark: SparkSession, disk_log: DiskLog) -> None:
    """``subscribe`` and ``subscribePattern``, with no column asked for at all."""
    wanted = sum(1 for row in disk_log.rows if row["topic"] in ("topic-0", "topic-2"))

    assert load(spark, disk_log, "term bigint", subscribe="topic-0, topic-2").count() == wanted
    assert load(spark, disk_log, subscribePattern="topic-[02]").count() == wanted


def test_sql_reads_it_through_a_view_and_a_table(spark: SparkSession, disk_log: DiskLog) -> None:
    """``CREATE … USING dledger``; Spark keeps a table's options to itself, so a query names them."""
    path = disk_log.directory
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW log_view USING dledger OPTIONS (path '{path}', schemaStyle 'kafka')")
    spark.sql("CREATE TABLE log_table (topic string, queueId int) USING dledger")
    try:
        by_view = spark.sql("SELECT partition, count(*) AS n FROM log_view GROUP BY 1 ORDER BY 1").collect()
        by_table = spark.sql(
            f"SELECT queueId, count(*) AS n FROM log_table WITH (path = '{path}') GROUP BY 1 ORDER BY 1"
        )

        assert [tuple(row) for row in by_view] == [(number, COUNT // 4) for number in range(4)]
        assert by_table.collect() == by_view
    finally:
        spark.sql("DROP TABLE log_table")
        spark.catalog.dropTempView("log_view")


def test_a_plain_log_and_the_replicated_one_that_goes_on_from_it_are_read_as_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    """As RocketMQ upgrades a broker: plain files that end in a blank, entries from the next file on."""
    config = small_config(tmp_path)
    with running(config) as store:
        fill(store, 200)
    end = open_directory(tmp_path).end
    size = config.mapped_file_size_commit_log
    with (tmp_path / "commitlog" / f"{end - end % size:020d}").open("r+b") as file:
        file.seek(end % size)
        file.write(BLANK.pack(size - end % size, BLANK_MAGIC))
    new = [Message("T", b"%d" % number, number % 2) for number in range(200, 400)]
    write_disk_log(tmp_path, new, segment_bytes=size, noop_every=32, begin=end - end % size + size)

    frame = spark.read.format("dledger").options(splitBytes="8k", verifyCrc="fail").load(str(tmp_path))

    rows = frame.select("position", "index", "body").orderBy("position").collect()
    assert [int(bytes(row["body"]).rstrip(b".")) for row in rows] == list(range(400))
    assert [row["index"] is None for row in rows] == [True] * 200 + [False] * 200
    assert frame.rdd.getNumPartitions() > 5


def test_errors_are_readable(spark: SparkSession, disk_log: DiskLog) -> None:
    """The last line of what Spark shows says what is wrong and what to do."""
    with pytest.raises(Exception, match="option splitbyte is unknown: did you mean splitBytes"):
        spark.read.format("dledger").load(str(disk_log.directory), splitByte="1m")
    with pytest.raises(Exception, match="there is no column topik: did you mean topic"):
        load(spark, disk_log, "topik string").count()
    with pytest.raises(Exception, match="column body is binary, not string"):
        load(spark, disk_log, "body string").count()


def test_a_broken_record_names_its_place_or_is_a_row(spark: SparkSession, tmp_path: Path) -> None:
    """``verifyCrc``: the job's error says segment and offset; ``column`` makes it a row among the others."""
    messages = [Message("t", b"body %d" % number) for number in range(100)]
    broken = write_disk_log(tmp_path, messages, segment_bytes=16 * 1024)
    row = broken.rows[70]
    path = broken.directory / "data" / str(row["segment"])
    offset = int(str(row["position"])) - int(path.name)
    with path.open("r+b") as file:
        file.seek(offset + 48 + 89)
        file.write(b"X")

    with pytest.raises(Exception, match=f"segment {path.name}, offset {offset}: damaged record"):
        load(spark, broken, "index bigint", verifyCrc="fail").count()

    marked = load(spark, broken, "index bigint, crcOk boolean", verifyCrc="column").where("NOT crcOk").collect()
    assert [one["index"] for one in marked] == [70]
    assert load(spark, broken, "index bigint", verifyCrc="skip").count() == 99
