"""The plain-language summary of a diagnosis: a few sentences, every number of them measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from farfield.report.diagnosis_rows import (
    Found,
    averaged,
    by_context,
    left_over_lags,
    mean_of,
    nearest,
    perplexities,
    strongest,
)
from farfield.report.wording import exp, integer, listed, number, ratio, spoken

FAILS = 1.1
"""A perplexity at the longest length of so many times that at L₀ is called a failure here."""

CURED = 0.5
"""The share of the rise in log-perplexity that a cure takes away."""

GUESSES = {
    "no_change": "nothing changes",
    "proportional": "far mass grows with the number of far keys",
    "proportional_odds": "its odds grow with the number of far keys",
}
ASSUMPTIONS = {
    "blocks_independent": "planes of a head turn independently of one another",
    "steps_independent": "steps of one token do not depend on those before",
    "steps_stationary": "steps follow one law at every position",
    "energy_spread": "queries and keys spread their size over the planes of a head",
    "gates_independent": "gates of one token do not depend on those before",
    "far_keys_many": "the far weight is shared by many keys",
    "ell_stationary": "a far key weighs at the longest context what it did in training",
    "near_stationary": "near keys weigh at the longest context what they did in training",
}


@dataclass(frozen=True)
class Prediction:
    """Mean errors in far mass beyond L₀, over heads and contexts: the theory's, each guess's."""

    error: float
    guesses: dict[str, float]
    wins: float
    rows: int

    @property
    def best(self) -> str:
        """The guess that errs least."""
        return min(self.guesses, key=lambda name: self.guesses[name])

    @property
    def fails(self) -> bool:
        """Whether a guess that needs no theory errs no more."""
        return self.error >= self.guesses[self.best]


def prediction(found: Found) -> Prediction | None:
    """How the prediction did; None where nothing was measured beyond L₀."""
    rows = found.tables["prediction"]
    if not rows:
        return None
    guesses = {name: sum(row[f"error_{name}"] for row in rows) / len(rows) for name in GUESSES}
    return Prediction(
        sum(row["error"] for row in rows) / len(rows),
        guesses,
        sum(row["beats_guesses"] for row in rows) / len(rows),
        len(rows),
    )


def summary(found: Found) -> list[str]:
    """The sentences, in the order of an explanation."""
    makers: tuple[Callable[[Found], str | None], ...] = (
        _outcome, _cause, _remedies, _weights, _keys, _transport, _moved, _gates, _foresight,
        _bounds, _unseen,
    )  # fmt: skip
    return [text for maker in makers if (text := maker(found))]


def percent(value: float) -> str:
    """A share: 61 %, 0.4 %."""
    scaled = 100 * value
    return f"{number(scaled, 2) if scaled < 10 else integer(scaled)} %"


def _multiples(found: Found) -> tuple[float, float, int] | None:
    """(ratio at the longest length, perplexity there, that length); None without perplexities."""
    own = perplexities(found).get("none", {})
    if found.base not in own or max(own) == found.base:
        return None
    longest = max(own)
    return own[longest] / own[found.base], own[longest], longest


def _outcome(found: Found) -> str | None:
    told = _multiples(found)
    if told is None:
        return None
    times, at_longest, longest = told
    at_base = perplexities(found)["none"][found.base]
    verdict = "fails" if times >= FAILS else "holds"
    return (
        f"{spoken(found.model)} {verdict}: its perplexity is {number(at_base)} at {found.base:,} "
        f"tokens, where it was trained, and {number(at_longest)} at {longest:,}, "
        f"{ratio(times)} times as much."
    )


def _use(change: float) -> str:
    """What a change of perplexity by hiding far keys says of them."""
    if change > 1.02:
        return ": it uses far context."
    return ": far keys do it harm already." if change < 0.98 else ": far keys hardly matter to it."


def cures(found: Found) -> dict[str, float]:
    """What share of the rise in log-perplexity each intervention takes away at the longest length.

    Against the untouched model's perplexity at L₀; empty where it does not rise.
    """
    told = _multiples(found)
    if told is None or told[0] < FAILS:
        return {}
    table = perplexities(found)
    base, longest = table["none"][found.base], told[2]
    return {
        name: 1 - math.log(own[longest] / base) / math.log(told[0])
        for name, own in table.items()
        if name != "none" and longest in own
    }


def _cause(found: Found) -> str | None:
    told, table = _multiples(found), perplexities(found)
    if told is None or "far_masked" not in table or told[2] not in table["far_masked"]:
        return None
    window, longest = found.facts["intervention_window"], told[2]
    masked = table["far_masked"][longest]
    if told[0] < FAILS:
        change = masked / told[1]
        sense = "adds" if change > 1 else "takes away"
        return (
            f"Hiding every key further than {window:,} tokens {sense} {percent(abs(change - 1))} "
            f"of its perplexity at {longest:,} tokens" + _use(change)
        )
    found_cures = cures(found)
    share = found_cures["far_masked"]
    text = (
        f"With every key further than {window:,} tokens hidden, its perplexity at {longest:,} is "
        f"{number(masked)}: "
    )
    if share < CURED:
        return text + "so the harm does not come from far keys alone."
    text += f"far keys do {percent(min(share, 1.0))} of the harm (of the rise in log-perplexity)."
    dropped = found_cures.get("far_values_dropped")
    if dropped is not None:
        told_of = "their weight alone starves the near keys" if dropped < CURED else (
            "what they bring does the harm, more than the weight they take"
        )  # fmt: skip
        text += f" With their weight kept and only their values dropped, {percent(max(dropped, 0))}"
        text += f" of it goes away: {told_of}."
    return text


def _remedies(found: Found) -> str | None:
    """What levelling the far logits, and ALiBi's slopes, take away of the harm."""
    shares = cures(found)
    parts = []
    if "far_logits_mean" in shares:
        level = shares["far_logits_mean"]
        why = (
            "far keys that stand out do it, not their number"
            if level >= CURED
            else "it is not a few far keys that stand out"
        )
        parts.append(
            f"with all far logits of a row set to their mean, {percent(max(level, 0.0))} of the "
            f"harm goes away ({why})"
        )
    if "alibi" in shares:
        parts.append(
            f"with ALiBi's slopes added at evaluation, {percent(max(shares['alibi'], 0.0))} does"
        )
    if not parts:
        return None
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."


def _weights(found: Found) -> str | None:
    rows = found.attention(found.far_window)
    curve = by_context(rows, "far_mass")
    beyond = [point for point in curve if point[0] >= 2 * found.far_window]
    if not beyond:
        return None
    first, last = beyond[0], beyond[-1]
    top = strongest((row for row in rows if row["high"] - 1 == last[0]), "far_mass")
    assert top is not None
    text = (
        f"In a context of {last[0]:,} tokens its heads give on average {percent(last[1])} of their "
        f"weight to keys further than {found.far_window:,} tokens; layer {top['layer']} head "
        f"{top['head']} gives {percent(top['far_mass'])}."
    )
    if first[0] == last[0]:
        return text
    return f"{text} In a context of {first[0]:,} it was {percent(first[1])}."


def _keys(found: Found) -> str | None:
    """What one far key weighs at length against training: the change of ℓ."""
    rows = [row for row in found.tables["assumptions"] if row["assumption"] == "ell_stationary"]
    change = mean_of(rows, "value", lambda _: True)
    if change is None:
        return None
    times = exp(change)
    held = sum(row["holds"] for row in rows)
    many = f"(in {held} of {len(rows)} heads it stays what it was)"
    if abs(change) < 0.25:
        return (
            f"One far key weighs at that length what it weighed in training, {number(times)} times "
            f"as much in the geometric mean over heads {many}: only their number grows."
        )
    if change < 0:
        return (
            f"One far key weighs less at that length than in training, {number(times)} times as "
            f"much in the geometric mean over heads {many}."
        )
    why = (
        "distances it never saw give scores it never learned to keep low"
        if _still(found)
        else "its far logits are not what training left them"
    )
    return (
        f"One far key weighs more at that length than in training, {number(times)} times as much "
        f"in the geometric mean over heads {many}: {why}."
    )


def _still(found: Found) -> bool:
    """Whether what moves keys is the same at every position."""
    steps = found.tables["steps"]
    return bool(steps) and all(step["rho"] > 1 - 1e-9 for step in steps)


def _transport(found: Found) -> str | None:
    steps = [s for s in found.tables["steps"] if s["kind"] != "gate"]
    if not steps:
        return (
            None if not found.tables["layers"] else "Nothing moves its keys: it has no transport."
        )
    kind = steps[0]["kind"]
    curve = averaged(left_over_lags(found, kind).values())
    at = nearest(curve, found.base)
    assert at is not None
    if _still(found):
        return (
            f"Its rotations are the same at every position, and nothing mixes: after {at[0]:,} "
            f"tokens {percent(at[1])} of a transport is left, at any distance."
        )
    known = [s["window"] for s in steps if s["window"] is not None]
    what = "planes" if kind == "rotation" else "heads"
    text = (
        f"After {at[0]:,} tokens {percent(at[1])} of a transport's mean is left (planes weighted "
        "by their size)" if kind == "rotation" else
        f"After {at[0]:,} tokens the mean transport has norm {number(at[1])}"
    )  # fmt: skip
    if known:
        text += (
            f"; {len(known)} of {len(steps)} {what} are seen to mix, half of those within "
            f"{integer(median(known))} tokens"
        )
    hidden = sum(not s["window_known"] for s in steps)
    if hidden:
        text += f" ({hidden} can't be told from noise)"
    return text + "."


DECOHERED = 0.02
"""The change of perplexity that one more random map on far keys may make where they have mixed."""


def _moved(found: Found) -> str | None:
    """Whether far keys have decohered: what one more random map does to them."""
    own = perplexities(found).get("far_frame")
    told = _multiples(found)
    if not own or told is None or told[2] not in own:
        return None
    change = own[told[2]] / told[1] - 1
    if abs(change) <= DECOHERED:
        verdict = "they are met as if at random already"
        if not any(step["rho"] < 1 - 1e-9 for step in found.tables["steps"]):
            verdict = "where they stand does not matter to it"
    else:
        verdict = "how they are turned still matters to it"
    return (
        f"One more random map on all far keys changes its perplexity at {told[2]:,} tokens by "
        f"{percent(abs(change))}: {verdict}."
    )


def _gates(found: Found) -> str | None:
    gates = found.tables["gates"]
    if not gates:
        return None
    reach = [gate["memory"] for gate in gates if gate["memory"] is not None]
    if not reach:
        return None
    short, long = min(reach), max(reach)
    what = "a bias that grows with distance" if all(g["constant"] for g in gates) else "its gates"
    return (
        f"In each head {what} weighs all of the past as much as {number(short)} to {number(long)} "
        "tokens would weigh without it, however long the context: more keys can't add up to more."
    )


def _foresight(found: Found) -> str | None:
    told = prediction(found)
    if told is None:
        return None
    best = told.guesses[told.best]
    text = (
        f"From {found.base:,} tokens alone the theory predicts the far mass at longer contexts "
        f"with a mean error of {number(told.error, 2)}; the best guess without it "
        f"({GUESSES[told.best]}) errs by {number(best, 2)}"
    )
    if not told.fails:
        return f"{text}, and it is closer than every guess in {percent(told.wins)} of the rows."
    broken = broken_assumptions(found)
    why = f": it does not hold here that {listed(broken)}" if broken else ""
    return f"{text}. The prediction failed here{why}."


def broken_assumptions(found: Found) -> list[str]:
    """The assumptions on logits that fail in most heads, in words."""
    broken = []
    for name in ("ell_stationary", "near_stationary", "far_keys_many"):
        rows = [row for row in found.tables["assumptions"] if row["assumption"] == name]
        if rows and sum(row["holds"] for row in rows) < len(rows) / 2:
            broken.append(ASSUMPTIONS[name])
    return broken


def _unseen(found: Found) -> str | None:
    absent = found.facts.get("not_measured")
    if not absent:
        return None
    which = [f"{layer} ({why})" for layer, why in absent.items()]
    return f"Layers without softmax attention were not measured: {', '.join(which)}."


def _bounds(found: Found) -> str | None:
    checked = found.facts.get("bounds_checked")
    if not checked:
        return None
    return (
        f"The far mass was above its two lower bounds (T4, T4′) in every one of the {checked:,} "
        "rows of attention that were checked."
    )
