"""What is fed: protobuf messages of a given type with any fields, and bytes that were right once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.support.sweeps import fewer

EXAMPLES: Final = 40
DEPTH_MAX: Final = 3
_EDGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), -1, 0, 1, (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), -1, 0, 1, 1 << 40, (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 1 << 40, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 0, 1, 2, 7, 999),
}


def fuzzed(examples: int = EXAMPLES) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test: so many examples, times ``FUZZ``."""
    return settings(
        max_examples=fewer(examples, 5) * int(os.environ.get("FUZZ", "1")),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


Known = Mapping[str, Sequence[Any]]
"""What a field of that name may be said to be: mostly one of these, where it is of their type."""


def messages(kind: type[Message], known: Known = MappingProxyType({})) -> st.SearchStrategy[bytes]:
    """Encoded messages of a type: each field there or not, with any value that its type has; some of them mutilated."""

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        message = kind()
        _fill(draw, message, message.DESCRIPTOR, 0, known)
        encoded = message.SerializeToString()
        return draw(mutilated(encoded)) if draw(st.integers(0, 3 if known else 1)) == 0 else encoded

    return build()


def _fill(draw: st.DrawFn, message: Any, kind: Any, depth: int, known: Known) -> None:  # noqa: ANN401  # by reflection
    for field in kind.fields:
        values = known.get(field.name)
        if values and field.message_type is None and draw(st.integers(0, 7)):
            _say(message, field, draw(st.sampled_from(values)))
            continue
        if draw(st.integers(0, 3)) == 0:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if depth == DEPTH_MAX:
                continue
            target = getattr(message, field.name)
            for one in [target.add() for _ in range(draw(st.integers(0, 3)))] if field.is_repeated else [target]:
                one.SetInParent()
                _fill(draw, one, field.message_type, depth + 1, known)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(_scalar(field), max_size=3)))
        else:
            setattr(message, field.name, draw(_scalar(field)))


def _say(message: Any, field: FieldDescriptor, value: Any) -> None:  # noqa: ANN401  # by reflection
    with suppress(TypeError, ValueError):  # of another type here
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=200)
        case FieldDescriptor.CPPTYPE_STRING:
            return st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(["n0", "default", "x" * 300])
        case FieldDescriptor.CPPTYPE_ENUM if field.enum_type is not None and field.enum_type.is_closed:
            return st.sampled_from([value.number for value in field.enum_type.values])
        case kind:
            edges = _EDGES[kind]
            return st.sampled_from(edges) | st.integers(max(edges[0], -4), 100)


_JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def changed_json(sound: bytes) -> st.SearchStrategy[bytes]:
    """JSON of which one part is another value; any JSON where ``sound`` is not quite JSON."""

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        value = draw(_JSON)
        with suppress(ValueError):
            whole = json.loads(sound)
            place = whole
            for _ in range(draw(st.integers(0, 4))):
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                key = draw(st.sampled_from(keys))
                if not isinstance(place[key], list | dict) or not place[key] or draw(st.integers(0, 3)) == 0:
                    place[key] = value
                    return json.dumps(whole).encode()
                place = place[key]
        return json.dumps(value).encode()

    return build()


def mutilated(sound: bytes) -> st.SearchStrategy[bytes]:
    """What is left of sound bytes: cut, with some bytes changed, something put in between, or a part twice."""

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        data = bytearray(sound)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(data)))
            end = draw(st.integers(at, min(len(data), at + 64)))
            match draw(st.integers(0, 4)):
                case 0:
                    del data[end:]
                case 1:
                    data[at:end] = draw(st.binary(min_size=end - at, max_size=end - at))
                case 2:
                    data[at:at] = draw(st.binary(max_size=16))
                case 3:
                    data[at:at] = data[at:end]
                case _ if at < len(data):
                    data[at] ^= 1 << draw(st.integers(0, 7))
        return bytes(data)

    return build()
