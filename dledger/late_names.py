"""Names of a package that are loaded when first used (PEP 562), so that commands load only what they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A ``__getattr__`` for ``package``. ``homes`` maps each name to the module that defines it."""

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home), name)

    return load
