"""``dledger deploy``: the files of the repository, as an installed package has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger_cli.cli import main
from dledger_cli.commands.deploy import KINDS

DEPLOY = Path(__file__).parents[4] / "cluster" / "deploy"


def deploy(*words: str) -> Result:
    return CliRunner().invoke(main, ["deploy", *words])


def test_every_directory_of_deployment_files_is_a_kind() -> None:
    """A new directory below ``cluster/deploy`` is shown, too."""
    assert {one.name for one in DEPLOY.iterdir() if one.is_dir()} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_all_files_of_a_kind_are_written_as_they_are(kind: str, tmp_path: Path) -> None:
    """Also those in directories below."""
    into = tmp_path / "made"

    result = deploy("show", kind, "--into", str(into))

    assert result.exit_code == 0, result.output
    expected = {
        path.relative_to(DEPLOY / kind): path.read_text() for path in (DEPLOY / kind).rglob("*") if path.is_file()
    }
    assert {path.relative_to(into): path.read_text() for path in into.rglob("*") if path.is_file()} == expected
    assert expected


def test_one_file_is_printed_exactly() -> None:
    """So that its output can be redirected into the file."""
    result = deploy("show", "systemd", "--file", "dledger-broker.service")

    assert (result.exit_code, result.output) == (0, (DEPLOY / "systemd/dledger-broker.service").read_text())


def test_all_files_are_printed_with_their_names() -> None:
    """Each after a line that is a comment in YAML and in units."""
    result = deploy("show", "compose")

    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if line.startswith("# ----- ")] == [
        f"# ----- compose/{path.name}" for path in sorted((DEPLOY / "compose").iterdir())
    ]


def test_an_unknown_file_is_refused_with_those_there_are() -> None:
    """The names are in the error."""
    result = deploy("show", "systemd", "--file", "x.service")

    assert result.exit_code == 1
    assert "no file 'x.service' for systemd: choose from dledger-broker-groups.conf, " in result.output


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    """If one exists, none is written."""
    (tmp_path / "dledger.service").write_text("mine")

    result = deploy("show", "systemd", "--into", str(tmp_path))

    assert result.exit_code == 1
    assert "dledger.service exists already: move it away, or choose another directory" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["dledger.service"]
    assert (tmp_path / "dledger.service").read_text() == "mine"


@pytest.mark.parametrize("name", ["dledger.yaml", "groups/a.conf"])
def test_a_link_to_a_file_that_is_not_there_yet_is_not_followed(name: str, tmp_path: Path) -> None:
    """It would make a file in another directory; one below is looked at, too."""
    into = tmp_path / "made"
    (into / name).parent.mkdir(parents=True)
    (into / name).symlink_to(tmp_path / "elsewhere")

    result = deploy("show", "kubernetes", "--into", str(into))

    assert result.exit_code == 1
    assert f"{name} exists already" in result.output
    assert not (tmp_path / "elsewhere").exists()
    assert [path for path in into.rglob("*") if path.is_file()] == []


def test_one_file_is_written_alone(tmp_path: Path) -> None:
    """With ``--file``, the other ones are not."""
    result = deploy("show", "kubernetes", "--file", "groups/a.conf", "--into", str(tmp_path))

    assert (result.exit_code, result.output) == (0, f"{tmp_path}/groups/a.conf\n")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "groups/a.conf"]


def test_the_list_as_json_names_kinds_and_files() -> None:
    """The same files, with what each kind is."""
    listed = json.loads(deploy("list", "--json").output)

    files = [(kind, str(path.relative_to(DEPLOY / kind))) for kind in KINDS for path in (DEPLOY / kind).rglob("*")]
    expected = {(kind, name, KINDS[kind]) for kind, name in files if (DEPLOY / kind / name).is_file()}
    assert {(one["kind"], one["file"], one["about"]) for one in listed} == expected
    assert len(listed) == len(expected)


def test_the_list_names_every_file() -> None:
    """A line for each."""
    listed = deploy("list").output

    for kind in KINDS:
        for path in (DEPLOY / kind).rglob("*"):
            assert not path.is_file() or f" {path.relative_to(DEPLOY / kind)} " in listed
