"""Values of flags, read as ``dledger.values`` reads them; their limits are click's own, and shown in the help."""

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


class Seconds(click.FloatRange):
    """A duration: ``5``, ``0.5``, ``500ms``, ``2m``."""

    name = "seconds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        text = str(value).strip()
        try:
            seconds = values.parse_duration_ms(text, unit="s") / 1000
        except ValueError as error:
            try:
                seconds = float(text)  # 1e-3
            except ValueError:
                seconds = math.nan
            if not math.isfinite(seconds):  # click's limits let NaN pass
                self.fail(str(error), param, ctx)
        return float(super().convert(seconds, param, ctx))


def addresses(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """A callback for an option that holds ``HOST:PORT,…``; None if it is not given."""
    if text is None:
        return None
    try:
        return values.parse_addresses(text)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None
