"""The theory's pictures, as files: lines for what is predicted, points for what was simulated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from farfield.theory import answers, checks, concentration, laws, mass, steps
from farfield.theory.answers import Head
from farfield.theory.diagram import Diagram
from farfield.theory.drawing import (
    BOUND,
    CARRIED,
    CONTROL,
    EDGE,
    GRID,
    KEPT,
    LEFT,
    LOST,
    PLAIN,
    TEXT,
    length_axis,
    name_at,
    sheet,
)
from farfield.theory.stylised import Control, Keys, Model, simulate, walked_phases

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def window_picture(law: answers.Law, path: Path, epsilon: float = 0.1, seed: int = 0) -> Path:
    """T1: what is left of a mean after n steps, and of |s| itself: predicted and simulated.

    Raises: ValueError for a law of whole-head maps, or a name that is no picture's.
    """
    if isinstance(law, laws.Maps):
        checks.refuse("law", law, "a law of angles for a picture")
    c1, c2 = (np.atleast_1d(law.harmonic(m)) for m in (1, 2))
    rho = np.minimum(np.abs(c1), 1.0)
    window = float(steps.head_window(np.ones_like(rho), rho, epsilon))
    span = int(min(2.2 * window, 4096)) if math.isfinite(window) else 256
    n = np.arange(0, span + 1)
    left = np.mean([np.abs(c) ** n for c in rho], axis=0)
    square = np.mean([0.5 * (1 + (c**n).real) for c in c2], axis=0)
    at = np.unique(np.geomspace(1, span, 14).astype(int))
    phase = walked_phases(law, 4000, rho.size, laws.Draws(seed), 1)(span)[:, at - 1].double()
    turned = np.exp(1j * phase.numpy())
    with sheet(path, 2, 3.6, "A mean forgets, a score's size need not") as (first, second):
        first.plot(n, left, color=PLAIN, linewidth=2, label="predicted")
        found = np.abs(turned.mean(axis=0)).mean(axis=-1)
        first.plot(at, found, "o", color=PLAIN, markersize=5, mfc="white", label="4,000 routes")
        first.axhline(epsilon, color=EDGE, linewidth=1, linestyle=(0, (1, 2)))
        if window <= span:
            first.axvline(window, color=CONTROL, linewidth=1.2)
            name = f"mixing window w({epsilon:g}) = {window:,.0f}"
            name_at(first, window, 0.93, name, CONTROL)
        first.set_title("|E e$^{iΦ}$|, the mean")
        second.plot(n, square, color=CARRIED, linewidth=2)
        found = (turned.real**2).mean(axis=0).mean(axis=-1)
        second.plot(at, found, "o", color=CARRIED, markersize=5, mfc="white")
        second.axhline(0.5, color=EDGE, linewidth=1, linestyle=(0, (1, 2)))
        name_at(second, span, 0.5, "uniform phases: ½", EDGE, ha="right", offset=(0, -12))
        second.set_title("E cos²Φ, the square")
        first.legend(loc="upper right", bbox_to_anchor=(1, 0.88))
        for axes in (first, second):
            axes.set(ylim=(0, 1.03), xlim=(0, span), xlabel="steps between key and query")
            axes.grid(color=GRID, linewidth=0.8)
    return path


def bounds_picture(head: Head, path: Path, delta: float = 0.05, seed: int = 0) -> Path:
    """T2: how often a far score is large, and the largest of M: exact, bounded and drawn."""
    dim = 2 * head.blocks
    S = head.half_range
    rng = np.random.default_rng(seed)
    t = np.linspace(0.001, 0.7, 200)
    first = rng.standard_normal(400_000)
    haar = np.abs(first) / np.sqrt(first**2 + rng.chisquare(dim - 1, first.size))
    parts = [
        np.cos(rng.uniform(0, 2 * np.pi, (1 << 16, head.blocks))).mean(axis=1) for _ in range(8)
    ]
    planes = np.abs(np.concatenate(parts))
    keys = 2.0 ** np.arange(4, 21)
    with sheet(path, 2, 3.8, "A far score is small; the largest of many is not") as (tail, top):
        curves: tuple[tuple[str, Any, str, Any], ...] = (
            ("sphere, exact", concentration.haar_tail(t, dim), PLAIN, "-"),
            ("(1 − t²)$^{(d−1)/2}$", concentration.haar_tail(t, dim, "closed"), PLAIN, (0, (5, 2))),
            ("Lévy: 2e$^{−dt²/2}$", concentration.haar_tail(t, dim, "levy"), PLAIN, (0, (1, 1.6))),
            ("planes: 2e$^{−Bt²}$", _planes_tail(t, head.blocks), CARRIED, (0, (5, 2))),
        )
        for name, curve, colour, dash in curves:
            tail.plot(t, curve, color=colour, linestyle=dash, linewidth=1.8, label=name)
        for drawn, colour in ((haar, PLAIN), (planes, CARRIED)):
            at = t[12::14][[(drawn >= x).sum() >= 10 for x in t[12::14]]]
            rate = [(drawn >= x).mean() for x in at]
            tail.plot(at, rate, "o", color=colour, markersize=4.5, mfc="white")
        tail.set(yscale="log", ylim=(1e-6, 2.5), xlim=(0, 0.7))
        tail.set(xlabel="t, as a share of the largest score", title=f"P(|score| ≥ t), d = {dim}")
        tail.legend(loc="upper right")
        tail.grid(color=GRID, linewidth=0.8)
        energies = head.amplitudes * np.sqrt(dim)
        hoeffding, uniform = (
            concentration.block_threshold(keys, delta, energies, dim, kind)
            for kind in ("hoeffding", "uniform")
        )
        exact = concentration.haar_threshold(keys, delta, dim, S)
        limits: tuple[tuple[str, Any, str, Any], ...] = (
            ("planes, Hoeffding", hoeffding, CARRIED, (0, (1, 1.6))),
            ("planes, uniform", uniform, CARRIED, "-"),
            ("sphere, exact", exact, PLAIN, "-"),
        )
        for name, curve, colour, dash in limits:
            top.plot(keys, curve, color=colour, linestyle=dash, linewidth=1.8, label=name)
        some = keys[:9:2].astype(int)
        largest = [np.quantile(planes.reshape(-1, M).max(axis=1), 1 - delta) for M in some]
        top.plot(
            some, S * np.array(largest), "o", color=CARRIED, markersize=4.5, mfc="white",
            label="planes, drawn",
        )  # fmt: skip
        top.axhline(head.near_score, color=CONTROL, linewidth=1.2)
        name_at(top, keys[-1], head.near_score, "near score", CONTROL, ha="right")
        length_axis(top, keys[0], keys[-1])
        top.set(
            ylim=(0, S),
            xlabel="far keys M",
            title=f"τ in nats: none of M above, {1 - delta:.0%} sure",
        )
        top.legend(loc="lower right")
    return path


def _planes_tail(t: Any, blocks: int) -> Any:
    return concentration.block_tail(t * blocks, np.ones(blocks), "uniform")


def _model(head: Head, slope: float = 0.0, keys: Keys = "independent") -> Model:
    return Model(
        head.law, head.amplitudes, head.near_window, head.near_score, keys, Control(slope),
        head.mean_power, head.noise_power, head.near_power,
    )  # fmt: skip


def break_picture(
    head: Head, path: Path, slope: float = 0.001, routes: int = 100, seed: int = 0
) -> Path:
    """T3, T4 and T6: far mass and signal-to-noise ratio over length, with every bound on them."""
    longest = 1 << 16
    lengths = np.unique(np.round(np.geomspace(2 * head.near_window, longest, 60)))
    at = 2 ** np.arange(math.ceil(math.log2(2 * head.near_window)), 17, 2)
    free = simulate(_model(head), at.tolist(), routes, seed)
    held = simulate(_model(head, slope), at.tolist(), routes, seed)
    M, near, lam = lengths - head.near_window, head.lse_near(), head.half_range
    rho = float(np.abs(head.harmonics).max())
    with sheet(
        path, 2, 3.9, "Far mass grows with length; what it does depends on values"
    ) as panels:
        share, ratio = panels
        least = mass.far_mass_lower(M, head.near_window, lam)
        share.plot(lengths, least, color=BOUND, linestyle=(0, (1, 1.6)), linewidth=1.5)
        forced = mass.far_mass_lower_decohered(M, near, lam, rho, 0.05)
        share.plot(lengths, forced, color=BOUND, linestyle=(0, (5, 2)), linewidth=1.5)
        told = head.predicted(lengths, False).far_mass
        share.plot(lengths, told, color=LEFT, linewidth=2)
        share.plot(lengths, head.predicted(lengths, False, slope).far_mass, color=CONTROL, lw=2)
        for runs, colour in ((free, LEFT), (held, CONTROL)):
            found = [run.far_mass.mean().item() for run in runs]
            share.plot(at, found, "o", color=colour, markersize=5, mfc="white")
        share.set(ylim=(0, 1.01), title="far mass")
        ways: tuple[tuple[str, bool, float, str], ...] = (
            ("values left", False, 0.0, LEFT),
            ("values carried", True, 0.0, CARRIED),
            (f"carried, ALiBi m = {slope:g}", True, slope, CONTROL),
        )
        for name, carried, m, colour in ways:
            curve = head.predicted(lengths, carried, m).snr
            ratio.plot(lengths, curve, color=colour, linewidth=2, label=name)
            found = [run.snr(carried)[0] for run in (held if m else free)]
            ratio.plot(at, found, "o", color=colour, markersize=5, mfc="white")
        ratio.axhline(1, color=EDGE, linewidth=1)
        ratio.set(yscale="log", title="near signal over far noise (power)")
        ratio.legend(loc="lower left")
        for axes in panels:
            length_axis(axes, lengths[0], longest)
            axes.set_xlabel("context length, tokens")
        _name_masses(share, lengths, head, slope, forced)
    return path


def _name_masses(axes: Axes, lengths: Any, head: Head, slope: float, forced: Any) -> None:
    third = len(lengths) // 3
    told = head.predicted(lengths, False)
    name_at(axes, lengths[third], told.far_mass[third], "free, typical", LEFT, ha="right")
    name_at(axes, lengths[-18], forced[-18], "forced once far\nscores average 0", BOUND, va="top")
    held = head.predicted(lengths, False, slope).far_mass[-1]
    name_at(axes, lengths[-1], held, f"ALiBi m = {slope:g}", CONTROL, ha="right", offset=(0, 6))
    name_at(axes, lengths[-1], 0, "forced by |s| ≤ λ alone", BOUND, ha="right", offset=(-2, 6))


def values_picture(head: Head, path: Path, routes: int = 100, seed: int = 0) -> Path:
    """T5 and T5″: the power of the far part, values left or carried, keys alike or not."""
    M = 2.0 ** np.arange(0, 16)
    at = M[4::2]
    rows = answers.value_rows(head, [int(m) for m in M])
    curves = {key: [row[key] for row in rows] for key in ("left", "carried", "floor")}
    lengths = [int(m) + head.near_window for m in at]
    apart = simulate(_model(head), lengths, routes, seed)
    alike = simulate(_model(head, keys="shared"), lengths, routes, seed)
    weights = np.maximum(mass.e2_blocks(head.amplitudes), 1)
    with sheet(
        path, 1, 4.2, "Carried values add up like noise, unless softmax saw their phases"
    ) as (axes,):
        axes.plot(M, curves["left"], color=LEFT, linewidth=2, label="values left")
        axes.plot(M, curves["carried"], color=CARRIED, linewidth=2, label="carried, equal weights")
        left = [run.far_power(False)[0] for run in apart]
        axes.plot(at, left, "o", color=LEFT, markersize=5, mfc="white")
        found = [run.far_power(True)[0] for run in apart]
        label = f"carried, softmax weights (E2 = {weights:.3g})"
        axes.plot(at, found, "o", color=CARRIED, markersize=5, mfc="white", label=label)
        found = [run.far_power(True)[0] for run in alike]
        axes.plot(
            at, found, "D", color=PLAIN, markersize=5, mfc="white", label="carried, one key for all"
        )
        axes.axhline(curves["floor"][0], color=PLAIN, linewidth=1.4, linestyle=(0, (5, 2)))
        name_at(
            axes, M[0], curves["floor"][0], "floor κ²|μ|² when far keys share a direction", PLAIN
        )
        length_axis(axes, 1, M[-1])
        axes.set(yscale="log", xlabel="far keys M", title="E‖far part‖² per unit of far mass²")
        axes.legend(loc="lower left")
    return path


def phase_picture(found: Diagram, path: Path) -> Path:
    """Where near signal survives, three ways side by side: SNR over length × λ, σ or slope."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("snr", [LOST, "#ffffff", KEPT])
    title = f"Where near signal survives, over length and {_OVER[found.over]}"
    with sheet(path, 3, 3.7, title) as panels:
        for panel, axes in zip(found.panels, panels, strict=True):
            mesh = axes.pcolormesh(
                found.lengths, found.values, panel.log_snr, cmap=colours, vmin=-4, vmax=4,
                shading="gouraud", rasterized=True,
            )  # fmt: skip
            axes.contour(
                found.lengths, found.values, panel.log_snr, levels=[0], colors=TEXT, linewidths=1.8
            )
            if found.mixing is not None:
                axes.fill_betweenx(
                    found.values, found.lengths[0], found.mixing, facecolor="none",
                    edgecolor=EDGE, hatch="////", linewidth=0,
                )  # fmt: skip
            length_axis(axes, found.lengths[0], found.lengths[-1])
            axes.grid(False)
            axes.set(ylim=(found.values[0], found.values[-1]), title=panel.title)
            axes.set_xlabel("context length, tokens")
            if found.over != "lambda":
                axes.set_yscale("log")
        panels[0].set_ylabel(_AXES[found.over])
        for x, y, side, word in ((0.05, 0.92, "left", "survives"), (0.95, 0.2, "right", "lost")):
            panels[0].text(x, y, word, ha=side, color="#16191d", transform=panels[0].transAxes)
        if found.mixing is not None:
            panels[0].text(
                0.04, 0.04, "L < w(0.1): nothing is far yet", transform=panels[0].transAxes, size=8,
                color=TEXT, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
        for axes in panels[1:]:
            axes.tick_params(labelleft=False)
        bar = panels[-1].figure.colorbar(mesh, ax=panels, ticks=[-4, -2, 0, 2, 4], pad=0.01)
        bar.ax.set_yticklabels(["10⁻⁴", "10⁻²", "1", "10²", "10⁴"], color=TEXT)
        bar.set_label("near signal ÷ far noise (power)", color=TEXT)
        bar.outline.set_visible(False)
    return path


_OVER = {"lambda": "the logits' range", "sigma": "the size of a step", "slope": "ALiBi's slope"}
_AXES = {
    "lambda": "λ, half-range of the logits (nats)",
    "sigma": "σ of a step (radians)",
    "slope": "ALiBi slope m (nats per token)",
}
