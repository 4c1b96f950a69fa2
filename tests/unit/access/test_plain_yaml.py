"""The YAML that ``plain_acl.yml`` is written in, read as YAML itself reads it, and nothing else."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dledger.access import plain_yaml
from dledger.access.plain_yaml import Mapping, Node, Scalar, Sequence
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
        case Sequence(items):
            return [plain(one) for one in items]
        case Mapping(entries):
            return {one.key: plain(one.value) for one in entries}


def by_yaml(text: str) -> object:
    return yaml.load(text, Loader=yaml.BaseLoader)  # texts only


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plain_yaml.parse(text)
    return list(caught.value.problems)


def test_rocketmqs_file_is_read_as_yaml_reads_it() -> None:
    """Lists that are not indented, empty values, comments, quotes; numbers stay texts."""
    assert plain(plain_yaml.parse(EXAMPLE)) == by_yaml(EXAMPLE)


NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.]{0,8}", fullmatch=True).filter(lambda text: text != "null")
TEXTS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12).map(lambda text: text.strip())
TREES = st.recursive(
    TEXTS,
    lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=4) | st.lists(inner, min_size=1, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=4))
def test_nothing_is_read_otherwise_than_yaml_reads_it(tree: dict[str, object]) -> None:
    """Compared with PyYAML, which quotes what needs it; what is not understood is refused."""
    text = yaml.safe_dump(tree, default_flow_style=False, width=1000)

    try:
        found = plain(plain_yaml.parse(text))
    except ConfigError:
        return

    assert found == by_yaml(text)


WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9=|._/-]{0,12}", fullmatch=True).filter(lambda text: text != "null")
ENTRIES = st.dictionaries(NAMES, WORDS | st.lists(WORDS, min_size=1, max_size=3), min_size=1, max_size=4)


@given(st.dictionaries(NAMES, st.lists(ENTRIES, min_size=1, max_size=3) | WORDS, min_size=1, max_size=3))
def test_everything_of_the_shape_of_a_rules_file_is_read(tree: dict[str, object]) -> None:
    """Lists of mappings of texts and lists of texts."""
    text = yaml.safe_dump(tree, default_flow_style=False, width=1000)

    assert plain(plain_yaml.parse(text)) == by_yaml(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &x 1", "line 1: text that starts with & must be quoted"),
        ("a: *x", "line 1: text that starts with * must be quoted"),
        ("a: !!python/object/apply:os.system [x]", "line 1: text that starts with ! must be quoted"),
        ("a: |\n  text", "line 1: text that starts with | must be quoted"),
        ("a: {b: 1}", "line 1: text that starts with { must be quoted"),
        ("a: [b]", "line 1: text that starts with [ must be quoted"),
        ("a: b: c", "line 1: text that contains a colon followed by a space must be quoted"),
        ('a: "b', "line 1: unterminated quotes, or text after the closing quote"),
        ("a: 1\na: 2", "line 2: a is given twice (first on line 1)"),
        ("a:\n\t- b", "line 2: indent with spaces, not tabs"),
        ("a: 1\n  b: 2", "line 2: unexpected indentation"),
        ("a:\n  b: 1\n c: 2", "line 3: unexpected indentation"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(text: str, problem: str) -> None:
    """A rules file that means something else than it seems to would open or close something."""
    assert problem in problems_of(text)


def test_all_problems_are_told_at_once_and_no_secret_is_quoted() -> None:
    """In the order of the lines."""
    found = problems_of("a: *x\nsecretsecret\nb: 1\nb: 2\n")

    assert [one.partition(":")[0] for one in found] == ["line 1", "line 2", "line 4"]
    assert "secretsecret" not in "".join(found)


def test_depth_is_bounded() -> None:
    """A file cannot exhaust the stack."""
    text = "".join(f"{' ' * n}a:\n" for n in range(2000))

    assert any("nested too deeply" in one for one in problems_of(text))


def test_an_empty_text_is_an_empty_mapping() -> None:
    """Also with nothing but comments."""
    assert plain(plain_yaml.parse("---\n# nothing\n")) == {}
