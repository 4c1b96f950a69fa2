"""Rows as messages: which columns count, what is refused before a task runs, which rows are refused in one."""

from __future__ import annotations

import pyarrow as pa
import pytest

from dledger_spark.errors import SchemaError
from dledger_spark.source.sink import RowError, bodies_of, row_format, rows_of
from rocketstore.client.aio.outgoing import check_properties

HEADERS = "array<struct<key:string,value:binary>>"


def test_columns_become_the_message() -> None:
    """Body, keys, tags, queue and properties; keys and tags win over the properties of that name."""
    form = row_format(
        [
            ("body", "binary"),
            ("topic", "string"),
            ("keys", "string"),
            ("tags", "string"),
            ("queueId", "int"),
            ("properties", "map<string,string>"),
        ]
    )
    batch = pa.RecordBatch.from_pydict(
        {
            "body": pa.array([b"one", b"two"]),
            "topic": ["t1", "t2"],
            "keys": ["k", None],
            "tags": ["a", None],
            "queueId": pa.array([3, None], pa.int32()),
            "properties": pa.array([[("TAGS", "z"), ("x", "y")], None], pa.map_(pa.string(), pa.string())),
        }
    )

    first, second = rows_of(batch, form, "", None, 0)

    assert (first.message.topic, first.message.body, first.queue_id) == ("t1", b"one", 3)
    assert first.message.properties == {"TAGS": "a", "x": "y", "KEYS": "k"}
    assert (second.message.topic, second.message.body, second.queue_id) == ("t2", b"two", None)
    assert second.message.properties == {}
    check_properties(first.message)  # a producer takes it: copied messages keep what they had


def test_kafka_names_are_understood() -> None:
    """A job that wrote to Kafka changes its format and its servers only."""
    form = row_format([("key", "binary"), ("value", "string"), ("partition", "int"), ("headers", HEADERS)])
    element = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k"]),
            "value": ["text"],
            "partition": pa.array([1], pa.int32()),
            "headers": pa.array([[{"key": "h", "value": b"v"}]], pa.list_(element)),
        }
    )

    (row,) = rows_of(batch, form, "topic", None, 0)

    assert (row.message.body, row.message.properties, row.queue_id) == (b"text", {"h": "v", "KEYS": "k"}, 1)


def test_options_win_over_columns() -> None:
    """As with Spark's Kafka sink."""
    form = row_format([("body", "string"), ("topic", "string"), ("queueId", "int")])
    batch = pa.RecordBatch.from_pydict({"body": ["b"], "topic": ["column"], "queueId": pa.array([1], pa.int32())})

    (row,) = rows_of(batch, form, "option", 5, 0)

    assert (row.message.topic, row.queue_id) == ("option", 5)


def test_columns_of_the_source_are_left_out() -> None:
    """What was read can be written as it is."""
    form = row_format([("index", "bigint"), ("body", "binary"), ("storeTimestamp", "timestamp"), ("offset", "bigint")])

    assert form.places == (("body", 1),)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ([("keys", "string")], "no column body"),
        ([("body", "int")], "column body is int: cast it to binary or string"),
        ([("body", "binary"), ("key_", "string")], "column key_ cannot be written: did you mean keys?"),
        ([("body", "binary"), ("price", "double")], "column price cannot be written: drop it"),
        ([("body", "binary"), ("value", "binary")], "columns value and body mean the same"),
        ([("body", "binary"), ("properties", "string")], "cast it to map<string,string>"),
        ([("body", "binary"), ("properties", "map<string,string>"), ("headers", HEADERS)], "drop one of them"),
    ],
)
def test_schema_that_cannot_be_written_is_refused(columns: list[tuple[str, str]], problem: str) -> None:
    """On the driver, with what to do."""
    with pytest.raises(SchemaError) as caught:
        row_format(columns)

    assert problem in str(caught.value)


def test_every_problem_is_told_at_once() -> None:
    """Not one per attempt."""
    with pytest.raises(SchemaError, match=r"tags is int.*no column body"):
        row_format([("tags", "int")])


@pytest.mark.parametrize("column", ["body", "topic"])
def test_row_without_body_or_topic_is_named(column: str) -> None:
    """By its number in the partition."""
    values = {"body": ["b", "b"], "topic": ["t", "t"], column: ["x", None]}
    batch = pa.RecordBatch.from_pydict({name: pa.array(some, pa.string()) for name, some in values.items()})

    with pytest.raises(RowError, match=f"row 101 of the task has no {column}"):
        list(rows_of(batch, row_format([("body", "string"), ("topic", "string")]), "", None, 100))


def test_key_that_is_no_text_is_named() -> None:
    """Keys are text in the log."""
    batch = pa.RecordBatch.from_pydict({"body": ["b"], "keys": pa.array([b"\xff"])})

    with pytest.raises(RowError, match="row 7 of the task: column keys"):
        list(rows_of(batch, row_format([("body", "string"), ("keys", "binary")]), "t", None, 7))


def test_bodies_of_a_slice_are_its_own() -> None:
    """A rerun sends the end of a batch only."""
    batch = pa.RecordBatch.from_pydict({"body": ["a", "b", "c"]}).slice(1)

    assert list(bodies_of(batch, row_format([("body", "string")]), 1)) == [b"b", b"c"]
