"""Any headers, bodies and frames of the remoting protocol."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from enum import IntEnum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from dledger.remoting.codes import Language
from dledger.remoting.frame import Frame, HeaderForm
from rocketstore.remoting import groups, headers, topics
from rocketstore.remoting.body import Body
from rocketstore.remoting.headers import Bits, Named, Short

NOTES_TO_FIELDS = (Bits, Named, Short)


def _records(modules: tuple[Any, ...], base: type[Any]) -> dict[str, type[Any]]:
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and dataclasses.is_dataclass(kind)
        and issubclass(kind, base)
        and kind.__module__ == module.__name__
        and kind not in NOTES_TO_FIELDS
        and not name.startswith("_")
    }


HEADERS = _records((headers,), object)
BODIES = _records((groups, topics), Body)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


def _values(hint: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401  # whatever type a field has
    """Any value that a field may have."""
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        for note in notes:
            if isinstance(note, Bits):
                limit = 1 << (note.width - 1)
                return st.integers(-limit, limit - 1) | st.sampled_from((-limit, -1, 0, 1, limit - 1))
    if get_origin(hint) in (Union, UnionType):
        return st.none() | _values(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return st.lists(_values(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) is Mapping:
        key, value = get_args(hint)
        return st.dictionaries(_values(key), _values(value), max_size=3)
    if hint is str:
        return TEXTS
    if hint is bool:
        return st.booleans()
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if issubclass(hint, IntEnum):
        return st.sampled_from(list(hint))
    return made(hint)


def made(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any record of a class."""
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{one.name: _values(hints[one.name]) for one in dataclasses.fields(kind)})


INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT16 = st.integers(-(1 << 15), (1 << 15) - 1)


def frames_of(form: HeaderForm) -> st.SearchStrategy[Frame]:
    """A binary header has shorter numbers, and takes an empty value for none."""
    binary = form is HeaderForm.BINARY
    short = INT16 if binary else INT32
    values = TEXTS.filter(bool) if binary else TEXTS
    return st.builds(
        Frame,
        short,
        INT32,
        st.dictionaries(TEXTS, values, max_size=5),
        st.binary(max_size=30),
        INT32,
        TEXTS,
        short,
        st.sampled_from(Language),
        st.just(form),
    )
