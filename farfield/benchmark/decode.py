"""Section `decode`: one token after a long context, over the same model with `rope`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.attention.engines.engine import FEATURES, FLOATS, Engine
from farfield.benchmark.layer import BASELINE, VOCABULARY, inputs, names
from farfield.benchmark.pairing import Report, groups, paired
from farfield.benchmark.plan import CALLS, Job, Setting, attention, where
from farfield.benchmark.rows import Row, timed
from farfield.benchmark.targets import CONTRACTIONS

SECTION = "decode"
ONE_TOKEN = "one token"


def jobs(setting: Setting) -> list[Job]:
    """One job for every three mechanisms beside their baseline."""
    sizes = setting.sizes
    # Filling a cache costs the model's matrix products; a token reads all keys and values.
    fill = 24.0 * sizes.context * sizes.width**2 * sizes.decode_layers
    token = 100.0 * 2 * sizes.context * sizes.width * sizes.decode_layers
    read = 3.0 * attention(sizes.context, sizes.heads, sizes.head_dim) * sizes.decode_layers
    return [
        Job(
            SECTION,
            f"context {sizes.context:,}: {', '.join(group)}",
            (1 + len(group)) * (fill + CALLS * token) + read * len(set(group) & set(CONTRACTIONS)),
            partial(_compare, setting, group),
            seconds=1.5,
        )
        for group in groups(names())
    ]


def _compare(setting: Setting, group: list[str], allowance: float, report: Report) -> list[Row]:
    sizes = setting.sizes
    tokens = [one_token(_model(name, setting), sizes.context) for name in (BASELINE, *group)]
    samples = paired(dict(zip((BASELINE, *group), tokens, strict=True)), allowance, report=report)
    fields = where(
        setting,
        SECTION,
        measure=ONE_TOKEN,
        tokens=sizes.context,
        sizes=f"{sizes.decode_layers} layers, {sizes.words()}",
    )
    return [timed(samples, name, BASELINE, **fields) for name in group]


def _model(mechanism: str, setting: Setting) -> FarfieldForCausalLM:
    sizes = setting.sizes
    config = FarfieldConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.decode_layers,
        num_attention_heads=sizes.heads,
        mechanism=mechanism,
        seed=setting.seed,
    )
    model = FarfieldForCausalLM(config)
    model.initialise(setting.seed)
    return model.eval()


def one_token(model: FarfieldForCausalLM, context: int) -> Callable[[], Tensor]:
    """A call that decodes one more token after `context` of them.

    The context is read without its quadratic part, where keys are absorbed: what decoding costs
    depends on which keys are remembered and how, not on what is in them. Every call makes the cache
    one token longer.
    """
    ids = torch.randint(VOCABULARY, (1, context), generator=torch.Generator().manual_seed(0))
    mechanism = model.mechanisms[0]
    with torch.inference_mode():
        carry = mechanism(inputs(1, model.config.hidden_size, 0), {})
        engine = NOTHING if carry.contraction is None else "auto"
        cache = model(input_ids=ids, engine=engine, use_cache=True, logits_to_keep=1).cache

    def call() -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=ids[:, :1], cache=cache).logits
        return logits

    return call


def _nothing(q: Tensor, k: Any, v: Tensor, **asked: Any) -> Tensor:
    return q.new_zeros(*q.shape[:-1], v.shape[-1])


NOTHING = Engine("nothing", _nothing, frozenset(), FLOATS, frozenset(), frozenset(FEATURES))
"""An engine that leaves attention out."""
