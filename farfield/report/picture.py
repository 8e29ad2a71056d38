"""One static picture of a study's ratio curves, for a README or a talk."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farfield.report.curves import FAILS_FROM, Point, curve, headline
from farfield.report.folder import read
from farfield.report.palette import Ink, inks
from farfield.report.pooling import Ladders
from farfield.report.wording import number, spoken

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
_DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (5, 2.4)),
    "dot": (0, (1.2, 1.8)),
    "dashdot": (0, (5, 2, 1.2, 2)),
}
_MARKERS = {
    "square": "s",
    "diamond": "D",
    "circle": "o",
    "triangle-up": "^",
    "triangle-down": "v",
    "star": "*",
    "x": "x",
    "cross": "P",
    "hexagon": "h",
    "pentagon": "p",
    "bowtie": "d",
    "hourglass": "X",
    "star-diamond": "d",
}
_TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500)


@dataclass(frozen=True)
class _Line:
    name: str
    points: Sequence[Point]
    ink: Ink

    @property
    def end(self) -> float:
        return self.points[-1].ratio or 1.0

    @property
    def label(self) -> str:
        return f"{spoken(self.name, brief=True)}  {number(self.end)}×"


def curves_picture(folder: Path | str, out: Path | str) -> Path:
    """Draw the ratio curves of a study (non-overlapping windows, pooled over seeds) to a file.

    Light paper, a label at the end of each line, the result as the title; as wide as a README.
    Raises: ValueError when `out` ends in neither .png nor .svg, or nothing has been measured.
    """
    out = Path(out)
    if out.suffix not in FORMATS:
        raise ValueError(f"{out}: expected a name that ends in {' or '.join(FORMATS)}")
    study = read(Path(folder))
    ladders = Ladders(study.rows)
    colours = inks(study.mechanisms)
    lines = []
    for name in ladders.mechanisms():
        points = [point for point in curve(ladders, name) if point.ratio is not None]
        if points:
            lines.append(_Line(name, points, colours[name]))
    if not lines:
        raise ValueError(f"{study.folder}: no length has been measured; there is nothing to draw")
    _draw(lines, ladders, out, headline(ladders).title)
    return out


def _draw(lines: Sequence[_Line], ladders: Ladders, out: Path, title: str) -> None:
    # Figures made without pyplot leave no global state behind; matplotlib takes long to import.
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws alike
        "font.size": 10.5,
        "svg.fonttype": "path",
        "svg.hashsalt": "farfield",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 5.2), dpi=200, facecolor="white")
        # A letter of a label takes about 0.0085 of the width.
        room = max(0.238, 0.035 + 0.0085 * max(len(line.label) for line in lines))
        axes = figure.add_axes((0.072, 0.135, 0.928 - room, 0.725))
        for line in lines:
            _draw_line(axes, line)
        _dress(axes, lines, ladders.train_length)
        _label_ends(axes, lines)
        figure.text(
            0.02,
            0.955,
            "\n".join(textwrap.wrap(title, 88)),
            weight="bold",
            size=11.5,
            va="top",
            linespacing=1.35,
        )
        metadata = {"Date": None} if out.suffix == ".svg" else {}
        figure.savefig(out, facecolor="white", metadata=metadata)


def _draw_line(axes: Axes, line: _Line) -> None:
    colour = line.ink.light
    hollow = line.ink.symbol.endswith("-open")
    edged = [p for p in line.points if p.low is not None]
    if len(edged) > 1:
        axes.fill_between(
            [p.length for p in edged],
            [p.low or 0.0 for p in edged],
            [p.high or 0.0 for p in edged],
            color=colour,
            alpha=0.13,
            linewidth=0,
        )
    axes.plot(
        [p.length for p in line.points],
        [p.ratio or math.nan for p in line.points],
        color=colour,
        linestyle=_DASHES[line.ink.dash],
        linewidth=2,
        marker=_MARKERS[line.ink.symbol.removesuffix("-open")],
        markersize=5.5,
        markerfacecolor="white" if hollow else colour,
        clip_on=False,
        zorder=3,
    )


def _dress(axes: Axes, lines: Sequence[_Line], base: int) -> None:
    lengths = sorted({p.length for line in lines for p in line.points})
    values = [v for line in lines for p in line.points for v in (p.ratio, p.low, p.high) if v]
    low, high = min(*values, 0.93), max(*values, 1.3)
    pad = (high / low) ** 0.04
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(lengths[0] / 1.06, lengths[-1] * 1.06)
    axes.set_ylim(low / pad, high * pad)
    axes.minorticks_off()
    axes.set_xticks(lengths, [f"{n // base}×\n{n:,}" for n in lengths])
    ticks = [t for t in _TICKS if low / pad <= t <= high * pad]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_xlabel("context length (× training length; tokens)", color="#4d545c")
    axes.set_ylabel(f"perplexity ÷ perplexity at {base:,} tokens", color="#4d545c")
    axes.grid(color="#e9ecef", linewidth=0.8)
    axes.axhline(1, color="#8a929a", linewidth=1)
    axes.axhline(FAILS_FROM, color="#8a929a", linewidth=1, linestyle=(0, (1, 2)))
    axes.set_axisbelow(True)
    axes.tick_params(length=3, color="#8a929a", labelcolor="#4d545c")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#8a929a")


def _label_ends(axes: Axes, lines: Sequence[_Line]) -> None:
    """A label right of each line's end, pushed apart where they would overlap."""
    low, high = (math.log10(edge) for edge in axes.get_ylim())
    tall = axes.get_window_extent().height / axes.figure.dpi * 72  # points
    step = 13.5

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * tall

    ranked = sorted(lines, key=lambda line: line.end)
    heights = spread([at(line.end) for line in ranked], step, tall)
    for line, height in zip(ranked, heights, strict=True):
        axes.annotate(
            line.label,
            xy=(line.points[-1].length, line.end),
            xytext=(20, height - at(line.end)),
            textcoords="offset points",
            color=line.ink.light,
            va="center",
            size=10,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line.ink.light,
                "alpha": 0.6,
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 6,
            },
        )


def spread(wanted: Sequence[float], step: float, top: float) -> list[float]:
    """Rising heights moved as little as one pass up and one down allow, `step` apart, ≤ top."""
    put: list[float] = []
    for height in wanted:
        put.append(max(height, put[-1] + step) if put else height)
    ceiling = top
    for index in reversed(range(len(put))):
        put[index] = min(put[index], ceiling)
        ceiling = put[index] - step
    return put
