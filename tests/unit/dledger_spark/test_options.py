"""Options and schemas: what is refused, and that the refusal says what to do."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Final

import pytest

from dledger_spark.errors import OptionError, SchemaError
from dledger_spark.options import EARLIEST, LATEST, ReadOptions, WriteOptions
from dledger_spark.schema import COLUMNS, columns_of, ddl_of, default_columns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/x", "failOnDataLos": "true"}, "failOnDataLos is unknown: did you mean failOnDataLoss"),
        ({"path": "/x", "zzzz": "1"}, "zzzz is unknown: there are: path, bootstrap.servers"),
        ({"path": "/x", "writerId": "w"}, "writerId does not apply to reads"),
        ({"path": "/x", "bootstrap.servers": "a:1"}, "not both"),
        ({}, "nothing to read"),
        ({"bootstrap.servers": "a"}, "invalid address 'a'"),
        ({"bootstrap.servers": "a:1", "nameServer": "b:1"}, "bootstrap.servers and nameServer mean the same"),
        ({"path": "hdfs://x/y"}, "not on a local file system"),
        ({"path": "/x", "splitBytes": "5"}, "splitBytes: 5 must be between 1 KiB and 1 GiB"),
        ({"path": "/x", "splitBytes": "much"}, "invalid size 'much'"),
        ({"path": "/x", "verifyCrc": "yes"}, "invalid value 'yes': use one of false, fail, column, skip"),
        ({"path": "/x", "pushFilters": "perhaps"}, "invalid boolean 'perhaps': use true or false"),
        ({"path": "/x", "startingOffsets": '{"t":{"0":1}}'}, "one log with one index"),
        ({"path": "/x", "startingOffsets": "soon"}, "use earliest, latest"),
        ({"path": "/x", "endingOffsets": "earliest"}, "use latest"),
        ({"path": "/x", "startingOffsets": "1", "startingTimestamp": "5"}, "not both"),
        ({"path": "/x", "subscribe": "a", "subscribePattern": "b"}, "not both"),
        ({"path": "/x", "subscribePattern": "("}, "invalid regular expression"),
        ({"path": "/x", "maxTriggerDelay": "soon"}, "invalid duration"),
        ({"path": "/x", "minPartitions": "0"}, "minPartitions: 0 must be between 1"),
        ({"path": "/x", "minPartitions": "4097"}, "4097 must be between 1 and 4096"),
        ({"bootstrap.servers": "a:1", "startingOffsetsByTimestamp": "{}"}, "is not supported: use startingTimestamp"),
        (
            {"bootstrap.servers": "a:1", "groupIdPrefix": "x"},
            "groupIdPrefix is not supported: a stream keeps",
        ),
        ({"bootstrap.servers": "a:1", "kafka.security.protocol": "SSL"}, "a group's are tlsCa"),
        ({"bootstrap.servers": "a:1", "kafka.fetch.min.bytes": "1"}, "have no effect here: leave it out"),
        ({"bootstrap.servers": "a:1", "assign": '{"t":[0]}'}, "use subscribe, and filter by the column queueId"),
    ],
)
def test_wrong_options_are_refused_with_advice(options: dict[str, str], message: str) -> None:
    """Spark would ignore them; here each is told, the unknown one with the nearest name."""
    with pytest.raises(OptionError) as refused:
        ReadOptions.parse(options)

    assert message in str(refused.value)


KAFKAS_SOURCE: Final = {
    "kafka.bootstrap.servers": ("a:1", "servers", ("a:1",)),
    "assign": ('{"t":[0]}', None, "use subscribe, and filter by the column queueId"),
    "subscribe": ("t,u", "topics", ("t", "u")),
    "subscribePattern": ("t.*", "topic_pattern", "t.*"),
    "startingTimestamp": ("5", "starting_ms", 5),
    "startingOffsetsByTimestamp": ("{}", None, "use startingTimestamp"),
    "startingOffsets": ("earliest", "starting", EARLIEST),
    "startingOffsetsByTimestampStrategy": ("latest", None, "leave it out"),
    "endingTimestamp": ("5", "ending_ms", 5),
    "endingOffsetsByTimestamp": ("{}", None, "use endingTimestamp"),
    "endingOffsets": ("latest", "ending", LATEST),
    "failOnDataLoss": ("false", "fail_on_data_loss", False),
    "kafkaConsumer.pollTimeoutMs": ("1", None, "use fetchTimeoutMs"),
    "fetchOffset.numRetries": ("1", "fetch_retries", 1),
    "fetchOffset.retryIntervalMs": ("1", None, "use fetchRetries and fetchTimeoutMs"),
    "maxOffsetsPerTrigger": ("9", "max_rows_per_trigger", 9),
    "minOffsetsPerTrigger": ("9", "min_rows_per_trigger", 9),
    "maxTriggerDelay": ("30s", "max_trigger_delay_ms", 30_000),
    "minPartitions": ("4", "min_partitions", 4),
    "maxRecordsPerPartition": ("9", "max_records_per_partition", 9),
    "groupIdPrefix": ("x", None, "use consumerGroup"),
    "kafka.group.id": ("g", "consumer_group", "g"),
    "includeHeaders": ("true", "include_headers", True),
    "kafka.isolation.level": ("read_committed", None, "have no effect here: leave it out"),
    "kafka.security.protocol": ("SSL", None, "a group's are tlsCa"),
    "kafka.ssl.truststore.location": ("/x", None, "a group's are tlsCa"),
    "kafka.sasl.jaas.config": ("x", None, "a group's are tlsCa"),
}
"""Every option that Spark documents for Kafka's source: a value, and the attribute and its value, or the refusal."""
KAFKAS_SINK: Final = {
    "kafka.bootstrap.servers": ("a:1", "servers", ("a:1",)),
    "topic": ("t", "topic", "t"),
    "includeHeaders": ("true", None, "a column headers or properties is written"),
    "kafka.acks": ("all", None, "have no effect here: leave it out"),
    "kafka.security.protocol": ("SSL", None, "a group's are tlsCa"),
}
"""Likewise for its sink."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((ReadOptions, name) for name in KAFKAS_SOURCE), *((WriteOptions, name) for name in KAFKAS_SINK)],
)
def test_every_option_of_kafka_means_the_same_or_is_refused(kind: type[ReadOptions | WriteOptions], name: str) -> None:
    """A job that comes from Kafka's source or sink changes nothing silently."""
    text, attribute, expected = (KAFKAS_SOURCE if kind is ReadOptions else KAFKAS_SINK)[name]
    options = {"kafka.bootstrap.servers": "a:1"} | {name: text}
    if attribute is None:
        with pytest.raises(OptionError) as refused:
            kind.parse(options)
        assert f"option {name}" in str(refused.value)
        assert str(expected) in str(refused.value)
    else:
        assert getattr(kind.parse(options), attribute) == expected


def test_all_problems_are_told_at_once() -> None:
    """Nobody corrects a query option by option."""
    with pytest.raises(OptionError) as refused:
        ReadOptions.parse({"pth": "/x", "verifyCrc": "no", "fetchRetries": "-1"})

    assert all(name in str(refused.value) for name in ("pth", "verifyCrc", "fetchRetries"))


def test_names_match_without_regard_to_case_and_as_kafka_has_them() -> None:
    """Spark lower-cases names; Kafka's and rocketmq-spark's are understood."""
    options = ReadOptions.parse(
        {
            "kafka.bootstrap.servers": "a:1, b:2",
            "FAILONDATALOSS": "False",
            "startingoffsets": '{"index": 7}',
            "topic": "t",
        }
    )

    assert (options.servers, options.fail_on_data_loss, options.starting) == (("a:1", "b:2"), False, 7)
    assert (options.topics, options.ending, options.is_live) == (("t",), None, True)
    assert ReadOptions.parse({"path": "/x", "endingOffsets": "latest"}).ending == LATEST
    assert ReadOptions.parse({"nameServer": "c:3;d:4", "startingOffsets": "-2"}).starting == EARLIEST


def test_options_of_kafkas_sink_are_refused_with_ours() -> None:
    """The nearest name would mislead."""
    with pytest.raises(OptionError, match=r"kafka\.sasl\.mechanism is not supported.*accessKey with secretKey"):
        WriteOptions.parse({"kafka.bootstrap.servers": "a:1", "kafka.sasl.mechanism": "PLAIN"})


def test_sizes_durations_and_paths_are_read_as_people_write_them() -> None:
    """``64m``, ``5 s``, and the URI that Spark's catalog makes of a path."""
    options = ReadOptions.parse({"path": "file:/data/log", "splitBytes": "64m", "maxTriggerDelay": "5 s"})

    assert (options.path, options.split_bytes, options.max_trigger_delay_ms) == ("/data/log", 64 << 20, 5000)


def test_a_write_needs_servers_and_knows_no_path() -> None:
    """The sink writes into running groups only."""
    with pytest.raises(OptionError, match=r"path does not apply to writes.*bootstrap\.servers is missing"):
        WriteOptions.parse({"path": "/x"})

    with pytest.raises(OptionError, match="give either queueId"):
        WriteOptions.parse({"bootstrap.servers": "a:1", "queueId": "1", "partitioner": "keys"})

    assert WriteOptions.parse({"bootstrap.servers": "a:1", "partitioner": "roundRobin"}).partitioner == "roundrobin"
    assert WriteOptions.parse({"bootstrap.servers": "a:1", "topic": "t", "batchBytes": "2m"}).batch_bytes == 2 << 20


def test_secrets_are_not_shown_and_errors_pickle() -> None:
    """Options end up in logs, errors travel from workers to the driver."""
    options = ReadOptions.parse({"path": "/x", "accessKey": "me", "secretKey": "hidden"})

    assert "hidden" not in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(OptionError, match="one of them is missing"):
        ReadOptions.parse({"path": "/x", "accessKey": "me"}).security.client()
    error = pickle.loads(pickle.dumps(SchemaError("what")))
    assert (type(error), str(error)) == (SchemaError, "what")


def test_default_schemas_leave_out_what_is_virtual() -> None:
    """What costs extra is there for those who name it."""
    names = [one.name for one in default_columns("default")]

    assert names == [one.name for one in COLUMNS if not one.virtual]
    assert [one.name for one in default_columns("kafka", headers=True)][-1] == "headers"
    assert "`properties` string" in ddl_of(columns_of("default", "raw"))
    assert default_columns("default", crc_column=True)[-1].name == "crcOk"


def test_a_secret_can_stay_in_its_file(tmp_path: Path) -> None:
    """Read when the options are; not beside a secret in the options, and never an empty one."""
    file = tmp_path / "secret"
    file.write_text("very secret\n")
    given = {"bootstrap.servers": "a:1", "accessKey": "me"}

    assert ReadOptions.parse({**given, "secretKeyFile": str(file)}).security.secret_key == "very secret"
    with pytest.raises(OptionError, match="secretKey and secretKeyFile mean the same"):
        ReadOptions.parse({**given, "secretKey": "x", "secretKeyFile": str(file)})
    file.write_text("\n")
    for path, problem in ((file, "is empty"), (tmp_path / "none", "cannot read .*none: No such file")):
        with pytest.raises(OptionError, match=problem):
            ReadOptions.parse({**given, "secretKeyFile": str(path)})
    file.write_text("x" * 5000)
    with pytest.raises(OptionError, match="more than 4096 bytes"):
        ReadOptions.parse({**given, "secretKeyFile": str(file)})
