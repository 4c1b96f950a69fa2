"""The command that an error names for a missing package can be run as it stands, wherever the project came from."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from dledger.command_line import flag_values

REQUIREMENTS = [
    "click<9,>=8.1",
    'starlette<1,>=0.47; extra == "console"',
    'uvicorn<1; extra == "console"',
    'pandas<3; extra == "spark-connect"',
    'pyspark<5; extra == "spark"',
    'dledger[spark]; extra == "spark-connect"',
]


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("console", "pip install 'starlette<1,>=0.47' 'uvicorn<1'"),
        ("spark-connect", "pip install 'pandas<3' 'pyspark<5'"),
        ("no-such", "pip install '.[no-such]' in a clone of the project"),
    ],
)
def test_the_command_names_the_packages_of_the_extra(extra: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their versions, quoted for a shell, and those of an extra that it contains."""
    monkeypatch.setattr(flag_values, "requires", lambda _name: REQUIREMENTS)

    assert flag_values.install_command(extra) == command


def test_every_extra_that_errors_name_exists() -> None:
    """In this installation's own metadata."""
    named = {
        extra
        for package in ("dledger", "rocketstore", "dledger_spark", "dledger_cli", "cluster")
        for path in (Path(__file__).parents[3] / package).rglob("*.py")
        for extra in re.findall(r"""\b(?:install_command|missing_extra)\(["']([\w-]+)""", path.read_text())
    }

    assert named >= {"console", "delta", "spark", "spark-connect"}
    assert named <= set(metadata.metadata("dledger").get_all("Provides-Extra") or [])
    assert not [extra for extra in named if "clone" in flag_values.install_command(extra)]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is said if nothing is."""
    monkeypatch.setattr(flag_values, "requires", lambda _name: REQUIREMENTS)

    assert flag_values.missing_extra("console", "the page", ("click", "sys")) == ""
    assert flag_values.missing_extra("console", "the page", ("click", "no_such_package")) == (
        "the page requires no_such_package, not installed here: run pip install 'starlette<1,>=0.47' 'uvicorn<1'"
    )
