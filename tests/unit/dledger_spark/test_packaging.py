"""The archive for ``--py-files``."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dledger_spark.packaging import main, write_zip


def test_the_archive_has_all_that_a_worker_imports(tmp_path: Path) -> None:
    """The source and the jobs are imported from it alone; the same sources make the same bytes."""
    path = tmp_path / "dledger.zip"
    assert write_zip(path) == len(zipfile.ZipFile(path).namelist())
    first = path.read_bytes()
    write_zip(path)

    code = (
        f"import sys; sys.path = [{str(path)!r}, *(one for one in sys.path if 'lib' in one)]\n"
        "import dledger_spark.source.datasource, dledger_spark.jobs.export, pyspark_dledger\n"
        "print(dledger_spark.__file__)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)

    assert path.read_bytes() == first
    assert done.stdout.startswith(str(path))


def test_wrong_usage_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    assert main([]) == 2
    assert main([str(tmp_path / "a.zip")]) == 0
    assert "--py-files" in capsys.readouterr().out
