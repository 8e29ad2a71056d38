"""Folders on disk that are built whole or not at all, and checked byte for byte when read.

An entry is built in a folder of its own beside its place and renamed into it, so two processes may
build the same entry at once: the first to finish wins, both hold the same content. A manifest lists
each file's SHA-256; an entry that doesn't agree with its manifest is built again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from farfield.data.files import content_digest

SCHEMA = 1
MANIFEST = "manifest.json"
BUILDING = ".building-"
ABANDONED_SECONDS = 24 * 3600
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}

Facts = dict[str, Any]


def default_cache_dir() -> Path:
    """`$FARFIELD_CACHE`, or the folder "farfield" in the user's cache folder of this platform."""
    named = os.environ.get("FARFIELD_CACHE")
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "farfield"


def entry(root: Path, key: str, build: Callable[[Path], Facts]) -> tuple[Path, Facts]:
    """The folder root/key and its facts, built by `build(folder) -> facts` unless it is whole.

    `facts` is JSON and comes back equal from the cache. Temporary folders that a killed process
    left behind, unchanged for a day, are removed on the way.

    Raises: OSError when the folder can't be written or the disk is full, naming the folder and how
    to choose another; what `build` raises. Nothing half-built remains.
    """
    final = root / key
    facts = read_entry(final)
    if facts is not None:
        return final, facts
    building = root / f"{BUILDING}{key}-{uuid.uuid4().hex}"
    try:
        building.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(root, error) from error
    try:
        _sweep(root)
        facts = _write_manifest(building, build(building))
        _publish(building, final)
    except OSError as error:
        if error.errno in FULL:
            raise _unwritable(root, error) from error
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final, facts


def read_entry(folder: Path) -> Facts | None:
    """The facts of an entry whose every file is as it was built, else None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        body, digest = manifest["body"], manifest["sha256"]
        if digest != _digest(body) or body["schema"] != SCHEMA:
            return None
        for name, expected in body["files"].items():
            if content_digest(folder / name).hex() != expected:
                return None
        return dict(body["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there, not JSON, or not ours: the caller builds it


def _write_manifest(folder: Path, facts: Facts) -> Facts:
    """Seal a finished folder; returns the facts as a reader of the manifest will see them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): content_digest(path).hex() for path in paths}
    body = {"schema": SCHEMA, "files": files, "facts": facts}
    text = json.dumps({"body": body, "sha256": _digest(body)}, indent=1)
    (folder / MANIFEST).write_text(text, "utf-8")
    return dict(json.loads(text)["body"]["facts"])


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _publish(building: Path, final: Path) -> None:
    """Rename a finished folder into its place, unless another process put a whole one there.

    Publishers take turns by a lock beside the cache: what one finds broken is then still the broken
    one when it is moved away, and a whole entry, once there, stays. Whether the lock's file is left
    behind is the lock library's choice, so it lies outside the folder of entries.
    """
    with FileLock(final.parent.with_suffix(".lock")):
        if read_entry(final) is not None:
            return
        if final.is_dir():
            # Moved, not deleted in place: a rename is the one step a reader can't see half done.
            broken = final.rename(final.with_name(f"{BUILDING}broken-{uuid.uuid4().hex}"))
            shutil.rmtree(broken)
        elif final.exists():
            final.unlink()
        building.rename(final)


def _sweep(root: Path) -> None:
    """Remove the temporary folders of processes that were killed."""
    limit = time.time() - ABANDONED_SECONDS
    for folder in root.glob(f"{BUILDING}*"):
        try:
            newest = max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])
        except OSError:
            continue  # its owner finished meanwhile
        if newest < limit:
            shutil.rmtree(folder, ignore_errors=True)


def _unwritable(root: Path, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    message = f"can't write tokens to {root}: {reason}; name another folder in FARFIELD_CACHE"
    return type(error)(error.errno, message)
