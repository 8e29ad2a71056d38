"""Losses in pieces equal the model's own, whatever its head; and nothing of it leaves a trace."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from oracle_model import Oracle, draw_everything, seed_everything
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.evaluation.losses import Scorer, undisturbed, vocabulary

VOCABULARY = 50
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**DECODER, num_key_value_heads=1))


def gpt2(**options):
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, **options
    )
    return GPT2LMHeadModel(config)


def gemma2():
    config = Gemma2Config(**DECODER, num_key_value_heads=1, head_dim=8, final_logit_softcapping=3.0)
    return Gemma2ForCausalLM(config)


def cohere():
    config = CohereConfig(**DECODER, logit_scale=0.25, bos_token_id=1, eos_token_id=2)
    return CohereForCausalLM(config)


def opt():
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=16,
        word_embed_proj_dim=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=40,
    )
    return OPTForCausalLM(config)


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2))


def ours():
    config = FarfieldConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        mechanism="learned+v+alibi",
        train_length=16,
    )
    return FarfieldForCausalLM(config)


class Headless(nn.Module):
    """A model that is all one module: no body to take hidden states from."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    @property
    def base_model(self):
        return self

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids):
        return type("Output", (), {"logits": self.table(input_ids)})()


MODELS = [
    (llama, "chunked", None),
    (gpt2, "chunked", 64),
    (opt, "chunked", 40),
    (bloom, "chunked", None),
    (ours, "chunked", None),
    (gemma2, "replayed", None),
    (cohere, "replayed", None),
    (Headless, "full", None),
]


@pytest.mark.parametrize(("build", "head", "positions"), MODELS)
def test_losses_in_pieces_are_the_models_own(monkeypatch, build, head, positions):
    monkeypatch.setattr("farfield.evaluation.losses._LOGITS_AT_ONCE", 7 * VOCABULARY)
    model = build()
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (3, 33))
    with undisturbed(model):
        scorer = Scorer(model, ids[0, :16])
        losses = {keep: scorer.nll(ids, keep) for keep in (32, 5, 1)}
        logits = model(input_ids=torch.from_numpy(ids[:, :-1])).logits
    assert (scorer.head, scorer.positions) == (head, positions)
    log_p = logits.double().log_softmax(-1)
    expected = -log_p.gather(-1, torch.from_numpy(ids[:, 1:, None]))[..., 0].numpy()
    for keep, found in losses.items():
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected[:, -keep:], atol=2e-5)


def test_no_piece_of_logits_is_larger_than_the_bound(monkeypatch):
    monkeypatch.setattr("farfield.evaluation.losses._LOGITS_AT_ONCE", 7 * VOCABULARY)
    model, sizes = llama(), []
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (3, 33))
    with undisturbed(model):
        scorer = Scorer(model, ids[0, :16])
        hook = model.lm_head.register_forward_hook(lambda *call: sizes.append(call[2].numel()))
        scorer.nll(ids, 32)
        hook.remove()
    assert max(sizes) == 7 * VOCABULARY
    assert sum(sizes) == 3 * 32 * VOCABULARY


def test_a_replayed_body_is_put_back_even_after_an_error(monkeypatch):
    model = gemma2()
    body, keys = model.model, list(model.state_dict())
    with undisturbed(model):
        scorer = Scorer(model, np.arange(16))
        monkeypatch.setattr(model.lm_head, "forward", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scorer.nll(np.zeros((1, 9), dtype=np.int64), 8)
    assert model.model is body
    assert list(model.state_dict()) == keys


def test_consecutive_ids_are_not_taken_for_positions():
    """A text that counts up, in a model with a second table of token ids."""

    class TwoTables(Headless):
        def __init__(self):
            super().__init__()
            self.angles = nn.Embedding(VOCABULARY, VOCABULARY)

        def forward(self, input_ids):
            return type("Output", (), {"logits": self.table(input_ids) + self.angles(input_ids)})()

    model = TwoTables()
    with undisturbed(model):
        assert Scorer(model, np.arange(16)).positions is None


def test_half_precision_logits_get_a_float32_softmax():
    model = llama().to(torch.bfloat16)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 17))
    with undisturbed(model):
        scorer = Scorer(model, ids[0, :16])
        losses = scorer.nll(ids, 16)
        logits = model(input_ids=torch.from_numpy(ids[:, :-1])).logits
    assert scorer.dtype == "bfloat16"
    expected = -logits.double().log_softmax(-1).gather(-1, torch.from_numpy(ids[:, 1:, None]))
    np.testing.assert_allclose(losses, expected[..., 0].numpy(), atol=1e-5)


def test_vocabulary_is_what_can_be_read_and_predicted():
    assert vocabulary(llama()) == VOCABULARY
    oracle = Oracle()
    oracle.head = nn.Linear(12, 7)
    assert vocabulary(oracle) == 7


def interrupted(model):
    """An evaluation that draws from every generator and ends by Ctrl-C."""
    with undisturbed(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        draw_everything()
        raise KeyboardInterrupt


def test_random_states_and_training_flags_come_back():
    model = gpt2(resid_pdrop=0.5)
    model.train()
    model.transformer.h[0].eval()  # a part frozen on purpose stays so
    flags = [module.training for module in model.modules()]
    seed_everything(1)
    expected = draw_everything()
    seed_everything(1)
    with pytest.raises(KeyboardInterrupt):
        interrupted(model)
    assert draw_everything() == expected
    assert [module.training for module in model.modules()] == flags
    assert torch.is_grad_enabled()


def test_autocast_of_the_surroundings_does_not_reach_the_losses():
    model = llama()
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 17))
    with undisturbed(model):
        plain = Scorer(model, ids[0, :16]).nll(ids, 16)
    with torch.autocast("cpu", torch.bfloat16), undisturbed(model):
        inside = Scorer(model, ids[0, :16]).nll(ids, 16)
    np.testing.assert_array_equal(plain, inside)


def test_a_table_made_in_evaluation_can_be_trained_with_afterwards():
    """What inference_mode would break: a model that keeps a table from its first forward."""

    class Keeps(Headless):
        kept = None

        def forward(self, input_ids):
            if self.kept is None:
                self.kept = torch.arange(1.0, VOCABULARY + 1)
            return type("Output", (), {"logits": self.table(input_ids) * self.kept})()

    model = Keeps()
    with undisturbed(model):
        Scorer(model, np.arange(16))
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    assert model.table.weight.grad is not None


PEAK_MEMORY = """
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from farfield.evaluation.losses import Scorer, undisturbed

    torch.set_num_threads(1)
    config = LlamaConfig(vocab_size=10_000, hidden_size=16, intermediate_size=16,
                         num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    ids = np.random.default_rng(0).integers(0, 10_000, (1, 4097))

    def peak():  # ru_maxrss would count what the parent of this process once held
        status = open("/proc/self/status").read()
        return int(status.split("VmHWM:")[1].split()[0]) // 1024

    with undisturbed(model):
        scorer = Scorer(model, ids[0, :16])
        assert scorer.head == "chunked"
        scorer.nll(ids[:, :65], 64)
        start = peak()
        scorer.nll(ids, 4096)
        pieces = peak()
        scorer._to_logits = None  # as for a model whose head can't be told from its body
        scorer.nll(ids, 4096)
        print(pieces - start, peak() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_does_not_hold_length_times_vocabulary():
    """4,096 tokens × 10,000 ids are 156 MiB of float32 logits, and the softmax as much again."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK_MEMORY)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    pieces, full = map(int, run.stdout.split()[-2:])
    assert full > 250  # the measurement sees what it is there to see
    assert pieces < 100
