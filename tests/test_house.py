"""The rules of the house: imports go down only, no grab-bag files, nothing long or undocumented.

Each rule is a function of one file's path and text that returns what it found; the same function
is first shown to catch a planted violation and then run over the package.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "farfield").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Part of the house -> the parts it may import (itself apart). `farfield` is the package's own
# __init__, which carries what the model exports.
BELOW = {
    "algebra": set(),
    "data": set(),
    "theory": {"algebra"},
    "attention": {"algebra"},
    "model": {"algebra", "attention"},
    "farfield": {"algebra", "attention", "model"},
    "training": {"algebra", "attention", "model", "farfield", "data"},
    "evaluation": {"algebra", "attention", "model", "farfield", "data"},
    "diagnosis": {"algebra", "attention", "model", "farfield", "data", "evaluation", "theory"},
    "benchmark": {
        "algebra",
        "attention",
        "model",
        "farfield",
        "data",
        "training",
        "evaluation",
        "diagnosis",
    },
    "report": {"evaluation.rows", "evaluation.intervals", "evaluation.whole", "theory"},
}
BELOW["study"] = set(BELOW) - {"theory"}
BELOW["cli"] = set(BELOW)

# Parts and files whose outside imports are limited; the standard library is always allowed.
OUTSIDE = {
    "algebra": {"torch"},
    "attention": {"torch"},
    "theory": {"torch", "numpy", "scipy", "matplotlib"},
    "evaluation.rows": {"numpy"},
    "evaluation.intervals": {"numpy"},
    "evaluation.whole": set(),
}
FORBIDDEN_OUTSIDE = {"report": {"torch", "transformers"}}

GRAB_BAGS = {"utils.py", "common.py", "helpers.py"}
LONGEST = 450


def module_name(path: Path) -> str:
    """farfield/data/tokens.py -> data.tokens; farfield/data/__init__.py -> data."""
    parts = list(path.with_suffix("").parts)
    parts = parts[parts.index("farfield") + 1 :]
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) or "farfield"


def within(module: str, part: str) -> bool:
    """Whether module `a.b.c` lies in part `a.b`."""
    return module == part or module.startswith(part + ".")


def imported(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, relative ones resolved, wherever in the file it is.

    `from a import b` gives a.b: only the files tell whether b is a module, and a prefix decides.
    `importlib.import_module("a.b")` and `__import__("a.b")` count as well.
    """
    package = ["farfield", *(p for p in module_name(path).split(".") if p != "farfield")]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            first = node.args[0]
            loads = called in {"import_module", "__import__"}
            if loads and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def part_of(name: str) -> str:
    """The part of the house a dotted farfield name lies in; what the package exports is its own."""
    first = name.removeprefix("farfield").lstrip(".").split(".")[0]
    return first if first in BELOW else "farfield"


def climbing_imports(path: Path, source: str) -> list[str]:
    """Imports of farfield that do not go down."""
    module = module_name(path)
    own = module.split(".")[0]
    if own not in BELOW:
        return [f"{module}: no such part of the house (docs/design.md)"]
    lean = module if module in OUTSIDE else None  # files of evaluation with no model below
    found = []
    for line, name in imported(path, source):
        if name.split(".")[0] != "farfield":
            continue
        inside = name.removeprefix("farfield").lstrip(".")
        part = part_of(name)
        allowed = {own} | BELOW[own]
        if lean is not None and lean != own:
            allowed = {other for other in OUTSIDE if other.split(".")[0] == own and other != own}
        if not any(within(inside, may) or part == may for may in allowed):
            found.append(f"{module}:{line} imports {name}; may import {sorted(allowed)}")
    return found


OPTIONAL = {"attention.engines.fla_path": {"fla"}}
"""Packages that one file may import where they are installed, and say so where they aren't."""


def foreign_imports(path: Path, source: str) -> list[str]:
    """Imports from outside the package that a part has renounced."""
    module = module_name(path)
    found = []
    for line, name in imported(path, source):
        top = name.split(".")[0]
        if top == "farfield" or top in sys.stdlib_module_names:
            continue
        for part, allowed in OUTSIDE.items():
            if within(module, part) and top not in allowed | OPTIONAL.get(module, set()):
                found.append(f"{module}:{line} imports {top}; {part} may use {sorted(allowed)}")
        for part, forbidden in FORBIDDEN_OUTSIDE.items():
            if within(module, part) and top in forbidden:
                found.append(f"{module}:{line} imports {top}; {part} must not")
        if within(module, "algebra") and within(name, "torch.nn"):
            found.append(f"{module}:{line} imports {name}; algebra knows tensors, not modules")
    return found


def grab_bags(path: Path, source: str) -> list[str]:
    """Files named after nothing in particular."""
    return [f"{path.name} says nothing about what it holds"] if path.name in GRAB_BAGS else []


def too_long(path: Path, source: str) -> list[str]:
    """Files over the limit."""
    lines = len(source.splitlines())
    return [f"{path.name} has {lines} lines, at most {LONGEST}"] if lines > LONGEST else []


def undocumented(path: Path, source: str) -> list[str]:
    """Public functions and classes of a module without a docstring."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        f"{path.name}:{node.lineno} {node.name} has no docstring"
        for node in ast.parse(source).body
        if isinstance(node, kinds) and not node.name.startswith("_")
        if not (ast.get_docstring(node) or "").strip()
    ]


def toothless_tests(path: Path, source: str) -> list[str]:
    """Tests that neither assert nor call a function of their file that does."""
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    def checks(name: str, seen: frozenset[str] = frozenset()) -> bool:
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Assert | ast.Raise):
                return True
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                called = node.func.id if isinstance(node.func, ast.Name) else called
                if called in {"raises", "expect", "fail"} or called.startswith("assert"):
                    return True
                fresh = called in functions and called not in {*seen, name}
                if fresh and checks(called, seen | {name}):
                    return True
        return False

    return [
        f"{path.name} {name} asserts nothing"
        for name in functions
        if name.startswith("test_") and not checks(name)
    ]


MOVING = {"evaluation.whole", "data.cache", "study.job"}
"""The one module that puts files in their place, and the two that put whole folders there."""


def own_moves(path: Path, source: str) -> list[str]:
    """Files replaced or renamed past `evaluation.whole`: os.replace and its like, and Path's own.

    A method `replace` or `rename` of one argument is Path's; a string's takes two.
    """
    module, names = module_name(path), {"replace", "rename", "renames"}
    if module in MOVING:
        return []
    functions = {f"os.{name}" for name in names} | {"shutil.move"}
    found = [(line, name) for line, name in imported(path, source) if name in functions]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in functions:
            found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            own = node.func.attr in names and len(node.args) == 1 and not node.keywords
            found += [(node.lineno, f"Path.{node.func.attr}")] if own else []
    return [
        f"{module}:{line} calls {name}; a file is replaced by evaluation.whole, whole or not at all"
        for line, name in found
    ]


Rule = Callable[[Path, str], list[str]]
RULES: list[Rule] = [
    climbing_imports, foreign_imports, grab_bags, too_long, undocumented, own_moves,
]  # fmt: skip

PLANTED: list[tuple[Rule, str, str]] = [
    (climbing_imports, "algebra/turns.py", "from farfield.attention import logit"),
    (climbing_imports, "algebra/turns.py", "import farfield.data.tokens"),
    (climbing_imports, "algebra/turns.py", "from farfield import FarfieldConfig"),
    (climbing_imports, "algebra/turns.py", "from ..model import modelling"),
    (climbing_imports, "algebra/__init__.py", "from ..model import modelling"),
    (climbing_imports, "attention/layer.py", "from .. import model"),
    (climbing_imports, "attention/mechanisms/rope.py", "from ...model import cache"),
    (climbing_imports, "model/modelling.py", "def f():\n    import farfield.diagnosis"),
    (climbing_imports, "model/modelling.py", "from farfield.data import tokens"),
    (climbing_imports, "data/tokens.py", "from farfield.algebra import hashing"),
    (climbing_imports, "training.py", "from farfield.evaluation import ladder"),
    (climbing_imports, "evaluation/ladder.py", "from farfield.training import train"),
    (climbing_imports, "evaluation/ladder.py", "import_module('farfield.study')"),
    (climbing_imports, "evaluation/rows.py", "from farfield.model import modelling"),
    (climbing_imports, "evaluation/rows.py", "from farfield.evaluation.ladder import evaluate"),
    (climbing_imports, "evaluation/whole.py", "from farfield.evaluation import plan"),
    (climbing_imports, "theory/bounds.py", "from farfield.attention import logit"),
    (climbing_imports, "theory/stylised.py", "from farfield.evaluation.rows import read_rows"),
    (climbing_imports, "theory/figures.py", "from farfield.report.palette import inks"),
    (climbing_imports, "report/page.py", "from farfield.evaluation.ladder import evaluate"),
    (climbing_imports, "report/page.py", "from farfield.evaluation import ladder"),
    (climbing_imports, "report/page.py", "import farfield.model"),
    (climbing_imports, "report/page.py", "import farfield"),
    (climbing_imports, "report/costs.py", "from farfield.benchmark.rows import Results"),
    (climbing_imports, "benchmark/plan.py", "from farfield.study import recipe"),
    (climbing_imports, "training.py", "from farfield.benchmark import pairing"),
    (climbing_imports, "study/grid.py", "from farfield.cli import app"),
    (climbing_imports, "study/grid.py", "from farfield.theory import mass"),
    (climbing_imports, "diagnosis/probe.py", "from farfield.cli import app"),
    (climbing_imports, "plumbing.py", ""),
    (foreign_imports, "algebra/turns.py", "import numpy as np"),
    (foreign_imports, "algebra/turns.py", "from torch import nn"),
    (foreign_imports, "algebra/turns.py", "import torch.nn.functional as F"),
    (foreign_imports, "attention/layer.py", "from transformers import Cache"),
    (foreign_imports, "evaluation/intervals.py", "import torch"),
    (foreign_imports, "evaluation/whole.py", "import numpy as np"),
    (foreign_imports, "report/page.py", "import torch"),
    (foreign_imports, "theory/bounds.py", "import transformers"),
    (grab_bags, "data/utils.py", ""),
    (grab_bags, "model/common.py", ""),
    (grab_bags, "report/helpers.py", ""),
    (too_long, "cli/bench.py", "x = 1\n" * (LONGEST + 1)),
    (undocumented, "cli/bench.py", "def run():\n    return 1"),
    (undocumented, "cli/bench.py", "async def run():\n    return 1"),
    (undocumented, "cli/bench.py", "class Run:\n    x = 1"),
    (undocumented, "cli/bench.py", 'def run():\n    "  "'),
    (own_moves, "study/files.py", "import os\nos.replace(a, b)"),
    (own_moves, "study/files.py", "move = os.rename"),
    (own_moves, "study/files.py", "from os import replace"),
    (own_moves, "study/files.py", "shutil.move(a, b)"),
    (own_moves, "study/files.py", "scratch.replace(path)"),
    (own_moves, "study/files.py", "scratch.with_name(a).rename(b)"),
    (toothless_tests, "test_x.py", "def test_runs():\n    run()"),
    (toothless_tests, "test_x.py", "def go():\n    run()\ndef test_runs():\n    go()"),
]

ALLOWED: list[tuple[Rule, str, str]] = [
    (climbing_imports, "algebra/rotation.py", "from farfield.algebra.turns import to_turns"),
    (climbing_imports, "algebra/rotation.py", "from .turns import to_turns"),
    (climbing_imports, "algebra/__init__.py", "from .turns import to_turns"),
    (climbing_imports, "__init__.py", "from farfield.attention import mechanisms"),
    (climbing_imports, "__init__.py", "from .model import FarfieldConfig"),
    (climbing_imports, "model/modelling.py", "from farfield.attention.layer import Layer"),
    (climbing_imports, "training.py", "from farfield.data import Corpus"),
    (climbing_imports, "evaluation/ladder.py", "from farfield.evaluation.rows import Row"),
    (climbing_imports, "evaluation/rows.py", "from farfield.evaluation.intervals import paired"),
    (climbing_imports, "diagnosis/probe.py", "from farfield.theory import bounds"),
    (climbing_imports, "diagnosis/probe.py", "from farfield.evaluation import rows"),
    (climbing_imports, "theory/bounds.py", "from farfield.algebra import measures"),
    (climbing_imports, "report/predicted.py", "from farfield.theory import predictor"),
    (climbing_imports, "report/page.py", "from farfield.evaluation import rows"),
    (climbing_imports, "report/page.py", "from farfield.evaluation.whole import write_text"),
    (climbing_imports, "evaluation/rows.py", "from farfield.evaluation import whole"),
    (climbing_imports, "report/page.py", "from farfield.evaluation.rows import read_rows"),
    (climbing_imports, "report/page.py", "from farfield.report.claims import verdicts"),
    (climbing_imports, "study/grid.py", "from farfield import report"),
    (climbing_imports, "study/grid.py", "from farfield import FarfieldConfig, training"),
    (climbing_imports, "cli/study.py", "from farfield.study import run"),
    (climbing_imports, "cli/theory.py", "from farfield.theory import mass"),
    (foreign_imports, "algebra/turns.py", "import math\nfrom torch import Tensor"),
    (foreign_imports, "attention/layer.py", "from torch import nn"),
    (foreign_imports, "report/page.py", "import numpy as np\nimport jinja2"),
    (foreign_imports, "theory/bounds.py", "import numpy as np\nfrom scipy import special"),
    (too_long, "cli/bench.py", "x = 1\n" * LONGEST),
    (undocumented, "cli/bench.py", "def _run():\n    return 1"),
    (own_moves, "evaluation/whole.py", "os.replace(scratch, path)"),
    (own_moves, "study/job.py", "os.replace(partial, folder)"),
    (own_moves, "cli/bench.py", "name.replace('a', 'b')"),
    (own_moves, "cli/bench.py", "dataclasses.replace(row, seed=1)"),
    (toothless_tests, "test_x.py", "def go():\n    assert run()\ndef test_runs():\n    go()"),
    (toothless_tests, "test_x.py", "def test_runs(page):\n    expect(page).to_have_title('x')"),
]


@pytest.mark.parametrize(("rule", "path", "source"), PLANTED)
def test_a_planted_violation_is_caught(rule: Rule, path: str, source: str) -> None:
    assert rule(Path("farfield") / path, source)


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED)
def test_what_is_allowed_passes(rule: Rule, path: str, source: str) -> None:
    assert rule(Path("farfield") / path, source) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert FILES, "no file found: the walk is broken"
    relative = [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in FILES]
    faults = [fault for path, text in relative for fault in rule(path, text)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("rule", [grab_bags, too_long, toothless_tests], ids=lambda r: r.__name__)
def test_the_tests_keep_the_rule(rule: Rule) -> None:
    assert TESTS, "no file found: the walk is broken"
    faults = [f for path in TESTS for f in rule(path, path.read_text(encoding="utf-8"))]
    assert not faults, "\n".join(faults)
