"""Readers give back the documents that were written, or say where a file is broken."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfield.data import files
from farfield.data.files import read_file, text_format

TEXTS = ["first\n", "zweites Stück", "", "三つ目 🙂\nline two\n"]


def documents(path: Path, column: str = "text") -> list[bytes]:
    """The pieces of a file, joined."""
    found: list[bytes] = []
    for first, data in read_file(path, column):
        if first:
            found.append(b"")
        found[-1] += data
    return found


def write(path: Path, texts: list[str], column: str = "text") -> Path:
    """The texts in the format of the path's name; a .txt holds only the first."""
    kind = text_format(path)
    if kind == ".parquet":
        plain = path.with_name("plain.parquet")
        pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), plain)
        content = plain.read_bytes()
        plain.unlink()
    elif kind == ".jsonl":
        lines = [json.dumps({"id": i, column: text}) for i, text in enumerate(texts)]
        content = "\n".join(lines).encode()
    else:
        content = texts[0].encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".jsonl.gz", ".parquet.gz", ".JSONL"])
def test_rows_are_documents(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", TEXTS)
    assert documents(path) == [text.encode() for text in TEXTS]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_another_column(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", TEXTS, "body")
    assert documents(path, "body") == [text.encode() for text in TEXTS]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_file_is_one_document(tmp_path: Path, suffix: str, text: str) -> None:
    assert documents(write(tmp_path / f"a{suffix}", [text])) == [text.encode()]


@given(text=st.text(max_size=40), block=st.integers(1, 7))
def test_characters_may_straddle_reads(
    tmp_path_factory: pytest.TempPathFactory, text: str, block: int
) -> None:
    path = write(tmp_path_factory.mktemp("reads") / "a.txt", [text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "READ_BYTES", block)
        assert documents(path) == [text.encode()]


@given(
    good=st.text(max_size=30),
    bad=st.sampled_from([b"\xff", b"\xc3(", b"\xe2\x82", b"\xed\xa0\x80", b"\xc0\xaf"]),
    block=st.integers(1, 9),
)
def test_not_utf8_names_the_byte(
    tmp_path_factory: pytest.TempPathFactory, good: str, bad: bytes, block: int
) -> None:
    path = tmp_path_factory.mktemp("bad") / "a.txt"
    path.write_bytes(good.encode() + bad)
    expected = rf"a\.txt: not UTF-8 at byte {len(good.encode())}; expected UTF-8$"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "READ_BYTES", block)
        with pytest.raises(ValueError, match=expected):
            documents(path)


def test_not_utf8_in_gzip_and_json_lines(tmp_path: Path) -> None:
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(b"abc\xff"))
    with pytest.raises(ValueError, match="at byte 3 of its uncompressed text"):
        documents(packed)
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl: not UTF-8 at byte 24;"):
        documents(lines)


def test_not_utf8_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pa.array([b"fine", b"ab\xff"], pa.binary())
    wrong = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": wrong}), path)
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: not UTF-8 at byte 2"):
        documents(path)


def test_byte_order_mark_and_line_ends_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\r")
    assert documents(path) == [b"\xef\xbb\xbfa\r\nb\r"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_missing_column_names_the_others(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", TEXTS, "texte")
    with pytest.raises(
        ValueError, match="no column 'text'; it has 'id', 'texte'; nearest: 'texte'"
    ):
        documents(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not JSON \(Expecting"),
        ("[1]", "line 2: got list, expected an object with 'text'"),
        ('{"text": 3}', "line 2: 'text' holds int, expected text"),
        ('{"text": null}', "line 2: 'text' holds NoneType, expected text"),
        ('{"text": "a\\ud800"}', "line 2: 'text' holds a lone surrogate at character 1"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        documents(path)
    assert "\n" not in str(caught.value)


def test_blank_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "a"}\n  \n{"text": "b"}\n\n')
    assert documents(path) == [b"a", b"b"]


def test_parquet_holds_text(tmp_path: Path) -> None:
    numbers, nulls = tmp_path / "n.parquet", tmp_path / "z.parquet"
    pq.write_table(pa.table({"text": [1, 2]}), numbers)
    pq.write_table(pa.table({"text": ["a", None]}), nulls)
    with pytest.raises(ValueError, match=r"n\.parquet, row 0: 'text' holds int"):
        documents(numbers)
    with pytest.raises(ValueError, match=r"z\.parquet, row 1: 'text' holds NoneType"):
        documents(nulls)


def test_parquet_in_many_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"row {i}" for i in range(700)]
    pq.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), path, row_group_size=300)
    assert documents(path) == [text.encode() for text in texts]


@pytest.mark.parametrize("name", ["a.parquet", "a.parquet.gz"])
def test_broken_parquet(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"PAR1 no") if name.endswith(".gz") else b"PAR1 no")
    with pytest.raises(ValueError, match="not a readable parquet file") as caught:
        documents(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".txt.gz", ".jsonl.gz", ".parquet.gz"])
@pytest.mark.parametrize("broken", ["cut", "plain"])
def test_broken_gzip(tmp_path: Path, suffix: str, broken: str) -> None:
    path = write(tmp_path / f"a{suffix}", ["long enough to be cut " * 50])
    content = path.read_bytes()
    path.write_bytes(content[:-12] if broken == "cut" else b"not gzip at all")
    with pytest.raises(ValueError, match="not a whole gzip file"):
        documents(path)


def test_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown suffix '\.json'.*nearest: '\.jsonl'"):
        documents(tmp_path / "a.json")
