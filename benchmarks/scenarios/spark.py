"""Reading the log with Spark: decoding alone, scans compared with Parquet's, scaling from one core to two."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.processes import PythonChild
from benchmarks.registry import Scenario, constant
from benchmarks.spark_data import LogSpec, WrittenLog, cached_log
from benchmarks.targets import ONE_CORE, PARQUET, SMALL_SPLITS, STRUCT_LOOP, WITH_BODIES
from dledger.store.format import HEADER
from dledger.values import MIB
from rocketstore.message.record import HEAD_V4

CHILD: Final = "benchmarks.children.spark_scan"
LOG_BYTES: Final = 3 * 1024 * MIB
TYPED_LOG_BYTES: Final = 512 * MIB
SPLIT_BYTES: Final = 256 * MIB
SPLIT: Final = "256m"
SMALL_SPLIT: Final = "32m"
START_SECONDS_MAX: Final = 120.0
SCAN_SECONDS_MAX: Final = 600.0
_MESSAGE: Final = HEAD_V4.struct()
_GIGA: Final = 1e9
_DECODED: Final = (
    "index", "topic", "queueId", "queueOffset", "flag", "sysFlag", "bornTimestamp", "storeTimestamp", "properties",
    "body",
)  # fmt: skip
_DECODED_HEADERS: Final = ("queueId", "queueOffset", "sysFlag", "storeTimestamp", "bodyLength")


def the_log(context: Context) -> WrittenLog:
    """The log read by all of these: kept in ``BENCH_DIR`` if set, otherwise removed after the run."""
    directory = context.settings.directory or context.kept
    log_bytes = context.settings.sized(LOG_BYTES)
    context.say(f"  a log of {log_bytes / 2**30:.1f} GiB, bodies of 200 B to 4 KiB, in {directory}")
    return cached_log(directory, LogSpec(log_bytes=log_bytes))


@contextmanager
def one_processor() -> Iterator[None]:
    """Pin this process to one processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def decoded_gigabytes_per_second(log: WrittenLog, names: tuple[str, ...], limit: int = LOG_BYTES) -> float:
    """GB of log per second through the decoder, split by split, without Spark."""
    from dledger_spark.decode import DecodeContext, named_columns
    from dledger_spark.directory import SplitSizes, open_directory, plan_splits, read_split

    found = open_directory(log.directory)
    context = DecodeContext(properties_format="raw")
    columns = named_columns(names, context)
    started = time.perf_counter()
    done = 0
    for split in plan_splits(found, found.begin, found.end, SplitSizes(SPLIT_BYTES)):
        for _ in read_split(split, columns, context):
            pass
        done += split.end - split.begin
        if done >= limit:
            break
    return done / (time.perf_counter() - started) / _GIGA


def looped_gigabytes_per_second(log: WrittenLog) -> float:
    """The same columns of one split, with a `struct` loop into lists and those into a batch: the obvious
    implementation.

    Measured under the same conditions: the file is in the page cache, and reading it is part of the work.
    """
    import pyarrow as pa

    from dledger_spark.schema import COLUMNS

    types = [next(one.arrow for one in COLUMNS if one.name == name) for name in _DECODED]
    types[_DECODED.index("properties")] = pa.string()
    started = time.perf_counter()
    with min((log.directory / "data").iterdir()).open("rb") as file:
        data = file.read(SPLIT_BYTES)
    columns: list[list[object]] = [[] for _ in _DECODED]
    at = 0
    while at + HEADER.size + _MESSAGE.size < len(data):
        entry = HEADER.unpack_from(data, at)
        if at + entry[1] > len(data):
            break
        head = _MESSAGE.unpack_from(data, at + HEADER.size)
        body_at = at + HEADER.size + _MESSAGE.size
        topic_at = body_at + head[-1]
        topic_end = topic_at + 1 + data[topic_at]
        row = (
            entry[2], data[topic_at + 1 : topic_end].decode(), head[3], head[5], head[4], head[7], head[8] * 1000,
            head[11] * 1000, data[topic_end + 2 : at + entry[1]].decode(), data[body_at:topic_at],
        )  # fmt: skip
        for column, value in zip(columns, row, strict=True):
            column.append(value)
        at += entry[1]
    pa.RecordBatch.from_arrays([pa.array(one, kind) for one, kind in zip(columns, types, strict=True)], list(_DECODED))
    return at / (time.perf_counter() - started) / _GIGA


def measure_decode(context: Context, _names: frozenset[str]) -> Iterator[Figure]:
    """Alternating rounds on one processor, the log in the page cache."""
    log = the_log(context)
    with one_processor():
        decoded_gigabytes_per_second(log, _DECODED)
        full, headers, looped = [], [], []
        for _ in range(context.settings.rounds):
            full.append(decoded_gigabytes_per_second(log, _DECODED))
            headers.append(decoded_gigabytes_per_second(log, _DECODED_HEADERS))
            looped.append(looped_gigabytes_per_second(log))
    yield Figure.median("spark_decode", full, "GB/s", STRUCT_LOOP, looped)
    yield Figure.median("spark_decode", full, "GB/s", "header columns only", headers)


class Scanner:
    """A session in a child process, on a given number of processors."""

    def __init__(self, context: Context, threads: int, stack: ExitStack) -> None:
        self._child = stack.enter_context(PythonChild(CHILD, [], context.directory / f"spark-{threads}.log"))
        scratch = context.directory / f"spark-{threads}"
        scratch.mkdir(exist_ok=True)
        self._child.ask({"do": "start", "threads": threads, "scratch": str(scratch)}, START_SECONDS_MAX)

    def seconds(self, log: WrittenLog, columns: str = "all", split: str = SPLIT) -> float:
        """One scan of the log."""
        return self._scan({"format": "dledger", "path": str(log.directory), "columns": columns, "split": split}, log)

    def parquet_seconds(self, log: WrittenLog, parquet: Path, columns: str = "all") -> float:
        """One scan of the same rows in Parquet."""
        return self._scan({"format": "parquet", "path": str(parquet), "columns": columns}, log)

    def _scan(self, command: dict[str, object], log: WrittenLog) -> float:
        answer = self._child.ask({"do": "scan", **command}, SCAN_SECONDS_MAX)
        if answer["rows"] != log.records:
            raise RuntimeError(f"{answer['rows']} rows were read of {log.records}")
        return float(answer["seconds"])

    def convert(self, log: WrittenLog, parquet: Path, columns: str = "all") -> None:
        """Write the log's rows as Parquet (snappy)."""
        command = {"format": "dledger", "path": str(log.directory), "columns": columns}
        self._child.ask({"do": "convert", "target": str(parquet), **command}, SCAN_SECONDS_MAX)

    def worker_megabytes(self) -> float:
        """The peak memory of any of its Python workers."""
        return float(self._child.ask({"do": "memory"}, START_SECONDS_MAX)["bytes"]) / 1e6


def _best(rounds: int, scan: Callable[[], float]) -> float:
    """The fastest of several rounds after a warm-up: interference by the machine is not a property of ours."""
    scan()
    return min(scan() for _ in range(rounds))


def measure_scans(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """One session on one processor, then one on two."""
    log = the_log(context)
    rounds = context.settings.rounds
    with ExitStack() as two_cores:
        parquet = context.directory / "parquet"
        two = Scanner(context, 2, two_cores)
        if "spark_scan" in names:
            two.convert(log, parquet)
        with ExitStack() as one_core:
            one = Scanner(context, 1, one_core)
            bodies = log.log_bytes / _GIGA / _best(rounds, lambda: one.seconds(log))
            if "spark_scan" in names:
                by_parquet = _best(rounds, lambda: one.parquet_seconds(log, parquet))
                yield Figure("spark_scan", bodies, "GB/s", PARQUET, log.log_bytes / _GIGA / by_parquet)
            if "spark_scan_headers" in names:
                headers = log.log_bytes / _GIGA / _best(rounds, lambda: one.seconds(log, "headers"))
                yield Figure("spark_scan_headers", headers, "GB/s", WITH_BODIES, bodies)
            if "spark_worker_memory" in names:
                megabytes = one.worker_megabytes()
        if "spark_scaling" in names:
            doubled = log.log_bytes / _GIGA / _best(rounds, lambda: two.seconds(log))
            yield Figure("spark_scaling", doubled, "GB/s", ONE_CORE, bodies)
    if "spark_worker_memory" in names:
        with ExitStack() as small:
            scanner = Scanner(context, 1, small)
            scanner.seconds(log, split=SMALL_SPLIT)
            yield Figure("spark_worker_memory", megabytes, "MB", SMALL_SPLITS, scanner.worker_megabytes())


def measure_typed(context: Context, _names: frozenset[str]) -> Iterator[Figure]:
    """Bodies of JSON as columns, beside Parquet with these columns, on one processor."""
    directory = context.settings.directory or context.kept
    spec = LogSpec(log_bytes=context.settings.sized(TYPED_LOG_BYTES), json_bodies=True)
    log = cached_log(directory, spec)
    rounds = context.settings.rounds
    with ExitStack() as stack:
        parquet = context.directory / "parquet-typed"
        scanner = Scanner(context, 1, stack)
        scanner.convert(log, parquet, "typed")
        typed = log.log_bytes / _GIGA / _best(rounds, lambda: scanner.seconds(log, "typed"))
        by_parquet = log.log_bytes / _GIGA / _best(rounds, lambda: scanner.parquet_seconds(log, parquet, "typed"))
    yield Figure("spark_scan_typed", typed, "GB/s", PARQUET, by_parquet)


DECODE: Final = Scenario("decoding the log without Spark", ("spark_decode",), measure_decode, constant(4))
SCANS: Final = Scenario(
    "scanning the log with Spark",
    ("spark_scan", "spark_scan_headers", "spark_scaling", "spark_worker_memory"),
    measure_scans,
    constant(8),
)
TYPED: Final = Scenario("scanning JSON bodies as columns", ("spark_scan_typed",), measure_typed, constant(1))
