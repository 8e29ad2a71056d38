"""Section `layer`: what an attention layer costs over the same layer with `rope`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.attention import Attention, Tokens, mechanisms
from farfield.benchmark.pairing import Report, groups, paired
from farfield.benchmark.plan import (
    CALLS,
    Job,
    Setting,
    Sizes,
    attention,
    projections,
    shared,
    where,
)
from farfield.benchmark.rows import Row, timed
from farfield.benchmark.targets import LAYER

SECTION = "layer"
BASELINE = "rope"
VOCABULARY = 259

COMPOSITIONS = (
    "rope+v",
    "random+v",
    "learned+v",
    "reflection+v",
    "alibi",
    "forget",
    "window",
    "logn",
    "learned+v+forget",
)
"""Beside every transport of the table: values carried, each control alone, and all at once."""


def names() -> list[str]:
    """The mechanisms that are measured: every transport there is, then the compositions."""
    transports = [row.name for row in mechanisms.table() if row.kind == "transport"]
    return [name for name in dict.fromkeys((*transports, *COMPOSITIONS)) if name != BASELINE]


def jobs(setting: Setting) -> list[Job]:
    """One job for every length and three mechanisms beside their baseline."""
    sizes = setting.sizes
    found = []
    for tokens in sizes.layer:
        for group in groups(names()):
            least = CALLS * (1 + len(group)) * work(tokens, sizes)
            name = f"T = {tokens:,}: {', '.join(group)}"
            run = partial(compare, SECTION, setting, tokens, group)
            found.append(Job(SECTION, name, least, run))
    return found


def work(tokens: int, sizes: Sizes) -> float:
    """Operations of a layer's forward alone, and of its forward and backward."""
    return sum(
        attention(tokens, sizes.heads, sizes.head_dim, backward)
        + projections(tokens, sizes.width, backward)
        for backward in (False, True)
    )


def compare(
    section: str, setting: Setting, tokens: int, group: list[str], allowance: float, report: Report
) -> list[Row]:
    """Rows of a group of mechanisms beside `rope`, forward and forward + backward."""
    sizes = setting.sizes
    layers = {
        name: attention_layer(name, sizes.width, sizes.heads, setting.seed)
        for name in (BASELINE, *group)
    }
    given = inputs(tokens, sizes.width, setting.seed)
    rows = []
    for measure, calls, start, stop in (
        ("forward", {name: forward(layer, given) for name, layer in layers.items()}, 0.0, 0.25),
        (LAYER, {name: backward(layer, given) for name, layer in layers.items()}, 0.25, 1.0),
    ):
        samples = paired(calls, allowance * (stop - start), report=shared(report, start, stop))
        fields = where(setting, section, measure=measure, tokens=tokens, sizes=sizes.words())
        rows += [timed(samples, name, BASELINE, **fields) for name in group]
    return rows


def attention_layer(mechanism: str, width: int, heads: int, seed: int) -> Attention:
    """One attention layer, its weights drawn as a fresh model's are."""
    config = FarfieldConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        mechanism=mechanism,
        seed=seed,
    )
    model = FarfieldForCausalLM(config)
    model.initialise(seed)
    layer = model.model.layers[0].self_attn
    assert isinstance(layer, Attention)
    return layer.eval()


def inputs(tokens: int, width: int, seed: int) -> Tokens:
    """A batch of one row: hidden states of norm √D, as a norm before the layer makes them."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, tokens, width, generator=generator)
    hidden = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    ids = torch.randint(VOCABULARY, (1, tokens), generator=generator)
    return Tokens(hidden, torch.arange(tokens)[None], ids)


def forward(layer: Attention, tokens: Tokens) -> Callable[[], Tensor]:
    """A call of the layer that keeps nothing for a gradient."""

    def call() -> Tensor:
        with torch.no_grad():
            out: Tensor = layer(tokens)
        return out

    return call


def backward(layer: Attention, tokens: Tokens) -> Callable[[], None]:
    """A call of the layer and of its gradients to its input and its weights."""
    hidden = tokens.hidden.detach().requires_grad_()
    given = Tokens(hidden, tokens.position, tokens.ids)
    slope = torch.ones_like(hidden)
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]

    def call() -> None:
        torch.autograd.grad(layer(given), (hidden, *weights), slope)

    return call


def plain(layer: Attention, tokens: Tokens) -> Callable[[], Tensor]:
    """A call of the layer's projections around plain causal attention, whatever its mechanism."""

    def call() -> Tensor:
        with torch.no_grad():
            q, k, v = (
                projection(tokens.hidden).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
                for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            moved: Tensor = layer.o_proj(out.transpose(1, 2).flatten(-2))
        return moved

    return call
