"""Files of another size than the setting says: which value is right, and what an earlier start has done."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.errors import ConfigError, CorruptLogError
from dledger.store.format import segment_name
from rocketstore.mapped.allocation import check_sizes

SIZE = 1000


def files(directory: Path, sizes: dict[int, int], filler: bytes = b"x") -> Path:
    """Files with these starts and sizes."""
    for base, size in sizes.items():
        (directory / segment_name(base)).write_bytes(filler * size)
    return directory


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {0: SIZE},
        {3000: SIZE, 4000: SIZE},
        {0: SIZE, 1000: SIZE, 2000: 0},
        {0: SIZE, 1000: SIZE, 2000: 10},
        {0: SIZE, 2000: SIZE},
        {0: SIZE, 77: 5},
    ],
)
def test_what_no_wrong_setting_explains_is_for_others(tmp_path: Path, sizes: dict[int, int]) -> None:
    """Files as they should be, what a crash leaves at the end, missing and foreign files."""
    check_sizes([files(tmp_path, sizes), tmp_path / "none"], SIZE, "size")


def test_a_short_blank_file_alone_is_no_store(tmp_path: Path) -> None:
    """A crash at its creation leaves it."""
    check_sizes([files(tmp_path, {0: 10}, b"\0")], SIZE, "size")


@pytest.mark.parametrize("other", [250, 4000])
def test_several_files_say_what_the_setting_must_be(tmp_path: Path, other: int) -> None:
    """By their names and lengths, even if one was padded."""
    files(tmp_path, {other * 2: other if other > SIZE else SIZE * 4, other * 3: other, other * 4: other})

    with pytest.raises(ConfigError) as caught:
        check_sizes([tmp_path], SIZE, "size")

    assert f"size is {SIZE}, but the files in {tmp_path} have {other} bytes: set it to {other}." in str(caught.value)


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b"x" * 500, "If the store was made with size=500, set it to that; if the file was cut short, lengthen it: "),
        (b"x" * 500 + bytes(3500), "if a start with that value has padded the file with zeros: cut them off: "),
        (b"x" * 4000, "It has contents behind 1000 bytes, so the store was made with size=4000, set it to that"),
    ],
)
def test_one_file_leaves_open_what_happened(tmp_path: Path, content: bytes, advice: str) -> None:
    """So each way out is named, and nothing is done."""
    path = tmp_path / segment_name(0)
    path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        check_sizes([tmp_path], SIZE, "size")

    assert advice in str(caught.value)
    assert path.read_bytes() == content


def test_a_padded_file_before_others_is_to_be_cut(tmp_path: Path) -> None:
    """The others say what its size was."""
    files(tmp_path, {0: SIZE, 1000: SIZE, 2000: SIZE})
    with (tmp_path / segment_name(0)).open("r+b") as file:
        file.truncate(4000)

    with pytest.raises(CorruptLogError) as caught:
        check_sizes([tmp_path], SIZE, "size")

    assert "a start with size=4000 has padded this file of 1000 bytes with zeros" in str(caught.value)
    assert f"truncate -s 1000 {tmp_path / segment_name(0)}" in str(caught.value)
