"""Recipes: what a study trains, on what, and how it is measured, as validated TOML.

Checking a recipe costs no heavy import, except for the names of mechanisms (`Recipe.canonical`).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from farfield.training import TrainingSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# TOML knows arrays only; frozen settings hold tuples.
Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Integers = Annotated[tuple[int, ...], Field(strict=False, min_length=1)]
Protocol = Literal["windows", "fixed", "clipped"]
Scaling = Literal["linear", "ntk", "yarn"]


_TOML_WORDS = {
    "a valid tuple": "an array",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid string": "a string",
    "a valid boolean": "true or false",
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataSettings(_Section):
    """The `[data]` table: a text source, its tokenizer, and how much of it to read (tokens)."""

    source: str = Field(default="kjv", min_length=1)
    tokenizer: str = Field(default="bytes", min_length=1)
    max_tokens: int | None = Field(default=None, ge=2)


class ModelSettings(_Section):
    """The `[model]` table: the decoder's shape, the same for every mechanism.

    Units: `mixing_window` in tokens (none: the training length).
    """

    layers: int = Field(default=4, ge=1)
    width: int = Field(default=128, ge=2)
    heads: int = Field(default=4, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    mlp_width: int | None = Field(default=None, ge=1)
    mixing_window: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelSettings:
        if self.head_dim is None and self.width % self.heads:
            near = min(_divisors(self.width), key=lambda n: abs(n - self.heads))
            raise ValueError(
                f"heads {self.heads} does not divide width {self.width}; "
                f"expected a divisor of it, such as {near}"
            )
        head_dim = self.head_dim or self.width // self.heads
        if head_dim % 2:
            raise ValueError(
                f"head dimension {head_dim} is odd; expected an even one: rotations turn pairs"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            near = min(_divisors(self.heads), key=lambda n: abs(n - (self.kv_heads or 0)))
            raise ValueError(
                f"kv_heads {self.kv_heads} does not divide heads {self.heads}; "
                f"expected a divisor of it, such as {near}"
            )
        return self


class LadderSettings(_Section):
    """The `[ladder]` table: the lengths to evaluate at, as multiples of the training length.

    `scaling` adds the rows of every trained rotary model with its frequencies scaled to the length,
    under each of these rules; other mechanisms have nothing to scale and get no such rows.

    Units: `tokens` scored at every length by `windows` and `clipped`; `blocks` of L₀/4 tokens
    scored by `fixed`.
    """

    multiples: Integers = (1, 2, 4, 8, 16, 32, 64, 128)
    tokens: int = Field(default=65536, ge=1)
    blocks: int = Field(default=32, ge=1)
    protocols: Annotated[tuple[Protocol, ...], Field(strict=False, min_length=1)] = (
        "windows",
        "fixed",
        "clipped",
    )
    scaling: Annotated[tuple[Scaling, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _starts_at_the_training_length(self) -> LadderSettings:
        if self.multiples[0] != 1 or list(self.multiples) != sorted(set(self.multiples)):
            raise ValueError(
                f"multiples {list(self.multiples)} do not rise from 1; "
                "expected 1 first (every ratio is over it), then rising lengths"
            )
        if len(set(self.scaling)) < len(self.scaling):
            raise ValueError(f"scaling {list(self.scaling)} holds one twice; expected each once")
        return self


class Recipe(_Section):
    """A study: mechanisms × seeds, trained and measured alike."""

    name: str = Field(min_length=1)
    description: str = ""
    mechanisms: Names
    seeds: Integers = (0,)
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    ladder: LadderSettings = LadderSettings()

    @model_validator(mode="after")
    def _runs_differ(self) -> Recipe:
        for key in ("mechanisms", "seeds"):
            values = list(getattr(self, key))
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise ValueError(f"{key} hold {twice[0]!r} twice; expected each once")
        for seed in self.seeds:
            if not 0 <= seed < 2**32:
                raise ValueError(f"seeds hold {seed}; expected 0 to 2^32 - 1")
        return self

    def canonical(self) -> Recipe:
        """The same recipe with every mechanism's canonical name.

        Raises: ValueError naming the recipe's key and the nearest valid name, or where scaled
        rows are asked for and no mechanism can have them, or one has their name.
        """
        from farfield.attention import mechanisms

        try:
            names = [mechanisms.canonical(name) for name in self.mechanisms]
        except ValueError as error:
            raise ValueError(f"recipe {self.name}: mechanisms: {error}") from None
        if self.ladder.scaling:
            self._check_scaled(names)
        return recipe_from({**self.as_toml(), "mechanisms": names}, self.name)

    def _check_scaled(self, names: list[str]) -> None:
        from farfield.evaluation.scaled import row_names

        rules = self.ladder.scaling
        made = [row for name in names for row in row_names(name, rules) if row != name]
        if not made:
            raise ValueError(
                f"recipe {self.name}: ladder.scaling is {list(rules)}, and {', '.join(names)} "
                "can't be scaled: no frequencies by position; expected a mechanism such as rope, "
                "or ladder.scaling=[]"
            )
        for row in made:
            if row in names:
                raise ValueError(
                    f"recipe {self.name}: mechanisms hold {row!r}, the name of the rows that "
                    "ladder.scaling makes; expected one or the other"
                )

    @property
    def lengths(self) -> tuple[int, ...]:
        """The ladder in tokens."""
        return tuple(multiple * self.training.length for multiple in self.ladder.multiples)

    def as_toml(self) -> dict[str, Any]:
        """Every setting that has a value, as TOML has types for it."""
        return self.model_dump(mode="json", exclude_none=True)


def packaged() -> list[str]:
    """Names of the recipes that ship with farfield, the quickest first."""
    order = {"smoke": 0, "laptop": 1, "transports": 2, "paper": 3}
    folder = resources.files("farfield.study") / "recipes"
    names = [
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    ]
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def load(name: str, settings: Iterable[str] = (), seeds: Iterable[int] | None = None) -> Recipe:
    """A packaged recipe by name, or a `.toml` file by path, with `--set` settings laid over it.

    Raises: ValueError with one line: the key's path, what was got, what was expected, the nearest
    valid key. FileNotFoundError for a path that isn't there.
    """
    text, label = _source(name)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {label}: not TOML: {error}") from None
    table.setdefault("name", Path(name).stem)
    for setting in settings:
        _set(table, setting)
    if seeds is not None:
        table["seeds"] = list(seeds)
    return recipe_from(table, label)


def recipe_from(table: Mapping[str, Any], label: str) -> Recipe:
    """A recipe from parsed TOML. Raises: ValueError with one line, as `load`."""
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise ValueError(f"recipe {label}: {_one_line(error)}") from None


def dump(recipe: Recipe) -> str:
    """The resolved recipe as TOML that `load` reads back to an equal one."""
    return tomli_w.dumps(recipe.as_toml())


def difference(old: Recipe, new: Recipe) -> str | None:
    """The first key by which `new` is another study than `old`, with both values; else None.

    More mechanisms, seeds or scaled rows make the same study larger; name and description are
    words.
    """
    before, after = _flat(old.as_toml()), _flat(new.as_toml())
    for key in dict.fromkeys([*before, *after]):
        a, b = before.get(key), after.get(key)
        if key in ("name", "description") or a == b:
            continue
        if key in ("mechanisms", "seeds", "ladder.scaling") and set(a or ()) <= set(b or ()):
            continue
        return f"{key} is {a!r} there and {b!r} here"
    return None


def _source(name: str) -> tuple[str, str]:
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise FileNotFoundError(f"{name}: no such recipe file")
        try:
            return path.read_text(encoding="utf-8"), name
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: byte {error.start} is not UTF-8") from None
    if name not in packaged():
        raise ValueError(
            f"no recipe {name!r}{_nearest(name, packaged())}; "
            f"expected one of {', '.join(packaged())} or a path to a .toml file"
        )
    folder = resources.files("farfield.study") / "recipes"
    return (folder / f"{name}.toml").read_text(encoding="utf-8"), name


def _set(table: dict[str, Any], setting: str) -> None:
    """Lay one `a.b=c` over the table; c is TOML, a bare word is a string."""
    path, equals, text = setting.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"--set {setting}: expected KEY=VALUE, such as training.iterations=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"--set {setting}: {key} is no table; expected a key inside a table")
        table = inner
    table[keys[-1]] = value


def _one_line(error: ValidationError) -> str:
    """The first thing wrong: its path, what was got, what was expected, and the nearest key."""
    problems = error.errors()
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    where = f"{path}: " if path else ""
    if first["type"] == "extra_forbidden":
        return f"{where}unknown key{_nearest_key(path)}{more}"
    if first["type"] == "missing":
        return f"{where}missing; expected a value{more}"
    if first["type"] == "value_error":
        return f"{where}{first['ctx']['error']}{more}"
    expected = first["msg"].removeprefix("Input should be ")
    expected = _TOML_WORDS.get(expected, expected)
    got = first["input"]
    return f"{where}got {got!r} ({_toml_type(got)}), expected {expected}{more}"


def _toml_type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "float", str: "string", list: "array"}
    return names.get(type(value), "table" if isinstance(value, Mapping) else type(value).__name__)


def keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted paths of every key a recipe may hold."""
    for name, field in section.model_fields.items():
        inner = next(
            (
                kind
                for kind in (field.annotation, *get_args(field.annotation))
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ),
            None,
        )
        if inner is None:
            yield prefix + name
        else:
            yield from keys(inner, f"{prefix}{name}.")


def _nearest_key(path: str) -> str:
    """The nearest key: of the same table, else of any table under the same last word."""
    table, _, word = path.rpartition(".")
    prefix = f"{table}." if table else ""
    beside = [key[len(prefix) :].split(".")[0] for key in keys() if key.startswith(prefix)]
    anywhere = {key.rpartition(".")[2]: key for key in keys()}
    if found := difflib.get_close_matches(word, beside, n=1):
        return f"; did you mean {found[0]}?"
    if found := difflib.get_close_matches(word, anywhere, n=1):
        return f"; did you mean {anywhere[found[0]]}?"
    return f"; expected one of {', '.join(dict.fromkeys(beside))}"


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
