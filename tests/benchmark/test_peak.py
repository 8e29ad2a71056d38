"""Peak memory, measured in a process of its own."""

import subprocess
import sys

import pytest

from farfield.benchmark import peak

needs_linux = pytest.mark.skipif(not peak.available(), reason="no VmHWM in /proc/self/status")

HEADS, DIM, TOKENS = 4, 32, 512
ONE = 4 * HEADS * TOKENS**2  # bytes of one T×T matrix for every head, in float32


@needs_linux
def test_a_process_of_its_own_grows_by_what_the_work_takes() -> None:
    work = peak.Work("T×T definition, backward", TOKENS, HEADS, DIM)
    # The definition keeps several T×T matrices at once for its gradients, and not dozens.
    assert 4 * ONE < peak.growth(work) < 40 * ONE


@needs_linux
def test_a_childs_high_water_does_not_remember_its_parents() -> None:
    waste = bytearray(b"x") * 2**28
    del waste
    code = "from pathlib import Path; print(Path('/proc/self/status').read_text())"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("VmHWM")]
    assert 1024 * int(line.split()[1]) < 2**27
    assert peak.high_water() >= 2**28


@needs_linux
def test_every_case_is_a_call_that_runs() -> None:
    for case in ("sdpa", "rope", "learned+v", "path, backward", "T×T definition, backward"):
        peak._prepared(peak.Work(case, 24, 2, 8), 24)()
    with pytest.raises(ValueError, match="did you mean 'rope'"):
        peak._prepared(peak.Work("roppe", 24, 2, 8), 24)


@needs_linux
def test_what_a_process_complains_of_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_PROGRAM", "raise SystemExit('no such luck')")
    with pytest.raises(ValueError, match=r"^rope at 8 tokens: no such luck$"):
        peak.growth(peak.Work("rope", 8, 2, 8))


def test_a_system_that_does_not_say_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(peak, "_STATUS", tmp_path_factory.mktemp("no") / "status")
    assert not peak.available()
    with pytest.raises(ValueError, match="this system has none"):
        peak.growth(peak.Work("rope", 8, 2, 8))
