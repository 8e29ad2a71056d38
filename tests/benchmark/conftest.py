"""Sizes at which every section runs in seconds, and a recipe that trains in one."""

from pathlib import Path

import pytest

from farfield.benchmark import Setting, Sizes, Workload
from farfield.data import load_corpus
from farfield.study import job
from farfield.study import recipe as recipes

TINY = Sizes(
    width=16,
    heads=2,
    layer=(32,),
    context=64,
    decode_layers=1,
    reflection=48,
    growth=(32, 64),
    path=32,
    pruned=(64, 130),
    llama=1,
    train=(2, 24),
    memory=(64, 128),
    memory_heads=2,
    queries=8,
)

SMALL = """
mechanisms = ["rope", "alibi", "random_iid+v"]
[data]
source = "{text}"
[model]
layers = 2
width = 16
heads = 2
[training]
length = 16
batch = 4
iterations = 2
validate_every = 2
checkpoint_every = 2
[ladder]
multiples = [1]
"""


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe file, with its text beside it."""
    folder = tmp_path_factory.mktemp("bench")
    text = folder / "text.txt"
    lines = (f"{n} times {n} is {n * n}, and {n} more is {n * n + n}.\n" for n in range(300))
    text.write_text("".join(lines), encoding="utf-8")
    recipe = folder / "small.toml"
    recipe.write_text(SMALL.format(text=text), encoding="utf-8")
    return recipe


@pytest.fixture
def setting(small_recipe: Path, tmp_path: Path) -> Setting:
    """A setting of tiny sizes, its workload the small recipe's."""
    resolved = recipes.load(str(small_recipe)).canonical()
    corpus = load_corpus(
        resolved.data.source, resolved.data.tokenizer, cache_dir=tmp_path / "cache"
    )
    workload = Workload(
        resolved.name,
        resolved.mechanisms,
        resolved.training,
        corpus,
        lambda mechanism: job.build(resolved, corpus, mechanism, 0),
    )
    return Setting(TINY, workload=workload)
