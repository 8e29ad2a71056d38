"""The page: a study's folder in, OUT/report.html out, one file that needs nothing else."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from farfield.evaluation.whole import write_text
from farfield.report import costs, diagnosis, figures, tables
from farfield.report.claims import Part, verdicts
from farfield.report.curves import FAILS_FROM, HOLDS_TO, headline
from farfield.report.folder import Run, Study, read
from farfield.report.palette import Ink, inks
from farfield.report.pooling import FEWEST_UNITS, MOST_UNITS, Ladders
from farfield.report.published import SOURCE
from farfield.report.wording import integer, number, spoken, unscaled

PAGE = "report.html"
PROTOCOLS = {
    "windows": "non-overlapping windows; a target sees as many tokens as precede it in its window. "
    "The verdicts rest on these.",
    "fixed": "the same block of L₀/4 targets at every length, each with almost the whole length "
    "before it: only the context changes.",
    "clipped": "the targets of the windows with a context that never exceeds L₀ (it slides by "
    "L₀/4): what a model gains by not looking further than it was trained to.",
}
MARKS = {"holds": "✓", "fails": "✕", "undecided": "~", "not tested": "–"}
STANDINGS = {
    "uses it": "uses far context",
    "survives": "neither gains nor loses",
    "harmed by it": "is harmed by far context",
    "harmed": "has no finite loss",
    "unclear": "can't be told",
    "not tested": "has no baseline",
}
# Stroke patterns of the figure's dashes, at the scale of a table's key.
DASHES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}


def write(folder: Path | str) -> Path:
    """Write a study's page from the files in its folder, whatever is there of them.

    Returns: the path of the page, which is replaced whole or not at all.
    Raises: OSError and ValueError as `folder.read` does.
    """
    study = read(Path(folder))
    page = study.folder / PAGE
    write_text(page, render(study))
    return page


def render(study: Study) -> str:
    """The page's HTML."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_asset),
        finalize=_tied,
    )
    environment.filters["spoken"] = spoken
    environment.filters["opened"] = lambda text: text[:1].upper() + text[1:]
    return environment.get_template("page.html.j2").render(_content(study))


def _tied(value: Any) -> Any:
    """A unit stays on the line of its number: 128 L₀, 95 %. Markup is left as it is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return value.replace(" L₀", "\N{NO-BREAK SPACE}L₀").replace(" %", "\N{NO-BREAK SPACE}%")


def _content(study: Study) -> dict[str, Any]:
    ladders = Ladders(study.rows)
    colours = inks(study.mechanisms)
    longest, positions = figures.position_figures(study, ladders, colours)
    drawn_figures = {
        "ratio": figures.ratio_figures(ladders, colours),
        "positions": positions,
        "training": figures.training_figures(study.runs, colours),
    }
    recipe = study.recipe
    data = recipe.get("data", {})
    return {
        "study": study,
        "recipe_text": escape(study.recipe_text),
        "headline": headline(ladders),
        "holds_to": f"{HOLDS_TO:g}",
        "fails_from": f"{FAILS_FROM:g}",
        "state": _state(study),
        "seeds": sorted({run.seed for run in study.runs if run.status == "finished"}),
        "corpus": ", ".join(str(data[key]) for key in ("source", "tokenizer") if key in data),
        "size": _size(recipe),
        "verdicts": verdicts(study.rows),
        "level": f"{100 * ladders.level:g}",
        "inks": colours,
        "drawn": _drawn(study, drawn_figures),
        "scaled": [name for name in ladders.mechanisms() if unscaled(name)[1]],
        "figures": drawn_figures,
        "longest": longest,
        "margin": f"{figures.FAR_CONTEXT_MARGIN:g}",
        "ratios": tables.ratio_table(ladders),
        "costs": tables.cost_table(study, ladders),
        "bench": costs.read(study.folder),
        "diagnosis": diagnosis.section(study.folder),
        "diagnosis_script": diagnosis.script(),
        "policy": tables.policy_facts(ladders),
        "left_out": tables.left_out(study),
        "environment": tables.flattened(study.environment),
        "commands": _commands(study),
        "source": SOURCE,
        "most": f"{MOST_UNITS:,}",
        "fewest": integer(FEWEST_UNITS),
        "protocols": PROTOCOLS,
        "marks": MARKS,
        "standings": STANDINGS,
        "dashes": DASHES,
        "gauge": gauge,
        "style": Markup(_asset("style.css")),
        "script": Markup(_asset("script.js")),
        "plotly": Markup(_plotly()),
        "data": _embedded(drawn_figures, colours),
    }


def _asset(name: str) -> str:
    return (resources.files("farfield.report") / "page" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """Plotly's script from its own package; imported late, as it takes long to import."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _embedded(drawn: Mapping[str, Any], colours: Mapping[str, Ink]) -> Markup:
    """JSON that can stand inside a script element: no character of it can end the element."""
    text = json.dumps(
        {**drawn, "inks": {name: asdict(ink) for name, ink in colours.items()}},
        allow_nan=False,
        separators=(",", ":"),
    )
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@dataclass(frozen=True)
class State:
    """How far the study is: counts, what has not finished (status, who, error), the moment."""

    finished: int
    total: int
    others: Sequence[tuple[str, str, str]]
    date: str


def _state(study: Study) -> State:
    others = [("failed", run.name, run.error) for run in study.with_status("failed")]
    others += [("running", run.name + _progress(run), "") for run in study.with_status("running")]
    for status in ("interrupted", "pending"):
        runs = study.with_status(status)
        if runs:
            others.append((status, "; ".join(run.name for run in runs), ""))
    ends = [str(run.facts["finished"]) for run in study.runs if run.facts.get("finished")]
    moment = max(map(_moment, ends)) if ends and not others else datetime.now(timezone.utc)
    finished = len(study.with_status("finished"))
    return State(finished, len(study.runs), others, f"{moment:%d %B %Y, %H:%M} UTC")


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return moment.astimezone(timezone.utc)


def _progress(run: Run) -> str:
    """Where a running run stands: its phase, its iteration."""
    facts = run.facts
    said = f", {facts['phase']}" if facts.get("phase") else ""
    if facts.get("iterations"):
        said += f", iteration {integer(facts['iteration'])} of {integer(facts['iterations'])}"
    return said


def _size(recipe: Mapping[str, Any]) -> str:
    """The study's own size in words, to set beside the paper's."""
    model, training = recipe.get("model", {}), recipe.get("training", {})
    parts = []
    if "layers" in model and "width" in model:
        parts.append(f"{model['layers']} layers × {model['width']}")
    if "length" in training:
        parts.append(f"trained at {training['length']:,} tokens")
    if "iterations" in training:
        parts.append(f"for {training['iterations']:,} iterations")
    return ", ".join(parts)


def _drawn(study: Study, drawn: Mapping[str, Any]) -> list[str]:
    """The mechanisms that any figure shows, in the study's order."""
    shown = {
        trace["meta"]["mechanism"]
        for group in (drawn["ratio"], drawn["training"])
        for figure in group.values()
        for trace in figure["data"]
    } | {panel["mechanism"] for panel in drawn["positions"]}
    return [name for name in study.mechanisms if name in shown]


def _commands(study: Study) -> list[str]:
    folder = (study.folder if study.folder.name else study.folder.resolve()).as_posix()
    here = shlex.quote(folder)
    said = [f"farfield study {here}/recipe.toml --out {shlex.quote(folder + '-again')}"]
    if study.with_status("finished") != list(study.runs):
        said.append(f"farfield study {here}/recipe.toml --out {here} --resume")
    said.append(f"farfield report {here}")
    return said


@dataclass(frozen=True)
class Gauge:
    """Where a part's number, interval and threshold lie on its own scale, in percent."""

    value: float
    low: float | None
    high: float | None
    bound: float
    side: tuple[float, float]
    label: str

    @property
    def lean(self) -> str:
        """Which way the label goes from the threshold, so that it stays on the card."""
        return "right" if self.bound < 25 else "left" if self.bound > 75 else "both"


def gauge(part: Part) -> Gauge | None:
    """The scale of a part: logarithmic for ratios, its holding side marked."""
    measure = part.decisive
    if measure is None or measure.value is None:
        return None
    bend = math.log if measure.unit == "×" else float
    ends = [part.bound, measure.value, *(e for e in (measure.low, measure.high) if e is not None)]
    bent = [bend(end) for end in ends]
    room = (max(bent) - min(bent)) or 0.01
    start, span = min(bent) - 0.12 * room, 1.24 * room

    def at(value: float | None) -> float | None:
        return None if value is None else round(100 * (bend(value) - start) / span, 2)

    bound, value = at(part.bound), at(measure.value)
    assert bound is not None
    assert value is not None
    upward = part.sense in ("at least", "above")
    sign = {"at least": "≥", "at most": "≤", "above": ">", "below": "<"}[part.sense]
    shown = f"{part.bound:.2f}" if measure.unit == "×" else number(part.bound)
    side = (bound, 100.0) if upward else (0.0, bound)
    return Gauge(value, at(measure.low), at(measure.high), bound, side, f"holds {sign} {shown}")
