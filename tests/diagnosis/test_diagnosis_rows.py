"""Rows of a diagnosis: written, read again, and refused."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from zoo import build, text

from farfield.diagnosis import Sampling, Settings, measure, read_rows, write_rows
from farfield.diagnosis import rows as schema


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Rows of a tiny model; its window leaves some of them without a far key."""
    settings = Settings(windows=(4, 16))
    return measure(
        build("mistral"), text(1, 30), name="tiny", settings=settings, sampling=Sampling(count=12)
    ).rows


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_are_read_as_they_were_written(
    rows: list[dict[str, Any]], tmp_path: Path, ending: str
) -> None:
    out = tmp_path / f"rows.{ending}"
    write_rows(out, rows)
    assert read_rows(out) == rows
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_full_disk_leaves_the_old_rows(
    rows: list[dict[str, Any]], tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / f"rows.{ending}"
    write_rows(out, rows[:1])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_rows(out, rows)
    assert read_rows(out) == rows[:1]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_every_column_is_documented(rows: list[dict[str, Any]]) -> None:
    words = set(re.findall(r"\w+", str(schema.__doc__)))
    spreads = {f"{key}_sd" for key in schema.SPREADS}
    columns = set(rows[0]) - spreads - {f"{key}_slack" for key in schema.BOUNDS}
    assert columns - words == set()
    assert set(rows[0]) - columns == {*spreads, "t4_slack", "t4_prime_slack"}


def test_rows_that_break_the_schema_are_refused(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    for change, message in (
        ({"far_mass": "much"}, "far_mass is 'much'; expected a number or null"),
        ({"layer": 1.5}, "layer is 1.5; expected int"),
        ({"schema": 2}, "schema is 2; expected 1"),
    ):
        with pytest.raises(ValueError, match=message):
            write_rows(out, [{**rows[0], **change}])
    short = {key: value for key, value in rows[0].items() if key != "ell"}
    with pytest.raises(ValueError, match="a diagnosis row lacks ell"):
        write_rows(out, [short])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"expected a name that ends in .jsonl or .parquet"):
        write_rows(tmp_path / "rows.csv", rows)


def test_damaged_files_are_refused_by_place(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"schema": 1}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, row 1: a diagnosis row lacks"):
        read_rows(lines)
    lines.write_text("{\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: not JSON"):
        read_rows(lines)
    lines.write_text("3\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: expected an object"):
        read_rows(lines)
    table = tmp_path / "rows.parquet"
    table.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"rows.parquet: not parquet"):
        read_rows(table)
