"""One colour, dash and marker per mechanism, the same in every figure, table and theme.

The hues follow Okabe and Ito's set, which stays distinct under the common forms of colour
blindness: one hue family per kind of step, and a dash and a marker for what is added to it,
so that no reader depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from farfield.report.wording import unscaled


@dataclass(frozen=True)
class Ink:
    """How one mechanism is drawn: a colour for light and for dark paper, a dash, a marker."""

    light: str
    dark: str
    dash: str = "solid"
    symbol: str = "circle"


_INKS: dict[str, Ink] = {
    "rope": Ink("#16191d", "#f2f2f0", "solid", "square"),
    "rope:mixing": Ink("#7b828a", "#9aa2ab", "dash", "square-open"),
    "alibi": Ink("#00805f", "#2fc49a", "solid", "diamond"),
    "nope": Ink("#85662a", "#c2a15f", "dot", "x"),
    "random": Ink("#e08e00", "#ffb224", "solid", "circle"),
    "random+v": Ink("#b8400a", "#f2763a", "dash", "circle-open"),
    "random+alibi": Ink("#9a7d00", "#d8bd3c", "dashdot", "star"),
    "random+v+alibi": Ink("#7a2a12", "#d98a6f", "dashdot", "star"),
    "random_iid": Ink("#a39a00", "#e8df4a", "dot", "pentagon"),
    "random_iid+v": Ink("#6d6800", "#b9b23f", "dot", "hexagon-open"),
    "learned": Ink("#3fa3e0", "#6cc0f5", "solid", "triangle-up"),
    "learned+v": Ink("#0a56a8", "#3d8bef", "dash", "triangle-up-open"),
    "learned+alibi": Ink("#8a63c9", "#b394ea", "dashdot", "star-diamond"),
    "learned+v+alibi": Ink("#a0186f", "#e86fd0", "solid", "star"),
}
_SPARE = (
    Ink("#5b5ea6", "#9a9de6", "dashdot", "cross"),
    Ink("#3d7a3a", "#84c77f", "dash", "bowtie"),
    Ink("#a34d6b", "#e390ac", "dot", "hourglass"),
    Ink("#4a7580", "#8bbac6", "dashdot", "hexagon"),
    Ink("#7d5a4f", "#c3a094", "dash", "diamond-open"),
    Ink("#6b7d1e", "#b3c65c", "dot", "triangle-down"),
)
# What a rule of scaling makes of its mechanism's ink: a tint of it, a dash and a marker.
_TINTS: dict[str, tuple[str, str, str, str]] = {
    "linear": ("#fba651", "#f98006", "dot", "triangle-down"),
    "ntk": ("#4f248f", "#db70d1", "dashdot", "hexagon"),
    "yarn": ("#06c8f9", "#51fb62", "dash", "pentagon"),
}
_TINTED = 0.45


def inks(mechanisms: Iterable[str]) -> dict[str, Ink]:
    """The ink of each mechanism; names the table lacks take the spare inks in their order.

    Rows scaled at evaluation are a dashed variant of their mechanism's ink.
    """
    chosen: dict[str, Ink] = {}
    spare = 0
    wanted = list(mechanisms)
    for name in dict.fromkeys(unscaled(name)[0] for name in wanted):
        if name in _INKS:
            chosen[name] = _INKS[name]
        else:
            chosen[name] = _SPARE[spare % len(_SPARE)]
            spare += 1
    return {name: _variant(chosen[unscaled(name)[0]], unscaled(name)[1]) for name in wanted}


def _variant(ink: Ink, rule: str) -> Ink:
    """The ink of rows scaled by a rule; the mechanism's own where there is none."""
    if not rule:
        return ink
    light, dark, dash, symbol = _TINTS[rule]
    return Ink(_blend(ink.light, light), _blend(ink.dark, dark), dash, symbol)


def _blend(colour: str, other: str) -> str:
    """A colour moved towards another, channel by channel."""
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + _TINTED * (b - a)):02x}" for a, b in pairs)
