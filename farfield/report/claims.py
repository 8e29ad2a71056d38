"""The claims C1–C6 and what a study's result rows say of each.

A claim is one or more inequalities between weighted sums of log-perplexities and a bound. Each
holds where the whole interval lies on its side of the bound, fails where the whole interval lies
on the other, and is undecided where the interval straddles it. A claim holds when all its parts
hold, fails when any part fails, and is undecided otherwise; a part whose mechanism or length the
study lacks is not tested, and a claim with such a part never holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from farfield.evaluation.rows import ResultRow
from farfield.report.pooling import FEWEST_UNITS, Estimate, Ladders, Term, log_ratio, scaled
from farfield.report.wording import interval, listed, multiple, nats, number, ratio

Status = Literal["holds", "fails", "undecided", "not tested"]
Sense = Literal["at least", "at most", "above", "below"]
Unit = Literal["×", "nats", "share"]

# Accumulated rotation of queries, keys and values with far-mass control, in order of preference:
# C6 is judged on the first that the study measured, whatever its numbers are.
CONTROLLED = ("learned+v+alibi", "random+v+alibi", "random_iid+v+alibi")
_CHOSEN = "(the far-mass-controlled mechanism)"


@dataclass(frozen=True)
class Test:
    """One inequality of a claim: sum of `terms` (nats per token) `sense` `bound`.

    A sum with `unit` "×" is read through exp, as a ratio of perplexities; one in "nats" is a
    difference of log-ratios. `label` names the sum, `reading` puts it into a
    sentence. `beside` are the ratios shown with it, `share` one sum as a share of another.
    """

    statement: str
    label: str
    reading: str
    terms: tuple[Term, ...]
    sense: Sense
    bound: float
    unit: Unit = "×"
    beside: tuple[tuple[str, tuple[Term, ...]], ...] = ()
    share: tuple[str, tuple[Term, ...], tuple[Term, ...]] | None = None


@dataclass(frozen=True)
class Claim:
    """A claim of the paper (or the project's own), as the project tests it."""

    name: str
    title: str
    words: str
    tests: tuple[Test, ...]


@dataclass(frozen=True)
class Measure:
    """A number behind a verdict, with its interval and the seeds and windows it was made from."""

    label: str
    value: float | None
    low: float | None
    high: float | None
    unit: Unit
    basis: str
    few: bool = False

    @property
    def text(self) -> str:
        """Value and interval as they are written: 4.08× [3.91, 4.25]."""
        if self.unit == "×":
            return f"{ratio(self.value)}× {interval(self.low, self.high)}".rstrip()
        if self.unit == "share":
            return f"{number(self.value, 2)} {interval(self.low, self.high)}".rstrip()
        ends = "" if self.low is None else f" [{nats(self.low)}, {nats(self.high)}]"
        return f"{nats(self.value)} nats{ends}"


@dataclass(frozen=True)
class Part:
    """The verdict on one inequality of a claim."""

    statement: str
    status: Status
    sense: Sense
    bound: float
    decisive: Measure | None
    beside: tuple[Measure, ...] = ()
    sentence: str = ""
    why: str = ""
    needed: str = ""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim: its status, a sentence with the numbers, and what would decide it."""

    claim: str
    title: str
    words: str
    status: Status
    sentence: str
    parts: tuple[Part, ...]

    @property
    def numbers(self) -> list[Measure]:
        """Every measure behind the verdict, the decisive ones first."""
        decisive = [part.decisive for part in self.parts if part.decisive]
        return decisive + [measure for part in self.parts for measure in part.beside]

    @property
    def needed(self) -> str:
        return " ".join(dict.fromkeys(part.needed for part in self.parts if part.needed))


def _ratio_test(mechanism: str, at: int, sense: Sense, bound: float) -> Test:
    return Test(
        statement=f"{mechanism}: ratio {_SIGNS[sense]} {bound:.2f} at {multiple(at)}",
        label="ratio",
        reading=f"the ratio of {mechanism} at {multiple(at)} is {{}}",
        terms=log_ratio(mechanism, at),
        sense=sense,
        bound=bound,
    )


def _half_test(mechanism: str, rival: str, at: int) -> Test:
    """log-ratio(mechanism) − ½ log-ratio(rival) ≤ 0."""
    return Test(
        statement=(f"{mechanism}: log-ratio at most half of that of {rival} at {multiple(at)}"),
        label=f"log-ratio less half that of {rival}",
        reading=(
            f"the log-ratio of {mechanism} less half that of {rival} at {multiple(at)} is {{}}"
        ),
        terms=(*log_ratio(mechanism, at), *scaled(-0.5, log_ratio(rival, at))),
        sense="at most",
        bound=0.0,
        unit="nats",
        beside=(
            (f"ratio of {mechanism} at {multiple(at)}", log_ratio(mechanism, at)),
            (f"ratio of {rival} at {multiple(at)}", log_ratio(rival, at)),
        ),
        share=(
            f"log-ratio of {mechanism} ÷ log-ratio of {rival}",
            log_ratio(mechanism, at),
            log_ratio(rival, at),
        ),
    )


def _carried_test(mechanism: str, at: int) -> Test:
    """log-ratio(mechanism+v) − log-ratio(mechanism) < 0: no gain is excluded."""
    carried = f"{mechanism}+v"
    return Test(
        statement=f"{carried}: lower ratio than {mechanism} at {multiple(at)}",
        label=f"ratio of {carried} ÷ ratio of {mechanism}",
        reading=f"the ratio of {carried} at {multiple(at)} is {{}} that of {mechanism}",
        terms=(*log_ratio(carried, at), *scaled(-1.0, log_ratio(mechanism, at))),
        sense="below",
        bound=1.0,
        beside=(
            (f"ratio of {mechanism} at {multiple(at)}", log_ratio(mechanism, at)),
            (f"ratio of {carried} at {multiple(at)}", log_ratio(carried, at)),
        ),
    )


_SIGNS: dict[Sense, str] = {"at least": "≥", "at most": "≤", "above": ">", "below": "<"}

# The thresholds, fixed before any run. Source: the project's list of claims C1–C6.
CLAIMS: tuple[Claim, ...] = (
    Claim(
        "C1",
        "RoPE fails",
        "RoPE's ratio is at least 2 at 16 L₀, and still rising to 128 L₀.",
        (
            _ratio_test("rope", 16, "at least", 2.0),
            Test(
                statement="rope: perplexity rises from 16 L₀ to 128 L₀",
                label="perplexity at 128 L₀ ÷ at 16 L₀",
                reading="from 16 L₀ to 128 L₀ its perplexity changes by {}",
                terms=(Term(1.0, "rope", 128), Term(-1.0, "rope", 16)),
                sense="above",
                bound=1.0,
                beside=(("ratio of rope at 128 L₀", log_ratio("rope", 128)),),
            ),
        ),
    ),
    Claim(
        "C2",
        "Random accumulated rotation holds far better",
        "Random accumulated rotation of queries and keys has at most half of RoPE's log-ratio "
        "at 16 L₀.",
        (_half_test("random", "rope", 16),),
    ),
    Claim(
        "C3",
        "Learned accumulated rotation stays near 1, and it is the data that does it",
        "Learned accumulated rotation has a ratio of at most 1.10 at 4 L₀, and at 16 L₀ at most "
        "half the log-ratio of RoPE with the same frequencies (rope:mixing).",
        (_ratio_test("learned", 4, "at most", 1.10), _half_test("learned", "rope:mixing", 16)),
    ),
    Claim(
        "C4",
        "Carrying values extends the range",
        "Carrying the values along the same routes lowers the ratio at 128 L₀, for random and "
        "for learned rotations.",
        (_carried_test("random", 128), _carried_test("learned", 128)),
    ),
    Claim(
        "C5",
        "Rotation alone degrades; ALiBi stays flat",
        "Random and learned rotations of queries and keys have a ratio of at least 1.10 at "
        "128 L₀; ALiBi's is at most 1.05.",
        (
            _ratio_test("random", 128, "at least", 1.10),
            _ratio_test("learned", 128, "at least", 1.10),
            _ratio_test("alibi", 128, "at most", 1.05),
        ),
    ),
    Claim(
        "C6",
        "Accumulated rotation with far-mass control holds, and costs nothing at home",
        "Accumulated rotation of queries, keys and values together with far-mass control has "
        "perplexity at L₀ no worse than RoPE's and a ratio of at most 1.05 at 128 L₀.",
        (
            Test(
                statement=f"{_CHOSEN}: perplexity at L₀ no worse than that of rope",
                label="perplexity at L₀ ÷ that of rope",
                reading=f"the perplexity of {_CHOSEN} at L₀ is {{}} that of rope",
                terms=(Term(1.0, _CHOSEN, 1), Term(-1.0, "rope", 1)),
                sense="at most",
                bound=1.0,
            ),
            _ratio_test(_CHOSEN, 128, "at most", 1.05),
        ),
    ),
)


def verdicts(rows: Sequence[ResultRow]) -> list[Verdict]:
    """The verdict on each of C1–C6 from result rows alone (protocol `windows`)."""
    ladders = Ladders(rows)
    return [_verdict(claim, ladders) for claim in CLAIMS]


def _verdict(claim: Claim, ladders: Ladders) -> Verdict:
    measured = ladders.mechanisms()
    chosen = next((name for name in CONTROLLED if name in measured), CONTROLLED[0])
    parts = tuple(_judge(_named(test, chosen), ladders) for test in claim.tests)
    statuses = [part.status for part in parts]
    status: Status
    if "fails" in statuses:
        status = "fails"
    elif all(s == "holds" for s in statuses):
        status = "holds"
    elif all(s == "not tested" for s in statuses):
        status = "not tested"
    else:
        status = "undecided"
    said = "; ".join(dict.fromkeys(part.sentence for part in parts))
    return Verdict(
        claim.name, claim.title, claim.words, status, f"{said[:1].upper()}{said[1:]}.", parts
    )


def _named(test: Test, chosen: str) -> Test:
    """The test with the far-mass-controlled mechanism that the study measured filled in."""
    return replace(
        test,
        statement=test.statement.replace(_CHOSEN, chosen),
        reading=test.reading.replace(_CHOSEN, chosen),
        terms=tuple(
            replace(term, mechanism=chosen) if term.mechanism == _CHOSEN else term
            for term in test.terms
        ),
    )


def _judge(test: Test, ladders: Ladders) -> Part:
    lacking = ladders.missing(test.terms)
    # What stands beside a verdict is of the verdict's own seeds, so that the numbers agree.
    estimate = None if lacking else ladders.estimate(test.terms)
    seeds = None if estimate is None else estimate.seeds
    beside = tuple(
        _measure(label, ladders.estimate(terms, seeds=seeds), "×")
        for label, terms in test.beside
        if not ladders.missing(terms)
    )
    if estimate is None:
        why = listed(lacking)
        return Part(
            test.statement,
            "not tested",
            test.sense,
            test.bound,
            None,
            beside,
            sentence=f"“{test.statement}” is not tested: {why}",
            why=why,
            needed=f"Needed: {_remedy(test, ladders)}.",
        )
    if test.share is not None:
        beside += _share(test.share, ladders)
    decisive = _measure(test.label, estimate, test.unit)
    status, why, needed = _decide(test, estimate)
    if estimate.value is None:
        sentence = f"“{test.statement}” can't be judged: {why}"
    else:
        sentence = test.reading.format(decisive.text) + (f" ({why})" if why else "")
    return Part(
        test.statement, status, test.sense, test.bound, decisive, beside, sentence, why, needed
    )


def _share(
    share: tuple[str, tuple[Term, ...], tuple[Term, ...]], ladders: Ladders
) -> tuple[Measure, ...]:
    """The share, where the whole it is taken of is clearly above zero; nothing otherwise."""
    label, part, whole = share
    of_whole = ladders.estimate(whole)
    if of_whole.low is None or of_whole.low <= 0:
        return ()
    return (_measure(label, ladders.share(part, whole), "share"),)


def _measure(label: str, estimate: Estimate, unit: Unit) -> Measure:
    ends = (estimate.value, estimate.low, estimate.high)
    if unit == "×":
        value, low, high = (None if end is None else math.exp(end) for end in ends)
    else:
        value, low, high = ends
    return Measure(label, value, low, high, unit, estimate.basis, estimate.few)


def _decide(test: Test, estimate: Estimate) -> tuple[Status, str, str]:
    """Status, why it is undecided, and what would decide it."""
    bound = math.log(test.bound) if test.unit == "×" else test.bound
    if estimate.value is None:
        why = f"{estimate.non_finite:,} losses were not finite"
        return "undecided", why, "Needed: a run whose losses are finite at these lengths."
    if estimate.low is None or estimate.high is None:
        why = f"{estimate.basis}: too few for an interval"
        longest = multiple(max(term.multiple for term in test.terms))
        needed = f"Needed: at least {FEWEST_UNITS} windows × seeds at {longest}."
        return "undecided", why, needed
    low, high = estimate.low, estimate.high
    if test.sense in ("at most", "below"):
        # Turned over, so that one comparison serves both directions.
        low, high, bound = -high, -low, -bound
    strict = test.sense in ("above", "below")
    if low > bound or (low == bound and not strict):
        return "holds", "", ""
    if high < bound or (high == bound and strict):
        return "fails", "", ""
    shown = f"{test.bound:.2f}" if test.unit == "×" else number(test.bound)
    return "undecided", f"the interval straddles {shown}", _sample_needed(test, estimate)


def _sample_needed(test: Test, estimate: Estimate) -> str:
    """How much more data would shrink the interval to one side, if the estimate stays put."""
    assert estimate.value is not None
    assert estimate.low is not None
    assert estimate.high is not None
    bound = math.log(test.bound) if test.unit == "×" else test.bound
    distance = estimate.value - bound
    reach = estimate.high - estimate.value if distance < 0 else estimate.value - estimate.low
    if distance == 0 or (reach / distance) ** 2 > 100:
        return "Needed: the estimate lies on the threshold; no affordable sample would decide it."
    factor = math.ceil((reach / distance) ** 2 * 10) / 10
    more = "windows and seeds" if len(estimate.seeds) > 1 else "windows, or more than one seed"
    return f"Needed: about {number(factor, 2)}× as many {more}, if the estimate stays where it is."


def _remedy(test: Test, ladders: Ladders) -> str:
    """What to add to the study so that the test can be made."""
    measured = ladders.mechanisms()
    absent = dict.fromkeys(t.mechanism for t in test.terms if t.mechanism not in measured)
    wanted = [f"{listed(list(absent))} in the study"] if absent else []
    lengths = sorted(
        {
            t.multiple
            for t in test.terms
            if t.mechanism in measured
            and not ladders.rows(t.mechanism, t.multiple * ladders.train_length)
        }
    )
    wanted += [f"a ladder that reaches {multiple(length)}" for length in lengths]
    return listed(wanted) or "the same seeds for each of its mechanisms"
