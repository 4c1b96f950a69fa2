"""What is said to Spark before it starts, without starting it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dledger_spark import session, spark_session
from dledger_spark.errors import JavaMissingError, PipelineError
from dledger_spark.session import java_version, known_settings, start_settings

CLUSTER = "spark://10.9.8.7:7077"


class Builder:
    """Stands for Spark's: keeps what it is told, and starts nothing."""

    def __init__(self, **conf: str) -> None:
        self.told: dict[str, str] = {}
        self.conf = conf

    def config(self, name: str, value: str) -> Builder:
        """Keep it."""
        self.told[name] = value
        return self

    appName = remote = lambda self, _: self  # noqa: N815 - Spark's names

    def getOrCreate(self) -> SimpleNamespace:  # noqa: N802 - as above
        """A session with the settings that it was made with."""
        held = self.conf
        conf = SimpleNamespace(getAll=dict(held), set=held.__setitem__)
        context = SimpleNamespace(getConf=dict)
        return SimpleNamespace(conf=conf, sparkContext=context)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This process's environment, where Spark's directory is empty, any Java will do, and there is no session."""
    environment = {"SPARK_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setattr("pyspark.SparkConf.getAll", lambda _: [])  # a JVM of this process knows its first session's
    monkeypatch.setattr(session, "java_version", lambda _: 17)
    return environment


@pytest.fixture
def builder(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Builder:
    """Instead of Spark's."""
    builder = Builder()
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", builder)
    return builder


def fake_java(directory: Path, says: str) -> dict[str, str]:
    """An environment whose java says so."""
    path = directory / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    path.chmod(0o755)
    return {"JAVA_HOME": str(directory)}


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "21" 2023-09-19', 21),
        ('openjdk version "25-ea"', 25),
    ],
)
def test_a_java_that_will_do_is_recognised(tmp_path: Path, says: str, version: int) -> None:
    """However it writes its version."""
    assert java_version(fake_java(tmp_path, says)) == version


@pytest.mark.parametrize(
    ("says", "message"),
    [('openjdk version "1.8.0_412"', "is Java 8"), ('openjdk version "11.0.2"', "is Java 11"), ("", "does not report")],
)
def test_a_java_that_is_too_old_is_told_with_what_to_install(tmp_path: Path, says: str, message: str) -> None:
    """Not a stack trace of class file versions."""
    with pytest.raises(JavaMissingError, match=message) as refused:
        java_version(fake_java(tmp_path, says))

    assert "apt-get install openjdk-17" in str(refused.value)


@pytest.mark.parametrize("environment", [{"PATH": "/nonexistent"}, {"JAVA_HOME": "/nonexistent"}])
def test_a_missing_java_is_told_with_what_to_install(environment: dict[str, str]) -> None:
    """Neither in PATH nor in JAVA_HOME."""
    with pytest.raises(JavaMissingError, match=r"Spark needs Java 17 or newer, and .*: install one"):
        java_version(environment)


def write_defaults(directory: Path, text: str) -> None:
    """A ``spark-defaults.conf``."""
    directory.mkdir()
    (directory / "spark-defaults.conf").write_text(text)


def test_what_the_user_says_is_never_overridden(environment: dict[str, str], tmp_path: Path) -> None:
    """Neither arguments nor spark-defaults.conf; the rest is set."""
    write_defaults(tmp_path / "conf", "# ours\nspark.ui.enabled  true\nspark.master=spark://h:7077\n")

    submitted = start_settings(None, known_settings(environment, {"spark.ui.showConsoleProgress": "true"}))
    local = start_settings("local[2]", known_settings(environment, {}))

    assert "spark.master" not in submitted
    assert "spark.ui.showConsoleProgress" not in submitted
    assert "spark.driver.host" not in submitted
    assert local["spark.master"] == "local[2]"
    assert "spark.ui.enabled" not in local
    assert local["spark.driver.bindAddress"] == "127.0.0.1"


@pytest.mark.parametrize(("master", "expected"), [("local[2]", True), (CLUSTER, True), ("yarn", False)])
def test_workers_of_python_use_sockets_of_files_where_their_paths_are_short(master: str, expected: bool) -> None:
    """A container's temporary directory on YARN is longer than the path of such a socket may be."""
    assert ("spark.python.unix.domain.socket.enabled" in start_settings(master, {})) is expected


@pytest.mark.parametrize("where", ["argument", "setting", "file", "MASTER", "PYSPARK_SUBMIT_ARGS"])
def test_executors_elsewhere_can_reach_the_driver_wherever_their_master_is_named(
    where: str, builder: Builder, environment: dict[str, str], tmp_path: Path
) -> None:
    """Loopback is for masters on this machine."""
    if where == "file":
        write_defaults(tmp_path / "conf", f"spark.master {CLUSTER}\n")
    elif where == "MASTER":
        environment["MASTER"] = CLUSTER
    elif where == "PYSPARK_SUBMIT_ARGS":
        environment["PYSPARK_SUBMIT_ARGS"] = f"--conf spark.a=b --master {CLUSTER} pyspark-shell"

    spark_session(CLUSTER if where == "argument" else None, **({"spark.master": CLUSTER} if where == "setting" else {}))

    assert "SPARK_LOCAL_IP" not in environment
    assert "spark.driver.host" not in builder.told
    assert builder.told.get("spark.master", CLUSTER) == CLUSTER


@pytest.mark.parametrize("master", [None, "local[2]", "spark://127.0.0.1:7077"])
def test_a_driver_beside_its_executors_listens_on_loopback_only(
    master: str | None, builder: Builder, environment: dict[str, str]
) -> None:
    """Spark would choose the network's address, where everybody may send jobs."""
    spark_session(master)

    assert environment["SPARK_LOCAL_IP"] == "127.0.0.1"


def test_settings_of_submit_arguments_stay(builder: Builder, environment: dict[str, str]) -> None:
    """The builder's would win over them."""
    environment["PYSPARK_SUBMIT_ARGS"] = "--master=local[3] -c spark.ui.enabled=true --conf=spark.x='a b' pyspark-shell"

    spark_session()

    assert not {"spark.master", "spark.ui.enabled"} & builder.told.keys()
    assert known_settings(environment, {})["spark.x"] == "a b"


def test_files_of_an_installed_spark_are_not_hidden(
    builder: Builder, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package from pip may have a ``conf``, too: our own directory is for those that have none."""
    del environment["SPARK_HOME"]
    monkeypatch.setattr("pyspark.find_spark_home._find_spark_home", lambda: str(tmp_path))
    write_defaults(tmp_path / "conf", f"spark.master {CLUSTER}\n")

    spark_session()

    assert "SPARK_CONF_DIR" not in environment
    assert "spark.master" not in builder.told


def test_what_a_session_holds_stays_and_the_rest_is_set(builder: Builder) -> None:
    """Whoever set it: a file, an argument, or somebody while it ran."""
    builder.conf["spark.sql.session.timeZone"] = "Asia/Tokyo"

    spark_session()

    assert builder.conf == {
        "spark.sql.session.timeZone": "Asia/Tokyo",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.parquet.compression.codec": "zstd",
    }


def test_a_jvm_that_ends_at_once_is_told_with_its_master(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a master that is none: no stack trace of the gateway."""
    from pyspark.errors import PySparkRuntimeError

    def fail() -> None:
        raise PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={})

    monkeypatch.setattr(builder, "getOrCreate", fail)

    with pytest.raises(PipelineError, match="does not start with master bogus"):
        spark_session("bogus")


def test_a_package_that_connect_lacks_is_told_with_what_to_install(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client needs more than classic Spark."""
    from pyspark.errors import PySparkImportError

    def fail() -> None:
        raise PySparkImportError(
            errorClass="PACKAGE_NOT_INSTALLED", messageParameters={"package_name": "Pandas", "minimum_version": "2.2.0"}
        )

    monkeypatch.setattr(builder, "getOrCreate", fail)

    with pytest.raises(PipelineError, match=r"Pandas.*run pip install .*'pandas"):
        spark_session("sc://h:15002")


def test_the_command_line_does_not_load_spark() -> None:
    """``import dledger_spark`` and its options cost nothing to those who do not use Spark."""
    code = "import sys, dledger_spark.options, dledger_cli.entry; print({'pyspark', 'pyarrow'} & set(sys.modules))"

    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )

    assert said.stdout.strip() == "set()"
