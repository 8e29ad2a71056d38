"""The page of a diagnosis, and the section of a study's page that sums its diagnoses up.

Both are drawn from the rows in a folder alone. A study keeps the diagnosis of run RUN in
`diagnosis/RUN` of its own folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from farfield.evaluation.whole import write_text
from farfield.report import diagnosis_figures as figures
from farfield.report import diagnosis_words as words
from farfield.report.diagnosis_rows import (
    FACTS,
    Found,
    averaged,
    by_context,
    left_over_lags,
    mean_of,
    nearest,
    perplexities,
    read,
)
from farfield.report.palette import inks
from farfield.report.wording import MISSING, exp, integer, number, ratio, spoken

PAGE = "report.html"
FOLDER = "diagnosis"

CHANGES: dict[str, str] = {
    "none": "the model as it is",
    "far_masked": "far keys hidden",
    "far_values_dropped": "far values dropped, their weight kept",
    "far_logits_mean": "far logits all set to their mean",
    "far_frame": "far keys moved by one more random map",
    "alibi": "ALiBi's slopes added",
    "log_n": "logits scaled by ln n / ln L₀",
}
LIMITS = {"at most": "at most {}", "at least": "at least {}", "within a factor": "within {} times"}

Cells = list[tuple[str, str]]


def write(folder: Path | str) -> Path:
    """Write the page of a diagnosis from the rows in its folder.

    Returns: the path of the page, which is replaced whole or not at all.
    Raises: OSError and ValueError as `diagnosis_rows.read` does.
    """
    found = read(Path(folder))
    page = found.folder / PAGE
    write_text(page, _rendered("diagnosis.html.j2", _content(found)))
    return page


def summary(folder: Path | str) -> list[str]:
    """The plain-language summary of the diagnosis in a folder. Raises: as `write`."""
    return words.summary(read(Path(folder)))


def of_study(folder: Path) -> list[Found]:
    """The diagnoses a study's folder holds, by name of their run. Raises: as `read`."""
    return [read(path.parent) for path in sorted((folder / FOLDER).glob(f"*/{FACTS}"))]


def section(folder: Path) -> Markup | None:
    """The section of a study's page: one model of each mechanism, the first in name.

    None where the study has no diagnosis. It needs `script()` and Plotly on the page.
    Raises: as `read`.
    """
    every = of_study(folder)
    chosen = list({found.model: found for found in reversed(every)}.values())[::-1]
    if not chosen:
        return None
    drawn = {
        "far_mass": figures.far_mass_figure(chosen),
        "lags": figures.lag_figure(chosen, heads=False),
    }
    shown = {key: figure for key, figure in drawn.items() if figure is not None}
    links = [f"{FOLDER}/{found.folder.name}/{PAGE}" for found in chosen]
    content = {
        "window": chosen[0].far_window,
        "figures": shown,
        "table": {
            "heads": _STUDY_HEADS,
            "rows": [
                (found.model, link, _study_cells(found))
                for found, link in zip(chosen, links, strict=True)
            ],
        },
        "stories": [
            (found.model, link, sentences)
            for found, link in zip(chosen, links, strict=True)
            if (sentences := words.summary(found))
        ],
        "data": _embedded(shown, [found.model for found in chosen], own=False),
    }
    return Markup(_rendered("diagnosis_section.html.j2", content))


def script() -> Markup:
    """What draws the figures of a page or a section, after Plotly."""
    return Markup(_asset("diagnosis.js"))


def _content(found: Found) -> dict[str, Any]:
    maps = figures.heat_maps(found)
    drawn = {
        **{f"heat{n}": one for n, one in enumerate(maps)},
        "lags": figures.lag_figure([found], heads=True),
        "prediction": figures.prediction_figure(found),
        "scatter": figures.scatter_figure(found),
    }
    shown = {key: figure for key, figure in drawn.items() if figure is not None}
    return {
        "found": found,
        "sentences": words.summary(found),
        "fails": f"{words.FAILS:g}",
        "maps": maps,
        "figures": shown,
        "windows": _windows(found),
        "gates": _gates(found),
        "told": words.prediction(found),
        "guesses": words.GUESSES,
        "broken": words.broken_assumptions(found),
        "assumptions": _assumptions(found),
        "changes": _changes(found),
        "style": Markup(_asset("style.css") + _STYLE),
        "script": script(),
        "plotly": Markup(_plotly()),
        "data": _embedded(shown, [found.model], own=True),
    }


_STYLE = """
.told { margin: 0; padding-left: 1.2em; max-width: 46em; } .told li { margin: 6px 0; }
.panels.maps { grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); }
section h3 { margin-top: 26px; }
"""

_STUDY_HEADS: Sequence[tuple[str, str]] = (
    ("ratio", "longest ÷ L₀"),
    ("far keys hidden", "its ratio then"),
    ("far weight", "longest; at 2 L₀"),
    ("a far key weighs", "longest ÷ L₀"),
    ("transport left", "after L₀ tokens"),
    ("memory", "tokens, by head"),
    ("theory errs by", "the best guess by"),
)


def _study_cells(found: Found) -> Cells:
    table = perplexities(found)
    own = table.get("none", {})
    longest = max(own, default=0)
    base = own.get(found.base)
    times = own[longest] / base if base and longest else None
    masked = table.get("far_masked", {}).get(longest)
    mass = [
        point
        for point in by_context(found.attention(found.far_window), "far_mass")
        if point[0] >= 2 * found.far_window
    ]
    change = mean_of(
        found.tables["assumptions"], "value", lambda r: r["assumption"] == "ell_stationary"
    )
    kinds = [kind for kind in ("rotation", "operator") if left_over_lags(found, kind)]
    left = (
        nearest(averaged(left_over_lags(found, kinds[0]).values()), found.base) if kinds else None
    )
    memories = [g["memory"] for g in found.tables["gates"] if g["memory"] is not None]
    told = words.prediction(found)
    return [
        (ratio(times), ""),
        (ratio(masked / base) if masked and base else MISSING, ""),
        (words.percent(mass[-1][1]), words.percent(mass[0][1])) if mass else (MISSING, ""),
        (f"{number(exp(change))}×" if change is not None else MISSING, ""),
        (words.percent(left[1]) if left else MISSING, ""),
        (f"{number(min(memories))} – {number(max(memories))}" if memories else MISSING, ""),
        (number(told.error, 2), number(told.guesses[told.best], 2)) if told else (MISSING, ""),
    ]


def _windows(found: Found) -> list[list[str]]:
    rows = []
    for layer in sorted({step["layer"] for step in found.tables["steps"]}):
        own = [step for step in found.tables["steps"] if step["layer"] == layer]
        mixed = [step["window"] for step in own if step["window"] is not None]
        told = [s["window_independent"] for s in own if s["window_independent"] is not None]
        rows.append(
            [
                str(layer),
                f"{len(own):,}",
                f"{len(mixed):,}",
                f"{integer(median(mixed))} tokens" if mixed else MISSING,
                f"{integer(median(told))} tokens" if told else "never",
                number(median(step["rho"] for step in own), 4),
            ]
        )
    return rows


def _gates(found: Found) -> list[tuple[str, str]]:
    gates = found.tables["gates"]
    return [
        (
            str(layer),
            ", ".join(
                number(gate["memory"]) if gate["memory"] is not None else "∞"
                for gate in sorted(gates, key=lambda g: g["head"])
                if gate["layer"] == layer
            ),
        )
        for layer in sorted({gate["layer"] for gate in gates})
    ]


def _assumptions(found: Found) -> list[list[str]]:
    rows = []
    for name, text in words.ASSUMPTIONS.items():
        own = [row for row in found.tables["assumptions"] if row["assumption"] == name]
        if own:
            limit = LIMITS[own[0]["sense"]].format(number(median(row["limit"] for row in own)))
            holds = f"{sum(row['holds'] for row in own):,} of {len(own):,}"
            rows.append([text, holds, _small(median(row["value"] for row in own)), limit])
    return rows


def _small(value: float) -> str:
    """A number; below a thousandth it is as good as 0."""
    return number(value) if abs(value) >= 1e-3 else "0"


def _changes(found: Found) -> dict[str, Any]:
    rows = found.tables["interventions"]
    lengths = sorted({row["length"] for row in rows})
    table = {(row["intervention"], row["length"]): row for row in rows}
    names = list(dict.fromkeys(row["intervention"] for row in rows))

    def cell(name: str, length: int) -> tuple[str, str]:
        row = table.get((name, length))
        if row is None or row["ppl"] is None:
            return MISSING, ""
        beside = "" if name == "none" or row["against"] is None else f"{ratio(row['against'])}×"
        return number(row["ppl"]), beside

    return {
        "heads": [(f"{length / found.base:g}×", f"{length:,}") for length in lengths],
        "rows": [(CHANGES.get(n, n), [cell(n, length) for length in lengths]) for n in names],
    }


def _rendered(template: str, content: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(_asset)
    )
    filters: dict[str, Callable[..., str]] = {
        "spoken": spoken,
        "opened": lambda text: text[:1].upper() + text[1:],
        "number": number,
    }
    environment.filters.update(filters)
    return environment.get_template(template).render(content)


def _asset(name: str) -> str:
    return (resources.files("farfield.report") / "page" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """Plotly's script from its own package; imported late, as it takes long to import."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _embedded(drawn: dict[str, Any], models: list[str], *, own: bool) -> Markup:
    """JSON that can stand inside a script element: no character of it can end the element."""
    colours = {name: asdict(ink) for name, ink in inks(models).items()}
    text = json.dumps(
        {"figures": drawn, "inks": colours, "own": own, "many": not own},
        allow_nan=False,
        separators=(",", ":"),
    )
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
