"""Creates a Spark session suited to the log. The user's settings always take precedence.

Defaults are set on the builder only if neither the user's arguments, nor the environment, nor Spark's own files
(``spark-defaults.conf``, ``spark-submit --conf``) set them. In an existing session, only settings that can change at
runtime are set, unless the session already has them.

Topics are tables of Spark's catalog: ``SELECT … FROM dledger.orders``. A catalog is a class in Spark's JVM, which
Python cannot add. So each topic becomes a table of a database in the session's own catalog, with the options to read
it. In a session without a metastore the tables end with it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dledger.command_line.flag_values import install_command
from dledger_spark.errors import JavaMissingError, OptionError, PipelineError
from dledger_spark.options import ReadOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_VERSION_MIN: Final = 17
_JAVA_TIMEOUT_S: Final = 30
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_INSTALL: Final = (
    "install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; Fedora: dnf install "
    "java-17-openjdk-headless; macOS: brew install openjdk@17) or set JAVA_HOME"
)

RUNTIME_DEFAULTS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
}
"""Settings that can be changed at any time."""
_SOCKETS: Final = "spark.python.unix.domain.socket.enabled"
START_DEFAULTS: Final[Mapping[str, str]] = {
    _SOCKETS: "true",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings that must be set before the JVM starts."""
LOCAL_DEFAULTS: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""Settings for a session in one process on one machine."""
_DEFAULT_MASTER: Final = "local[*]"
_MANY: Final = 1 << 16
"""More than the processors of any cluster."""
_LOG4J: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""
"""Errors only. Python sessions set the level to that of the gateway, and would otherwise log warnings."""


def spark_session(master: str | None = None, app_name: str = "dledger", **conf: object) -> SparkSession:
    """The running session, or a new one.

    ``master``: as in Spark (default: ``local[*]``); ``sc://…`` connects to a Spark Connect server, as does
    ``SPARK_REMOTE``; ``SPARK_REMOTE=local[2]`` starts one here. ``conf``: Spark settings, in which ``_`` stands
    for ``.`` (``spark_driver_memory="4g"``) unless the name has dots (``**{"spark.driver.memory": "4g"}``). Raises
    ``JavaMissingError``, ``PipelineError``.
    """
    return open_session(master, app_name, conf)


def open_session(
    master: str | None, app_name: str, conf: Mapping[str, object], defaults: Mapping[str, str] = START_DEFAULTS
) -> SparkSession:
    """The same with other defaults for settings that must be set before the JVM starts. Raises the same errors."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise PipelineError(f"Spark is not installed ({error}): run {install_command('spark')}") from error
    settings = {_setting_name(name): _setting_text(value) for name, value in conf.items()}
    master = master or settings.pop("spark.master", None)
    builder: Any = SparkSession.builder.appName(app_name)  # Any: the builder of classic Spark and of Connect
    for name, value in settings.items():
        builder = builder.config(name, value)
    remote = master if master is not None and master.startswith("sc://") else os.environ.get("SPARK_REMOTE")
    running = SparkSession.getActiveSession()
    if remote or (running is not None and is_remote(running)):
        connect = builder.remote(remote) if remote else builder
        return _with_defaults(_remote_session(connect.getOrCreate, remote))
    if running is not None:
        return _with_defaults(builder.getOrCreate())
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit has already started a JVM
    if submitted:
        _meet_the_jvm()
    said = known_settings(os.environ, settings)
    if not submitted:
        _prepare_environment(os.environ, master or said.get("spark.master"))
        java_version(os.environ)
    for name, value in start_settings(master, said, defaults).items():
        builder = builder.config(name, value)
    session = _with_defaults(_started(builder.getOrCreate, master or said.get("spark.master")))
    if session.sparkContext.getConf().get("spark.submit.pyFiles"):
        _register_shipped(session)
    return session


def _remote_session(make: Callable[[], SparkSession], remote: str | None) -> SparkSession:
    """A Spark Connect session. Raises ``PipelineError`` if its client lacks a package."""
    if remote and remote.startswith("local"):  # start a server in this machine's JVM
        _prepare_environment(os.environ, remote)
        java_version(os.environ)
    try:
        return make()
    except ImportError as error:
        raise PipelineError(
            f"Spark Connect's client lacks a package ({error}): run {install_command('spark-connect')}"
        ) from error


def _started(make: Callable[[], SparkSession], master: str | None) -> SparkSession:
    """A session with a new JVM. Raises ``PipelineError`` if it exits at once."""
    from pyspark.errors import PySparkRuntimeError

    try:
        return make()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise PipelineError(
            f"Spark does not start with master {master or _DEFAULT_MASTER}: see its JVM's messages on the console"
        ) from error


def _meet_the_jvm() -> None:
    """Under ``spark-submit``, only its JVM knows the settings, such as the master."""
    from pyspark import SparkContext

    SparkContext._ensure_initialized()  # private, but the builder calls it, too


def _register_shipped(session: SparkSession) -> None:
    """Register the formats: Spark discovers them in installed packages, but not in ``--py-files``."""
    from dledger_spark.source.datasource import DLedgerDataSource

    session.dataSource.register(DLedgerDataSource)


def start_settings(
    master: str | None, said: Mapping[str, str], defaults: Mapping[str, str] = START_DEFAULTS
) -> dict[str, str]:
    """Settings to pass to the builder before the JVM starts, besides those the user ``said`` (``known_settings``)."""
    chosen_master = master or said.get("spark.master") or _DEFAULT_MASTER
    if chosen_master.startswith("local"):
        defaults = {**defaults, **LOCAL_DEFAULTS}
    chosen = {name: value for name, value in defaults.items() if name not in said}
    if chosen_master.startswith("yarn"):  # a container's temporary directory is longer than a socket's path may be
        chosen.pop(_SOCKETS, None)
    if master is not None or "spark.master" not in said:
        chosen["spark.master"] = chosen_master
    return chosen


def known_settings(environment: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The user's settings from all sources; later ones take precedence, as in Spark."""
    from pyspark import SparkConf

    environments_master = {"spark.master": environment["MASTER"]} if environment.get("MASTER") else {}
    return (
        environments_master
        | _files_settings(environment)
        | _submit_settings(environment)
        | dict(SparkConf(loadDefaults=True).getAll())
        | dict(settings)
    )


def _conf_directory(environment: Mapping[str, str]) -> Path:
    """Spark's configuration directory, also if Spark is an installed Python package."""
    from pyspark.find_spark_home import _find_spark_home

    return Path(environment.get("SPARK_CONF_DIR") or f"{environment.get('SPARK_HOME') or _find_spark_home()}/conf")


def _files_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings in ``spark-defaults.conf``: the JVM reads them only after applying the builder's settings."""
    path = _conf_directory(environment) / "spark-defaults.conf"
    if not path.is_file():
        return {}
    pairs = (re.split(r"[\s=:]+", line.strip(), maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and not pair[0].startswith("#")}


def _submit_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The master and settings in ``PYSPARK_SUBMIT_ARGS``: ``--master local[2] --conf a=b pyspark-shell``.

    The JVM is started with them, but the builder's settings would take precedence.
    """
    found: dict[str, str] = {}
    words = iter(shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", "")))
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--master", "--conf", "-c"):
            text = value if equals else next(words, "")
            name, _, value = ("spark.master", "", text) if option == "--master" else text.partition("=")
            found[name] = value
    return found


def _with_defaults(session: SparkSession) -> SparkSession:
    """Set runtime defaults unless they are set in a file, by an argument or in the session.

    A session's settings include all of these, but not Spark's own defaults.
    """
    held = session.conf.getAll
    for name, value in RUNTIME_DEFAULTS.items():
        if name not in held:
            session.conf.set(name, value)
    return session


def tasks_at_once(session: SparkSession) -> int:
    """How many tasks run at a time, as far as Spark knows: its default number of partitions."""
    if not is_remote(session):
        return session.sparkContext.defaultParallelism
    from pyspark.sql import functions as f

    return session.range(_MANY).select(f.spark_partition_id()).distinct().count()


def is_remote(session: SparkSession) -> bool:
    """Whether it is a Spark Connect session, whose context is on the server."""
    return "connect" in type(session).__module__


def _prepare_environment(environment: MutableMapping[str, str], master: str | None) -> None:
    """Set the environment that Spark reads at startup: the workers' interpreter, loopback, quiet logs."""
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master is None or master.startswith(("local", "spark://127.0.0.1:", "spark://localhost:")):
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if "SPARK_CONF_DIR" not in environment and not _conf_directory(environment).is_dir():
        environment["SPARK_CONF_DIR"] = str(_quiet_conf_directory())


def _quiet_conf_directory() -> Path:
    """A directory with a ``log4j2.properties`` that logs only errors; shared by all sessions of a user."""
    directory = Path(tempfile.gettempdir()) / f"dledger-spark-conf-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PipelineError(f"{directory} belongs to another user: set SPARK_CONF_DIR to a directory of your own")
    path = directory / "log4j2.properties"
    temporary = directory / f"log4j2.{os.getpid()}.tmp"
    temporary.write_text(_LOG4J, encoding="ascii")
    temporary.replace(path)
    return directory


def java_version(environment: Mapping[str, str]) -> int:
    """The major version of the Java that Spark will use. Raises ``JavaMissingError``."""
    home = environment.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java", path=environment.get("PATH"))
    if java is None or not os.access(java, os.X_OK):
        where = f"JAVA_HOME={home} has no bin/java" if home else "no java in PATH"
        raise JavaMissingError(f"Spark needs Java {JAVA_VERSION_MIN} or newer, and {where}: {_INSTALL}")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False)
    match = _VERSION.search(said.stderr + said.stdout)
    if match is None:
        raise JavaMissingError(f"{java} -version does not report its version ({said.stderr.strip()[:200]}): {_INSTALL}")
    version = int(match[2] or 0) if match[1] == "1" else int(match[1])  # Java 8 reports version 1.8
    if version < JAVA_VERSION_MIN:
        raise JavaMissingError(f"Spark needs Java {JAVA_VERSION_MIN} or newer; {java} is Java {version}: {_INSTALL}")
    return version


def _setting_name(name: str) -> str:
    return name if "." in name else name.replace("_", ".")


def _setting_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
