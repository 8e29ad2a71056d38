"""The ladder on model folders: loading, naming, refusing, and the files it leaves."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.data import load_tokenizer
from farfield.evaluation.plan import LadderSettings
from farfield.evaluation.pretrained import load_model, positions_path, resolve_train_length, run
from farfield.evaluation.rows import read_positions, read_rows

SETTINGS = LadderSettings(lengths=(32, 64), blocks=4)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).choice(["near", "far", "field", "turn"], 900)
    path.write_text(" ".join(words), encoding="utf-8")
    return str(path)


def saved(model, folder):
    model.save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return folder


def vocabulary():
    return load_tokenizer("bytes").vocab_size


def gpt2(**options):
    torch.manual_seed(0)
    config = {"vocab_size": vocabulary(), "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**config, n_positions=32, **options))


def ours(mechanism="random+v"):
    config = FarfieldConfig(
        vocab_size=vocabulary(),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        mechanism=mechanism,
        train_length=16,
        seed=5,
    )
    return FarfieldForCausalLM(config)


def test_our_model_folder_names_its_own_rows(tmp_path, text):
    folder, out = saved(ours(), tmp_path / "model"), tmp_path / "rows.jsonl"
    result = run(folder, text, out=out, settings=SETTINGS, cache_dir=tmp_path)
    rows = read_rows(out)
    assert rows == result.rows
    assert {(r["mechanism"], r["seed"], r["train_length"]) for r in rows} == {("random+v", 5, 16)}
    assert {r["length"] for r in rows} == {32, 64}
    assert {r["protocol"] for r in rows} == {"windows", "fixed", "clipped"}
    assert read_positions(positions_path(out)) == result.positions
    assert positions_path(out).name == "rows.positions.jsonl"


def test_a_gpt2_folder_stops_at_its_positions(tmp_path, text):
    folder, out = saved(gpt2(), tmp_path / "model"), tmp_path / "rows.jsonl"
    result = run(folder, text, out=out, settings=SETTINGS, cache_dir=tmp_path)
    assert {(r["mechanism"], r["train_length"], r["length"]) for r in read_rows(out)} == {
        ("gpt2", 32, 32)
    }
    assert {left["length"] for left in result.left_out} == {64}


def test_a_gemma2_folder_in_half_precision(tmp_path, text):
    config = Gemma2Config(
        vocab_size=vocabulary(),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.5,
        final_logit_softcapping=2.0,
    )
    model = Gemma2ForCausalLM(config).to(torch.bfloat16)
    folder, out = saved(model, tmp_path / "model"), tmp_path / "rows.jsonl"
    for dtype, kept in ((None, "bfloat16"), ("float32", "float32")):
        run(folder, text, out=out, settings=SETTINGS, train_length=32, dtype=dtype,
            cache_dir=tmp_path)  # fmt: skip
        policies = [row["policy"] for row in read_rows(out)]
        assert {(p["dtype"], p["head"]) for p in policies} == {(kept, "replayed")}


def test_scaled_rows_stand_beside_the_models_own(tmp_path, text):
    out = tmp_path / "rows.jsonl"
    settings = LadderSettings(lengths=(16, 64), blocks=4)
    folder = saved(ours("rope"), tmp_path / "ours")
    result = run(folder, text, out=out, settings=settings, scaling=["ntk", "yarn"],
                 cache_dir=tmp_path)  # fmt: skip
    assert read_rows(out) == result.rows
    names = [row["mechanism"] for row in result.rows]
    assert list(dict.fromkeys(names)) == ["rope", "rope:scaling=ntk", "rope:scaling=yarn"]
    factors = {row["policy"].get("factor") for row in result.rows if row["length"] == 64}
    assert factors == {None, 1.0, 4.0}
    assert {row["mechanism"] for row in read_positions(positions_path(out))} == set(names)
    config = LlamaConfig(
        vocab_size=vocabulary(),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    folder = saved(LlamaForCausalLM(config), tmp_path / "llama")
    result = run(folder, text, out=out, settings=settings, scaling=["linear"], cache_dir=tmp_path)
    names = [row["mechanism"] for row in result.rows]
    assert list(dict.fromkeys(names)) == ["llama", "llama:scaling=linear"]


def test_models_that_cannot_be_scaled_leave_no_file(tmp_path, text):
    out = tmp_path / "rows.jsonl"
    folder = saved(ours(), tmp_path / "ours")
    with pytest.raises(ValueError, match=r"'random\+v' can't be scaled by yarn: .*such as rope"):
        run(folder, "nowhere.txt", out=out, scaling=["yarn"])  # told before a text is looked for
    folder = saved(gpt2(), tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"a gpt2 model can't be scaled by yarn: .* no rotary"):
        run(folder, text, out=out, settings=SETTINGS, scaling=["yarn"], cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"scaling 'yarm': expected .* did you mean 'yarn'"):
        run(folder, text, out=out, scaling=["yarm"])
    assert not out.exists()


def test_split_all_reads_the_whole_text(tmp_path, text):
    folder, out = saved(gpt2(), tmp_path / "model"), tmp_path / "rows.jsonl"
    tokens = {}
    for split in ("test", "all"):
        result = run(folder, text, out=out, settings=LadderSettings((1,)), split=split,
                     cache_dir=tmp_path)  # fmt: skip
        tokens[split] = result.rows[0]["tokens"]
    assert tokens["all"] > 9 * tokens["test"]
    with pytest.raises(ValueError, match=r"split 'tests'.*did you mean 'test'"):
        run(folder, text, out=out, split="tests")


def test_faults_are_found_before_the_evaluation(tmp_path, text):
    folder = saved(gpt2(), tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"folder with a config\.json"):
        run(tmp_path / "none", text, out=tmp_path / "rows.jsonl")
    with pytest.raises(IsADirectoryError, match=r"the name of a \.jsonl file"):
        run(folder, text, out=tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        run(folder, text, out=tmp_path / "no" / "rows.jsonl")
    with pytest.raises(ValueError, match=r"dtype 'float23'.*did you mean 'float32'"):
        load_model(folder, dtype="float23")


def test_missing_weights_are_refused_not_drawn_at_random(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = saved(gpt2(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.0.attn.c_attn.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing, the first is transformer\.h\.0"):
        load_model(folder)


def test_a_folder_that_is_no_causal_model_is_refused_in_one_line(tmp_path):
    for config in ({"model_type": "t5"}, {"model_type": "nonesuch"}, {"model_type": "gpt2"}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=str(tmp_path)) as caught:
            load_model(tmp_path)
        assert "\n" not in str(caught.value)


def test_training_length_is_what_was_given_or_what_the_model_says():
    assert resolve_train_length(FarfieldConfig(train_length=48)) == 48
    assert resolve_train_length(LlamaConfig(max_position_embeddings=4096)) == 4096
    assert resolve_train_length(GPT2Config(n_positions=77)) == 77
    assert resolve_train_length(GPT2Config(n_positions=77), 33) == 33
    with pytest.raises(ValueError, match=r"bloom configuration.*expected --train-length"):
        resolve_train_length(BloomConfig())
    with pytest.raises(ValueError, match="train_length = 0"):
        resolve_train_length(BloomConfig(), 0)


def test_a_loaded_model_is_the_saved_one(tmp_path):
    model = ours().eval()
    loaded = load_model(saved(model, tmp_path / "model"))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded.eval()(ids).logits)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), FarfieldForCausalLM)


def test_weights_that_the_configuration_has_no_place_for_are_refused(tmp_path):
    config = FarfieldConfig(mechanism="learned+v", hidden_size=16, num_attention_heads=2)
    FarfieldForCausalLM(config).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**told, "mechanism": "rope"}))
    with pytest.raises(ValueError, match=r"weights have no place .*transport\.weight"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**told, "vocab_size": "many"}))
    with pytest.raises(ValueError, match=r"config\.json not understood"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="device 'gpu': not on this machine; expected cpu"):
        load_model(tmp_path, device="gpu")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="not loaded as a causal language model"):
        load_model(tmp_path)
