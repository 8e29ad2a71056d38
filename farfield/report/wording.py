"""Numbers, intervals and lists as the page and the verdicts write them."""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent below a million."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value:.{digits - 1}e}"
    # Rounded first: 9.996 to three digits is 10.0, not 10.00.
    rounded = abs(float(f"{value:.{digits - 1}e}"))
    decimals = max(0, digits - 1 - math.floor(math.log10(rounded)))
    return f"{value:,.{min(decimals, 6)}f}".replace("-", "−")


def exp(value: float) -> float:
    """e^value, or infinity where no number is that large."""
    return math.exp(value) if value < 700 else math.inf


def ratio(value: float | None) -> str:
    """A ratio; near one its third decimal counts: 0.983, 1.052, 12.4."""
    if value is not None and 0.1 <= value < 2:
        return f"{value:.3f}"
    return number(value, 3 if value is None or value < 100 else 4)


def interval(low: float | None, high: float | None) -> str:
    """[low, high]; empty when there is no interval."""
    if low is None or high is None:
        return ""
    return f"[{ratio(low)}, {ratio(high)}]"


def nats(value: float | None) -> str:
    """Nats per token with their sign, to a thousandth."""
    return MISSING if value is None else f"{value:+.3f}".replace("-", "−")


def integer(value: float | None) -> str:
    """A whole number with its thousands apart."""
    return MISSING if value is None else f"{round(value):,}"


def scaled(value: float | None, units: Sequence[tuple[float, str]], digits: int = 3) -> str:
    """A quantity in the largest unit it fills: units are (size, name), largest first."""
    if value is None:
        return MISSING
    size, name = next((unit for unit in units if abs(value) >= unit[0]), units[-1])
    return f"{number(value / size, digits)} {name}".rstrip()


def count(value: float | None) -> str:
    """A large count: 1.23 M."""
    return scaled(value, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"), (1, "")))


def memory(value: float | None) -> str:
    """Bytes in the largest binary unit that fits."""
    return scaled(value, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def duration(seconds: float | None) -> str:
    """Seconds as 42 s, 3 min 20 s or 2 h 05 min."""
    if seconds is None:
        return MISSING
    if seconds < 10:
        return f"{number(seconds, 2)} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def listed(items: Sequence[str], last: str = "and") -> str:
    """a; a and b; a, b and c."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def counted(value: int, noun: str) -> str:
    """A count with its noun: 1 seed, 3 seeds."""
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


SCALINGS = {
    "linear": "linear interpolation",
    "ntk": "NTK",
    "yarn": "YaRN",
}
"""The rules that scale a trained model's frequencies at evaluation, as they are spoken of."""


def unscaled(mechanism: str) -> tuple[str, str]:
    """The mechanism that was trained, and the rule its rows were scaled by ("" where none was).

    Rows scaled at evaluation are named by the rule alone (`rope:mixing,scaling=yarn+v`), since
    their factor follows the length; a model trained with a factor of its own is what its name says.
    """
    transport, plus, rest = mechanism.partition("+")
    head, _, tail = transport.partition(":")
    options = tail.split(",") if tail else []
    rules = [o.partition("=")[2] for o in options if o.startswith("scaling=")]
    if not rules or rules[0] not in SCALINGS or any(o.startswith("factor=") for o in options):
        return mechanism, ""
    kept = ",".join(o for o in options if not o.startswith("scaling="))
    return head + (f":{kept}" if kept else "") + plus + rest, rules[0]


def spoken(mechanism: str, brief: bool = False) -> str:
    """A mechanism's name for a reader: rope with YaRN at evaluation; in brief rope with YaRN."""
    trained, rule = unscaled(mechanism)
    if not rule:
        return mechanism
    return f"{trained} with {SCALINGS[rule]}" + ("" if brief else " at evaluation")


def multiple(value: float) -> str:
    """A length as a multiple of the training length: L₀, 16 L₀."""
    return "L₀" if value == 1 else f"{value:g} L₀"
