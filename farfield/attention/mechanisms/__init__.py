"""The table of mechanisms, and the names that compose them.

A name is a transport, `v` if values are carried along it, and controls, joined by `+`:
`learned+v+forget`. A part may have options after a colon, `learned:c=0`; the first may go without
its name, `rope:mixing`. Controls alone stand on `nope`: `alibi` is `nope+alibi`. Controls stack
where each sets another field of the Carry: a potential (`alibi`, `forget`), a window, a scale of
the logits (`logn`).

A mechanism of your own is one more row, from outside the package:

    mechanisms.register(mechanisms.Row("mine", "transport", "what it is", "M_t = …", Options, Mine))
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import nn

from farfield.attention.mechanism import Geometry, Mechanism
from farfield.attention.mechanisms import (
    alibi,
    dense,
    forget,
    learned,
    logn,
    nope,
    path,
    random,
    reflection,
    rope,
    window,
)

CARRIED = "v"
"""The part of a name that says values are carried."""


@dataclass(frozen=True)
class Row:
    """One transport or control: its name, what it is, its step or potential, and how to build it.

    `options` is a frozen dataclass whose fields all have defaults; `build(geometry, options)`
    returns the module (None: the identity transport). `sets` is the field of the Carry that a
    control sets. `values_stay` is why values can't be carried along a transport (empty: they can).
    """

    name: str
    kind: Literal["transport", "control"]
    summary: str
    equation: str
    options: type
    build: Callable[[Geometry, Any], nn.Module | None]
    sets: str = ""
    values_stay: str = ""


_TABLE: dict[str, Row] = {
    row.name: row
    for row in (
        Row(
            "nope",
            "transport",
            "no position at all",
            "M_t = I",
            nope.Options,
            nope.nope,
            values_stay="there is no transport to carry them along; add one, such as 'rope+v'",
        ),
        Row("rope", "transport", "rotation by position", "M_t = R(-ω_b)", rope.Options, rope.Rope),
        Row(
            "random",
            "transport",
            "accumulated rotation by a random angle for each token id",
            "M_t = R(-σ_b g(id_t))",
            random.Options,
            random.Random,
        ),
        Row(
            "random_iid",
            "transport",
            "accumulated rotation by random angles, drawn afresh every iteration",
            "M_t = R(-σ_b g_t)",
            random.Options,
            random.RandomIid,
        ),
        Row(
            "learned",
            "transport",
            "accumulated rotation by an angle the token chooses",
            "M_t = R(-ω_b (c + W x_t))",
            learned.Options,
            learned.Learned,
        ),
        Row(
            "reflection",
            "transport",
            "accumulated Householder reflection across a vector the token chooses",
            "M_t = I - 2 w wᵀ, w = W x_t / |W x_t|",
            reflection.Options,
            reflection.Reflection,
        ),
        Row(
            "dense",
            "transport",
            "accumulated orthogonal map of whole blocks, chosen by the token",
            "M_t = exp(S_t), S_t skew, linear in x_t",
            dense.Options,
            dense.Dense,
        ),
        Row(
            "path",
            "transport",
            "PaTH: a part along a vector is taken away, as much as the token says",
            "M_t = I - β w wᵀ, β = 2 sigmoid(U x_t + b)",
            path.Options,
            path.Path,
            values_stay="path's steps shrink what they carry and have no inverse, so values have "
            "no common frame to meet in; 'reflection+v' is its orthogonal form",
        ),
        Row(
            "alibi",
            "control",
            "linear penalty on distance",
            "u_t = m_h t",
            alibi.Options,
            alibi.Alibi,
            sets="potential",
        ),
        Row(
            "forget",
            "control",
            "a gate for every token decides how much of the past is kept",
            "u_t = -Σ log sigmoid(W x_l + b)",
            forget.Options,
            forget.Forget,
            sets="potential",
        ),
        Row(
            "window",
            "control",
            "nothing further than N tokens is visible, sinks apart",
            "i - j < N",
            window.Options,
            window.Window,
            sets="window",
        ),
        Row(
            "logn",
            "control",
            "logits grow with the logarithm of the number of keys",
            "c_i = s log n_i",
            logn.Options,
            logn.Logn,
            sets="logit_scale",
        ),
    )
}


@dataclass(frozen=True)
class Part:
    """A row of the table with its options."""

    row: Row
    options: Any

    def __str__(self) -> str:
        changed = [
            f"{f.name}={_spelled(getattr(self.options, f.name))}"
            for f in fields(self.options)
            if getattr(self.options, f.name) != f.default
        ]
        if changed and changed[0].startswith(fields(self.options)[0].name + "="):
            changed[0] = changed[0].split("=", 1)[1]
        return self.row.name + (":" + ",".join(changed) if changed else "")


@dataclass(frozen=True)
class Composition:
    """A composed name, read: its transport, whether values are carried, its controls in the
    table's order."""

    transport: Part
    carried: bool
    controls: tuple[Part, ...]

    def __str__(self) -> str:
        parts = [str(self.transport)]
        if self.carried:
            parts.append(CARRIED)
        parts += [str(control) for control in self.controls]
        if parts[0] == "nope" and len(parts) > 1:
            del parts[0]
        return "+".join(parts)


def table() -> list[Row]:
    """All rows, in the table's order."""
    return list(_TABLE.values())


def register(row: Row) -> None:
    """Add a row to the table. Raises: ValueError for a name that is taken or can't be composed."""
    if row.name in _TABLE or row.name == CARRIED:
        raise ValueError(f"mechanism '{row.name}' is already registered")
    if not row.name.isidentifier():
        raise ValueError(f"mechanism name '{row.name}' is not an identifier")
    if (row.kind == "control") != bool(row.sets):
        raise ValueError(
            f"mechanism '{row.name}': a control names the field it sets, and a transport none; "
            f"got sets='{row.sets}'"
        )
    if any(f.default is MISSING for f in fields(row.options)):
        raise ValueError(f"every option of mechanism '{row.name}' needs a default")
    for key, kind in get_type_hints(row.options).items():
        if get_origin(kind) is not Literal and kind not in (int, float):
            raise ValueError(
                f"option '{key}' of mechanism '{row.name}' is a {kind}; a name can spell an int, "
                "a float or a Literal of strings"
            )
    _TABLE[row.name] = row


def parse(name: str) -> Composition:
    """Read a composed name.

    Raises: ValueError naming the part that is not known, the nearest and the valid ones; or why
    the parts don't go together.
    """
    transports: list[Part] = []
    controls: list[Part] = []
    carried = False
    for text in name.split("+"):
        if text == CARRIED:
            if carried:
                raise ValueError(f"mechanism '{name}' carries values twice; one 'v' is enough")
            carried = True
            continue
        part = _part(text, name)
        (transports if part.row.kind == "transport" else controls).append(part)
    if len(transports) > 1:
        raise ValueError(
            f"mechanism '{name}' names {len(transports)} transports "
            f"({', '.join(p.row.name for p in transports)}); expected at most one"
        )
    transport = transports[0] if transports else Part(_TABLE["nope"], nope.Options())
    if carried and transport.row.values_stay:
        raise ValueError(
            f"mechanism '{name}' can't carry values: {transport.row.values_stay} ({_valid()})"
        )
    order = list(_TABLE)
    controls.sort(key=lambda part: order.index(part.row.name))
    for i, one in enumerate(controls):
        for other in controls[i + 1 :]:
            if one.row.sets == other.row.sets:
                raise ValueError(
                    f"mechanism '{name}' names {one.row.name} and {other.row.name}, which both "
                    f"set the {one.row.sets.replace('_', ' ')}; expected at most one of them"
                )
    return Composition(transport, carried, tuple(controls))


def canonical(name: str) -> str:
    """The one spelling of a composed name: transport, `v`, control, defaults left out.

    Raises: ValueError as `parse`.
    """
    return str(parse(name))


def slug(name: str) -> str:
    """The canonical name as a folder's name on any system."""
    return canonical(name).replace(":", "~")


def build(name: str, geometry: Geometry) -> Mechanism:
    """The mechanism of a composed name for one attention layer.

    Raises: ValueError as `parse`, and for carried values that a frame of keys doesn't fit.
    """
    composition = parse(name)
    transport = composition.transport
    if composition.carried and geometry.value_dim not in (None, geometry.head_dim):
        raise ValueError(
            f"mechanism '{name}' carries values of dimension {geometry.value_dim} in frames of "
            f"dimension {geometry.head_dim}; expected the same, or values that stay"
        )
    return Mechanism(
        transport.row.build(geometry, transport.options),  # type: ignore[arg-type]
        composition.carried,
        tuple(part.row.build(geometry, part.options) for part in composition.controls),  # type: ignore[misc]
    )


def _valid() -> str:
    names = {"transport": [], "control": []}  # type: dict[str, list[str]]
    for row in _TABLE.values():
        names[row.kind].append(row.name)
    return (
        f"transports: {', '.join(names['transport'])}; {CARRIED} carries values; "
        f"controls: {', '.join(names['control'])}"
    )


def _part(text: str, name: str) -> Part:
    head, _, tail = text.partition(":")
    if head == CARRIED:
        raise ValueError(f"'{CARRIED}' in '{name}' takes no options, got '{tail}'")
    row = _TABLE.get(head)
    if row is None:
        near = difflib.get_close_matches(head, [*_TABLE, CARRIED], 1, 0.5)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"unknown mechanism '{head}' in '{name}'{hint} ({_valid()})")
    return Part(row, _options(row, tail, name))


def _options(row: Row, text: str, name: str) -> Any:
    known = {f.name: f for f in fields(row.options)}
    hints = get_type_hints(row.options)
    values: dict[str, Any] = {}
    for index, item in enumerate(text.split(",") if text else []):
        key, equals, value = item.partition("=")
        if not equals and index == 0 and known:
            key, value = next(iter(known)), item
        if key in values:
            raise ValueError(f"option '{key}' of '{row.name}' is given twice in '{name}'")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            valid = ", ".join(known) or "none"
            raise ValueError(
                f"unknown option '{key}' of '{row.name}' in '{name}'{hint} (options: {valid})"
            )
        values[key] = _value(value, hints[key], f"option '{key}' of '{row.name}' in '{name}'")
    return row.options(**values)


def _value(text: str, kind: Any, where: str) -> Any:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if text not in choices:
            near = difflib.get_close_matches(text, choices, 1, 0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"{where} is '{text}'{hint} (one of: {', '.join(choices)})")
        return text
    try:
        value = kind(text)
        if math.isfinite(value):
            return value + 0  # -0.0 is 0.0: one value, one spelling
    except ValueError:
        pass
    raise ValueError(f"{where} is '{text}'; expected a finite {kind.__name__}")


def _spelled(value: Any) -> str:
    """The shortest text that reads back as the value, without the `+` that joins parts."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return (short if float(short) == value else repr(value)).replace("e+", "e")
