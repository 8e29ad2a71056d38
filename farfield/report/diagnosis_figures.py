"""The figures of a diagnosis as Plotly's own JSON, without colours: the page's script paints them.

Every trace says in `meta` which model it belongs to and what part it plays; a heat map's scale is
the script's as well.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from farfield.report.diagnosis_rows import Found, averaged, by_context, left_over_lags
from farfield.report.wording import number, spoken

Figure = dict[str, Any]
Curve = Sequence[tuple[int, float]]

MOST_NAMED = 16
"""Heads of a layer, and layers, up to which each cell of a heat map has its number written in."""


def heat_maps(found: Found) -> list[Figure]:
    """Far mass of every layer and head, one map for each of up to four contexts."""
    window = found.far_window
    rows = [row for row in found.attention(window) if row["far_mass"] is not None]
    contexts = sorted({row["high"] - 1 for row in rows if row["high"] - 1 > window})
    layers = sorted({row["layer"] for row in rows})
    heads = sorted({row["head"] for row in rows})
    maps = []
    for at in _spread(contexts, 4):
        own = {(r["layer"], r["head"]): r["far_mass"] for r in rows if r["high"] - 1 == at}
        z = [[own.get((layer, head)) for head in heads] for layer in layers]
        maps.append(_heat_map(found, at, z, layers, heads))
    return maps


def _heat_map(
    found: Found, at: int, z: list[list[float | None]], layers: list[int], heads: list[int]
) -> Figure:
    small = len(layers) <= MOST_NAMED and len(heads) <= MOST_NAMED
    return {
        "title": f"context {at:,}",
        "words": f"{_times(at / found.base)} L₀",
        "height": max(170, min(420, 34 * len(layers) + 70)),
        "data": [
            {
                "type": "heatmap",
                "meta": {"role": "heat"},
                "x": [str(head) for head in heads],
                "y": [str(layer) for layer in layers],
                "z": z,
                "zmin": 0,
                "zmax": 1,
                "xgap": 2,
                "ygap": 2,
                "texttemplate": "%{text}" if small else "",
                "text": [
                    ["" if v is None else f"{100 * v:.0f}" if v >= 0.01 else "<1" for v in row]
                    for row in z
                ],
                "hovertemplate": "layer %{y}, head %{x}: %{z:.3f}<extra></extra>",
                "showscale": False,
            }
        ],
        "layout": {
            "xaxis": _axis("head") | {"type": "category", "showgrid": False, "ticks": ""},
            "yaxis": _axis("layer")
            | {"type": "category", "showgrid": False, "ticks": "", "autorange": "reversed"},
        },
    }


def _spread(values: Sequence[int], count: int) -> list[int]:
    """At most so many of the values, first and last among them, evenly spaced between."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def lag_figure(founds: Sequence[Found], *, heads: bool) -> Figure | None:
    """What is left of a transport after n tokens: a line for each model, thin ones for its heads,
    and for one model alone the level below which nothing could be seen."""
    traces: list[Figure] = []
    for found in founds:
        for kind, role in (("rotation", "main"), ("operator", "main"), ("gate", "gate")):
            curves = left_over_lags(found, kind)
            if not curves:
                continue
            if heads:
                traces += [_line(found, "thin", curve) for curve in curves.values()]
            mean = averaged(curves.values())
            said = "gates" if kind == "gate" else "transport"
            traces.append(_line(found, role, mean, f"{spoken(found.model)}: {said}", hover=True))
            if heads and kind != "gate":
                floor = averaged(left_over_lags(found, kind, "floor").values())
                traces.append(_line(found, "floor", floor, "noise"))
    if not traces:
        return None
    longest = max(x for trace in traces for x in trace["x"])
    return {
        "data": traces,
        "layout": {
            "xaxis": _log_axis("tokens between key and query", longest),
            "yaxis": _axis("what is left, 1 = all") | {"range": [-0.02, 1.04], "dtick": 0.2},
            "shapes": [_upright(founds[0].base)],
        },
    }


def far_mass_figure(founds: Sequence[Found]) -> Figure | None:
    """Far mass beyond L₀ against context: one measured line for each model."""
    traces = []
    for found in founds:
        curve = _beyond(by_context(found.attention(found.far_window), "far_mass"), found.far_window)
        if curve:
            traces.append(_line(found, "main", curve, spoken(found.model), hover=True))
    return _shares(traces, founds[0], "weight on keys beyond L₀") if traces else None


def prediction_figure(found: Found) -> Figure | None:
    """Far mass against context, means over heads: measured, predicted, guessed, and bounded."""
    rows = found.tables["prediction"]
    if not rows:
        return None
    window = rows[0]["near_window"]
    known = [
        r
        for r in found.attention(window)
        if r["far_keys"] and r["far_keys"] > 0 and r["high"] - 1 > window
    ]
    traces = [
        _line(found, "main", by_context(known, "far_mass"), "measured", hover=True),
        _line(found, "predicted", by_context(rows, "predicted"), "predicted", hover=True),
        _line(found, "guess", by_context(rows, "no_change"), "guess: no change", hover=True),
        _line(
            found, "guess2", by_context(rows, "proportional_odds"), "guess: odds grow with keys",
            hover=True,
        ),
        _line(found, "bound", by_context(known, "t4_prime"), "lower bound (T4′)", hover=True),
    ]  # fmt: skip
    traces = [trace for trace in traces if trace["x"]]
    return _shares(traces, found, f"weight on keys beyond {window:,} tokens")


def scatter_figure(found: Found) -> Figure | None:
    """Predicted against measured far mass at the longest context, one mark for each head."""
    rows = found.tables["prediction"]
    if not rows:
        return None
    last = max(row["high"] for row in rows)
    own = [row for row in rows if row["high"] == last]
    return {
        "data": [
            _marks(found, "main", own, "predicted", "predicted"),
            _marks(found, "guess2", own, "proportional_odds", "guess: odds grow with keys"),
            {
                "type": "scatter", "mode": "lines", "meta": {"role": "rule"}, "x": [0, 1],
                "y": [0, 1], "line": {"width": 1}, "hoverinfo": "skip",
            },
        ],
        "layout": {
            "xaxis": _axis(f"measured at {last - 1:,} tokens") | {"range": [-0.03, 1.03]},
            "yaxis": _axis(f"told from {found.base:,} tokens") | {"range": [-0.03, 1.03]},
        },
    }  # fmt: skip


def _marks(found: Found, role: str, rows: Sequence[Any], key: str, name: str) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "meta": {"model": found.model, "role": role},
        "x": [row["measured"] for row in rows],
        "y": [row[key] for row in rows],
        "marker": {"size": 8, "symbol": "circle" if role == "main" else "x-thin-open"},
        "customdata": [[row["layer"], row["head"]] for row in rows],
        "hovertemplate": "layer %{customdata[0]}, head %{customdata[1]}<br>measured %{x:.3f}, "
        + name
        + " %{y:.3f}<extra></extra>",
    }


def _shares(traces: list[Figure], found: Found, title: str) -> Figure:
    longest = max(x for trace in traces for x in trace["x"])
    least = min(x for trace in traces for x in trace["x"])
    return {
        "data": traces,
        "layout": {
            "xaxis": _log_axis("tokens of context", longest, least),
            "yaxis": _axis(title) | {"range": [-0.02, 1.04], "dtick": 0.2},
            "shapes": [_upright(found.base)] if least < found.base else [],
        },
    }


def _beyond(curve: Curve, window: int) -> list[tuple[int, float]]:
    return [point for point in curve if point[0] > window]


def _line(found: Found, role: str, curve: Curve, name: str = "", hover: bool = False) -> Figure:
    trace: Figure = {
        "type": "scatter",
        "mode": "lines+markers" if role == "main" else "lines",
        "name": html.escape(name),
        "meta": {"model": found.model, "role": role},
        "x": [x for x, _ in curve],
        "y": [y for _, y in curve],
        "marker": {"size": 6},
        "hoverinfo": "skip",
    }
    if hover:
        said = html.escape(name)
        trace["hovertemplate"] = f"<b>{said}</b><br>%{{x:,}} tokens: %{{y:.3f}}<extra></extra>"
        trace.pop("hoverinfo")
    return trace


def _axis(title: str) -> Figure:
    return {"title": {"text": title}, "zeroline": False, "ticks": "outside", "automargin": True}


def _log_axis(title: str, longest: float, least: float = 1) -> Figure:
    powers = [2**n for n in range(40) if least * 0.9 <= 2**n <= longest * 1.1]
    step = max(1, math.ceil(len(powers) / 8))
    ticks = powers[::-1][::step][::-1]
    return _axis(title) | {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{t:,}" for t in ticks],
        "range": [math.log10(least) - 0.06, math.log10(longest) + 0.06],
    }


def _upright(at: float) -> Figure:
    return {
        "type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at, "layer": "below",
        "line": {"width": 1.2, "dash": "dot"},
    }  # fmt: skip


def _times(value: float) -> str:
    return number(value, 3) if value >= 1 else f"{value:.2g}"
