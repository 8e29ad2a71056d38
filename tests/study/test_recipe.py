"""Recipes: what they resolve to, and what a mistake in one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from farfield.study import recipe as recipes
from farfield.study.recipe import Recipe


@pytest.mark.parametrize("name", ["smoke", "laptop", "transports", "paper"])
def test_packaged_recipes_resolve_and_reload(name: str, tmp_path: Path) -> None:
    recipe = recipes.load(name).canonical()
    assert recipe.name == name
    path = tmp_path / "recipe.toml"
    path.write_text(recipes.dump(recipe))
    assert recipes.load(str(path)) == recipe


def test_packaged_recipes_are_those_of_the_study() -> None:
    assert recipes.packaged() == ["smoke", "laptop", "transports", "paper"]
    laptop, paper = recipes.load("laptop"), recipes.load("paper")
    assert set(laptop.mechanisms) >= {
        "rope", "alibi", "random", "random+v", "learned", "learned+v", "learned+v+alibi",
    }  # fmt: skip
    assert laptop.lengths[-1] == 128 * laptop.training.length
    assert (paper.model.layers, paper.model.width) == (16, 768)
    assert (paper.lengths[0], paper.lengths[-1]) == (512, 65536)
    assert paper.data.tokenizer == "gpt2"
    assert paper.training.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("training.lerning_rate=1", "lerning_rate: unknown key; did you mean learning_rate?"),
        ("lerning_rate=1", "lerning_rate: unknown key; did you mean training.learning_rate?"),
        ("trainin.batch=3", "trainin: unknown key; did you mean training?"),
        ("zzzz=1", "zzzz: unknown key; expected one of name, description, mechanisms"),
        ("training.iterations=many", "iterations: got 'many' (string), expected an integer"),
        ("training.iterations=0", "got 0 (integer), expected greater than or equal to 1"),
        ("training.batch=3.5", "training.batch: got 3.5 (float), expected an integer"),
        ("mechanisms=rope", "mechanisms: got 'rope' (string), expected an array"),
        ("training=3", "training: got 3 (integer), expected"),
        ("training.dtype=float16", "got 'float16' (string), expected 'float32' or 'bfloat16'"),
        ("training.accumulation=7", "accumulation 7 does not divide batch"),
        ("model.heads=3", "heads 3 does not divide width 128; expected a divisor of it, such as 2"),
        ("model.kv_heads=3", "kv_heads 3 does not divide heads 4; expected a divisor of it"),
        ("model.head_dim=7", "head dimension 7 is odd; expected an even one"),
        ("ladder.multiples=[2, 4]", "multiples [2, 4] do not rise from 1"),
        ("ladder.protocols=['window']", "protocols.0: got 'window' (string), expected 'windows'"),
        ("seeds=[0, 0]", "seeds hold 0 twice; expected each once"),
        ("seeds=[-1]", "seeds hold -1; expected 0 to 2^32 - 1"),
        ("seeds=[]", "seeds: got [] (array)"),
        ("iterations", "--set iterations: expected KEY=VALUE"),
        ("name.x=1", "--set name.x=1: name is no table"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(setting: str, told: str) -> None:
    with pytest.raises(ValueError, match=r"^(recipe laptop|--set)") as error:
        recipes.load("laptop", [setting])
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_recipe_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no recipe 'labtop'; did you mean laptop\?"):
        recipes.load("labtop")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml: no such recipe file"):
        recipes.load("nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = \n")
    with pytest.raises(ValueError, match="not TOML"):
        recipes.load(str(broken))
    broken.write_bytes(b"name = '\xff'")
    with pytest.raises(ValueError, match="byte 8 is not UTF-8"):
        recipes.load(str(broken))


def test_an_unknown_mechanism_names_the_nearest() -> None:
    recipe = recipes.load("laptop", ["mechanisms=['rope', 'lerned+v']"])
    with pytest.raises(ValueError, match=r"recipe laptop: mechanisms: .*learned"):
        recipe.canonical()


def test_spellings_of_one_mechanism_are_one_run() -> None:
    recipe = recipes.load("laptop", ["mechanisms=['alibi', 'nope+alibi']"])
    with pytest.raises(ValueError, match="mechanisms hold 'alibi' twice"):
        recipe.canonical()


def test_settings_are_toml_and_bare_words_are_strings() -> None:
    recipe = recipes.load(
        "laptop",
        ["training.iterations=7", "data.source=my text.txt", "model.kv_heads=2", "name='a'"],
        seeds=[3, 4],
    )
    assert recipe.training.iterations == 7
    assert recipe.data.source == "my text.txt"
    assert recipe.model.kv_heads == 2
    assert (recipe.name, recipe.seeds) == ("a", (3, 4))


def test_a_recipe_file_is_named_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mechanisms = ['rope']\n")
    assert recipes.load(str(path)).name == "mine"


def test_a_study_may_grow_but_not_change(small: Recipe) -> None:
    def changed(**update: object) -> Recipe:
        return recipes.recipe_from({**small.as_toml(), **update}, "small")

    assert recipes.difference(small, small) is None
    assert recipes.difference(small, changed(seeds=[0, 1], description="x", name="y")) is None
    grown = changed(mechanisms=["alibi", *small.mechanisms])
    assert recipes.difference(small, grown) is None
    assert "mechanisms is" in str(recipes.difference(grown, small))
    training = {**small.as_toml()["training"], "iterations": 9}
    told = recipes.difference(small, changed(training=training))
    assert told == "training.iterations is 8 there and 9 here"
    model = {**small.as_toml()["model"], "kv_heads": 1}
    assert recipes.difference(small, changed(model=model)) == (
        "model.kv_heads is None there and 1 here"
    )
