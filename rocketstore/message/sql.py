"""SQL92 filters: a condition on a message's properties, as RocketMQ's broker reads and evaluates it.

Loosest first: ``OR``; ``AND``; ``=``, ``<>``, ``IS [NOT] NULL``; ``<``, ``<=``, ``>``, ``>=`` and ``[NOT]``
``BETWEEN``, ``IN``, ``CONTAINS``, ``STARTSWITH``, ``ENDSWITH``; the signs and ``NOT``. So ``NOT a = 1`` compares the
truth of ``NOT a`` with 1: write ``NOT (a = 1)``. Keywords in any case; property names are case-sensitive.

Properties are strings. Beside a number or a truth value a property is converted to its type; if that fails, the whole
condition has no result. Absent properties make comparisons unknown, and only TRUE delivers a message. The verdicts of
RocketMQ's own filter in some thousand cases are kept in the tests (``tests/interop/sql_cases.py``). Different on
purpose: RocketMQ ignores what follows a complete condition (``a = 1 b``), and here it is refused; it refuses the number
``0.0``, which is taken here.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from dledger.errors import InvalidRequestError

Properties = Mapping[str, str]
Value = str | int | float | bool | None
Evaluate = Callable[[Properties], Value]

CHARS_MAX: Final = 16 * 1024
DEPTH_MAX: Final = 64
TERMS_MAX: Final = 1024
HEIGHT_MAX: Final = 256
"""How deep evaluating a condition may recurse: comparisons of comparisons (``a = b = c``) need no parentheses."""
_DIGITS_MAX: Final = 19
_TEXT_DIGITS_MAX: Final = 4096
"""Of a property that is read as a number; leading zeros are allowed there."""
_FEW_DIGITS: Final = 10
"""A number of fewer digits fits every type."""
_JAVA_CHAR_MAX: Final = "\uffff"
_INT_BITS, _LONG_BITS = 31, 63
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\n\r\f]+|--[^\n\r]*(?=[\n\r]|$)|/\*.*?\*/)
    |(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)
    |(?P<integer>(?:0|[1-9][0-9]*)[lL]?)
    |(?P<string>'(?:[^']|'')*')
    |(?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
    |(?P<sign><>|<=|>=|[=<>(),+\-])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_KEYWORDS: Final = frozenset(
    {"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH", "ENDSWITH"}
)
_TEXT_TESTS: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "CONTAINS": str.__contains__,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}
_JAVA_INTEGER: Final = re.compile(r"[+-]?\d+")
_JAVA_DOUBLE: Final = re.compile(
    r"[+-]?(?:NaN|Infinity|(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?[fFdD]?"
    r"|0[xX](?:[0-9a-fA-F]++(?:\.[0-9a-fA-F]*+)?|\.[0-9a-fA-F]++)[pP][+-]?[0-9]++[fFdD]?)",
    re.ASCII,
)
"""Its time must not grow faster than a property's length, hence without going back."""
_JAVA_SPACE: Final = "".join(map(chr, range(33)))


class NoResultError(Exception):
    """A value cannot be compared, so the condition has no result for this message."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class _Term:
    """A parsed part: how to evaluate it, and what it is (``constant``, ``property``, ``boolean`` or ``number``)."""

    evaluate: Evaluate
    kind: str
    at: int
    value: Value = None
    """A constant's, also with a sign."""
    height: int = 1
    """How deep evaluating it recurses."""


class SqlCondition:
    """A compiled condition. Raises ``InvalidRequestError``, which gives the place, for a wrong expression."""

    def __init__(self, expression: str) -> None:
        parser = _Parser(expression)
        self._evaluate = parser.parse()
        self.names: Final = frozenset(parser.names)
        """The properties that it looks at."""

    def delivers(self, properties: Properties) -> bool:
        """Like ``matches``. Raises ``NoResultError`` where that says False because a value cannot be compared."""
        return self._evaluate(properties) is True

    def matches(self, properties: Properties) -> bool:
        """Whether a message with these properties is delivered."""
        return self.result(properties) is True

    def result(self, properties: Properties) -> bool | None:
        """The condition's truth; None: unknown, or without a result."""
        try:
            result = self._evaluate(properties)
        except NoResultError:
            return None
        return result if isinstance(result, bool) else None


class _Parser:
    """One pass over the tokens; nesting is limited, so its recursion is."""

    def __init__(self, expression: str) -> None:
        if len(expression) > CHARS_MAX:
            raise InvalidRequestError(
                f"the SQL expression has {len(expression)} characters; at most {CHARS_MAX} are allowed"
            )
        self._text = expression
        self._tokens = self._cut()
        self.names: set[str] = set()
        """Of properties, so far."""
        self._next = 0
        self._depth = 0
        self._terms = 0

    def parse(self) -> Evaluate:
        """The whole expression as a function."""
        condition = self._boolean(self._or())
        if self._peek.kind != "end":
            self._fail("AND, OR or the end")
        return condition.evaluate

    # -- tokens --------------------------------------------------------------------------------------------------

    def _cut(self) -> list[_Token]:
        tokens, at = [], 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None or found.lastgroup is None:
                self._refuse(at, f"{self._text[at]!r} has no meaning here")
            kind, text = found.lastgroup, found.group()
            if kind == "name" and text.upper() in _KEYWORDS:
                kind, text = "keyword", text.upper()
            if kind != "space":
                tokens.append(_Token(kind, text, at))
            at = found.end()
        tokens.append(_Token("end", "the end", len(self._text)))
        return tokens

    @property
    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _has(self, *texts: str) -> str:
        """The next token's text if it is one of these signs or keywords, which is then passed; else empty."""
        token = self._peek
        if token.kind in ("keyword", "sign") and token.text in texts:
            self._next += 1
            return token.text
        return ""

    def _expect(self, text: str) -> None:
        if not self._has(text):
            self._fail(text)

    def _string(self) -> str:
        token = self._peek
        if token.kind != "string":
            self._fail("a string in single quotes")
        self._next += 1
        return _unquoted(token.text)

    def _fail(self, expected: str) -> NoReturn:
        token = self._peek
        found = token.text if len(token.text) <= 32 else f"{token.text[:32]}..."
        self._refuse(token.at, f"found {found}, expected {expected}")

    def _refuse(self, at: int, why: str) -> NoReturn:
        raise InvalidRequestError(f"the SQL expression is wrong at character {at + 1}: {why}")

    # -- grammar, loosest first ----------------------------------------------------------------------------------

    def _or(self) -> _Term:
        terms = [self._and()]
        while self._has("OR"):
            terms.append(self._and())
        return terms[0] if len(terms) == 1 else _all_of([self._boolean(one) for one in terms], decisive=True)

    def _and(self) -> _Term:
        terms = [self._equality()]
        while self._has("AND"):
            terms.append(self._equality())
        return terms[0] if len(terms) == 1 else _all_of([self._boolean(one) for one in terms], decisive=False)

    def _equality(self) -> _Term:
        term = self._comparison()
        while True:
            self._check_height(term)
            if sign := self._has("=", "<>"):
                right = self._comparison()
                self._check_equal(term, right)
                term = _equal(term, right, negated=sign == "<>")
            elif self._has("IS"):
                negated = bool(self._has("NOT"))
                self._expect("NULL")
                term = _is_null(term, negated=negated)
            else:
                return term

    def _comparison(self) -> _Term:
        term = self._unary()
        while True:
            self._check_height(term)
            if sign := self._has("<", "<=", ">", ">="):
                right = self._unary()
                self._check_ordered(term)
                self._check_ordered(right)
                term = _ordered(term, right, sign)
                continue
            following = self._tokens[self._next + 1] if self._peek.text == "NOT" else None
            negated = following is not None and following.text in (
                "BETWEEN",
                "IN",
                "CONTAINS",
                "STARTSWITH",
                "ENDSWITH",
            )
            if negated:
                self._next += 1
            if self._has("BETWEEN"):
                term = self._between(term, negated=negated)
            elif self._has("IN"):
                term = self._in(term, negated=negated)
            elif how := self._has(*_TEXT_TESTS):
                term = _text_test(term, how, self._string(), negated=negated)
            else:
                return term

    def _between(self, term: _Term, *, negated: bool) -> _Term:
        low = self._unary()
        self._expect("AND")
        high = self._unary()
        for one in (term, low, high):
            self._check_ordered(one)
        if not negated and low.kind == high.kind == "constant" and _order(low.value, high.value) > 0:
            self._refuse(low.at, "the first bound of BETWEEN is greater than the second")
        if negated:
            return _all_of([_ordered(term, low, "<"), _ordered(term, high, ">")], decisive=True)
        return _all_of([_ordered(term, low, ">="), _ordered(term, high, "<=")], decisive=False)

    def _in(self, term: _Term, *, negated: bool) -> _Term:
        if term.kind != "property":
            self._refuse(term.at, "only a property can be IN a list")
        self._expect("(")
        wanted = {self._string()}
        while self._has(","):
            self._count()
            wanted.add(self._string())
        self._expect(")")
        return _in_list(term, frozenset(wanted), negated=negated)

    def _unary(self) -> _Term:
        token = self._peek
        sign = self._has("+", "-", "NOT")
        if not sign:
            return self._primary()
        self._deeper()
        term = self._unary()
        self._depth -= 1
        if sign == "NOT":
            return _negated(self._boolean(term), token.at)
        return term if sign == "+" else _minus(term, token.at)

    def _primary(self) -> _Term:  # noqa: RET503  # _fail raises
        self._count()
        token = self._peek
        if self._has("("):
            self._deeper()
            term = self._or()
            self._depth -= 1
            self._expect(")")
            return term
        self._next += 1
        match token.kind, token.text:
            case "name", name:
                self.names.add(name)
                return _Term(lambda properties: properties.get(name), "property", token.at)
            case "string", text:
                return _constant(_unquoted(text), token.at)
            case "integer", text:
                return self._integer(text, token.at)
            case "float", text:
                return self._float(text, token.at)
            case "keyword", ("TRUE" | "FALSE") as text:
                return _constant(text == "TRUE", token.at)
            case "keyword", "NULL":
                return _constant(None, token.at)
        self._next -= 1
        self._fail("a property, a value, NOT or (")

    def _integer(self, text: str, at: int) -> _Term:
        digits = text.rstrip("lL")
        if len(digits) > _DIGITS_MAX or int(digits) >= 1 << _LONG_BITS:
            self._refuse(at, f"{text[:32]} is too large: whole numbers end at {(1 << _LONG_BITS) - 1}")
        return _constant(int(digits), at)

    def _float(self, text: str, at: int) -> _Term:
        value = float(text)
        if math.isinf(value):
            self._refuse(at, f"{text[:32]} is too large for a number")
        return _constant(value, at)

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._refuse(self._peek.at, f"it is nested too deeply: at most {DEPTH_MAX} levels are allowed")

    def _count(self) -> None:
        self._terms += 1
        if self._terms > TERMS_MAX:
            self._refuse(self._peek.at, f"it has too many terms: at most {TERMS_MAX} are allowed")

    def _check_height(self, term: _Term) -> None:
        if term.height > HEIGHT_MAX:
            self._refuse(term.at, f"too many comparisons of comparisons: at most {HEIGHT_MAX} levels are allowed")

    # -- checks of types -----------------------------------------------------------------------------------------

    def _boolean(self, term: _Term) -> _Term:
        """The term as a condition: a property is never true, because properties are strings."""
        if term.kind == "boolean":
            return term
        if term.kind == "constant" and (term.value is None or isinstance(term.value, bool)):
            return term
        if term.kind in ("constant", "number"):
            self._refuse(term.at, "a condition is expected here, not a value")

        def cast(properties: Properties) -> Value:
            value = term.evaluate(properties)
            return value if value is None or isinstance(value, bool) else False

        return _Term(cast, "boolean", term.at, height=_above(term))

    def _check_equal(self, left: _Term, right: _Term) -> None:
        for one in (left, right):
            if one.kind == "constant" and one.value is None:
                self._refuse(one.at, "nothing equals NULL: use IS NULL or IS NOT NULL")
        if left.kind == right.kind == "constant" and isinstance(left.value, bool) > isinstance(right.value, bool):
            self._refuse(right.at, "a truth value cannot equal another value")

    def _check_ordered(self, term: _Term) -> None:
        if term.kind == "boolean":
            self._refuse(term.at, "a condition is neither less nor greater than anything")
        if term.kind == "constant" and (term.value is None or isinstance(term.value, bool | str)):
            self._refuse(term.at, "only numbers and properties can be compared by <, <=, >, >= and BETWEEN")


def _unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'")


def _constant(value: Value, at: int) -> _Term:
    return _Term(lambda _properties: value, "constant", at, value)


def _above(*terms: _Term) -> int:
    """The height of what is made of these."""
    return 1 + max(one.height for one in terms)


def _all_of(terms: Sequence[_Term], *, decisive: bool) -> _Term:
    """``OR`` (decisive: TRUE) or ``AND`` (decisive: FALSE): one such term decides, whatever the others are."""
    parts, otherwise = tuple(one.evaluate for one in terms), not decisive

    def evaluate(properties: Properties) -> Value:
        result: Value = otherwise
        for part in parts:
            value = part(properties)
            if value is decisive:
                return decisive
            if value is None:
                result = None
        return result

    return _Term(evaluate, "boolean", terms[0].at, height=_above(*terms))


def _negated(term: _Term, at: int) -> _Term:
    def evaluate(properties: Properties) -> Value:
        value = term.evaluate(properties)
        return None if value is None else not value

    return _Term(evaluate, "boolean", at, height=_above(term))


def _minus(term: _Term, at: int) -> _Term:
    """The negative number; unknown for anything else, also for a property, which is a string."""
    if isinstance(term.value, int | float) and not isinstance(term.value, bool):
        value = -term.value
        return _Term(lambda _properties: value, "number", at, value)

    def unknown(properties: Properties) -> Value:
        term.evaluate(properties)  # it may be without a result
        return None

    return _Term(unknown, "number", at, height=_above(term))


def _is_null(term: _Term, *, negated: bool) -> _Term:
    part = term.evaluate
    return _Term(lambda properties: (part(properties) is None) is not negated, "boolean", term.at, height=_above(term))


def _equal(left: _Term, right: _Term, *, negated: bool) -> _Term:
    of_left, of_right, wanted = left.evaluate, right.evaluate, right.value

    def evaluate(properties: Properties) -> Value:
        first, second = of_left(properties), of_right(properties)
        if first is None:
            return None if second is not None else not negated
        return (second is not None and _same(first, second)) is not negated

    def is_text(properties: Properties) -> Value:
        text = of_left(properties)
        return None if text is None else (text == wanted) is not negated

    is_simple = left.kind == "property" and right.kind == "constant" and isinstance(wanted, str)
    return _Term(is_text if is_simple else evaluate, "boolean", left.at, height=_above(left, right))


def _ordered(left: _Term, right: _Term, sign: str) -> _Term:
    test, compare = _TESTS[sign], _COMPARISONS[sign]
    of_left, of_right, limit = left.evaluate, right.evaluate, right.value

    def evaluate(properties: Properties) -> Value:
        first = of_left(properties)
        second = None if first is None else of_right(properties)
        return None if second is None else test(_order(first, second))

    def with_integer(properties: Properties) -> Value:
        text = of_left(properties)
        assert isinstance(limit, int)
        return compare(_integer(text, limit), limit) if isinstance(text, str) else None

    is_simple = left.kind == "property" and isinstance(limit, int)
    return _Term(with_integer if is_simple else evaluate, "boolean", left.at, height=_above(left, right))


def _in_list(term: _Term, wanted: frozenset[str], *, negated: bool) -> _Term:
    def evaluate(properties: Properties) -> Value:
        value = term.evaluate(properties)
        return None if value is None else (value in wanted) is not negated

    return _Term(evaluate, "boolean", term.at, height=_above(term))


def _text_test(term: _Term, how: str, text: str, *, negated: bool) -> _Term:
    """Whether a string contains, begins or ends with ``text``; FALSE, negated or not, for what is no string, and for an
    empty ``text``.
    """
    test = _TEXT_TESTS[how]

    def evaluate(properties: Properties) -> Value:
        value = term.evaluate(properties) if text else None
        if not isinstance(value, str):
            return False
        return test(value, text) is not negated

    return _Term(evaluate, "boolean", term.at, height=_above(term))


# -- values: a string takes the type of the other side ---------------------------------------------------------------


def _same(left: Value, right: Value) -> bool:
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    if isinstance(left, str):
        left = _converted(left, right)
    elif isinstance(right, str):
        if isinstance(left, bool):
            raise NoResultError
        right = _converted(right, left)
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return left == right


def _order(left: Value, right: Value) -> int:
    """Less than, equal to or greater than 0, as Java's ``compareTo``."""
    if isinstance(left, str) and isinstance(right, str):
        left, right = _double(left), _double(right)
    elif isinstance(left, str):
        left = _converted(left, right)
    elif isinstance(right, str):
        right = _converted(right, left)
    if isinstance(left, bool) or isinstance(right, bool) or left is None or right is None:
        raise NoResultError
    assert not isinstance(left, str)
    assert not isinstance(right, str)
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) - math.isnan(right)
    if left == right == 0:
        return (math.copysign(1, left) > math.copysign(1, right)) - (math.copysign(1, left) < math.copysign(1, right))
    return (left > right) - (left < right)


def _converted(text: str, like: Value) -> Value:
    if isinstance(like, bool):
        return text.lower() == "true"
    return _integer(text, like) if isinstance(like, int) else _double(text)


def _integer(text: str, like: int) -> int:
    """As Java's ``Integer`` beside a number that fits it, otherwise as a ``Long``."""
    if len(text) < _FEW_DIGITS and text.isascii() and text.isdigit():
        return int(text)
    bits = _INT_BITS if -(1 << _INT_BITS) < like < 1 << _INT_BITS else _LONG_BITS
    if len(text) > _TEXT_DIGITS_MAX or _JAVA_INTEGER.fullmatch(text) is None or max(text) > _JAVA_CHAR_MAX:
        raise NoResultError
    value = int(text)
    if not -(1 << bits) <= value < 1 << bits:
        raise NoResultError
    return value


def _double(text: str) -> float:
    bare = text.strip(_JAVA_SPACE)
    if _JAVA_DOUBLE.fullmatch(bare) is None:
        raise NoResultError
    if "x" in bare or "X" in bare:
        try:
            return float.fromhex(bare.rstrip("fFdD"))  # which ends in decimal digits of the exponent
        except OverflowError:
            return -math.inf if bare[0] == "-" else math.inf
    return float(bare.rstrip("fFdD") if not bare.endswith(("Infinity", "NaN")) else bare)


_COMPARISONS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TESTS: Final[Mapping[str, Callable[[int], bool]]] = {
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
}
