"""A split's files hold what encoding its documents one by one gives."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfield.data import Tokenizer, encoding
from farfield.data.encoding import encode_split, id_type, read_split, text_pieces
from farfield.data.spool import Spool, spool
from farfield.data.tokenizer import byte_tokenizer, train_bpe

TEXTS = ["The cat\n", "sat on the mat, naïve 三つ.\n", "\n\n", "🙂", "the end"]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    """A small BPE."""
    return train_bpe(["the cat sat on the mat. naïve 三つ 🙂🙂\n" * 20], 280)


def spooled(texts: list[str], folder: Path) -> Spool:
    """The texts as documents."""
    return spool([(True, text.encode()) for text in texts], folder)


def test_bytes_are_the_texts_own(tmp_path: Path) -> None:
    got = spooled(TEXTS, tmp_path)
    encode_split(got, 8, len(got), byte_tokenizer(), tmp_path, "test")
    stream = read_split(tmp_path, "test", 259)
    assert stream.ids.dtype == np.uint16
    assert stream.ids.tolist() == list("".join([*TEXTS[1:4], "\n", TEXTS[4]]).encode())
    sizes = [len(text.encode()) for text in (*TEXTS[1:3], TEXTS[3] + "\n", TEXTS[4])]
    assert stream.documents.tolist() == [0, *np.cumsum(sizes)]
    assert stream.byte_count(2, 9) == 7


@pytest.mark.parametrize("batch", [1, 2, 1000])
def test_tokens_are_those_of_each_document(
    tmp_path: Path, bpe: Tokenizer, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "BATCH_PIECES", batch)
    got = spooled(TEXTS, tmp_path)
    encode_split(got, 0, len(got), bpe, tmp_path, "train")
    stream = read_split(tmp_path, "train", bpe.vocab_size)
    documents = [TEXTS[0], TEXTS[1], TEXTS[2], TEXTS[3] + "\n", TEXTS[4]]
    for i, text in enumerate(documents):
        start, stop = (int(bound) for bound in stream.documents[i : i + 2])
        assert stream.ids[start:stop].tolist() == bpe.encode(text)
        assert stream.byte_count(start, stop) == len(text.encode())
    assert stream.byte_count(0, len(stream)) == len(got)


def test_a_document_cut_by_the_split_opens_both_parts(tmp_path: Path, bpe: Tokenizer) -> None:
    got = spooled(TEXTS, tmp_path)
    for name, start, stop in (("train", 0, 12), ("test", 12, len(got))):
        for tokenizer in (bpe, byte_tokenizer()):
            encode_split(got, start, stop, tokenizer, tmp_path, name)
            stream = read_split(tmp_path, name, tokenizer.vocab_size)
            text = tokenizer.decode(stream.ids)
            assert text == got.text[start:stop].tobytes().decode()
            assert stream.document_count == (2 if name == "train" else 4)
            (tmp_path / f"{name}.byte_ends").unlink(missing_ok=True)


def test_limit_keeps_the_front(tmp_path: Path, bpe: Tokenizer) -> None:
    got = spooled(TEXTS, tmp_path)
    encode_split(got, 0, len(got), bpe, tmp_path, "whole")
    whole = read_split(tmp_path, "whole", bpe.vocab_size)
    for limit in range(len(whole) + 3):
        encode_split(got, 0, len(got), bpe, tmp_path, "part", limit)
        part = read_split(tmp_path, "part", bpe.vocab_size)
        assert part.ids.tolist() == whole.ids[:limit].tolist()
        assert part.byte_count(0, len(part)) == whole.byte_count(0, min(limit, len(whole)))
        expected = [int(start) for start in whole.documents[:-1] if start < len(part)]
        assert part.documents.tolist() == [*expected, len(part)]


@given(
    st.lists(
        st.sampled_from(["word", " two  words", "\n", "\n\n", "三つ", " ", "it's"]), max_size=60
    ),
    st.integers(8, 40),
)
def test_long_documents_are_encoded_as_if_whole(
    tmp_path_factory: pytest.TempPathFactory, bpe: Tokenizer, parts: list[str], size: int
) -> None:
    # A newline after every part gives each window a place to cut at; without one see below.
    text = "".join(part + ".\nx" for part in parts)
    got = spooled([text], tmp_path_factory.mktemp("long"))
    pieces = list(text_pieces(got, 0, len(got), 2 * size))
    assert "".join(piece for _, piece in pieces) == text
    assert [first for first, _ in pieces] == [i == 0 for i in range(len(pieces))]
    assert all(len(piece.encode()) <= 2 * size for _, piece in pieces)
    ids = [index for _, piece in pieces for index in bpe.encode(piece)]
    if all(piece.endswith(".\n") for _, piece in pieces[:-1]):
        assert ids == bpe.encode(text)


def test_the_law_above_is_not_empty(tmp_path: Path, bpe: Tokenizer) -> None:
    text = "the cat sat.\nx 三つ.\n" * 50
    pieces = [
        piece for _, piece in text_pieces(spooled([text], tmp_path), 0, len(text.encode()), 64)
    ]
    assert len(pieces) > 10
    assert all(piece.endswith(".\n") for piece in pieces)
    assert [i for piece in pieces for i in bpe.encode(piece)] == bpe.encode(text)


@given(st.text(alphabet="a三🙂é", min_size=1, max_size=80), st.integers(4, 12))
def test_a_text_without_lines_is_cut_between_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    got = spooled([text], tmp_path_factory.mktemp("line"))
    pieces = [piece for _, piece in text_pieces(got, 0, len(got), size)]
    assert "".join(pieces) == text
    assert all(0 < len(piece.encode()) <= size for piece in pieces)


def test_documents_without_a_token_are_not_counted(tmp_path: Path) -> None:
    class Words(Tokenizer):
        is_bytes = False
        vocab_size = 9

        def __init__(self) -> None:
            pass

        def encode_pieces(self, texts):  # type: ignore[no-untyped-def,override]
            sizes = [len(text.encode()) if text.strip() else 0 for text in texts]
            return [(np.ones(min(n, 1), int), np.full(min(n, 1), n)) for n in sizes]

    got = spooled([" \n", "word\n", " \n", "word"], tmp_path)
    encode_split(got, 0, len(got), Words(), tmp_path, "test")
    stream = read_split(tmp_path, "test", 9)
    assert stream.documents.tolist() == [0, 1, 2]
    assert [stream.byte_count(i, i + 1) for i in range(2)] == [7, 6]  # blanks go with the next word


def test_id_type() -> None:
    assert id_type(65536) == np.uint16
    assert id_type(65537) == np.uint32


def test_large_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    class Wide(Tokenizer):
        is_bytes = False
        vocab_size = 1 << 20

        def __init__(self) -> None:
            pass

        def encode_pieces(self, texts):  # type: ignore[no-untyped-def,override]
            return [(np.array([70_000, 5]), np.array([1, 3])) for _ in texts]

    got = spooled(["abc"], tmp_path)
    encode_split(got, 0, 3, Wide(), tmp_path, "test")
    stream = read_split(tmp_path, "test", 1 << 20)
    assert stream.block(0, 2).tolist() == [70_000, 5]
