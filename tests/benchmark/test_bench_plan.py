"""What fits into the time, how it is shared out, and what the rows are held to."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest

from farfield.attention import mechanisms
from farfield.benchmark import QUICK, SECTIONS, LeftOut, Results, Row, Sizes, check, plan, rows
from farfield.benchmark.plan import Job, Plan
from farfield.benchmark.targets import TARGETS, Target, target


def row(**changed) -> Row:
    given = {"section": "layer", "case": "learned", "measure": "forward", "tokens": 8, "ratio": 1.0}
    return Row(**{**given, **changed})


def job(name: str, operations: float, log: list | None = None) -> Job:
    def run(allowance, report):
        if log is not None:
            log.append((name, allowance))
        report(0.5)
        return [row(case=name)]

    return Job("layer", name, operations, run, seconds=0.0)


def test_the_quickest_jobs_that_fit_are_done_in_the_order_of_their_section() -> None:
    found = [job("slow", 50.0), LeftOut("layer", "peer", "not installed"), job("b", 2), job("a", 1)]
    made = plan.plan(found, 10.0, 1.0)
    assert [one.name for one in made.jobs] == ["b", "a"]
    assert sum(made.allowances) == pytest.approx(10.0)
    assert made.allowances[0] > made.allowances[1]
    assert [one.case for one in made.left_out] == ["peer", "slow"]
    assert "about 65 s here (everything: --budget 2)" in made.left_out[1].reason


def test_a_job_is_not_taken_without_the_one_it_comes_after() -> None:
    first, second = job("first", 30.0), replace(job("second", 2.0), after="first")
    third = replace(job("third", 1.0), after="second")
    assert plan.plan([first, second, third, job("own", 3.0)], 10.0, 1.0).jobs[0].name == "own"
    assert len(plan.plan([first, second, third, job("own", 3.0)], 10.0, 1.0).jobs) == 1
    for budget, names in ((41.0, ["first"]), (42.0, ["first", "second"])):
        made = plan.plan([first, second, third], budget, 1.0)
        assert [one.name for one in made.jobs] == names
    assert len(plan.plan([first, second, third], 60.0, 1.0).jobs) == 3


def test_sections_are_interleaved() -> None:
    found = [job(name, 1.0) for name in "abcd"]
    found += [replace(job(name, 1.0), section="decode") for name in "xy"]
    made = plan.plan(found, 60.0, 1.0)
    assert "".join(one.name for one in made.jobs) == "axbcyd"


def test_the_quickest_is_done_whatever_it_takes() -> None:
    made = plan.plan([job("slow", 500.0), job("slower", 900.0)], 1.0, 1.0)
    assert [one.name for one in made.jobs] == ["slow"]
    assert made.allowances[0] == pytest.approx(650.0)
    assert plan.plan([], 1.0, 1.0) == Plan((), (), ())


def test_what_a_job_leaves_of_its_time_goes_to_the_next() -> None:
    log: list = []
    made = Plan((job("a", 1, log), job("b", 1, log)), (5.0, 5.0), ())
    told: list = []
    done, late = plan.carry_out(made, lambda job, seconds, total: told.append((seconds, total)))
    assert [one.case for one in done] == ["a", "b"]
    assert late == []
    assert log[0] == ("a", 5.0)
    assert log[1][1] == pytest.approx(10.0, abs=0.5)
    assert [seconds for seconds, _ in told] == [0.0, 2.5, 5.0, 7.5]
    assert {total for _, total in told} == {10.0}


def test_what_has_not_begun_when_the_time_is_over_is_left_out() -> None:
    log: list = []
    made = Plan((job("a", 1, log), job("b", 1, log)), (0.0, 0.0), ())
    done, late = plan.carry_out(made, lambda *told: None)
    assert [one.case for one in done] == ["a"]
    assert [(one.case, one.section) for one in late] == [("b", "layer")]
    assert "budget" in late[0].reason
    assert len(log) == 1


def test_rows_are_judged_as_they_come() -> None:
    held = row(
        case="learned", measure="forward + backward", tokens=2048, baseline="rope", ratio=1.5
    )
    made = Plan((Job("layer", "x", 1.0, lambda allowance, report: [held, row()]),), (1.0,), ())
    (first, second), _ = plan.carry_out(made, lambda *told: None)
    assert (first.target, first.verdict) == (1.10, "not met")
    assert (second.target, second.verdict) == (None, "")


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [
        (1.0, 0.9, 1.1, "met"),
        (1.05, 0.9, 1.2, "straddles"),
        (1.3, 1.2, 1.4, "not met"),
        (1.1, None, None, "met"),
        (1.2, None, None, "not met"),
        (None, None, None, "not met"),
    ],
)
def test_verdicts(ratio: float | None, low: float | None, high: float | None, verdict: str) -> None:
    held = row(ratio=ratio, low=low, high=high).judged(Target("layer", "forward", 8, "", 1.1))
    assert held.verdict == verdict
    assert held.target == 1.1
    assert row().judged(None) == row()


def test_targets_are_of_sections_and_mechanisms_that_exist_at_full_size() -> None:
    sizes = Sizes()
    lengths = {*sizes.layer, *sizes.pruned, *sizes.memory, *sizes.growth}
    lengths |= {sizes.context, sizes.reflection, sizes.path, 8 * sizes.path, sizes.train[1]}
    known = [one.name for one in mechanisms.table()]
    for one in TARGETS:
        assert one.section in SECTIONS
        assert one.tokens in lengths
        for case in one.cases:
            assert case.partition(",")[0].partition("+")[0] in known
            assert target(one.section, case, one.measure, one.tokens, one.baseline) == one
    assert target("layer", "learned", "forward + backward", 2047, "rope") is None
    assert target("decode", "path", "one token", 16384, "rope") is None
    assert target("decode", "dense", "one token", 16384, "rope").most == 1.05


def test_quick_sizes_are_held_to_nothing() -> None:
    quick = {
        "layer": QUICK.layer,
        "decode": (QUICK.context,),
        "scaling": (QUICK.reflection, QUICK.path),
        "pruned": QUICK.pruned,
        "peers": (QUICK.context, QUICK.train[1]),
        "memory": QUICK.memory,
        "diagnosis": (QUICK.context,),
    }
    growths = {
        ("scaling", QUICK.growth[0], QUICK.growth[1]),
        ("memory", 2 * QUICK.path, 8 * QUICK.path),
        ("pruned", *QUICK.pruned),
        ("memory", *QUICK.memory),
    }
    named = {(section, f"growth from {short:,}", long) for section, short, long in growths}
    for one in TARGETS:
        if one.measure.startswith("growth"):
            assert (one.section, one.measure, one.tokens) not in named
        else:
            assert one.tokens not in quick[one.section]


def test_the_file_holds_what_the_results_say(tmp_path: Path) -> None:
    results = Results(
        rows.machine(2, ["layer"], 60.0, False),
        (row(low=0.9, high=1.1, target=1.2, verdict="met", note="β"), row(ratio=None)),
        (LeftOut("peers", "x-transformers", "not installed"),),
    )
    file = tmp_path / "bench.json"
    results.write(file)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    value = json.loads(file.read_text(encoding="utf-8"))
    assert value == {"version": rows.VERSION, **json.loads(json.dumps(asdict(results)))}
    assert {"processor", "threads", "torch", "date", "load"} <= set(value["machine"])
    assert {"median", "ratio", "low", "high", "target", "verdict", "seed"} <= set(value["rows"][0])


def test_a_result_that_is_not_finite_is_not_written_as_a_number(tmp_path: Path) -> None:
    results = Results({}, (replace(row(), ratio=float("nan")),))
    with pytest.raises(ValueError, match="JSON"):
        results.write(tmp_path / "bench.json")
    assert list(tmp_path.iterdir()) == []


def test_sections_are_checked_by_name() -> None:
    check(["layer", "memory"])
    for names, said in (
        (["layr"], "did you mean 'layer'"),
        ([], "no section"),
        (["x"], "sections:"),
    ):
        with pytest.raises(ValueError, match=said):
            check(names)


def test_the_probe_is_a_plausible_speed() -> None:
    assert 1e8 < plan.speed() < 1e15
    seen: list[float] = []
    part = plan.shared(seen.append, 0.25, 1.0)
    for share in (0.0, 0.5, 1.0):
        part(share)
    assert seen == [0.25, 0.625, 1.0]
    assert all(a < b for a, b in pairwise(seen))
