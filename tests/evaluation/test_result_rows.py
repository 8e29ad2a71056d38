"""The row files: what is refused, where it says the fault is, and that writing is whole or not."""

import json
import os

import pytest

from farfield.evaluation import rows
from farfield.evaluation.rows import (
    append_rows,
    perplexity,
    read_positions,
    read_rows,
    write_positions,
    write_rows,
)


def result(**changes):
    row = {
        "schema": 1,
        "mechanism": "rope",
        "seed": 0,
        "train_length": 4,
        "length": 8,
        "protocol": "windows",
        "nll": 30.0,
        "tokens": 16,
        "bytes": 16,
        "ppl": 6.5,
        "ratio": 1.1,
        "ratio_low": None,
        "ratio_high": None,
        "unit_nll": [10.0, 20.0],
        "unit_tokens": 8,
        "policy": {
            "documents": "concatenated",
            "bos": False,
            "stride": 8,
            "dtype": "float32",
            "discarded_tail": 3,
            "non_finite": 0,
        },
    }
    return row | changes


def position(**changes):
    row = {"schema": 1, "mechanism": "rope", "seed": 0, "train_length": 4, "length": 8}
    return row | {"low": 5, "high": 9, "nll": 3.0, "tokens": 8} | changes


def test_round_trip_keeps_every_value_and_extra_columns(tmp_path):
    path = tmp_path / "results.jsonl"
    written = [result(), result(seed=1, note="häufig"), result(nll=None, ppl=None, ratio=None)]
    write_rows(path, written)
    assert read_rows(path) == written
    assert list(tmp_path.iterdir()) == [path]
    append_rows(path, [result(seed=2)])
    assert [row["seed"] for row in read_rows(path)] == [0, 1, 0, 2]
    append_rows(tmp_path / "new.jsonl", [result()])
    assert read_rows(tmp_path / "new.jsonl") == [result()]


def test_positions_round_trip(tmp_path):
    path = tmp_path / "positions.jsonl"
    write_positions(path, [position(), position(nll=None)])
    assert read_positions(path) == [position(), position(nll=None)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema = 2: this version reads schema 1"),
        ({"protocol": "window"}, "protocol = 'window'.*did you mean 'windows'"),
        ({"tokens": 16.0}, "tokens = 16.0: expected int"),
        ({"seed": True}, "seed = True: expected int"),
        ({"length": 0}, "length = 0: expected at least 1"),
        ({"nll": "30"}, "nll = '30': expected a finite number or null"),
        ({"nll": float("nan")}, "nll = nan: expected a finite number or null"),
        ({"ppl": float("inf")}, "ppl = inf"),
        ({"unit_nll": [10.0]}, "1 units of 8 tokens, but tokens = 16"),
        ({"unit_nll": [10.0, float("inf")]}, r"unit_nll\[1\] = inf"),
        ({"nll": None}, "nll is null, but ppl or ratio is not"),
        ({"mechanism": None}, "mechanism = None: expected str"),
        ({"policy": {"stride": 8}}, "policy has no 'documents'"),
    ],
)
def test_a_bad_row_is_not_written_and_the_old_file_stays(tmp_path, changes, message):
    path = tmp_path / "results.jsonl"
    write_rows(path, [result()])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message) as caught:
        write_rows(path, [result(), result(**changes)])
    assert "row 2 not written" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"schema": 1', "line 3: not JSON"),
        (b"[1]", "line 3: got list: expected an object"),
        (json.dumps(result()).replace("30.0", "NaN").encode(), "line 3: NaN is not JSON"),
        (b'{"m": "\xff"}', "line 3: not UTF-8"),
        (b'{"schema": 1, "mechanizm": "x"}', "line 3: no 'mechanism' in the row; is 'mechanizm'"),
    ],
)
def test_reading_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "results.jsonl"
    good = json.dumps(result()).encode()
    path.write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_rows(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_position_bucket_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"positions \[5, 10\): expected low < high"):
        write_positions(tmp_path / "p.jsonl", [position(high=10)])


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    write_rows(path, [result()])

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        append_rows(path, [result(seed=1)])
    assert [row["seed"] for row in read_rows(path)] == [0]
    assert list(tmp_path.iterdir()) == [path]


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "none.jsonl")


def test_perplexity_of_sums():
    assert perplexity(20.0, 10) == pytest.approx(7.38905609893065)
    assert perplexity(None, 10) is None
    assert perplexity(1e6, 1) is None
    assert rows.SCHEMA == 1
