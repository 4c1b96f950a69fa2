"""Frames: the encoding of one request or response. Pure: bytes in, frames out, and back.

``[length i32][kind u8 | header length u24][header][body]``, big-endian; the length does not count itself. The header is
JSON or RocketMQ's binary form, as stated in every frame: a response uses the form of its request.

A request's signature is RocketMQ's: HMAC-SHA1 of the fields' values and the body. It contains neither time nor nonce:
an intercepted request can be replayed forever, so only TLS protects against that.
"""

from __future__ import annotations

import base64
import hmac
import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Final, NamedTuple

import msgspec

from dledger.remoting.codes import LANGUAGES, VERSION, FrameError, Language
from dledger.remoting.fastjson import strict

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""RocketMQ's ``frameMaxLength``: a whole frame, including its length field."""
HEADER_BYTES_MAX: Final = 256 * 1024
"""Our limit for requests: a property string of 32,767 characters, each escaped in JSON, takes three quarters of it."""
ANSWER_HEADER_BYTES_MAX: Final = 1024 * 1024
"""The same for answers: the ids of the messages of the largest batch take nearly all of it."""
_LARGE_HEADER_BYTES: Final = 4096
"""A header up to this size takes no more than what else there is for each request."""
FIELDS_MAX: Final = 256
"""Our limit for the fields of one header."""
LENGTH_BYTES: Final = 4
FLAG_RESPONSE: Final = 1
FLAG_ONEWAY: Final = 2
_PREFIX: Final = struct.Struct(">iI")
PREFIX_BYTES: Final = _PREFIX.size
"""The two lengths, of the frame and of its header."""
_FIXED: Final = struct.Struct(">hBhiii")
"""The fixed part of a binary header: code, language, version, opaque, flag, length of the remark."""
_INT32: Final = struct.Struct(">i")
_UINT32: Final = struct.Struct(">I")
_INT16: Final = struct.Struct(">h")
_HEADER_LENGTH_BITS: Final = 24
_HEADER_LENGTH_MASK: Final = (1 << _HEADER_LENGTH_BITS) - 1
_INT32_MIN: Final = -(1 << 31)
_INT32_MAX: Final = (1 << 31) - 1
_INT16_MIN: Final = -(1 << 15)
_INT16_MAX: Final = (1 << 15) - 1
_Int32 = Annotated[int, msgspec.Meta(ge=_INT32_MIN, le=_INT32_MAX)]
_LANGUAGES: Final = tuple(Language)
_JSON_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
_NO_FIELDS: Final[Mapping[str, str]] = {}


class LargeFields(dict[str, str]):
    """The fields of a large header, with its size: a request is kept until it is done."""

    __slots__ = ("header_bytes",)

    def __init__(self, fields: Mapping[str, str], header_bytes: int) -> None:
        super().__init__(fields)
        self.header_bytes = header_bytes


class HeaderForm(IntEnum):
    """The encoding of a header; the numbers are those on the wire."""

    JSON = 0
    BINARY = 1


_JSON: Final = int(HeaderForm.JSON)
_BINARY: Final = int(HeaderForm.BINARY)


class Frame(NamedTuple):
    """One request or response. ``fields`` is the header's ``extFields`` as texts, without null values."""

    code: int
    opaque: int
    fields: Mapping[str, str] = _NO_FIELDS
    body: bytes = b""
    flag: int = 0
    remark: str = ""
    version: int = VERSION
    language: Language = Language.PYTHON
    form: HeaderForm = HeaderForm.JSON

    @property
    def is_response(self) -> bool:
        """Whether it is a response to one of our requests."""
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether its sender expects no response."""
        return bool(self.flag & FLAG_ONEWAY)

    def answer(
        self, code: int = 0, remark: str = "", fields: Mapping[str, str] = _NO_FIELDS, body: bytes = b""
    ) -> Frame:
        """The response to this request, with the same form of header."""
        return Frame(code, self.opaque, fields, body, FLAG_RESPONSE, remark, form=self.form)


def cut(
    buffer: bytearray | bytes, begin: int = 0, *, most: int = -1, header_bytes_max: int = HEADER_BYTES_MAX
) -> tuple[list[Frame], int]:
    """Complete frames from ``begin`` on, up to ``most`` if given, and where the rest starts. Raises ``FrameError``."""
    frames: list[Frame] = []
    available = len(buffer)
    view = memoryview(buffer)
    try:
        while available - begin >= LENGTH_BYTES and len(frames) != most:
            end = begin + LENGTH_BYTES + frame_length(view, begin)
            if end > available:
                break
            frames.append(decode(view, begin, end, header_bytes_max))
            begin = end
    finally:
        view.release()
    return frames, begin


def frame_length(data: memoryview, begin: int = 0) -> int:
    """The length in the first four bytes, validated as early as possible. Raises ``FrameError``."""
    length: int = _INT32.unpack_from(data, begin)[0]
    if not LENGTH_BYTES <= length <= FRAME_BYTES_MAX - LENGTH_BYTES:
        raise FrameError(f"a frame of {length} bytes: {LENGTH_BYTES} to {FRAME_BYTES_MAX - LENGTH_BYTES} are allowed")
    return length


def decode(data: memoryview, begin: int = 0, end: int | None = None, header_bytes_max: int = HEADER_BYTES_MAX) -> Frame:
    """Decode the one frame between ``begin`` and ``end``, including its length. Raises ``FrameError``.

    No slice of ``data`` gets a name: a buffer held by an error's traceback could not be cleared.
    """
    if end is None:
        end = len(data)
    word: int = _UINT32.unpack_from(data, begin + LENGTH_BYTES)[0]
    kind, header_bytes = word >> _HEADER_LENGTH_BITS, word & _HEADER_LENGTH_MASK
    header_begin = begin + _PREFIX.size
    body_begin = header_begin + header_bytes
    if body_begin > end:
        raise FrameError(f"a header of {header_bytes} bytes in a frame of {end - begin} bytes")
    if header_bytes > header_bytes_max:
        raise FrameError(f"a header of {header_bytes} bytes: at most {header_bytes_max} are allowed")
    header, body = bytes(data[header_begin:body_begin]), bytes(data[body_begin:end])
    if kind == _JSON:
        frame = _from_json(header, body)
    elif kind == _BINARY:
        frame = _from_binary(header, body)
    else:
        raise FrameError(f"unknown kind of header {kind}")
    if header_bytes <= _LARGE_HEADER_BYTES:
        return frame
    return frame._replace(fields=LargeFields(frame.fields, header_bytes))


def encode(frame: Frame) -> bytes:
    """Encode a frame. Raises ``FrameError`` if it would exceed a receiver's limit."""
    return head_of(frame, len(frame.body)) + frame.body


def head_of(frame: Frame, body_bytes: int) -> bytes:
    """The part of a frame before its body, for callers that write the body themselves. Raises ``FrameError``."""
    header = _to_json(frame) if frame.form is HeaderForm.JSON else _to_binary(frame)
    length = LENGTH_BYTES + len(header) + body_bytes
    header_bytes_max = ANSWER_HEADER_BYTES_MAX if frame.is_response else HEADER_BYTES_MAX
    if length > FRAME_BYTES_MAX - LENGTH_BYTES or len(header) > header_bytes_max:
        raise FrameError(
            f"a frame of {length} bytes with a header of {len(header)}: at most "
            f"{FRAME_BYTES_MAX - LENGTH_BYTES} and {header_bytes_max} are allowed"
        )
    return _PREFIX.pack(length, frame.form << _HEADER_LENGTH_BITS | len(header)) + header


# -- JSON --------------------------------------------------------------------------------------------------------------


class _UsualHeader(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The header that RocketMQ's clients in Java and Go write: decoded in a third of the time of any JSON."""

    code: _Int32 = 0
    extFields: dict[str, str] | None = None  # noqa: N815  # the names are those on the wire
    flag: _Int32 = 0
    language: str = ""
    opaque: _Int32 = 0
    remark: str | None = None
    serializeTypeCurrentRPC: str | None = None  # noqa: N815
    version: _Int32 = 0


_decode_usual: Final = msgspec.json.Decoder(_UsualHeader).decode


def _from_json(header: bytes, body: bytes) -> Frame:
    try:
        usual = _decode_usual(header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _from_any_json(header, body)
    fields = usual.extFields
    if fields is not None and len(fields) > FIELDS_MAX:
        raise _too_many_fields(fields)
    return Frame(
        usual.code,
        usual.opaque,
        _NO_FIELDS if fields is None else fields,
        body,
        usual.flag,
        usual.remark or "",
        usual.version,
        LANGUAGES.get(usual.language, Language.OTHER),
    )


def _from_any_json(header: bytes, body: bytes) -> Frame:
    """With other members, numbers in fields, halves of surrogate pairs: whatever is a header at all."""
    try:
        values = strict(header.decode())
    except (ValueError, RecursionError) as error:
        raise FrameError("a header that is not JSON") from error
    if type(values) is not dict:
        raise FrameError("a JSON header that is not an object")
    get = values.get
    code, opaque, flag, version = numbers = get("code", 0), get("opaque", 0), get("flag", 0), get("version", 0)
    if not type(code) is type(opaque) is type(flag) is type(version) is int or not (
        min(numbers) >= _INT32_MIN and max(numbers) <= _INT32_MAX
    ):
        raise FrameError("a header whose code, opaque, flag or version is not a number of 32 bits")
    remark, language = get("remark"), get("language")
    return Frame(
        code,
        opaque,
        _json_fields(get("extFields")),
        body,
        flag,
        remark if type(remark) is str else "",
        version,
        LANGUAGES.get(language, Language.OTHER) if type(language) is str else Language.OTHER,
    )


def _json_fields(found: object) -> Mapping[str, str]:
    if found is None:
        return _NO_FIELDS
    if type(found) is not dict:
        raise FrameError("a header whose extFields is not an object")
    if len(found) > FIELDS_MAX:
        raise _too_many_fields(found)
    fields: dict[str, str] = found
    for value in fields.values():
        if type(value) is not str:
            return _texts(fields)
    return fields


def _too_many_fields(fields: Mapping[str, object]) -> FrameError:
    return FrameError(f"a header with {len(fields)} fields: at most {FIELDS_MAX} are allowed")


def _texts(fields: Mapping[str, object]) -> dict[str, str]:
    """The C++ client writes numbers as numbers; null fields are dropped."""
    texts: dict[str, str] = {}
    for name, value in fields.items():
        if type(value) is str:
            texts[name] = value
        elif value is True or value is False:
            texts[name] = "true" if value else "false"
        elif type(value) in (int, float):
            texts[name] = str(value)
        elif value is not None:
            raise FrameError(f"a header whose field {name[:64]!r} is neither a text nor a number")
    return texts


def _to_json(frame: Frame) -> bytes:
    """Members in Java's order, without nulls."""
    values: dict[str, object] = {"code": frame.code}
    if frame.fields or frame.is_response:  # Java's clients read a response's fields even if they need none
        values["extFields"] = frame.fields
    values["flag"] = frame.flag
    values["language"] = frame.language.name
    values["opaque"] = frame.opaque
    if frame.remark:
        values["remark"] = frame.remark
    values["serializeTypeCurrentRPC"] = "JSON"
    values["version"] = frame.version
    return _JSON_ENCODER.encode(values).encode("utf-8", "replace")


# -- RocketMQ's binary form --------------------------------------------------------------------------------------------


def _from_binary(header: bytes, body: bytes) -> Frame:
    try:
        code, language, version, opaque, flag, remark_bytes = _FIXED.unpack_from(header)
        at = _FIXED.size
        remark, at = _text(header, at, remark_bytes)
        (fields_bytes,) = _INT32.unpack_from(header, at)
        at += _INT32.size
    except struct.error as error:
        raise FrameError("a binary header that ends too early") from error
    if not 0 <= fields_bytes <= len(header) - at:
        raise FrameError(f"a binary header whose fields take {fields_bytes} of {len(header) - at} bytes")
    return Frame(
        code,
        opaque,
        _binary_fields(header, at, at + fields_bytes),
        body,
        flag,
        remark,
        version,
        _LANGUAGES[language] if language < len(_LANGUAGES) else Language.OTHER,
        HeaderForm.BINARY,
    )


def _binary_fields(header: bytes, at: int, end: int) -> Mapping[str, str]:
    """A value of length 0 is null; of a repeated field, as after Java's signing hook, the last one counts."""
    fields: dict[str, str] = {}
    try:
        while at < end:
            (size,) = _INT16.unpack_from(header, at)
            name, at = _text(header, at + _INT16.size, size)
            (size,) = _INT32.unpack_from(header, at)
            value, at = _text(header, at + _INT32.size, size)
            if value:
                fields[name] = value
                if len(fields) > FIELDS_MAX:
                    raise FrameError(f"a header with more than {FIELDS_MAX} fields")
    except struct.error as error:
        raise FrameError("a binary header whose fields end too early") from error
    if at != end:
        raise FrameError("a binary header whose last field is longer than its fields")
    return fields


def _text(header: bytes, at: int, size: int) -> tuple[str, int]:
    end = at + size
    if size < 0 or end > len(header):
        raise FrameError(f"a binary header with a text of {size} bytes at {at} of {len(header)}")
    try:
        return header[at:end].decode(), end
    except UnicodeDecodeError as error:
        raise FrameError(f"a binary header whose text at {at} is not UTF-8") from error


def _to_binary(frame: Frame) -> bytes:
    if not (_INT16_MIN <= frame.code <= _INT16_MAX and _INT16_MIN <= frame.version <= _INT16_MAX):
        raise FrameError(f"code {frame.code} and version {frame.version} do not fit a binary header")
    fields = bytearray()
    for name, value in frame.fields.items():
        key, content = name.encode("utf-8", "replace"), value.encode("utf-8", "replace")
        if len(key) > _INT16_MAX:
            raise FrameError(f"a field's name of {len(key)} bytes does not fit a binary header")
        fields += _INT16.pack(len(key)) + key + _INT32.pack(len(content)) + content
    remark = frame.remark.encode("utf-8", "replace")
    fixed = _FIXED.pack(frame.code, frame.language, frame.version, frame.opaque, frame.flag, len(remark))
    return fixed + remark + _INT32.pack(len(fields)) + fields


ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
"""Older clients add this field after signing, newer ones sign it; Java's brokers refuse the newer ones."""
_NONE: Final[frozenset[str]] = frozenset()


def signature(secret: str, fields: Mapping[str, str], body: bytes, *, without: frozenset[str] = _NONE) -> str:
    """The signature of all fields but the signature itself and those in ``without``.

    An empty text, which a binary header cannot distinguish from a missing one, adds nothing to the signed text.
    """
    names = sorted(fields) if "".join(fields).isascii() else sorted(fields, key=_as_java_sorts)
    values = [fields[name] for name in names if name != SIGNATURE and name not in without]
    text = "".join(values).encode() + body
    return base64.b64encode(hmac.digest(secret.encode(), text, "sha1")).decode()


def is_signed(secret: str, fields: Mapping[str, str], body: bytes, *, without: frozenset[str] = _NONE) -> bool:
    """Whether the signature is present and matches the secret; compared in constant time.

    ``without``: fields added to the request on its way.
    """
    found = fields.get(SIGNATURE, "").encode()
    matches = hmac.compare_digest(signature(secret, fields, body, without=without).encode(), found)
    if UNIQUE_KEY_QUERY in fields:
        older = signature(secret, fields, body, without=without | {UNIQUE_KEY_QUERY})
        matches |= hmac.compare_digest(older.encode(), found)
    return matches


def signed(
    fields: Mapping[str, str], body: bytes, access_key: str, secret: str, security_token: str = ""
) -> dict[str, str]:
    """The fields of a request, with the access key and the signature."""
    found = {**fields, ACCESS_KEY: access_key}
    if security_token:
        found[SECURITY_TOKEN] = security_token
    found[SIGNATURE] = signature(secret, found, body)
    return found


def _as_java_sorts(name: str) -> bytes:
    """By UTF-16 units, whose order differs from that of characters beyond the basic plane."""
    return name.encode("utf-16-be")
