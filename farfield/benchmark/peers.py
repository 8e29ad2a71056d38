"""Section `peers`: a whole model with `rope` beside others of its shape.

Llama of Hugging Face on its sdpa attention, and x-transformers where it is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.benchmark.decode import ONE_TOKEN, one_token
from farfield.benchmark.iteration import ITERATION, iteration
from farfield.benchmark.layer import BASELINE, VOCABULARY
from farfield.benchmark.pairing import Call, Report, paired
from farfield.benchmark.plan import CALLS, Job, Setting, attention, where
from farfield.benchmark.rows import LeftOut, Row, timed
from farfield.training.settings import TrainingSettings

SECTION = "peers"
LLAMA, OTHER = "Llama", "x-transformers"


def jobs(setting: Setting) -> list[Job | LeftOut]:
    """A training iteration, a forward of a long text, and one token after it."""
    sizes = setting.sizes
    batch, length = sizes.train
    weights = parameters(setting)
    other = _x_transformers()
    models = 2 if isinstance(other, str) else 3
    short = attention(length, sizes.heads, sizes.head_dim, True) * batch * sizes.llama
    long = attention(sizes.context, sizes.heads, sizes.head_dim) * sizes.llama
    token = 100.0 * 2 * sizes.context * sizes.width * sizes.llama
    fill = 2.0 * weights * sizes.context
    package = None if isinstance(other, str) else other
    found: list[Job | LeftOut] = [
        Job(
            SECTION,
            ITERATION,
            CALLS * models * (6.0 * weights * batch * length + short),
            partial(_iterations, setting, package),
            seconds=1.0,
        ),
        Job(SECTION, "one token", 2 * CALLS * token + fill, partial(_tokens, setting), 1.0),
        Job(
            SECTION,
            f"forward of {sizes.context:,}",
            CALLS * models * (fill + long),
            partial(_forwards, setting, package),
            1.0,
        ),
    ]
    if isinstance(other, str):
        found.append(LeftOut(SECTION, OTHER, other))
    return found


def _iterations(setting: Setting, package: Any, allowance: float, report: Report) -> list[Row]:
    batch, length = setting.sizes.train
    generator = torch.Generator().manual_seed(setting.seed)
    ids = torch.randint(VOCABULARY, (batch, length), generator=generator)
    settings = TrainingSettings()
    calls = {
        name: iteration(model, ids, settings)  # type: ignore[arg-type]
        for name, model in _models(setting, package).items()
    }
    return _rows(setting, calls, ITERATION, length, batch, allowance, report)


def _forwards(setting: Setting, package: Any, allowance: float, report: Report) -> list[Row]:
    tokens = setting.sizes.context
    generator = torch.Generator().manual_seed(setting.seed)
    ids = torch.randint(VOCABULARY, (1, tokens), generator=generator)

    def call(model: nn.Module) -> Call:
        def run() -> None:
            with torch.inference_mode():
                model(input_ids=ids, use_cache=False, logits_to_keep=1)

        return run

    calls = {name: call(model.eval()) for name, model in _models(setting, package).items()}
    return _rows(setting, calls, "forward", tokens, 1, allowance, report)


def _tokens(setting: Setting, allowance: float, report: Report) -> list[Row]:
    context = setting.sizes.context
    calls = {
        BASELINE: one_token(ours(setting).eval(), context),
        LLAMA: llama_token(llama(setting).eval(), context, setting.seed),
    }
    return _rows(setting, calls, ONE_TOKEN, context, 1, allowance, report)


def _rows(
    setting: Setting,
    calls: Mapping[str, Call],
    measure: str,
    tokens: int,
    batch: int,
    allowance: float,
    report: Report,
) -> list[Row]:
    samples = paired(calls, allowance, report=report)
    sizes = f"{setting.sizes.llama} layers, {setting.sizes.words(batch)}"
    fields = where(setting, SECTION, measure=measure, tokens=tokens, sizes=sizes)
    return [timed(samples, BASELINE, name, **fields) for name in calls if name != BASELINE]


def _models(setting: Setting, package: Any) -> dict[str, nn.Module]:
    models: dict[str, nn.Module] = {BASELINE: ours(setting), LLAMA: llama(setting)}
    if package is not None:
        models[OTHER] = _Other(package, setting)
    return models


def ours(setting: Setting) -> FarfieldForCausalLM:
    """Our model with `rope`, in the shape that the peers are given."""
    sizes = setting.sizes
    config = FarfieldConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.llama,
        num_attention_heads=sizes.heads,
        mechanism=BASELINE,
        seed=setting.seed,
    )
    model = FarfieldForCausalLM(config)
    model.initialise(setting.seed)
    return model


def llama(setting: Setting) -> LlamaForCausalLM:
    """Hugging Face's Llama of the same shape, on scaled_dot_product_attention."""
    sizes, inner = setting.sizes, ours(setting).config.intermediate_size
    assert inner is not None, "the configuration resolves it"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.width,
        intermediate_size=inner,
        num_hidden_layers=sizes.llama,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=2 * sizes.context,
        tie_word_embeddings=True,
        attn_implementation="sdpa",  # type: ignore[call-arg]  # read by its base class
    )
    return LlamaForCausalLM(config)


def llama_token(model: LlamaForCausalLM, context: int, seed: int) -> Callable[[], Tensor]:
    """A call that decodes one more token after a cache of `context` random keys and values."""
    config = model.config
    heads = config.num_attention_heads
    dim = config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=config)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        for layer in range(config.num_hidden_layers):
            k, v = (torch.randn(1, heads, context, dim, generator=generator) for _ in range(2))
            cache.update(k, v, layer)

    def call() -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=ids, cache=cache).logits
        return logits

    return call


def parameters(setting: Setting) -> int:
    """How many parameters the shape has."""
    return sum(p.numel() for p in ours(setting).parameters())


class _Other(nn.Module):
    """x-transformers in our shape, called as the other models are. Its feed-forward layers have a
    bias more."""

    def __init__(self, package: Any, setting: Setting) -> None:
        super().__init__()
        sizes, inner = setting.sizes, ours(setting).config.intermediate_size
        assert inner is not None, "the configuration resolves it"
        self.model = package.TransformerWrapper(
            num_tokens=VOCABULARY,
            max_seq_len=sizes.context,
            use_abs_pos_emb=False,
            tie_embedding=True,
            attn_layers=package.Decoder(
                dim=sizes.width,
                depth=sizes.llama,
                heads=sizes.heads,
                attn_dim_head=sizes.head_dim,
                rotary_pos_emb=True,
                rotary_emb_dim=sizes.head_dim,
                attn_flash=True,
                use_rmsnorm=True,
                ff_glu=True,
                ff_swish=True,
                ff_no_bias=True,
                ff_mult=inner / sizes.width,
            ),
        )

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> SimpleNamespace:
        """The loss, as the other models have it. It knows no shorter logits."""
        logits = self.model(input_ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss)


def _x_transformers() -> Any:
    """The package, or why it isn't there."""
    try:
        return importlib.import_module("x_transformers")
    except ImportError as error:
        if error.name == "x_transformers":
            return "not installed"
        return f"can't be imported here: {error}"
