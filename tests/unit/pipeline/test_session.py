"""What is said to Spark before it starts, without starting it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import JavaMissingError
from pipeline.session import java_version, start_settings


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
    [('openjdk version "1.8.0_412"', "is Java 8"), ('openjdk version "11.0.2"', "is Java 11"), ("", "does not tell")],
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


def test_what_the_user_says_is_never_overridden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither arguments nor spark-defaults.conf; the rest is set."""
    (tmp_path / "spark-defaults.conf").write_text("# ours\nspark.ui.enabled  true\nspark.master=spark://h:7077\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr("pyspark.SparkConf.getAll", lambda _: [])  # a JVM of this process knows its first session's

    submitted = start_settings(None, {"spark.ui.showConsoleProgress": "true"})
    local = start_settings("local[2]", {})

    assert "spark.master" not in submitted
    assert "spark.ui.showConsoleProgress" not in submitted
    assert "spark.driver.host" not in submitted
    assert local["spark.master"] == "local[2]"
    assert "spark.ui.enabled" not in local
    assert local["spark.driver.bindAddress"] == "127.0.0.1"


def test_the_command_line_does_not_load_spark() -> None:
    """``import pipeline`` and its options cost nothing to those who do not use Spark."""
    code = "import sys, pipeline, pipeline.options, cluster.entry; print({'pyspark', 'pyarrow'} & set(sys.modules))"

    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )

    assert said.stdout.strip() == "set()"
