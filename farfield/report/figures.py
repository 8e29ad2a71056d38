"""The page's figures as Plotly's own JSON: traces and axes from numbers, without colours.

Every trace names its mechanism and its role in `meta`; the page's script paints it in the theme
in force and shows or hides it, so that one set of numbers serves light, dark and print.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farfield.evaluation.rows import PositionRow
from farfield.report.curves import FAILS_FROM, PROTOCOLS, Point, curve, seed_ratios
from farfield.report.folder import Run, Study
from farfield.report.palette import Ink
from farfield.report.pooling import Estimate, Ladders
from farfield.report.wording import counted, interval, nats, number, ratio, spoken

Figure = dict[str, Any]
_TICKS = (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100, 200, 500, 1000)


def ratio_figures(ladders: Ladders, inks: Mapping[str, Ink]) -> dict[str, Figure]:
    """Ratio against length (both log) under each protocol measured: pooled line, interval band
    and one thin line per seed for each mechanism."""
    figures = {}
    for protocol in PROTOCOLS:
        traces: list[Figure] = []
        for name in ladders.mechanisms(protocol):
            points = [p for p in curve(ladders, name, protocol) if p.ratio is not None]
            if points:
                traces += _band(name, points)
                traces += _seed_lines(ladders, name, protocol)
                traces.append(_pooled_line(name, points, inks[name]))
        if traces:
            layout = _ratio_layout(ladders, traces)
            rules = [_rule(layout, 1.0, "solid"), _rule(layout, FAILS_FROM, "4px,4px")]
            figures[protocol] = {"data": rules + traces, "layout": layout}
    return figures


def _pooled_line(name: str, points: Sequence[Point], ink: Ink) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(spoken(name)),
        "meta": {"mechanism": name, "role": "pooled"},
        "x": [p.length for p in points],
        "y": [p.ratio for p in points],
        "line": {"dash": ink.dash, "width": 2.4},
        "marker": {"symbol": ink.symbol, "size": 8},
        "customdata": [
            [
                html.escape(spoken(name)),
                f"{p.multiple:g} L₀ = {p.length:,} tokens",
                f"{ratio(p.ratio)}× {interval(p.low, p.high)}".rstrip(),
                number(p.ppl, 4),
                f"{counted(p.windows, 'window')} × {counted(p.seeds, 'seed')}",
            ]
            for p in points
        ],
        "hovertemplate": (
            "<b>%{customdata[0]}</b> at %{customdata[1]}<br>ratio %{customdata[2]}<br>"
            "perplexity %{customdata[3]}<br>%{customdata[4]}<extra></extra>"
        ),
    }


def _band(name: str, points: Sequence[Point]) -> list[Figure]:
    """The interval as a closed area; lengths without an interval are left out of it."""
    edged = [(p.length, p.low, p.high) for p in points if p.low is not None]
    if len(edged) < 2:
        return []
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "meta": {"mechanism": name, "role": "band"},
            "x": [e[0] for e in edged] + [e[0] for e in reversed(edged)],
            "y": [e[1] for e in edged] + [e[2] for e in reversed(edged)],
            "fill": "toself",
            "line": {"width": 0},
            "hoverinfo": "skip",
        }
    ]


def _seed_lines(ladders: Ladders, name: str, protocol: str) -> list[Figure]:
    lines = seed_ratios(ladders, name, protocol)
    if len(lines) < 2:
        return []
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": html.escape(f"{spoken(name)}, seed {seed}"),
            "meta": {"mechanism": name, "role": "seed"},
            "x": [length for length, _ in line],
            "y": [value for _, value in line],
            "line": {"width": 0.9},
            "opacity": 0.45,
            "hoverinfo": "skip",
        }
        for seed, line in lines.items()
    ]


def _ratio_layout(ladders: Ladders, traces: Iterable[Figure]) -> Figure:
    base = ladders.train_length
    values = [y for trace in traces for y in trace["y"] if y is not None and y > 0]
    low, high = min(*values, 0.93), max(*values, 1.3)
    pad = 0.05 * math.log10(high / low)
    ticks = _thinned([t for t in _TICKS if low <= t <= high], math.log10(high / low) / 16)
    lengths = sorted({x for trace in traces for x in trace["x"]})
    return {
        "xaxis": _axis("context length", log=True)
        | {
            "tickvals": lengths,
            "ticktext": [f"{x // base}×<br>{x:,}" for x in lengths],
            "range": [math.log10(lengths[0]) - 0.06, math.log10(lengths[-1]) + 0.06],
        },
        "yaxis": _axis("perplexity ÷ perplexity at L₀", log=True)
        | {
            "tickvals": ticks,
            "ticktext": [f"{t:g}" for t in ticks],
            "range": [math.log10(low) - pad, math.log10(high) + pad],
        },
        "hovermode": "closest",
    }


def _thinned(ticks: Sequence[float], gap: float) -> list[float]:
    """Ticks at least `gap` decades apart, 1 always among them."""
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda t: (t not in (1, 2, 5, 10, 100), abs(math.log10(t)))):
        if all(abs(math.log10(tick / other)) >= gap for other in kept):
            kept.append(tick)
    return sorted(kept)


def _rule(layout: Figure, value: float, dash: str) -> Figure:
    """A level right across the figure. As a trace: a dashed shape can vanish between pixels."""
    return {
        "type": "scatter",
        "mode": "lines",
        "meta": {"mechanism": "", "role": "rule"},
        "x": [10**edge for edge in layout["xaxis"]["range"]],
        "y": [value, value],
        "line": {"width": 1, "dash": dash},
        "hoverinfo": "skip",
    }


def _axis(title: str, *, log: bool = False) -> Figure:
    axis: Figure = {"title": {"text": title}, "type": "log" if log else "linear"}
    return axis | {"zeroline": False, "showgrid": True, "ticks": "outside", "automargin": True}


def position_figures(
    study: Study, ladders: Ladders, inks: Mapping[str, Ink]
) -> tuple[int, list[Figure]]:
    """Loss by position at the longest length measured, one panel per mechanism on one scale, and
    that length. Each panel carries its clipped baseline and what context beyond L₀ is worth."""
    if not study.positions:
        return 0, []
    longest = max(row["length"] for row in study.positions)
    rows = [row for row in study.positions if row["length"] == longest]
    lines = {
        name: line
        for name in study.mechanisms
        if (line := _by_position(row for row in rows if row["mechanism"] == name))
    }
    levels = {name: ladders.log_perplexity(name, longest, "clipped") for name in lines}
    values = [y for line in lines.values() for _, _, y in line]
    values += [level for level in levels.values() if level is not None]
    if not values:
        return 0, []
    low, high = math.log10(min(values)), math.log10(max(values))
    span = [low - 0.06 * (high - low) - 0.005, high + 0.06 * (high - low) + 0.005]
    return longest, [
        _position_panel(name, line, levels[name], longest, ladders, inks[name], span)
        for name, line in lines.items()
    ]


def _by_position(rows: Iterable[PositionRow]) -> list[tuple[int, int, float]]:
    """(low, high, nats per token) of each bucket, sums over seeds; non-finite ones left open."""
    sums: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if row["nll"] is not None:
            total = sums.setdefault((row["low"], row["high"]), [0.0, 0.0])
            total[0] += row["nll"]
            total[1] += row["tokens"]
    return [(low, high, nll / tokens) for (low, high), (nll, tokens) in sorted(sums.items())]


def _position_panel(
    name: str,
    line: Sequence[tuple[int, int, float]],
    level: float | None,
    longest: int,
    ladders: Ladders,
    ink: Ink,
    span: Sequence[float],
) -> Figure:
    base = ladders.train_length
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(spoken(name)),
        "meta": {"mechanism": name, "role": "pooled"},
        "x": [math.sqrt(low * max(low, high - 1)) for low, high, _ in line],
        "y": [value for _, _, value in line],
        "line": {"width": 2},
        "marker": {"symbol": ink.symbol, "size": 5},
        "customdata": [
            [f"{low:,}" if high == low + 1 else f"{low:,}–{high - 1:,}", number(value, 4)]
            for low, high, value in line
        ],
        "hovertemplate": (
            "%{customdata[0]} tokens before<br>%{customdata[1]} nats/token<extra></extra>"
        ),
    }
    data = [trace] if level is None else [trace, _clipped_line(name, level, longest)]
    ticks = [t for t in (1, 10, 100, 1000, 10_000, 100_000, 1_000_000) if t <= longest]
    edges = [10 ** span[0], 10 ** span[1]]
    levels = [t for t in (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20) if edges[0] < t < edges[1]]
    boundary: Figure = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": base, "x1": base}
    verdict, words = far_context(ladders.gain_over_clipped(name, longest))
    return {
        "mechanism": name,
        "standing": verdict,
        "words": words,
        "data": data,
        "layout": {
            "xaxis": _axis("tokens before the target", log=True)
            | {
                "tickvals": ticks,
                "ticktext": [_short(t) for t in ticks],
                "range": [-0.05, math.log10(longest) + 0.05],
            },
            "yaxis": _axis("nats/token", log=True)
            | {"tickvals": levels, "ticktext": [f"{t:g}" for t in levels], "range": list(span)},
            "shapes": [boundary | {"layer": "between", "line": {"width": 1.2, "dash": "dot"}}],
        },
    }


def _clipped_line(name: str, level: float, longest: int) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "clipped",
        "meta": {"mechanism": name, "role": "baseline"},
        "x": [1, longest],
        "y": [level, level],
        "line": {"dash": "dash", "width": 1.5},
        "hovertemplate": f"context clipped to L₀: {number(level, 4)} nats/token<extra></extra>",
    }


def _short(value: int) -> str:
    return f"{value // 1000}k" if value >= 1000 else str(value)


# Less than this (nats per token, a hundredth of the perplexity) is neither gain nor harm, however
# narrow its interval. For the panels' words alone: no claim rests on it.
FAR_CONTEXT_MARGIN = 0.01


def far_context(gain: Estimate | None) -> tuple[str, str]:
    """What context beyond L₀ is worth, as a word and in a sentence.

    The gain is the clipped loss less the full-context loss on the same tokens (nats per token).
    """
    if gain is None:
        return "not tested", "no clipped baseline at this length"
    if gain.value is None:
        return "harmed", "losses were not finite"
    size = f"gain {nats(gain.value)} nats/token"
    if gain.low is None or gain.high is None:
        return "unclear", f"{size}: {gain.basis}, too few for an interval"
    size = f"gain {nats(gain.value)} nats/token [{nats(gain.low)}, {nats(gain.high)}]"
    if gain.low > 0 and gain.value > FAR_CONTEXT_MARGIN:
        return "uses it", size
    harmed = gain.high < 0 and gain.value < -FAR_CONTEXT_MARGIN
    return ("harmed by it", size) if harmed else ("survives", size)


def training_figures(runs: Sequence[Run], inks: Mapping[str, Ink]) -> dict[str, Figure]:
    """Training loss and validation loss against iterations, one line per run."""
    figures = {}
    for key, title in (("loss", "training loss"), ("validation_loss", "validation loss")):
        traces: list[Figure] = []
        firsts: set[str] = set()
        for run in runs:
            points = [(row["iteration"], row[key]) for row in run.metrics if row.get(key)]
            if not points:
                continue
            first = run.mechanism not in firsts
            firsts.add(run.mechanism)
            traces.append(_training_line(run, points, key, inks[run.mechanism], first))
        if traces:
            figures[key] = {"data": traces, "layout": _training_layout(traces, title)}
    return figures


def _training_line(
    run: Run, points: Sequence[tuple[int, float]], key: str, ink: Ink, first: bool
) -> Figure:
    validated = key == "validation_loss"
    return {
        "type": "scatter",
        "mode": "lines+markers" if validated or len(points) == 1 else "lines",
        "name": html.escape(run.name),
        "meta": {"mechanism": run.mechanism, "role": "pooled" if first else "seed"},
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"dash": ink.dash if validated else "solid", "width": 1.6 if first else 1.0},
        "marker": {"symbol": ink.symbol, "size": 6 if first else 4},
        "opacity": 1.0 if first else 0.55,
        "hovertemplate": (
            f"<b>{html.escape(run.name)}</b><br>iteration %{{x:,}}: "
            "%{y:.4f} nats/token<extra></extra>"
        ),
    }


def _training_layout(traces: Sequence[Figure], title: str) -> Figure:
    """The scale leaves out the fall of the first twentieth, which would flatten all the rest."""
    last = max(x for trace in traces for x in trace["x"])
    late = [
        y for trace in traces for x, y in zip(trace["x"], trace["y"], strict=True) if x >= last / 20
    ] or [y for trace in traces for y in trace["y"]]
    low, high = math.log10(min(late)), math.log10(max(late))
    room = 0.06 * (high - low) + 0.005
    edges = [10 ** (low - room), 10 ** (high + room)]
    ticks = [t / 4 for t in range(1, 81) if edges[0] < t / 4 < edges[1]]
    step = max(1, math.ceil(len(ticks) / 7))
    return {
        "xaxis": _axis("iteration") | {"range": [0, last * 1.02], "rangemode": "tozero"},
        "yaxis": _axis(f"{title}, nats/token", log=True)
        | {
            "tickvals": ticks[::step],
            "ticktext": [f"{t:g}" for t in ticks[::step]],
            "range": [low - room, high + room],
        },
    }
