"""Reads settings by name from flags, the environment and a properties file, for any set of settings.

The text of a setting is read by the type of its field, and by the unit beside it (``parsers_of``). A ``Vocabulary``
defines the names and how their texts are read; ``read`` takes the sources from the weakest to the
strongest and keeps, per setting, the last good value and its source. All problems are collected, none raised.
``notices`` are about settings that were read and change nothing: alarms first, then a line per subject.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

from dledger import properties
from dledger.errors import ConfigError
from dledger.java_names import ALARMS, SWITCHED_OFF, Idleness, Risk, family_of
from dledger.values import (
    Unit,
    limits_of,
    parse_boolean,
    parse_integer,
    parse_millis,
    parse_number,
    parse_path,
    parse_size,
)

_NAMES_MAX: Final = 8
"""Names in one line; the debug log has all of them."""

logger = logging.getLogger(__name__)


def notices(unused: Iterable[Given]) -> tuple[str, ...]:
    """Warnings about known settings without effect: a line per alarm, a line per unsupported subject, one for the rest.

    An unsupported setting that is only switched off belongs to the rest. The debug log gets every setting with its
    value, its place and what it means.
    """
    alarms: list[str] = []
    unsupported: dict[str, list[Given]] = {}
    idle: dict[str, list[Given]] = {}
    for given in unused:
        family, value = family_of(given.name), given.text.strip()
        logger.debug("%s=%s (%s): %s: %s", given.name, value, given.source, family.idleness, _plain(family.means))
        wanted = value.lower() not in SWITCHED_OFF
        alarm = ALARMS.get(given.name)
        if alarm is not None and wanted:
            alarms.append(f"{alarm.risk.upper()}: {given.name}={value} ({given.source}) {alarm.means}")
        elif family.idleness is Idleness.UNSUPPORTED and wanted:
            unsupported.setdefault(family.subject, []).append(given)
        else:
            idle.setdefault(family.subject, []).append(given)
    lines = [_unsupported_line(some) for some in unsupported.values()]
    if idle:
        parts = (f"{_names(some)} ({subject})" for subject, some in idle.items())
        lines.append(f"settings that change nothing here: {', '.join(parts)}")
    return (*alarms, *lines)


def alarms_first(warnings: Iterable[str]) -> tuple[str, ...]:
    """The same warnings, in the order in which people should read them."""
    marks = tuple(f"{risk.upper()}: " for risk in Risk)
    return tuple(sorted(warnings, key=lambda one: not one.startswith(marks)))


def _unsupported_line(some: Sequence[Given]) -> str:
    family = family_of(some[0].name)
    return f"{family.subject}: not supported: {_names(some)} ({places(some)}). {_plain(family.means)}"


def _names(some: Sequence[Given]) -> str:
    names = list(dict.fromkeys(one.name for one in some))
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def places(some: Iterable[Given]) -> str:
    """Where settings were given; lines of one file follow its name once."""
    found: dict[str, list[str]] = {}
    for one in some:
        file, _, line = one.source.rpartition(":")
        if not line.isdigit():
            file, line = one.source, ""
        lines = found.setdefault(file, [])
        if line and line not in lines:
            lines.append(line)
    return "; ".join(file + (":" + ",".join(lines) if lines else "") for file, lines in found.items())


def _plain(means: str) -> str:
    """For a terminal: without the marks of the reference."""
    return means.replace("`", "").removesuffix(".")


ENVIRONMENT_PREFIX: Final = "DLEDGER_"

# --- names -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SettingTarget:
    """The setting behind a known name, and the parser of its text."""

    setting: str
    parse: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Given:
    """One setting in a source: the name used there, its text and its place."""

    name: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """The value of a setting, and its source."""

    value: object
    given: Given


def parsers_of(
    record: type, by_type: Mapping[object, Callable[[str], object]] | None = None
) -> Iterator[tuple[str, Callable[[str], object]]]:
    """Every setting of a record, with the parser of its text: by its unit, or else by its type.

    ``by_type`` precedes the parsers here, and adds to them; fields of further types are no settings.
    """
    known = {**_TYPE_PARSERS, **(by_type or {})}
    hints, limits = get_type_hints(record), limits_of(record)
    for one in fields(record):
        unit, hint = limits[one.name].unit, hints[one.name]
        parse = known.get(hint) or _word_parser(hint)
        if parse is not None and limits[one.name].is_setting:
            yield one.name, _UNIT_PARSERS.get(unit, parse) if unit is not None else parse


def _word_parser(hint: object) -> Callable[[str], object] | None:
    """For an enumeration of words, also an optional one."""
    kinds = [one for one in (*get_args(hint), hint) if isinstance(one, type) and issubclass(one, StrEnum)]
    return partial(parse_word, kinds[0]) if kinds else None


def parse_word(kind: type[_Word], text: str) -> _Word:
    """The member of this value, in any case. Raises ``ValueError``."""
    for one in kind:
        if one.value.lower() == text.lower():
            return one
    raise ValueError(f"invalid value {text!r}: use one of {', '.join(kind)}")


_Word = TypeVar("_Word", bound=StrEnum)
_TYPE_PARSERS: Final[dict[object, Callable[[str], object]]] = {
    int: parse_integer,
    int | None: parse_integer,
    float: parse_number,
    bool: parse_boolean,
    str: str,
    Path: parse_path,
    Path | None: parse_path,
}
_UNIT_PARSERS: Final[dict[Unit, Callable[[str], object]]] = {Unit.BYTES: parse_size, Unit.MS: parse_millis}


def values_of(record: type, chosen: Mapping[str, Chosen]) -> dict[str, Any]:  # Any: each is its own field's
    """The chosen values of a record's fields, by name."""
    return {one.name: chosen[one.name].value for one in fields(record) if one.name in chosen}


def camel_case(name: str) -> str:
    """A setting's name in RocketMQ's spelling."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class Vocabulary:
    """The known names: those with a target, and those that are recognized but set nothing.

    ``own`` are the names proposed in hints for the environment. ``variables`` are variables of other programs (or of
    the command line) with the same prefix.
    """

    def __init__(
        self, targets: Mapping[str, SettingTarget], unused: Iterable[str], own: Iterable[str], variables: Iterable[str]
    ) -> None:
        self.targets = targets
        self.unused = frozenset(unused)
        self.own = frozenset(own)
        self.others_variables = frozenset(variables)
        self._all_names = tuple(sorted({*targets, *self.unused}))
        self._folded = {_fold(name): name for name in (*sorted(self.unused), *targets)}

    def __contains__(self, name: str) -> bool:
        return name in self.targets or name in self.unused

    def unfold(self, short: str) -> str | None:
        """The name behind a variable's name without its prefix."""
        return short.lower() if short.lower() in self.own else self._folded.get(_fold(short))

    def hint(self, name: str, candidates: Iterable[str] | None = None) -> str:
        """``did you mean …?``, or nothing when no known name comes close.

        Names of the same words are closest, in whatever order. A name with an effect precedes one without, and of two
        spellings of a setting, the one in the style of ``name`` precedes the other.
        """
        best, known = 0.0, ""
        for one in candidates or self._all_names:
            score = _likeness(name, one)
            if score >= _LIKE:
                score += (0.1 if one in self.targets else 0) + (0.01 if ("_" in one) == ("_" in name) else 0)
                if score > best:
                    best, known = score, one
        return f": did you mean {known}?" if known else ""


_LIKE: Final = 0.6
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _likeness(name: str, known: str) -> float:
    """From 0 on: how many letters two names share in the same order, and how many words in any."""
    name = re.sub("ssl", "tls", name, flags=re.IGNORECASE)
    letters = difflib.SequenceMatcher(None, _fold(name), _fold(known)).ratio()
    words, of_known = ({word.lower() for word in _WORD.findall(one)} for one in (name, known))
    shared = len(words & of_known) / max(len(words | of_known), 1)
    return letters + shared / 3 + (0.1 if _fold(known).startswith(_fold(name)) else 0)


def _fold(name: str) -> str:
    return name.lower().replace("_", "")


# --- sources ---------------------------------------------------------------------------------------------------------


class Readings:
    """The result of reading: ``chosen`` values by setting, what sets nothing in ``unused``, and ``problems``.

    ``corrections`` say what was read otherwise than it is written, as RocketMQ does without a word.
    """

    def __init__(self) -> None:
        self.chosen: dict[str, Chosen] = {}
        self.unused: list[Given] = []
        self.corrections: list[str] = []
        self.problems: list[str] = []


def read(vocabulary: Vocabulary, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> Readings:
    """Read every source; a later one wins, two names for one setting within a source must agree."""
    readings = Readings()
    layers = (
        _file_layer(vocabulary, file, readings.problems),
        _environment_layer(vocabulary, environ, readings.problems),
        _flag_layer(vocabulary, flags, readings.problems),
    )
    for layer in layers:
        _take(vocabulary, layer, readings)
    return readings


def _file_layer(vocabulary: Vocabulary, file: Path | None, problems: list[str]) -> list[Given]:
    if file is None:
        return []
    try:
        text = properties.decode(file.read_bytes())
    except OSError as error:
        problems.append(f"{file}: cannot be read: {error.strerror}")
        return []
    is_pem = "-----BEGIN " in text
    try:
        found = properties.parse(text)
    except ConfigError as error:
        problems += [f"{file}: {problem}" for problem in error.problems]
        return []
    layer: list[Given] = []
    foreign: list[int] = []
    for one in found:
        if one.key in vocabulary:
            layer.append(Given(one.key, one.value, f"{file}:{one.line}"))
        elif is_pem or not one.value or not _NAME.fullmatch(one.key):
            foreign.append(one.line)
        else:
            problems.append(f"{file}:{one.line}: unknown setting {one.key!r}{vocabulary.hint(one.key)}")
    if is_pem:
        problems.append(f"{file}: this is a certificate or a key, not a conf file")
    elif foreign:  # it may be a secret: nothing of it is shown
        more = f", nor are {len(foreign) - 1} more lines" if len(foreign) > 1 else ""
        problems.append(f"{file}:{foreign[0]}: the line is not a setting (name=value){more}: is this a conf file?")
    return layer


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Texts that look like a setting's name, and may be quoted."""
_SERVICE_LINK = re.compile(r"(.*_)?SERVICE_(HOST|PORT(_\w+)?)|(.*_)?PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?")
"""Variables that Kubernetes sets in every container for a service called ``dledger…``; not ours."""


def _environment_layer(vocabulary: Vocabulary, environ: Mapping[str, str], problems: list[str]) -> list[Given]:
    layer: list[Given] = []
    for variable in sorted(environ):
        short = variable.removeprefix(ENVIRONMENT_PREFIX)
        if short == variable or variable in vocabulary.others_variables or not environ[variable]:
            continue
        name = vocabulary.unfold(short)
        if name is not None:
            layer.append(Given(name, environ[variable], f"environment variable {variable}"))
        elif not _SERVICE_LINK.fullmatch(short):
            hint = vocabulary.hint(short, vocabulary.own)
            name_at = hint.rfind(" ") + 1
            hint = hint[:name_at] + ENVIRONMENT_PREFIX + hint[name_at:].upper() if hint else ""
            problems.append(f"environment variable {variable}: unknown setting{hint}")
    return layer


def _flag_layer(vocabulary: Vocabulary, flags: Mapping[str, str], problems: list[str]) -> list[Given]:
    layer: list[Given] = []
    for name, text in flags.items():
        if name in vocabulary:
            layer.append(Given(name, text, f"flag {name}"))
        else:
            problems.append(f"flag {name}: unknown setting{vocabulary.hint(name)}")
    return layer


def _take(vocabulary: Vocabulary, layer: Iterable[Given], readings: Readings) -> None:
    here: dict[str, Chosen] = {}
    for given in layer:
        target = vocabulary.targets.get(given.name)
        if target is None:
            readings.unused.append(given)
            continue
        text = given.text.strip()
        try:
            value = target.parse(text)
        except ValueError as error:
            if text:
                readings.problems.append(f"{given.source}: {given.name}: {error}{_comment_hint(text)}")
            else:
                readings.corrections.append(f"{given.name} ({given.source}) is empty and counts as not set")
            continue
        before = here.get(target.setting)
        if before is not None and before.value != value:
            _settle(before, given, readings)
        here[target.setting] = Chosen(value, given)
    readings.chosen.update(here)


def _settle(before: Chosen, given: Given, readings: Readings) -> None:
    """Of two lines with one name the last counts, as in Java; two names with different values are a problem."""
    if before.given.name == given.name:
        readings.corrections.append(
            f"{given.name}={given.text} ({given.source}) replaces {before.given.text} ({before.given.source})"
        )
        return
    readings.problems.append(
        f"{given.source}: {given.name}={given.text} contradicts {before.given.name}={before.given.text} "
        f"({before.given.source}): keep one of them"
    )


def _comment_hint(text: str) -> str:
    return " (a comment needs a line of its own)" if re.search(r"\s(#|//|!)", text) else ""


def with_sources(problem: str, chosen: Mapping[str, Chosen], spoken_of_as: Mapping[str, tuple[str, ...]]) -> str:
    """The problem, with the sources of the settings that it names."""
    places = [
        f"{one.given.name} from {one.given.source}"
        for setting, one in sorted(chosen.items())
        if any(re.search(rf"\b{re.escape(word)}\b", problem) for word in (setting, *spoken_of_as.get(setting, ())))
    ]
    return f"{problem} [{', '.join(places)}]" if places else problem
