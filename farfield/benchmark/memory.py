"""Section `memory`: the peak memory of attention at inference, over that of plain attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from farfield.benchmark import peak
from farfield.benchmark.pairing import Report
from farfield.benchmark.plan import Job, Setting, attention, projections, where
from farfield.benchmark.rows import LeftOut, Row, quantity

SECTION = "memory"
BASELINE = "sdpa"
PEAK = "peak memory"
CASES = ("rope", "learned+v", "alibi", "forget", "reflection+v", "dense")
BACKWARD = {"path, backward": (2.0, 8.0), "T×T definition, backward": (0.5, 1.0)}
"""The lengths whose memory is compared, as multiples of `Sizes.path`. The second is quadratic."""

_LIBRARIES = 10.0
"""Seconds that a fresh process takes to begin."""


@dataclass
class Peaks:
    """Growths of peak memory, each measured once."""

    setting: Setting
    known: dict[peak.Work, int] = field(default_factory=dict)

    def __call__(self, case: str, tokens: int, heads: int) -> int:
        """Bytes. Raises: ValueError as `peak.growth`."""
        sizes = self.setting.sizes
        work = peak.Work(
            case, tokens, heads, sizes.head_dim, self.setting.seed, self.setting.threads
        )
        if work not in self.known:
            self.known[work] = peak.growth(work)
        return self.known[work]


def jobs(setting: Setting) -> list[Job | LeftOut]:
    """One job for each mechanism and length."""
    sizes = setting.sizes
    if not peak.available():
        return [LeftOut(SECTION, "everything", "this system has no /proc/self/status")]
    peaks, width = Peaks(setting), sizes.memory_heads * sizes.head_dim
    found: list[Job | LeftOut] = []
    for index, tokens in enumerate(sizes.memory):
        once = attention(tokens, sizes.memory_heads, sizes.head_dim) + projections(tokens, width)
        for case in CASES:
            riding = 2.0 if case in ("alibi", "forget") else 1.0
            first = 1.0 if case == CASES[0] else 0.0  # it measures the baseline for all
            shorter = sizes.memory[index - 1] if index else None
            found.append(
                Job(
                    SECTION,
                    f"{case} at T = {tokens:,}",
                    once * (riding + first),
                    partial(_inference, peaks, case, tokens, shorter),
                    seconds=_LIBRARIES * (1 + first),
                    after="" if first else f"{CASES[0]} at T = {tokens:,}",
                )
            )
    for case, multiples in BACKWARD.items():
        short, long = (int(sizes.path * multiple) for multiple in multiples)
        work = 3.0 * attention(long, sizes.heads, sizes.head_dim, True)
        run = partial(_backward, peaks, case, short, long)
        found.append(Job(SECTION, f"{case} at T = {long:,}", work, run, 2 * _LIBRARIES))
    return found


def _inference(
    peaks: Peaks, case: str, tokens: int, shorter: int | None, allowance: float, report: Report
) -> list[Row]:
    setting, heads = peaks.setting, peaks.setting.sizes.memory_heads
    fields = where(
        setting,
        SECTION,
        case=case,
        tokens=tokens,
        sizes=f"layer at inference, {heads} heads of {setting.sizes.head_dim}, batch 1",
    )
    own, base = peaks(case, tokens, heads), peaks(BASELINE, tokens, heads)
    rows = [_over(own, base, measure=PEAK, baseline=BASELINE, **fields)]
    if shorter is not None:
        before = peaks(case, shorter, heads)
        rows.append(_over(own, before, measure=f"growth from {shorter:,}", **fields))
    return rows


def _backward(
    peaks: Peaks, case: str, short: int, long: int, allowance: float, report: Report
) -> list[Row]:
    sizes = peaks.setting.sizes
    before, own = (peaks(case, tokens, sizes.heads) for tokens in (short, long))
    fields = where(
        peaks.setting,
        SECTION,
        case=case,
        tokens=long,
        sizes=f"{sizes.heads} heads of {sizes.head_dim}, batch 1, forward + backward",
    )
    return [_over(own, before, measure=f"growth from {short:,}", **fields)]


def _over(own: int, base: int, **fields: Any) -> Row:
    """Raises: ValueError where nothing grew, so that there is no ratio."""
    if base <= 0:
        raise ValueError(
            f"{fields['case']} at {fields['tokens']:,} tokens: no growth of memory to compare with"
        )
    medians = {"median": float(own), "baseline_median": float(base), "unit": "B"}
    return quantity(own / base, **medians, **fields)
