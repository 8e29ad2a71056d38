"""A corpus from end to end: exact, disjoint, never stale, and clear about what it can't do."""

import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farfield.data import Corpus, Splits, load_corpus
from farfield.data.files import Piece
from farfield.data.sources import Files
from farfield.data.tokenizer import byte_tokenizer, train_bpe

POEM = "Über allen Gipfeln\nist Ruh 三つ 🙂.\n" * 60


@pytest.fixture
def poem(tmp_path: Path) -> Path:
    """A file of characters from one to four bytes."""
    path = tmp_path / "poem.txt"
    path.write_bytes(POEM.encode())
    return path


def streams(corpus: Corpus) -> list:
    """The three splits."""
    return [corpus.train, corpus.validation, corpus.test]


def text_of(corpus: Corpus) -> str:
    """All three splits, decoded each alone: a broken character would show."""
    return "".join(corpus.tokenizer.decode(stream.ids) for stream in streams(corpus))


def entries(cache: Path) -> list[Path]:
    """What is kept."""
    return sorted((cache / "tokens").iterdir())


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:280"])
def test_splits_are_the_text_exactly_once(poem: Path, tokenizer: str) -> None:
    corpus = load_corpus(str(poem), tokenizer)
    assert text_of(corpus) == POEM
    counts = [stream.byte_count(0, len(stream)) for stream in streams(corpus)]
    assert sum(counts) == poem.stat().st_size
    assert [entry["bytes"] for entry in corpus.policy["splits"].values()] == counts
    bounds = [entry["text"] for entry in corpus.policy["splits"].values()]
    assert [bounds[0][0], bounds[0][1], bounds[1][1], bounds[2][1]] == [
        0, bounds[1][0], bounds[2][0], poem.stat().st_size,
    ]  # fmt: skip
    for stream, fraction in zip(streams(corpus), (0.85, 0.05, 0.10), strict=True):
        share = stream.byte_count(0, len(stream)) / poem.stat().st_size
        assert share == pytest.approx(fraction, abs=0.005)


def test_bytes_tokens_are_the_file(poem: Path) -> None:
    corpus = load_corpus(str(poem))
    ids = np.concatenate([stream.ids for stream in streams(corpus)])
    assert isinstance(corpus.train.ids, np.memmap)
    assert ids.astype(np.uint8).tobytes() == poem.read_bytes()
    assert corpus.tokenizer.hugging_face.encode(POEM) == ids.tolist()


def test_bpe_is_trained_on_the_training_split_alone(tmp_path: Path) -> None:
    head, tail = "the cat sat. " * 600, "zyxwv zyxwv " * 70
    path = tmp_path / "a.txt"
    path.write_text(head + tail)
    corpus = load_corpus(str(path), "bpe:265")
    trained = corpus.tokenizer.decode(corpus.train.ids)
    assert "zyx" not in trained
    assert train_bpe([trained], 265).fingerprint == corpus.tokenizer.fingerprint
    assert len(corpus.tokenizer.encode("zyxwv")) == 5


def test_bpe_tokenizer_comes_back_from_the_cache(poem: Path) -> None:
    first, again = (load_corpus(str(poem), "bpe:280") for _ in range(2))
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert again.tokenizer.name == "bpe:280"
    assert again.policy == first.policy
    assert again.fingerprint == first.fingerprint


def test_a_tokenizers_folder(poem: Path, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "b")
    train_bpe([POEM], 280).save(tmp_path / "t")
    corpus = load_corpus(str(poem), str(tmp_path / "t"))
    assert corpus.tokenizer.name == "bpe:280"
    assert text_of(corpus) == POEM
    assert load_corpus(str(poem), str(tmp_path / "b")).fingerprint == (
        load_corpus(str(poem)).fingerprint
    )


def write_rows(folder: Path, name: str, texts: list[str]) -> Path:
    """The texts as rows of a file."""
    path = folder / name
    if ".parquet" in name:
        pq.write_table(pa.table({"text": texts}), path)
        content = path.read_bytes()
    else:
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


ROWS = [f"row {i} naïve" + "!" * (i % 5) for i in range(120)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.parquet.gz", "hub"])
def test_rows_of_every_format_give_the_same_tokens(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    if name == "hub":
        write_rows(folder, "train.parquet", ROWS)
        spec = f"hub:{folder}"
    else:
        spec = str(write_rows(folder, name, ROWS))
    corpus = load_corpus(spec)
    assert text_of(corpus) == "\n".join(ROWS)
    assert corpus.policy["split"] == "document"
    assert corpus.policy["document_count"] == 120
    found: list[str] = []
    for stream in streams(corpus):
        for start, stop in zip(stream.documents, stream.documents[1:], strict=False):
            found.append(corpus.tokenizer.decode(stream.ids[start:stop]).removesuffix("\n"))
    assert found == ROWS


def test_text_and_gzip_give_the_same_tokens(poem: Path, tmp_path: Path) -> None:
    packed = tmp_path / "poem.txt.gz"
    packed.write_bytes(gzip.compress(poem.read_bytes()))
    assert text_of(load_corpus(str(packed))) == POEM


def test_king_james() -> None:
    corpus = load_corpus()
    assert corpus.policy["split"] == "document"
    assert corpus.policy["document_count"] == 66
    assert [stream.document_count for stream in streams(corpus)] == [42, 2, 22]
    assert corpus.tokenizer.decode(corpus.train.block(0, 16)) == "In the beginning"
    assert corpus.tokenizer.decode(corpus.test.block(0, 30)) == "Paul, a servant of Jesus Chris"
    assert len(corpus.test) > 128 * 128 * 20  # twenty windows at 128 times 128 tokens


def test_policy_is_json_and_says_how(poem: Path) -> None:
    policy = load_corpus(str(poem), max_tokens=500).policy
    assert json.loads(json.dumps(policy)) == policy
    expected = {
        "source": str(poem),
        "documents": "concatenated",
        "bos": False,
        "split": "position",
        "tokenizer": "bytes",
        "document_count": 1,
        "max_tokens": 500,
        "fractions": {"train": 0.85, "validation": 0.05, "test": 0.1},
    }
    assert {key: policy[key] for key in expected} == expected


def test_second_call_reads_the_cache(poem: Path, own_cache: Path) -> None:
    first = load_corpus(str(poem))
    [kept] = entries(own_cache)
    before = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert load_corpus(str(poem)).fingerprint == first.fingerprint
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == before


def test_parameter_wins_over_the_environment(poem: Path, own_cache: Path, tmp_path: Path) -> None:
    load_corpus(str(poem), cache_dir=tmp_path / "other")
    assert len(entries(tmp_path / "other")) == 1
    assert not own_cache.exists()


def test_changed_input_is_noticed_whatever_its_time_says(poem: Path) -> None:
    first = load_corpus(str(poem))
    times = poem.stat()
    changed = POEM.replace("Ruh", "Not", 1)
    poem.write_bytes(changed.encode())
    os.utime(poem, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = load_corpus(str(poem))
    assert second.fingerprint != first.fingerprint
    assert text_of(second) == changed
    assert text_of(first) == POEM  # a corpus in use keeps its tokens


def test_changed_dataset_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    write_rows(tmp_path / "d", "train.jsonl", ROWS)
    load_corpus(f"hub:{tmp_path / 'd'}")
    write_rows(tmp_path / "d", "train.jsonl", ROWS[::-1])
    assert text_of(load_corpus(f"hub:{tmp_path / 'd'}")) == "\n".join(ROWS[::-1])


def test_every_setting_is_part_of_the_fingerprint(poem: Path, tmp_path: Path) -> None:
    train_bpe([POEM], 280).save(tmp_path / "t")
    found = {
        load_corpus(str(poem)).fingerprint,
        load_corpus(str(poem), "bpe:280").fingerprint,
        load_corpus(str(poem), "bpe:281").fingerprint,
        load_corpus(str(poem), str(tmp_path / "t")).fingerprint,
        load_corpus(str(poem), splits=Splits(0.8, 0.1, 0.1)).fingerprint,
        load_corpus(str(poem), max_tokens=900).fingerprint,
        load_corpus(str(poem), column="body").fingerprint,
    }
    assert len(found) == 7


@pytest.mark.parametrize("name", ["train.ids", "test.documents", "manifest.json"])
def test_damaged_entry_is_never_served(poem: Path, own_cache: Path, name: str) -> None:
    load_corpus(str(poem))
    [kept] = entries(own_cache)
    content = bytearray((kept / name).read_bytes())
    content[len(content) // 2] ^= 1
    (kept / name).write_bytes(content)
    corpus = load_corpus(str(poem))
    assert text_of(corpus) == POEM
    assert corpus.test.documents.tolist() == [0, len(corpus.test)]


def test_input_that_changes_while_it_is_read(
    poem: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Files.pieces

    def meddled(self):  # type: ignore[no-untyped-def]
        poem.write_text("other text, and enough of it " * 9)
        return read(self)

    monkeypatch.setattr(Files, "pieces", meddled)
    with pytest.raises(ValueError, match=r"poem\.txt: the text changed while it was read"):
        load_corpus(str(poem))
    assert entries(own_cache) == []


def build_at_once(path: str, tokenizer: str, meet: Any, results: Any) -> None:
    """In a process of its own: build only once the other has begun to build."""
    read = Files.pieces

    def together(self: Files) -> Iterator[Piece]:
        meet.wait(60)
        return read(self)

    Files.pieces = together  # type: ignore[method-assign]
    corpus = load_corpus(path, tokenizer)
    results.put((corpus.fingerprint, corpus.tokenizer.fingerprint, text_of(corpus)))


@pytest.mark.skipif(sys.platform == "win32", reason="a fork has the imports already")
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:280"])
def test_two_processes_at_once(poem: Path, own_cache: Path, tokenizer: str) -> None:
    context = multiprocessing.get_context("fork")
    meet, results = context.Barrier(2), context.Queue()
    arguments = (str(poem), tokenizer, meet, results)
    both = [context.Process(target=build_at_once, args=arguments) for _ in range(2)]
    for process in both:
        process.start()
    got = [results.get(timeout=60) for _ in both]
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    corpus = load_corpus(str(poem), tokenizer)
    assert got == [(corpus.fingerprint, corpus.tokenizer.fingerprint, POEM)] * 2
    assert len(entries(own_cache)) == 1


@pytest.mark.parametrize("limit", [100, 1000])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:262"])
def test_max_tokens(poem: Path, tokenizer: str, limit: int) -> None:
    corpus = load_corpus(str(poem), tokenizer, max_tokens=limit)
    total = sum(len(stream) for stream in streams(corpus))
    assert limit - 3 <= total <= limit
    assert POEM.startswith(corpus.tokenizer.decode(corpus.train.ids).rstrip("\ufffd"))


def test_max_tokens_stops_reading_the_source(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "fine " * 20})] * 20 + ["not JSON at all"]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    assert len(load_corpus(str(path), max_tokens=1000).train) == 850
    with pytest.raises(ValueError, match="line 21: not JSON"):
        load_corpus(str(path))


def test_evaluation_text_alone(poem: Path) -> None:
    corpus = load_corpus(str(poem), splits=Splits(0, 0, 1))
    assert (len(corpus.train), len(corpus.validation)) == (0, 0)
    assert corpus.tokenizer.decode(corpus.test.ids) == POEM
    with pytest.raises(ValueError, match="'bpe:280' is trained on the training split"):
        load_corpus(str(poem), "bpe:280", splits=Splits(0, 0, 1))


@pytest.mark.parametrize("parts", [(0.5, 0.5, 0.5), (1.2, -0.2, 0.0), (0.0, 0.0, 0.0)])
def test_fractions_that_are_none(parts: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="expected fractions from 0 to 1 that add up to 1"):
        Splits(*parts)


@pytest.mark.parametrize("count", [0, -5])
def test_max_tokens_too_small(poem: Path, count: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens is {count}; expected at least 1"):
        load_corpus(str(poem), max_tokens=count)
    with pytest.raises(ValueError, match=r"too short to split|has no token"):
        load_corpus(str(poem), max_tokens=3)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_empty_file(tmp_path: Path, own_cache: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    with pytest.raises(ValueError, match=f"{name}: the text is empty; expected at least one"):
        load_corpus(str(path))
    assert entries(own_cache) == []


def test_split_without_a_token_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(str(tmp_path / "w"))
    (tmp_path / "a.txt").write_text("word " * 50 + " " * 50)
    with pytest.raises(ValueError, match=r"validation split \(15 bytes of text\) has no token"):
        load_corpus(str(tmp_path / "a.txt"), str(tmp_path / "w"))


@pytest.mark.parametrize(
    ("spec", "tokenizer", "message"),
    [
        ("kvj", "bytes", "nearest: 'kjv'"),
        ("kjv", "byte", "nearest: 'bytes'"),
        ("kjv", "bpe:12", "at least 260"),
        ("nowhere/*.txt", "bytes", "no file matches the glob"),
    ],
)
def test_misspelt(spec: str, tokenizer: str, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load_corpus(spec, tokenizer)
    assert "\n" not in str(caught.value)


def test_not_utf8_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine " * 40 + b"\xe9")
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 at byte 200"):
        load_corpus(str(tmp_path))


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_bytes(b"a line of text that is not very long\n" * 1_300_000)
    tracemalloc.start()
    corpus = load_corpus(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(map(len, streams(corpus))) == path.stat().st_size > 45e6
    assert peak < 12e6


# The package's own __init__ imports the model; here only the data part is wanted.
ALONE = f"""
import sys, types
package = sys.modules["farfield"] = types.ModuleType("farfield")
package.__path__ = [{str(Path(__file__).parents[2] / "farfield")!r}]
"""


def test_importing_loads_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'datasets', 'pyarrow'}"
    script = f"{ALONE}import farfield.data; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
