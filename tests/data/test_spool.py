"""The spooled text is the documents, and its cuts never lose, share or break a character."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfield.data.spool import FEW_DOCUMENTS, Spool, character_start, cut, spool

FRACTIONS = (0.85, 0.05, 0.10)


def spooled(texts: list[str], folder: Path, limit: int | None = None) -> Spool:
    """The texts, each a document that arrives in two pieces."""
    pieces: list[tuple[bool, bytes]] = []
    for text in texts:
        data = text.encode()
        pieces += [(True, data[: len(data) // 2]), (False, data[len(data) // 2 :])]
    return spool(pieces, folder, limit)


def expected_text(texts: list[str]) -> str:
    """Documents end to end, with a newline between two where there is none."""
    joined = ""
    for text in filter(None, texts):
        joined += ("\n" if joined and not joined.endswith("\n") else "") + text
    return joined


@given(st.lists(st.text(max_size=12), max_size=8))
def test_documents_follow_one_another(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    got = spooled(texts, tmp_path_factory.mktemp("spool"))
    assert got.text.tobytes().decode() == expected_text(texts)
    assert got.empty == texts.count("")
    bounds = [*got.starts, len(got)]
    found = [got.text[a:b].tobytes().decode() for a, b in pairwise(bounds)]
    full = [text for text in texts if text]
    assert len(found) == len(full)
    for i, (piece, text) in enumerate(zip(found, full, strict=True)):
        newline = "" if text.endswith("\n") or i == len(full) - 1 else "\n"
        assert piece == text + newline


@given(st.lists(st.text(max_size=12), max_size=8), st.integers(1, 60))
def test_limit_is_the_front_of_the_text(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], limit: int
) -> None:
    got = spooled(texts, tmp_path_factory.mktemp("spool"), limit)
    whole = expected_text(texts).encode()
    assert len(got) <= limit
    assert whole.startswith(got.text.tobytes())
    got.text.tobytes().decode()
    assert len(got) > min(limit, len(whole)) - 4  # at most a character's other bytes are missing
    assert all(start < len(got) for start in got.starts)


def test_limit_stops_the_reading(tmp_path: Path) -> None:
    read: list[int] = []

    def endless():  # type: ignore[no-untyped-def]
        while True:
            read.append(1)
            yield True, b"x" * 100

    assert len(spool(endless(), tmp_path, 250)) == 250
    assert len(read) == 4  # the fourth is asked for and not written


def test_documents_beyond_the_limit_are_not_empty_ones(tmp_path: Path) -> None:
    assert spooled(["abc", "def"], tmp_path, 3).empty == 0


@given(st.text(max_size=20), st.data())
def test_character_start(text: str, data: st.DataObject) -> None:
    raw = np.frombuffer(text.encode(), np.uint8)
    position = data.draw(st.integers(0, len(raw)))
    starts = [len(text[:i].encode()) for i in range(len(text) + 1)]
    assert character_start(raw, position) == max(s for s in starts if s <= position)


@given(st.text(min_size=40, max_size=400))
def test_few_documents_are_cut_by_position(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    got = spooled([text], tmp_path_factory.mktemp("cut"))
    edges, by = cut(got, FRACTIONS)
    assert by == "position"
    assert edges[0] == 0
    assert edges[3] == len(got)
    parts = [got.text[a:b].tobytes().decode() for a, b in pairwise(edges)]
    assert "".join(parts) == text
    for edge, target in zip(edges[1:3], (0.85, 0.90), strict=True):
        assert abs(edge - target * len(got)) < 4


def test_many_documents_are_cut_between_documents(tmp_path: Path) -> None:
    texts = [f"document {i}" * (1 + i % 7) for i in range(200)]
    got = spooled(texts, tmp_path)
    edges, by = cut(got, FRACTIONS)
    assert by == "document"
    assert set(edges) <= {*got.starts.tolist(), len(got)}
    longest = max(map(len, texts)) + 1
    for edge, target in zip(edges[1:3], (0.85, 0.90), strict=True):
        assert abs(edge - target * len(got)) <= longest / 2 + 1


@pytest.mark.parametrize(
    ("count", "by"), [(FEW_DOCUMENTS - 1, "position"), (FEW_DOCUMENTS, "document")]
)
def test_threshold(tmp_path: Path, count: int, by: str) -> None:
    assert cut(spooled(["some text"] * count, tmp_path), FRACTIONS)[1] == by


def test_one_giant_among_many_is_cut_by_position(tmp_path: Path) -> None:
    texts = ["small"] * 30 + ["giant " * 2000] + ["small"] * 30
    edges, by = cut(spooled(texts, tmp_path), FRACTIONS)
    assert by == "position"
    assert min(np.diff(edges)) > 0


@pytest.mark.parametrize("fractions", [(0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.9, 0.1, 0.0)])
@pytest.mark.parametrize("count", [1, 100])
def test_a_fraction_of_zero_is_empty(
    tmp_path: Path, fractions: tuple[float, float, float], count: int
) -> None:
    got = spooled(["a hundred texts"] * count, tmp_path)
    edges, _ = cut(got, fractions)
    sizes = np.diff(edges)
    assert [size > 0 for size in sizes] == [part > 0 for part in fractions]
    assert sizes.sum() == len(got)


@pytest.mark.parametrize("text", ["", "a", "abcd", "🙂"])
def test_too_short_to_split(tmp_path: Path, text: str) -> None:
    got = spooled([text], tmp_path)
    message = f"a text of {len(text.encode())} bytes is too short to split"
    with pytest.raises(ValueError, match=message):
        cut(got, FRACTIONS)
