"""Types of command-line flags, and which packages a command lacks.

Flags are parsed by ``dledger.values``; their limits are click's, and shown in the help.

The command that installs the packages of an extra comes from this installation's own metadata: the project is not on
PyPI, and an installation does not know where it came from. The packages of its extras are.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from dledger import values


def missing_extra(extra: str, needed_by: str, packages: Sequence[str]) -> str:
    """Which of these packages are missing and how to install them; empty if all are there."""
    missing = [name for name in packages if find_spec(name) is None]
    if not missing:
        return ""
    return f"{needed_by} requires {' and '.join(missing)}, not installed here: run {install_command(extra)}"


def install_command(extra: str) -> str:
    """``pip install 'starlette<1,>=0.47' …``; from uninstalled sources, the command for a clone."""
    try:
        requirements = requires("dledger") or []
    except PackageNotFoundError:
        requirements = []
    packages = [shlex.quote(one) for one in dict.fromkeys(_packages(extra, requirements))]
    return "pip install " + (" ".join(packages) or f"'.[{extra}]' in a clone of the project")


def _packages(extra: str, requirements: list[str]) -> Iterator[str]:
    for requirement in requirements:
        package, _, marker = (part.strip() for part in requirement.partition(";"))
        if marker.replace("'", '"').replace(" ", "") != f'extra=="{extra}"':
            continue
        if package.startswith("dledger["):
            for other in package[len("dledger[") : -1].split(","):
                yield from _packages(other.strip(), requirements)
        else:
            yield package


INT64_MAX: Final = (1 << 63) - 1


class Whole(click.IntRange):
    """A whole number, at most the largest of 64 bits, to fit the wire."""

    name = "number"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number, within its range."""
        try:
            number = int(str(value))
        except ValueError:
            self.fail(f"{str(value)[:64]!r} is not a whole number", param, ctx)
        if number > INT64_MAX:
            self.fail(f"{str(value)[:64]} is too large: numbers go to {INT64_MAX:,}", param, ctx)
        if problem := _problem(self, number):
            self.fail(problem, param, ctx)
        return number

    def _describe_range(self) -> str:
        return _in_words(self)


class Size(click.IntRange):
    """A number of bytes, also ``64k`` or ``4g``."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes, within its range."""
        try:
            size = values.parse_size(str(value).strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if problem := _problem(self, size):
            self.fail(problem, param, ctx)
        return size

    def _describe_range(self) -> str:
        return _in_words(self)


class Number(click.FloatRange):
    """A finite number: click's own ranges accept NaN, which is beyond every bound."""

    name = "number"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = _finite(str(value))
        if number is None:
            self.fail(f"{value!r} is not a finite number", param, ctx)
        if problem := _problem(self, number):
            self.fail(problem, param, ctx)
        return number

    def _describe_range(self) -> str:
        return _in_words(self)


class Seconds(click.FloatRange):
    """A duration: ``5``, ``0.5``, ``500ms``, ``2m``."""

    name = "seconds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = _seconds(str(value).strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if problem := _problem(self, seconds):
            self.fail(problem, param, ctx)
        return seconds

    def _describe_range(self) -> str:
        return _in_words(self)


class NewFile(click.Path):
    """A file that is written at the end, perhaps hours later: that it can be is checked before."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.exists() and not path.is_file():  # such as /dev/stdout
            return path
        if not path.parent.is_dir():
            self.fail(f"there is no directory {path.parent}", param, ctx)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            self.fail(f"no file can be written into {path.parent}", param, ctx)
        return path


_Range = click.IntRange | click.FloatRange


def _problem(limits: _Range, number: float) -> str:
    """Why the number is beyond its limits; empty if it is not."""
    low, high = limits.min, limits.max
    too_low = low is not None and (number < low or (limits.min_open and number == low))
    too_high = high is not None and (number > high or (limits.max_open and number == high))
    shown = f"{number:,}".removesuffix(".0")
    return f"{shown} is not allowed: use {_in_words(limits)}" if too_low or too_high else ""


def _in_words(limits: _Range) -> str:
    """The limits, for the help and for errors."""
    low = None if limits.min is None else f"{limits.min:,}"
    high = None if limits.max is None else f"{limits.max:,}"
    if low is None:
        return f"{'less than' if limits.max_open else 'at most'} {high}"
    if high is None:
        return f"more than {low}" if limits.min_open else f"{low} or more"
    return f"more than {low}, at most {high}" if limits.min_open else f"{low} to {high}"


def _seconds(text: str) -> float:
    try:
        return values.parse_duration_ms(text, unit="s") / 1000
    except ValueError:
        if (seconds := _finite(text)) is None:  # it may be in the form 1e-3
            raise
        return seconds


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def addresses(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """A callback for an option that holds ``HOST:PORT,…``; None if it is not given."""
    if text is None:
        return None
    try:
        return values.parse_addresses(text)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None
