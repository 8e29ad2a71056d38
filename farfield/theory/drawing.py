"""How the theory's pictures look: one sheet of panels on light paper, one colour per way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
TEXT, EDGE, GRID = "#4d545c", "#8a929a", "#e9ecef"
# Okabe and Ito's hues: one for values left, one for values carried, one for a control.
LEFT, CARRIED, CONTROL, BOUND, PLAIN = "#e08e00", "#b8400a", "#00805f", "#7b828a", "#0a56a8"
LOST, KEPT = "#d98a3d", "#2f7fb8"


def check_name(path: Path) -> Path:
    """The path itself. Raises: ValueError when it ends in neither .png nor .svg."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(FORMATS)}")
    return path


@contextmanager
def sheet(path: Path, panels: int, height: float, title: str) -> Iterator[list[Axes]]:
    """Axes side by side under one title; written to the file at the end."""
    # Figures made without pyplot leave no global state behind; matplotlib takes long to import.
    import matplotlib
    from matplotlib.figure import Figure

    check_name(path)
    style: Any = {
        "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws alike
        "font.size": 10,
        "svg.fonttype": "path",
        "svg.hashsalt": "farfield",
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "legend.fontsize": 9,
    }
    with matplotlib.rc_context(style):
        page = Figure(figsize=(9.6, height), dpi=160, facecolor="white", layout="constrained")
        axes = page.subplots(1, panels, squeeze=False)[0]
        page.suptitle(title, x=0.01, ha="left", weight="bold", size=11.5)
        yield list(axes)
        for each in axes:
            _dress(each)
        page.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def _dress(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(length=3, color=EDGE, labelcolor=TEXT, which="major")
    axes.tick_params(length=0, which="minor")
    axes.xaxis.label.set_color(TEXT)
    axes.yaxis.label.set_color(TEXT)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(EDGE)


def length_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic axis of tokens, every fourth power of two named."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    step = max(1, math.ceil(len(powers) / 6))
    axes.set_xticks([2**p for p in powers][::step], [short(2**p) for p in powers][::step])
    axes.minorticks_off()
    axes.grid(color=GRID, linewidth=0.8)


def short(value: float) -> str:
    """512, 4k, 1M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def name_at(axes: Axes, x: float, y: float, text: str, colour: str, **place: Any) -> None:
    """A word beside a point, in its line's colour."""
    axes.annotate(
        text, (x, y), xytext=place.pop("offset", (4, 4)), textcoords="offset points",
        color=colour, size=9, annotation_clip=False, **place,
    )  # fmt: skip
