"""Properties of digests of a plain log's files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from crc32c import crc32c

from rocketstore.commit_log.base_log import FileEnding, LogDigest, PlainFileReader, digest_log, find_plain_files
from rocketstore.message.record import BLANK, BLANK_MAGIC
from tests.unit.rocketstore.commit_log.support import FILE_BYTES, message, open_log, put, small_config
from tests.unit.rocketstore.commit_log.test_recovery import PER_FILE, RECORD_BYTES, overwrite, segment, write_log

FULL_BYTES = PER_FILE * RECORD_BYTES


def digest(directory: Path) -> LogDigest:
    """Of a broker's log."""
    return digest_log(find_plain_files([directory / "commitlog"]))


def copy(directory: Path, name: str) -> Path:
    """A copy of a broker's directory, beside it."""
    return Path(shutil.copytree(directory, directory.with_name(name)))


def test_a_digest_covers_the_whole_records_of_each_file(tmp_path: Path) -> None:
    """Lengths, checksums and numbers are those of the records' bytes; a group goes on where the last file ends."""
    write_log(tmp_path / "a", 12)

    found = digest(tmp_path / "a")

    stored = [segment(tmp_path / "a", number).read_bytes() for number in range(3)]
    lengths = [FULL_BYTES, FULL_BYTES, 2 * RECORD_BYTES]
    assert [one.length for one in found.files] == lengths
    assert [one.crc32c for one in found.files] == [
        crc32c(data[:length]) for data, length in zip(stored, lengths, strict=True)
    ]
    assert [one.records for one in found.files] == [5, 5, 2]
    assert [one.ending for one in found.files] == [FileEnding.FULL, FileEnding.FULL, FileEnding.ZEROS]
    assert (found.min_offset, found.end, found.divided) == (0, 2 * FILE_BYTES + 2 * RECORD_BYTES, 3 * FILE_BYTES)
    assert found.problems == ()
    assert found.torn is None


def test_many_records_are_read_in_pieces_with_the_same_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of reads does not show, even where a record is longer than one."""
    log = open_log(small_config(tmp_path / "a", mapped_file_size_commit_log=64 * 1024))
    for number in range(300):
        put(log, message(b"%d" % number * (number % 40 * 10 + 1)))
    log.shutdown()
    whole = digest(tmp_path / "a")

    monkeypatch.setattr("rocketstore.commit_log.base_log._CHUNK_BYTES", 200)

    assert digest(tmp_path / "a") == whole
    assert sum(one.records for one in whole.files) == 300


def test_what_is_not_a_record_does_not_count(tmp_path: Path) -> None:
    """Equal are also logs whose blanks hold other bytes, with a file created ahead, and after a blank at the end."""
    write_log(tmp_path / "a", 10)
    other = copy(tmp_path / "a", "b")
    overwrite(segment(other, 0), FULL_BYTES + BLANK.size, b"left over")
    overwrite(segment(other, 1), FULL_BYTES, BLANK.pack(FILE_BYTES - FULL_BYTES, BLANK_MAGIC))
    segment(other, 2).write_bytes(bytes(FILE_BYTES))

    one, two = digest(tmp_path / "a"), digest(other)

    assert one.difference(two) == two.difference(one) == ""
    assert (two.end, two.divided) == (one.end, one.divided) == (FILE_BYTES + FULL_BYTES, 2 * FILE_BYTES)


def test_a_log_that_lacks_the_end_is_different(tmp_path: Path) -> None:
    """Its end is named, whether it ends in the same file or in an earlier one."""
    write_log(tmp_path / "a", 12)
    for count in (11, 10, 3, 0):
        write_log(tmp_path / f"{count}", count)
        digest_of_less = digest(tmp_path / f"{count}")

        assert digest(tmp_path / "a").difference(digest_of_less) == (
            f"one ends at offset {2 * FILE_BYTES + 2 * RECORD_BYTES}, the other at {digest_of_less.end}"
        )


def test_other_records_of_the_same_length_are_different(tmp_path: Path) -> None:
    """The checksum tells, also where every record is sound."""
    log = open_log(small_config(tmp_path / "a"))
    put(log, *(message(b"one") for _ in range(12)))
    log.shutdown()
    log = open_log(small_config(tmp_path / "b"))
    put(log, *(message(b"two") for _ in range(12)))
    log.shutdown()

    assert digest(tmp_path / "a").difference(digest(tmp_path / "b")) == f"the records of file {0:020d} differ"


def test_what_has_expired_in_one_log_is_not_compared(tmp_path: Path) -> None:
    """Only its files from there on, which must be equal."""
    write_log(tmp_path / "a", 12)
    other = copy(tmp_path / "a", "b")
    segment(other, 0).unlink()

    assert digest(other).min_offset == FILE_BYTES
    assert digest(tmp_path / "a").difference(digest(other)) == ""
    overwrite(segment(tmp_path / "a", 2), 0, (b"x" * RECORD_BYTES))
    assert digest(tmp_path / "a").difference(digest(other))


def test_damage_is_named_and_equal_to_nothing(tmp_path: Path) -> None:
    """A changed body is found by its record's own CRC; even two logs with the same damage are not equal."""
    write_log(tmp_path / "a", 12)
    overwrite(segment(tmp_path / "a", 0), 2 * RECORD_BYTES + 120, b"x")

    found = digest(tmp_path / "a")

    assert [(one.path, one.offset) for one in found.problems] == [(segment(tmp_path / "a", 0), 2 * RECORD_BYTES)]
    assert "does not match its CRC" in found.problems[0].reason
    assert "does not match its CRC" in found.difference(found)


def test_zeros_before_further_records_are_damage(tmp_path: Path) -> None:
    """A file that ends early, without a blank, is not the end of a log that goes on."""
    write_log(tmp_path / "a", 12)
    overwrite(segment(tmp_path / "a", 1), 3 * RECORD_BYTES, bytes(FILE_BYTES - 3 * RECORD_BYTES))

    (problem,) = digest(tmp_path / "a").problems

    assert (problem.path, problem.offset) == (segment(tmp_path / "a", 1), 3 * RECORD_BYTES)


def test_a_torn_end_is_not_damage(tmp_path: Path) -> None:
    """What follows the last record in the last file is what an unclean stop leaves."""
    write_log(tmp_path / "a", 12)
    overwrite(segment(tmp_path / "a", 2), RECORD_BYTES + 100, b"\xff\xff")

    found = digest(tmp_path / "a")

    assert found.torn is not None
    assert (found.torn.path, found.torn.offset) == (segment(tmp_path / "a", 2), RECORD_BYTES)
    assert found.problems == ()
    assert found.end == 2 * FILE_BYTES + RECORD_BYTES


def test_missing_files_and_files_of_other_sizes_are_problems(tmp_path: Path) -> None:
    """A log with a gap is not read as if there were none."""
    write_log(tmp_path / "a", 22)
    segment(tmp_path / "a", 1).unlink()
    with segment(tmp_path / "a", 3).open("r+b") as file:
        file.truncate(100)

    found = digest(tmp_path / "a")

    assert [(one.path.name, one.reason) for one in found.problems] == [
        (f"{3 * FILE_BYTES:020d}", f"the file has 100 bytes instead of {FILE_BYTES}"),
        (f"{FILE_BYTES:020d}", "the file is missing"),
    ]


def test_logs_of_other_file_sizes_are_different(tmp_path: Path) -> None:
    """A group needs one size; the same records lie at the same offsets only by chance."""
    write_log(tmp_path / "a", 3)
    log = open_log(small_config(tmp_path / "b", mapped_file_size_commit_log=2 * FILE_BYTES))
    log.shutdown()
    (tmp_path / "b" / "commitlog" / f"{0:020d}").write_bytes(segment(tmp_path / "a", 0).read_bytes().ljust(2048, b"\0"))

    assert digest(tmp_path / "a").difference(digest(tmp_path / "b")) == "files of 1024 bytes, and of 2048"


def test_no_log_at_all_has_an_empty_digest(tmp_path: Path) -> None:
    """Nothing to continue: a group begins at 0."""
    (tmp_path / "commitlog").mkdir()

    found = digest(tmp_path)

    assert (found.files, found.min_offset, found.end, found.divided) == ((), 0, 0, 0)


def test_a_reader_begins_at_any_record(tmp_path: Path) -> None:
    """It gives what follows, with the records' heads."""
    write_log(tmp_path, 12)
    reader = PlainFileReader(segment(tmp_path, 1), FILE_BYTES, FILE_BYTES, FILE_BYTES + 3 * RECORD_BYTES)

    pieces = list(reader)

    assert [head.offset for piece in pieces for head in piece.heads] == [
        FILE_BYTES + 3 * RECORD_BYTES,
        FILE_BYTES + 4 * RECORD_BYTES,
    ]
    assert reader.end == FILE_BYTES + FULL_BYTES
    assert reader.ending is FileEnding.FULL


@pytest.mark.parametrize("chunk_bytes", [200, 16_000])
def test_every_body_is_checked_however_many_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """One changed bit in a body is found, among few records and among many."""
    log = open_log(small_config(tmp_path, mapped_file_size_commit_log=64 * 1024))
    put(log, *(message(b"a body") for _ in range(300)))
    log.shutdown()
    path = tmp_path / "commitlog" / f"{0:020d}"
    record_bytes = path.read_bytes().rindex(b"a body") // 299
    overwrite(path, path.read_bytes().index(b"a body") + 100 * record_bytes, b"\x60")
    monkeypatch.setattr("rocketstore.commit_log.base_log._CHUNK_BYTES", chunk_bytes)

    found = digest(tmp_path)

    assert found.torn is not None
    assert "does not match its CRC" in found.torn.reason
    assert found.files[0].records == 100
