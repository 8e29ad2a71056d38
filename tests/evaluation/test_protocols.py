"""Each protocol against its definition, by a model whose loss says what context a target had."""

import numpy as np
import pytest
import torch
from oracle_model import VOCABULARY, Oracle, oracle_loss
from transformers import LlamaConfig, LlamaForCausalLM

from farfield.data import TokenStream
from farfield.evaluation import protocols
from farfield.evaluation.losses import Scorer, undisturbed
from farfield.evaluation.plan import LadderSettings, make_plan
from farfield.evaluation.protocols import Reader

BASE = 16


def stream_of(tokens, seed=0):
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, tokens)
    return TokenStream(ids.astype(np.uint16))


def reader_of(model, stream, settings, progress=None):
    scorer = Scorer(model, stream.block(0, 16))
    plan = make_plan(settings, len(stream), BASE, scorer.positions)
    return Reader(scorer, stream, plan, progress)


@pytest.fixture
def oracle():
    model = Oracle()
    with undisturbed(model):
        yield model


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def test_windows_predict_the_next_token_from_those_before_it(oracle):
    stream = stream_of(4 * BASE * 3 + 5)
    reader = reader_of(oracle, stream, LadderSettings(multiples=(1, 4)))
    losses = protocols.windows(reader, 4 * BASE)
    assert losses.shape == (3, 4 * BASE)
    assert losses.dtype == np.float64
    for window, offset in [(0, 0), (0, 63), (1, 0), (2, 17), (2, 63)]:
        target = window * 64 + offset + 1
        expected = oracle_loss(oracle, stream.ids, target, seen=offset + 1)
        assert losses[window, offset] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_fixed_targets_see_between_length_minus_block_and_length_minus_one(oracle, multiple):
    stream = stream_of(8 * BASE * 2 + 33)
    settings = LadderSettings(multiples=(1, 2, 8), blocks=9)
    reader = reader_of(oracle, stream, settings)
    plan, length, block = reader.plan, multiple * BASE, BASE // 4
    losses = protocols.fixed(reader, length, None)
    assert losses.shape == (9, block)
    for row, end in enumerate(plan.block_ends):
        for column in range(block):
            seen = length - block + column
            expected = oracle_loss(oracle, stream.ids, end - block + column, seen)
            assert losses[row, column] == pytest.approx(expected, abs=1e-5)


def test_clipped_targets_see_the_last_training_length_in_strides(oracle):
    stream = stream_of(8 * BASE * 2 + 3)
    reader = reader_of(oracle, stream, LadderSettings(multiples=(1, 8)))
    heads = protocols.windows(reader, BASE)
    slid = protocols.sliding(reader, heads)
    losses = protocols.clipped(reader.plan, 8 * BASE, heads, slid)
    stride = BASE // 4
    for window in range(2):
        for offset in range(8 * BASE):
            seen = offset + 1 if offset < BASE else BASE - stride + 1 + offset % stride
            target = window * 8 * BASE + offset + 1
            expected = oracle_loss(oracle, stream.ids, target, seen)
            assert losses[window, offset] == pytest.approx(expected, abs=1e-5), (window, offset)


def direct_clipped(model, stream, length, windows):
    """Every window on its own: a context of L₀ at each stride, none of it shared."""
    stride, losses = BASE // 4, np.empty((windows, length))
    for window in range(windows):
        for start in range(0, length - BASE + 1, stride):
            ids = torch.from_numpy(stream.block(window * length + start, BASE + 1))[None]
            log_p = model(input_ids=ids[:, :-1]).logits.double().log_softmax(-1)
            nll = -log_p.gather(-1, ids[:, 1:, None])[0, :, 0].numpy()
            keep = BASE if start == 0 else stride
            losses[window, start + BASE - keep : start + BASE] = nll[-keep:]
    return losses


@pytest.mark.parametrize("length", [2 * BASE, 4 * BASE])
def test_shared_clipped_losses_equal_the_direct_computation(llama, length):
    stream = stream_of(4 * BASE * 2 + 9)
    with undisturbed(llama):
        reader = reader_of(llama, stream, LadderSettings(multiples=(1, 2, 4)))
        heads = protocols.windows(reader, BASE)
        slid = protocols.sliding(reader, heads)
        shared = protocols.clipped(reader.plan, length, heads, slid)
        direct = direct_clipped(llama, stream, length, reader.plan.tokens // length)
    np.testing.assert_allclose(shared, direct, atol=1e-5)


def test_blocks_taken_from_windows_equal_their_own_forwards(llama):
    stream = stream_of(4 * BASE * 5)
    with undisturbed(llama):
        reader = reader_of(llama, stream, LadderSettings(multiples=(1, 2, 4), blocks=7))
        for length in reader.plan.lengths:
            shared = reader.plan.shared_ends(length)
            assert shared.any()
            scored = protocols.windows(reader, length)
            np.testing.assert_allclose(
                protocols.fixed(reader, length, scored),
                protocols.fixed(reader, length, None),
                atol=1e-5,
            )


def test_no_forward_is_run_twice(oracle):
    """L₀, 2 L₀ and 4 L₀ in all protocols: windows, one slide, and no block that ends a window."""
    stream = stream_of(4 * BASE * 4 + 1)
    settings = LadderSettings(multiples=(1, 2, 4), blocks=4)
    done = []
    reader = reader_of(oracle, stream, settings, lambda *progress: done.append(progress))
    for length in reader.plan.lengths:
        scored = protocols.windows(reader, length)
        if length == BASE:
            protocols.sliding(reader, scored)
        protocols.fixed(reader, length, scored)
    tokens = reader.plan.tokens
    steps = (tokens - BASE) // (BASE // 4) - (tokens - BASE) // BASE
    assert sum(rows * inputs for rows, inputs in oracle.calls) == 3 * tokens + steps * BASE
    assert done[-1][0] == pytest.approx(done[-1][1])  # and that is what the plan foresaw


def test_short_windows_share_a_forward_of_about_the_budget(oracle):
    stream = stream_of(64 * BASE + 1)
    settings = LadderSettings(multiples=(1, 16), forward_tokens=10 * BASE)
    reader = reader_of(oracle, stream, settings)
    protocols.windows(reader, BASE)
    protocols.windows(reader, 16 * BASE)
    assert oracle.calls == [(10, BASE)] * 6 + [(4, BASE)] + [(1, 16 * BASE)] * 4
