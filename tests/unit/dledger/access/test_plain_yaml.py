"""The YAML that ``plain_acl.yml`` is written in, read as YAML itself reads it, and nothing else."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dledger.access import rules
from dledger.access.rules import Node, Scalar, YamlMapping, YamlSequence
from dledger.errors import ConfigError

EXAMPLE = """\
globalWhiteRemoteAddresses:
- 10.10.103.*
- 192.168.0.*

accounts:
- accessKey: RocketMQ
  secretKey: 12345678
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  groupPerms:
  # the group should convert to retry topic
  - groupA=DENY

- accessKey: rocketmq2   # a comment
  secretKey: "0012 # no comment"
  whiteRemoteAddress: 192.168.1.*
  admin: true
  topicPerms: []
dataVersion:
- counter: 1
  timestamp: 1600000000000
"""


def plain(node: Node) -> object:
    """As ``yaml`` gives it, all scalars as texts."""
    match node:
        case Scalar(text):
            return text
        case YamlSequence(items):
            return [plain(one) for one in items]
        case YamlMapping(entries):
            return {one.key: plain(one.value) for one in entries}


def by_yaml(text: str) -> object:
    return yaml.load(text, Loader=yaml.BaseLoader)  # texts only


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        rules.parse_yaml(text)
    return list(caught.value.problems)


def test_rocketmqs_file_is_read_as_yaml_reads_it() -> None:
    """Lists that are not indented, empty values, comments, quotes; numbers stay texts."""
    assert plain(rules.parse_yaml(EXAMPLE)) == by_yaml(EXAMPLE)


NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.]{0,8}", fullmatch=True).filter(lambda text: text != "null")
TEXTS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12).map(lambda text: text.strip())
TREES = st.recursive(
    TEXTS,
    lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=4) | st.lists(inner, min_size=1, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=4), st.booleans())
def test_nothing_is_read_otherwise_than_yaml_reads_it(tree: dict[str, object], flow: bool) -> None:
    """Compared with PyYAML's own objects, in blocks and in brackets; what lies too deep is refused."""
    text = yaml.safe_dump(tree, default_flow_style=flow, width=1000)

    try:
        found = plain(rules.parse_yaml(text))
    except ConfigError as error:
        assert "nested too deeply" in str(error)  # noqa: PT017 - hypothesis may nest as deep as it likes
        return

    assert found == by_yaml(text)


WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9=|._/-]{0,12}", fullmatch=True).filter(lambda text: text != "null")
ENTRIES = st.dictionaries(NAMES, WORDS | st.lists(WORDS, min_size=1, max_size=3), min_size=1, max_size=4)


@given(st.dictionaries(NAMES, st.lists(ENTRIES, min_size=1, max_size=3) | WORDS, min_size=1, max_size=3))
def test_everything_of_the_shape_of_a_rules_file_is_read(tree: dict[str, object]) -> None:
    """Lists of mappings of texts and lists of texts."""
    text = yaml.safe_dump(tree, default_flow_style=False, width=1000)

    assert plain(rules.parse_yaml(text)) == by_yaml(text)


def test_lists_may_stand_in_brackets_and_texts_take_several_lines() -> None:
    """They are YAML; a name or a number stays the text that it is."""
    text = "accounts: [{accessKey: 00123456, topicPerms: [a=PUB, no]}]\nnote: |\n  two\n  lines\n"

    assert plain(rules.parse_yaml(text)) == {
        "accounts": [{"accessKey": "00123456", "topicPerms": ["a=PUB", "no"]}],
        "note": "two\nlines\n",
    }
    assert plain(rules.parse_yaml("a: ~\nb: null\nc: 'null'\nd:")) == {"a": "", "b": "", "c": "null", "d": ""}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: &x 1", 1, "anchors and aliases are not supported"),
        ("b: 1\na: *x", 2, "anchors and aliases are not supported"),
        ("a: !!python/object/apply:os.system [x]", 1, "tags are not supported"),
        ("a: !secret!key x", 1, "tag"),
        ("a: 1\n---\nb: 2", 2, "a second document"),
        ("? [a]\n: b", 1, "a name must be text"),
        ("a: b: c", 1, "mapping values are not allowed"),
        ('a: "b', 1, ""),
        ("a: 1\na: 2", 2, "a is given twice (first on line 1)"),
        ("a:\n\t- b", 2, "cannot start any token"),
        ("a: 1\n  b: 2", 2, "mapping values are not allowed"),
        ("a:\n  b: 1\n c: 2", 3, "expected"),
        ("a: 1\nb: \a", 2, "unprintable character"),
        ('a: 1\nb: "\\U00110000"', 2, "Unicode"),
        ('a: 1\nb: "\\UFFFFFFFF"', 2, "Unicode"),
        ("a: üüüüüüüü\nb: \a\nc: 1\nd: 2\n", 2, "unprintable character"),
        ("&x a: 1", 1, "anchors and aliases are not supported"),
        ("a:\n  &x b: 1", 2, "anchors and aliases are not supported"),
        ("a: 1\n!!str b: 2", 2, "tags are not supported"),
        ("a: 1\n# b\u2028c: 1", 2, "U+2028 is a line break in YAML"),
        ("a: 1\n# b\u2029c: 1", 2, "U+2029 is a line break in YAML"),
        ("a: 1\n# b\x85c: 1", 2, "U+0085 is a line break in YAML"),
    ],
)
@pytest.mark.parametrize("loader", ["CBaseLoader", "BaseLoader"])
def test_what_is_refused_is_told_with_its_line(
    text: str, line: int, words: str, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rules file that means something else than it seems to would open or close something."""
    monkeypatch.setattr(rules, "_LOADER", getattr(yaml, loader))

    (problem,) = problems_of(text)

    assert problem.startswith(f"line {line}: ")
    assert words in problem


def test_every_key_given_twice_is_told() -> None:
    """In the order of the lines."""
    assert problems_of("a: 1\na: 2\nb: 1\nb: 2\n") == [
        "line 2: a is given twice (first on line 1)",
        "line 4: b is given twice (first on line 3)",
    ]
    assert problems_of("a: 1\na: 2\nb: !x 1\n") == [
        "line 2: a is given twice (first on line 1)",
        "line 3: tags are not supported: quote text that starts with !",
    ]


@pytest.mark.parametrize(
    "text", ["a: 1\nsecretsecret\nb: 1", "k: !secretsecret!x", 'k: "secretsecret', "k: *secretsecret"]
)
@pytest.mark.parametrize("loader", ["CBaseLoader", "BaseLoader"])
def test_no_secret_is_quoted(text: str, loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the parser says about what it met."""
    monkeypatch.setattr(rules, "_LOADER", getattr(yaml, loader))

    assert "secretsecret" not in "".join(problems_of(text))


def test_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the bytes of the file."""
    monkeypatch.setattr(rules, "NODES_MAX", 5)

    assert problems_of("a: [1, 2, 3, 4]") == ["line 1: more than 5 values"]


def test_depth_is_bounded() -> None:
    """A file cannot exhaust the stack."""
    assert problems_of("".join(f"{' ' * n}a:\n" for n in range(2000))) == ["line 10: nested too deeply"]
    assert problems_of("[" * 100_000) == ["line 1: nested too deeply"]
    for names in ("{", "? "):
        assert problems_of(names * 2000) == ["line 1: a name must be text"]


def test_an_empty_text_is_an_empty_mapping() -> None:
    """Also with nothing but comments."""
    assert plain(rules.parse_yaml("---\n# nothing\n")) == {}
