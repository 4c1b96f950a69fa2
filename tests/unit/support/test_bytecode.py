"""Byte code of test modules: which must be compiled before workers start."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import bytecode


def test_the_byte_code_of_a_module_that_runs_is_where_pytest_keeps_it() -> None:
    """Another release of pytest that names it otherwise fails here, and does not compile all modules in each run."""
    here = Path(__file__)
    assert bytecode.compiled(here).exists()
    assert bytecode.stale([here]) == []


def test_a_module_without_byte_code_or_with_older_one_is_stale(tmp_path: Path) -> None:
    """One that was never loaded, and one that was edited since; none else."""
    modules = [tmp_path / f"test_{name}.py" for name in ("new", "edited", "same")]
    for number, module in enumerate(modules):
        module.write_text("")
        os.utime(module, (100, 100))
        if number:
            code = bytecode.compiled(module)
            code.parent.mkdir(exist_ok=True)
            code.write_bytes(b"")
            os.utime(code, (99, 99) if number == 1 else (100, 100))
    assert bytecode.stale(modules) == modules[:2]
