"""The default study's colours stay apart for colour-blind readers, on light and dark paper."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from farfield.report.palette import inks
from farfield.report.wording import spoken, unscaled

DEFAULT = (
    "rope",
    "rope:mixing",
    "alibi",
    "random",
    "random+v",
    "learned",
    "learned+v",
    "learned+v+alibi",
)
SCALED = tuple(f"rope:scaling={rule}" for rule in ("linear", "ntk", "yarn"))
# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
VISION = {
    "full": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
PAPER = {"light": "#ffffff", "dark": "#14171a"}


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", list(VISION))
def test_colours_of_the_default_study_stay_apart(theme: str, vision: str) -> None:
    seen = {
        name: lab(VISION[vision] @ linear(getattr(ink, theme)))
        for name, ink in inks([*DEFAULT, *SCALED]).items()
    }
    for a, b in itertools.combinations(seen, 2):
        distance = float(np.linalg.norm(seen[a] - seen[b]))
        assert distance > 11, f"{a} and {b} are {distance:.1f} apart in {vision}, {theme}"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out_from_the_paper(theme: str) -> None:
    for name, ink in inks([*DEFAULT, *SCALED]).items():
        assert contrast(getattr(ink, theme), PAPER[theme]) > 2.4, f"{name} on {theme}"


def test_no_two_mechanisms_share_colour_dash_and_marker() -> None:
    names = [*DEFAULT, *SCALED, "rope:mixing,scaling=yarn", "a", "a:scaling=yarn", "b", "c"]
    drawn = [(ink.light, ink.dash, ink.symbol) for ink in inks(names).values()]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("trained", ["rope", "rope:mixing", "mine"])
def test_scaled_rows_are_dashed_variants_of_the_ink_of_what_was_trained(trained: str) -> None:
    rules = ("linear", "ntk", "yarn")
    names = [f"{trained}{',' if ':' in trained else ':'}scaling={rule}" for rule in rules]
    found = inks([trained, *names])
    own = found[trained]
    assert own == inks([trained])[trained]
    assert {found[name].dash for name in names} == {"dot", "dashdot", "dash"}
    for name in names:
        for theme in ("light", "dark"):
            theirs, mine = (getattr(ink, theme) for ink in (found[name], own))
            spans = [abs(int(theirs[i : i + 2], 16) - int(mine[i : i + 2], 16)) for i in (1, 3, 5)]
            assert (
                0 < max(spans) <= round(0.45 * 255)
            )  # related: less than half the way to the tint


@pytest.mark.parametrize(
    ("name", "parts", "said"),
    [
        ("rope:scaling=yarn", ("rope", "yarn"), "rope with YaRN"),
        ("rope:mixing,scaling=ntk+v+alibi", ("rope:mixing+v+alibi", "ntk"),
         "rope:mixing+v+alibi with NTK"),
        ("rope:scaling=linear+v", ("rope+v", "linear"), "rope+v with linear interpolation"),
        ("rope:scaling=yarn,factor=8", ("rope:scaling=yarn,factor=8", ""),
         "rope:scaling=yarn,factor=8"),
        ("mine:scaling=other", ("mine:scaling=other", ""), "mine:scaling=other"),
        ("learned+v+alibi", ("learned+v+alibi", ""), "learned+v+alibi"),
    ],
)  # fmt: skip
def test_names_of_scaled_rows_are_spoken(name: str, parts: tuple[str, str], said: str) -> None:
    assert unscaled(name) == parts
    assert spoken(name, brief=True) == said
    assert spoken(name) == said + (" at evaluation" if parts[1] else "")
