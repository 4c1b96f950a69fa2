"""The options of the format ``dledger``, parsed once, on the driver, into frozen records.

Spark passes on all options and ignores unknown ones; here an unknown option is an error that suggests the nearest name.
Names are case-insensitive, as in Spark. All problems are reported at once.

The tables ``READ_OPTIONS`` and ``WRITE_OPTIONS`` define name, parser, default and meaning of every option. A test
compares the documentation with them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from dledger.errors import ConfigError
from dledger.values import (
    MIB,
    FieldLimits,
    Range,
    Unit,
    parse_addresses,
    parse_boolean,
    parse_integer,
    parse_millis,
    parse_size,
)
from dledger_spark.errors import OptionError
from dledger_spark.option_values import (
    EARLIEST,
    LATEST,
    choice_value,
    delimiter_value,
    instead_of,
    names_value,
    offsets_value,
    path_value,
    pattern_value,
    schema_value,
    secret_value,
    text_value,
)

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity

__all__ = [
    "EARLIEST",
    "LATEST",
    "READ_OPTIONS",
    "SECURITY_OPTIONS",
    "WRITE_OPTIONS",
    "Option",
    "ReadOptions",
    "WriteOptions",
    "unknown_option",
]

VerifyCrc = Literal["false", "fail", "column", "skip"]
RecordFormat = Literal["auto", "message", "entry"]
SchemaStyle = Literal["default", "kafka"]
ReadFrom = Literal["leader", "follower", "any"]
PropertiesFormat = Literal["map", "raw"]
BodyFormatName = Literal["", "json", "csv", "avro", "protobuf"]
BadBodies = Literal["column", "fail"]
Partitioner = Literal["roundrobin", "keys"]

SPLIT_BYTES_DEFAULT: Final = 256 * MIB
SPLIT_BYTES_MIN: Final = 1024
SPLIT_BYTES_MAX: Final = 1024 * MIB
"""Offsets within a split are 32 bits wide."""
SPLITS_MAX: Final = 4096
"""For one read, more tasks than this cost more than they gain."""
_OF_BODIES: Final = frozenset(("body_schema", "body_message", "body_delimiter", "bad_bodies"))
GROUP_DEFAULT: Final = "default"
BATCH_BYTES_DEFAULT: Final = MIB
_BATCH_BYTES_MAX: Final = 16 * MIB
_UNITS: Final[dict[Callable[[str], Any], Unit]] = {parse_size: Unit.BYTES, parse_millis: Unit.MS}
_INT64_MAX: Final = (1 << 63) - 1
_NEAREST: Final = 3
NOTHING_NAMED: Final = (
    'nothing to read: name it with load("/a/log/directory"), or option bootstrap.servers. (A table made with columns '
    "keeps no OPTIONS: SELECT … FROM t WITH (path = '…'), or CREATE TABLE without columns)"
)


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``attribute`` is its field in the options record."""

    name: str
    attribute: str
    parse: Callable[[str], Any]  # Any: each option has its own type
    default: str
    meaning: str
    aliases: tuple[str, ...] = ()
    allowed: Range | None = None

    def read(self, text: str) -> Any:  # noqa: ANN401  # as above
        """The value. Raises ``ValueError``."""
        value = self.parse(text)
        if problem := FieldLimits(self.allowed, self._unit).complaint(value):
            raise ValueError(problem)
        return value

    @property
    def row(self) -> str:
        """Its row in the documentation's table."""
        limits = ""
        if self.allowed is not None:
            told = replace(self.allowed, high=None) if self.allowed.high == _INT64_MAX else self.allowed
            limits = f"; {told.text(self._unit)}"
        return f"| `{self.name}` | {self.default} | {self.meaning}{limits} |"

    @property
    def _unit(self) -> Unit | None:
        return _UNITS.get(self.parse)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read. Bytes and milliseconds; 0 for "none" in the table."""

    path: str = ""
    servers: tuple[str, ...] = ()
    group: str = GROUP_DEFAULT
    topics: tuple[str, ...] = ()
    topic_pattern: str = ""
    starting: int | None = None
    """A log index, ``EARLIEST`` or ``LATEST``; None: the default of a batch (earliest) or a stream (latest)."""
    ending: int | None = None
    """A log index (exclusive), or ``LATEST``; None: not given, which means the same in a batch."""
    starting_ms: int | None = None
    ending_ms: int | None = None
    max_rows_per_trigger: int = 0
    max_bytes_per_trigger: int = 0
    min_rows_per_trigger: int = 0
    max_trigger_delay_ms: int = 900_000
    min_partitions: int = 0
    max_records_per_partition: int = 0
    split_bytes: int = SPLIT_BYTES_DEFAULT
    fail_on_data_loss: bool = True
    verify_crc: VerifyCrc = "false"
    read_from: ReadFrom = "leader"
    fetch_timeout_ms: int = 30_000
    fetch_retries: int = 3
    push_filters: bool = False
    record_format: RecordFormat = "auto"
    schema_style: SchemaStyle = "default"
    properties_format: PropertiesFormat = "map"
    include_headers: bool = False
    decompressed: bool = False
    body_format: BodyFormatName = ""
    body_schema: bytes = b""
    body_message: str = ""
    body_delimiter: str = ","
    bad_bodies: BadBodies = "column"
    allow_uncommitted: bool = False
    consumer_group: str = ""
    security: SecurityOptions = field(default_factory=lambda: SecurityOptions())

    @property
    def is_live(self) -> bool:
        """Whether a running group is read instead of a directory."""
        return bool(self.servers)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Parse the user's options. Raises ``OptionError`` with every problem."""
        values, security, problems = _parsed(options, READ_OPTIONS, WRITE_OPTIONS, "reads")
        if values.get("path") and values.get("servers"):
            problems.append("give either path (a directory) or bootstrap.servers (a running group), not both")
        elif not values.get("path") and not values.get("servers"):
            problems.append(NOTHING_NAMED)
        problems += _problems_of_bodies(values)
        if values.get("topics") and values.get("topic_pattern"):
            problems.append("give either subscribe or subscribePattern, not both")
        for one, other in (("starting", "starting_ms"), ("ending", "ending_ms")):
            if one in values and other in values:
                problems.append(f"give either {one}Offsets or {one}Timestamp, not both")
        _raise_if(problems)
        return cls(**values, security=security)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write."""

    servers: tuple[str, ...] = ()
    group: str = GROUP_DEFAULT
    topic: str = ""
    writer_id: str = ""
    queue_id: int | None = None
    partitioner: Partitioner = "roundrobin"
    batch_bytes: int = BATCH_BYTES_DEFAULT
    send_timeout_ms: int = 60_000
    security: SecurityOptions = field(default_factory=lambda: SecurityOptions())

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Parse the user's options. Raises ``OptionError`` with every problem."""
        values, security, problems = _parsed(options, WRITE_OPTIONS, READ_OPTIONS, "writes")
        if not values.get("servers"):
            problems.append("option bootstrap.servers is missing: host:port of one or more nodes")
        if "queue_id" in values and values.get("partitioner") == "keys":
            problems.append(
                "give either queueId (one queue for all rows) or partitioner=keys (one for each key), not both"
            )
        _raise_if(problems)
        return cls(**values, security=security)


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """TLS and access keys as text, so that they can be sent to executors, which read the files."""

    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    insecure: bool = False
    access_key: str = ""
    secret_key: str = field(default="", repr=False)

    def client(self) -> ClientSecurity:
        """The client's settings. Raises ``OptionError`` if one of two related options is missing."""
        # Imported here: reading a directory, and planning, do not need gRPC, and Spark starts processes for both.
        from dledger.client.shared import ClientSecurity
        from dledger.rpc.tls import TlsFiles

        certificate, key = (Path(one) if one else None for one in (self.tls_certificate, self.tls_key))
        if (certificate or key) and not self.tls_ca:
            raise OptionError("option tlsCa is missing: the CA that signed the servers' certificates")
        try:
            files = TlsFiles(Path(self.tls_ca), certificate, key) if self.tls_ca else None
            return ClientSecurity(files, self.insecure, self.access_key, self.secret_key)
        except ConfigError as error:
            raise OptionError(f"options tls… and accessKey, secretKey: {error}") from error


def _parsed(
    options: Mapping[str, str], table: Iterable[Option], other_table: Iterable[Option], doing: str
) -> tuple[dict[str, Any], SecurityOptions, list[str]]:
    """The given values by attribute; the security options; problems."""
    by_name = {name.lower(): one for one in (*table, *SECURITY_OPTIONS) for name in (one.name, *one.aliases)}
    elsewhere = {name.lower() for one in other_table for name in (one.name, *one.aliases)}
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    problems: list[str] = []
    for key, text in options.items():
        option = by_name.get(key.lower())
        if option is None:
            problems.append(_unknown(key, by_name, elsewhere, doing))
            continue
        if option.attribute in given_as:
            problems.append(f"options {given_as[option.attribute]} and {key} mean the same: give only one")
            continue
        given_as[option.attribute] = key
        try:
            values[option.attribute] = option.read(str(text).strip())
        except ValueError as error:
            problems.append(f"option {option.name}: {error}")
    names = {one.attribute for one in SECURITY_OPTIONS}
    security = replace(SecurityOptions(), **{name: values.pop(name) for name in list(values) if name in names})
    return values, security, problems


def _unknown(key: str, by_name: Mapping[str, Option], elsewhere: Iterable[str], doing: str) -> str:
    if instead := instead_of(key):
        return f"option {key} is not supported: {instead}"
    if key.lower() in elsewhere:
        return f"option {key} does not apply to {doing}"
    return unknown_option(key, {name: option.name for name, option in by_name.items()})


def unknown_option(key: str, names: Mapping[str, str]) -> str:
    """The error for an unknown option; ``names`` maps lower-case names and aliases to the documented names."""
    near = difflib.get_close_matches(key.lower(), names, n=_NEAREST, cutoff=0.5)
    meant = list(dict.fromkeys(names[one] for one in near))
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"there are: {', '.join(dict.fromkeys(names.values()))}"
    return f"option {key} is unknown: {hint}"


def _problems_of_bodies(values: Mapping[str, Any]) -> list[str]:
    if "body_format" not in values:
        given = [one.name for one in READ_OPTIONS if one.attribute in _OF_BODIES and one.attribute in values]
        return [f"option {', '.join(given)} needs bodyFormat"] if given else []
    problems = [] if "body_schema" in values else ["option bodySchema is missing: the columns of the bodies"]
    if (values["body_format"] == "protobuf") != ("body_message" in values):
        problems.append("option bodyMessage: required for bodyFormat=protobuf, and for no other")
    if "body_delimiter" in values and values["body_format"] != "csv":
        problems.append("option bodyDelimiter applies to bodyFormat=csv only")
    return problems


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise OptionError("; ".join(problems))


READ_OPTIONS: Final = (
    Option("path", "path", path_value, "", 'a log directory; what `load("…")` gives'),
    Option(
        "bootstrap.servers",
        "servers",
        parse_addresses,
        "",
        "client addresses of a running group, `host:port,host:port` (brokers: `listenPort`)",
        ("kafka.bootstrap.servers", "bootstrapServers", "nameServer"),
    ),
    Option("group", "group", text_value, "default", "the name of the replication group (brokers: `dLegerGroup`)"),
    Option("subscribe", "topics", names_value, "all", "topics, separated by commas", ("topic",)),
    Option(
        "subscribePattern",
        "topic_pattern",
        pattern_value,
        "all",
        "regular expression that must match the whole topic name",
    ),
    Option(
        "startingOffsets",
        "starting",
        offsets_value(starting=True),
        "earliest (batch), latest (stream)",
        '`earliest`, `latest` (streams only) or `{"index": N}`: the first entry read; -2 and -1 as in Kafka',
    ),
    Option(
        "endingOffsets",
        "ending",
        offsets_value(starting=False),
        "latest",
        '`latest`, what is committed when the query starts, or `{"index": N}`: the first entry not read; batch only',
    ),
    Option(
        "startingTimestamp",
        "starting_ms",
        parse_integer,
        "",
        "ms: start with the first message stored then or later",
        allowed=Range(0, _INT64_MAX),
    ),
    Option(
        "endingTimestamp",
        "ending_ms",
        parse_integer,
        "",
        "ms: end before the first message stored then or later; batch only",
        allowed=Range(0, _INT64_MAX),
    ),
    Option(
        "maxOffsetsPerTrigger",
        "max_rows_per_trigger",
        parse_integer,
        "none",
        "maximum entries per micro-batch",
        allowed=Range(1, _INT64_MAX),
    ),
    Option(
        "maxBytesPerTrigger",
        "max_bytes_per_trigger",
        parse_size,
        "none",
        "maximum bytes of log per micro-batch",
        allowed=Range(1, _INT64_MAX),
    ),
    Option(
        "minOffsetsPerTrigger",
        "min_rows_per_trigger",
        parse_integer,
        "none",
        "wait for this many entries before starting a micro-batch",
        allowed=Range(1, _INT64_MAX),
    ),
    Option(
        "maxTriggerDelay",
        "max_trigger_delay_ms",
        parse_millis,
        "15m",
        "but no longer than this",
        allowed=Range(0, _INT64_MAX),
    ),
    Option(
        "minPartitions",
        "min_partitions",
        parse_integer,
        "",
        "at least so many splits, as far as records allow",
        allowed=Range(1, SPLITS_MAX),
    ),
    Option(
        "maxRecordsPerPartition",
        "max_records_per_partition",
        parse_integer,
        "none",
        "maximum entries per split",
        allowed=Range(1, _INT64_MAX),
    ),
    Option(
        "splitBytes",
        "split_bytes",
        parse_size,
        "256m",
        "how much of the log one task reads and maps into memory",
        allowed=Range(SPLIT_BYTES_MIN, SPLIT_BYTES_MAX),
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        parse_boolean,
        "true",
        "fail when a requested part is no longer kept; `false`: continue with the rest",
    ),
    Option(
        "verifyCrc",
        "verify_crc",
        choice_value("false", "fail", "column", "skip"),
        "false",
        "check every checksum: `fail` the query, report it in the column `crcOk`, or `skip` the record",
    ),
    Option(
        "readFrom",
        "read_from",
        choice_value("leader", "follower", "any"),
        "leader",
        "which nodes of a running group to read",
    ),
    Option(
        "fetchTimeoutMs",
        "fetch_timeout_ms",
        parse_millis,
        "30000",
        "how long one fetch may take",
        allowed=Range(1, 3_600_000),
    ),
    Option(
        "fetchRetries",
        "fetch_retries",
        parse_integer,
        "3",
        "how often a failed fetch is retried",
        ("fetchOffset.numRetries",),
        allowed=Range(0, 1000),
    ),
    Option(
        "pushFilters",
        "push_filters",
        parse_boolean,
        "false",
        "filter in the reader; needs Spark's `spark.sql.python.filterPushdown.enabled`",
    ),
    Option(
        "recordFormat",
        "record_format",
        choice_value("auto", "message", "entry"),
        "auto",
        "contents of entries: RocketMQ's `message`s, or anything (`entry`); `auto` checks the first ones",
    ),
    Option(
        "schemaStyle",
        "schema_style",
        choice_value("default", "kafka"),
        "default",
        "`kafka`: the columns of Spark's Kafka source",
    ),
    Option(
        "propertiesFormat",
        "properties_format",
        choice_value("map", "raw"),
        "map",
        "`raw`: the property string as stored",
    ),
    Option(
        "includeHeaders",
        "include_headers",
        parse_boolean,
        "false",
        "with `schemaStyle=kafka`: the properties as `headers`",
    ),
    Option(
        "decompressed",
        "decompressed",
        parse_boolean,
        "false",
        "bodies as they were before their producers compressed them (zlib, LZ4, Zstandard); null if damaged",
    ),
    Option(
        "bodyFormat",
        "body_format",
        choice_value("json", "csv", "avro", "protobuf"),
        "",
        "what bodies are: `json`, `csv`, `avro` or `protobuf`; their columns are read instead of `body`",
    ),
    Option(
        "bodySchema",
        "body_schema",
        schema_value,
        "",
        "their columns in DDL, Avro's schema in JSON, or a descriptor set in Base64; or `@` and a file that holds it",
    ),
    Option("bodyMessage", "body_message", text_value, "", "with `protobuf`: the full name of the message"),
    Option("bodyDelimiter", "body_delimiter", delimiter_value, ",", "between the fields of `csv`"),
    Option(
        "badBodies",
        "bad_bodies",
        choice_value("column", "fail"),
        "column",
        "a body that does not fit the schema: null with the reason in `badBody`, or `fail` the query",
    ),
    Option(
        "allowUncommitted",
        "allow_uncommitted",
        parse_boolean,
        "false",
        "read a directory beyond the committed end in its checkpoint: such entries may never have been acknowledged",
    ),
    Option(
        "consumerGroup",
        "consumer_group",
        text_value,
        "",
        "publish a stream's progress as this consumer group's offsets",
        ("kafka.group.id",),
    ),
)
WRITE_OPTIONS: Final = (
    Option(
        "bootstrap.servers",
        "servers",
        parse_addresses,
        "",
        "client addresses of a running group, `host:port,host:port` (brokers: `listenPort`)",
        ("kafka.bootstrap.servers", "bootstrapServers", "nameServer"),
    ),
    Option("group", "group", text_value, "default", "the name of the replication group (brokers: `dLegerGroup`)"),
    Option("topic", "topic", text_value, "", "topic for all rows; default: the topic in the column `topic`"),
    Option(
        "writerId",
        "writer_id",
        text_value,
        "random",
        "name of this write: a rerun with the same name adds only what is missing",
    ),
    Option(
        "queueId",
        "queue_id",
        parse_integer,
        "in turn",
        "queue for all rows",
        allowed=Range(0, (1 << 31) - 1),
    ),
    Option(
        "partitioner",
        "partitioner",
        choice_value("roundrobin", "keys"),
        "roundRobin",
        "queue of a row that names none: each in turn, or, with `keys`, always the same one for the same keys, "
        "as chosen by RocketMQ's `SelectMessageQueueByHash`",
    ),
    Option(
        "batchBytes",
        "batch_bytes",
        parse_size,
        "1m",
        "bytes sent in one request",
        allowed=Range(1, _BATCH_BYTES_MAX),
    ),
    Option(
        "sendTimeoutMs",
        "send_timeout_ms",
        parse_millis,
        "60000",
        "how long a send is retried before the task fails",
        allowed=Range(1, 3_600_000),
    ),
)
SECURITY_OPTIONS: Final = (
    Option(
        "tlsCa",
        "tls_ca",
        text_value,
        "",
        "CA (PEM) that signed the servers' certificates; a path on every executor",
    ),
    Option("tlsCertificate", "tls_certificate", text_value, "", "this client's certificate (PEM)"),
    Option("tlsKey", "tls_key", text_value, "", "its key (PEM)"),
    Option("insecure", "insecure", parse_boolean, "false", "allow plaintext to other machines"),
    Option("accessKey", "access_key", text_value, "", "access key to sign requests with"),
    Option("secretKey", "secret_key", text_value, "", "its secret; Spark redacts it in plans and pages"),
    Option("secretKeyFile", "secret_key", secret_value, "", "instead: the file with the secret, on the driver"),
)
