"""A file is replaced whole or not at all: failures, kills, and writers at the same moment."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from farfield.evaluation import whole
from farfield.evaluation.whole import replacing, write_text

OLD = "old\n"

# `whole` needs the standard library alone: a process that has it and no torch starts at once.
ALONE = f"""
import os, signal, sys
from pathlib import Path
sys.path.append({str(Path(whole.__file__).parent)!r})
from whole import replacing, write_text
path = Path(sys.argv[1])
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    old = tmp_path / "rows.jsonl"
    old.write_text(OLD)
    return old


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def script(body: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", ALONE + body, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def expect_untouched(path: Path) -> None:
    assert path.read_text() == OLD
    assert list(path.parent.iterdir()) == [path]


def test_text_replaces_a_file_and_makes_one(path: Path, tmp_path: Path) -> None:
    for place in (path, tmp_path / "new.txt"):
        write_text(place, "ℓ ≥ 0\n")
        assert place.read_bytes() == f"ℓ ≥ 0{os.linesep}".encode()
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / "new.txt"])


def test_any_writer_of_a_path_may_fill_the_scratch_file(path: Path) -> None:
    with replacing(path) as scratch:
        assert scratch.parent == path.parent
        assert str(os.getpid()) in scratch.name
        assert not scratch.exists()
        scratch.write_bytes(b"\x00\xff")
        assert path.read_text() == OLD
    assert path.read_bytes() == b"\x00\xff"
    assert list(path.parent.iterdir()) == [path]


def test_it_is_on_the_disk_before_it_replaces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *ends: (done.append("replace"), replace(*ends)))
    write_text(path, "new")
    assert done == ["fsync", "replace"]


def test_permissions_are_those_of_an_ordinary_file(tmp_path: Path, umask: None) -> None:
    ordinary, own = tmp_path / "ordinary", tmp_path / "own"
    ordinary.write_text("")
    write_text(own, "")
    modes = [stat.S_IMODE(file.stat().st_mode) for file in (ordinary, own)]
    assert modes == [0o640, 0o640]


@pytest.mark.parametrize("error", [ValueError("a bad row"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failure_inside_leaves_the_old_file(path: Path, error: BaseException) -> None:
    def write() -> None:
        with replacing(path) as scratch:
            scratch.write_text("half of i")
            raise error

    with pytest.raises(type(error)) as caught:
        write()
    assert caught.value is error
    expect_untouched(path)


def test_a_block_that_writes_nothing_is_an_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    expect_untouched(path)


def test_text_that_has_no_utf8_is_an_error(path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\udcff")
    expect_untouched(path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left on device"):
        write_text(path, "new")
    expect_untouched(path)


def test_a_write_that_the_system_cuts_short_leaves_the_old_file(path: Path) -> None:
    job = script(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "write_text(path, 'x' * 100_000)\n",
        path,
    )
    assert b"File too large" in job.communicate(timeout=60)[1]
    assert job.returncode == 1
    expect_untouched(path)


def test_a_folder_in_the_way_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(path, "new")
    assert list(tmp_path.iterdir()) == [path]
    assert list(path.iterdir()) == []


def test_a_missing_folder_and_a_file_in_its_place_are_errors(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "nowhere" / "rows", "new")
    with pytest.raises(NotADirectoryError, match="partial"):
        write_text(path / "rows", "new")
    expect_untouched(path)


def test_a_killed_writer_leaves_the_old_file(path: Path) -> None:
    job = script(
        "with replacing(path) as scratch:\n"
        "    scratch.write_text('half of i')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        path,
    )
    job.communicate(timeout=60)
    assert job.returncode == -9
    assert path.read_text() == OLD
    write_text(path, "new")  # what the killed one left is in nobody's way
    assert path.read_text() == "new"


def test_threads_at_one_file_have_a_scratch_file_each(path: Path) -> None:
    writers = 8
    barrier = Barrier(writers, timeout=60)

    def write(writer: int) -> str:
        with replacing(path) as scratch:
            barrier.wait()  # all of them are inside at once
            scratch.write_text(str(writer) * 10_000)
            barrier.wait()
            return scratch.name

    with ThreadPoolExecutor(writers) as pool:
        names = list(pool.map(write, range(writers)))
    assert len(set(names)) == writers
    assert path.read_text() in {str(writer) * 10_000 for writer in range(writers)}
    assert list(path.parent.iterdir()) == [path]


def test_processes_at_one_file_never_show_a_part_of_it(path: Path) -> None:
    body = "for _ in range(200):\n    write_text(path, sys.argv[2] * 100_000)\n"
    jobs = [script(body, path, letter) for letter in "ab"]
    seen = set()
    while any(job.poll() is None for job in jobs):
        seen.add(path.read_text())
    assert [job.communicate(timeout=60)[1] for job in jobs] == [b"", b""]
    assert [job.returncode for job in jobs] == [0, 0]
    seen.add(path.read_text())
    assert seen <= {OLD, "a" * 100_000, "b" * 100_000}
    assert len(seen) > 1
    assert list(path.parent.iterdir()) == [path]
