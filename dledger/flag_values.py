"""Types of command-line flags, parsed by ``dledger.values``; their limits are click's, and shown in the help."""

from __future__ import annotations

import math

import click

from dledger import values


class Size(click.IntRange):
    """A number of bytes, also ``64k`` or ``4g``."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes."""
        try:
            size = values.parse_size(str(value).strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return int(super().convert(size, param, ctx))


class Number(click.FloatRange):
    """A finite number: click's own ranges accept NaN, which is beyond every bound."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = _finite(str(value))
        if number is None:
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return float(super().convert(number, param, ctx))


class Seconds(click.FloatRange):
    """A duration: ``5``, ``0.5``, ``500ms``, ``2m``."""

    name = "seconds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        try:
            seconds = _seconds(str(value).strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return float(super().convert(seconds, param, ctx))


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
