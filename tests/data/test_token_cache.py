"""An entry is whole or it is built: under races, damage and interruption."""

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from farfield.data import cache
from farfield.data.cache import default_cache_dir, entry, read_entry


def build(folder: Path) -> dict[str, object]:
    """A small entry."""
    (folder / "sub").mkdir()
    (folder / "sub" / "data").write_bytes(b"content")
    (folder / "empty").touch()
    return {"made": [1, 2]}


def never(folder: Path) -> dict[str, object]:
    """A build that must not happen."""
    raise AssertionError("built again")


def leftovers(root: Path) -> list[str]:
    """Temporary folders (the lock of a place stays: removing it would let two in)."""
    return [path.name for path in root.glob(f"{cache.BUILDING}*")]


def test_second_call_reads(tmp_path: Path) -> None:
    folder, facts = entry(tmp_path / "new" / "root", "key", build)
    assert facts == {"made": [1, 2]}
    assert entry(tmp_path / "new" / "root", "key", never) == (folder, facts)
    assert (folder / "sub" / "data").read_bytes() == b"content"
    assert leftovers(tmp_path / "new" / "root") == []


def flip(path: Path) -> None:
    """Change one bit, keeping the size and the times."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: flip(f / "sub" / "data"),
        lambda f: (f / "sub" / "data").write_bytes(b"cont"),
        lambda f: (f / "sub" / "data").unlink(),
        lambda f: (f / "empty").unlink(),
        lambda f: (f / "manifest.json").unlink(),
        lambda f: (f / "manifest.json").write_text("{"),
        lambda f: (f / "manifest.json").write_text("[]"),
        lambda f: (f / "manifest.json").write_text('{"body": 1, "sha256": 2}'),
        lambda f: (f / "manifest.json").write_text(
            (f / "manifest.json").read_text().replace("2\n", "3\n")
        ),
    ],
)
def test_damage_is_noticed_and_repaired(tmp_path: Path, damage: object) -> None:
    folder, facts = entry(tmp_path, "key", build)
    assert callable(damage)
    damage(folder)
    assert read_entry(folder) is None
    assert entry(tmp_path, "key", build) == (folder, facts)
    assert read_entry(folder) == facts
    assert (folder / "sub" / "data").read_bytes() == b"content"
    assert leftovers(tmp_path) == []


def test_another_schema_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = entry(tmp_path, "key", build)
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    assert read_entry(folder) is None


def test_a_file_or_empty_folder_in_its_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    for key in ("file", "folder"):
        folder, facts = entry(tmp_path, key, build)
        assert read_entry(folder) == facts
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("broken_before", [False, True])
@pytest.mark.parametrize("builders", [2, 8])
def test_many_at_once_all_get_a_whole_entry(
    tmp_path: Path, broken_before: bool, builders: int
) -> None:
    if broken_before:
        folder, _ = entry(tmp_path, "key", build)
        flip(folder / "sub" / "data")
    meet = threading.Barrier(builders, timeout=20)
    built: list[Path] = []
    got: list[object] = []

    def slow(folder: Path) -> dict[str, object]:
        built.append(folder)
        meet.wait()  # neither has finished when the other begins
        return build(folder)

    def work() -> None:
        folder, facts = entry(tmp_path, "key", slow)
        got.append((read_entry(folder), facts))

    threads = [threading.Thread(target=work) for _ in range(builders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(built)) == builders
    assert got == [({"made": [1, 2]}, {"made": [1, 2]})] * builders
    assert leftovers(tmp_path) == []


def test_a_failed_or_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> dict[str, object]:
        build(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        entry(tmp_path, "key", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_names_the_folder(tmp_path: Path) -> None:
    def full(folder: Path) -> dict[str, object]:
        build(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left on device; name another folder in FAR") as c:
        entry(tmp_path, "key", full)
    assert c.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(c.value)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_a_build_pass_unchanged(tmp_path: Path) -> None:
    def missing(folder: Path) -> dict[str, object]:
        raise FileNotFoundError("the source went away")

    with pytest.raises(FileNotFoundError, match=r"^the source went away$"):
        entry(tmp_path, "key", missing)


def test_unwritable_root_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"can't write tokens to .*file.*FARFIELD_CACHE"):
        entry(tmp_path / "file" / "root", "key", build)


def test_abandoned_folders_are_swept_and_living_ones_kept(tmp_path: Path) -> None:
    old, living = tmp_path / f"{cache.BUILDING}old", tmp_path / f"{cache.BUILDING}living"
    for folder in (old, living):
        folder.mkdir()
        (folder / "part").touch()
    past = time.time() - 2 * cache.ABANDONED_SECONDS
    for path in (old / "part", old, living):
        os.utime(path, (past, past))  # in `living` a file is still being written
    entry(tmp_path, "key", build)
    assert not old.exists()
    assert living.exists()


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    folder, _ = entry(tmp_path, "key", build)
    body = json.loads((folder / "manifest.json").read_text())["body"]
    assert sorted(body["files"]) == ["empty", "sub/data"]


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"FARFIELD_CACHE": "/x/y", "XDG_CACHE_HOME": "/z"}, "/x/y"),
        ("linux", {"XDG_CACHE_HOME": "/z"}, "/z/farfield"),
        ("linux", {}, "/home/u/.cache/farfield"),
        ("darwin", {}, "/home/u/Library/Caches/farfield"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/farfield"),
        ("win32", {}, "/home/u/AppData/Local/farfield"),
    ],
)
def test_default_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("FARFIELD_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setattr(sys, "platform", platform)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_cache_dir() == Path(expected)
