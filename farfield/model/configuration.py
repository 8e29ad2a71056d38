"""Configuration of the native model."""

# No `from __future__ import annotations`: strict checks types, and skips those that are strings.
import difflib
import math
from dataclasses import fields
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from farfield.attention import Geometry, mechanisms

_LIBRARY_KEYS = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "quantization_config",
        "torch_dtype",
    }
)
"""Keys that transformers itself writes into, or passes to, a configuration."""


@strict
class FarfieldConfig(PreTrainedConfig):
    """A decoder whose attention carries by a named mechanism.

    `mechanism` is a composed name (`farfield mechanisms` lists the parts). `train_length` is L₀,
    the length the model is trained at; `mixing_window` the tokens in which the slowest random or
    mixing block decorrelates (None: L₀). `seed` names the random angles, so it belongs to the
    model as its weights do. `intermediate_size` defaults to 8/3 of the width, `head_dim` to
    width / heads, `v_head_dim` (that of values) to `head_dim`, `initializer_range` (the standard
    deviation of fresh matrices) to 1/√(2 width).

    Units: lengths in tokens. Raises: ValueError for a key or mechanism that doesn't exist (naming
    the nearest) and for heads that don't divide; transformers' own validation error for a wrong
    type.
    """

    model_type = "farfield"

    vocab_size: int = 259
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    mechanism: str = "rope"
    train_length: int = 512
    mixing_window: int | None = None
    rope_base: float | int = 10000.0
    seed: int = 0
    initializer_range: float | None = None
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs)
        for name in ("vocab_size", "hidden_size", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}; give head_dim, or sizes that divide"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = -(-self.hidden_size * 8 // 3 // 8) * 8
        if self.initializer_range is None:
            self.initializer_range = (2 * self.hidden_size) ** -0.5
        self.mechanism = mechanisms.canonical(self.mechanism)
        for name in ("train_length", "num_hidden_layers", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("initializer_range", "rms_norm_eps", "rope_base"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a finite number >= 0")
        # Builds one layer's mechanism, so that all it refuses is refused here.
        with torch.device("meta"):
            mechanisms.build(self.mechanism, self.geometry(0))
        super().__post_init__(**kwargs)

    def geometry(self, layer: int) -> Geometry:
        """What the mechanism of one layer is built for."""
        return Geometry(
            hidden_size=self.hidden_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,  # type: ignore[arg-type]
            head_dim=self.head_dim,  # type: ignore[arg-type]
            vocab_size=self.vocab_size,
            mixing_window=self.train_length if self.mixing_window is None else self.mixing_window,
            layer=layer,
            seed=self.seed,
            rope_base=self.rope_base,
            train_length=self.train_length,
            value_dim=self.v_head_dim,
        )

    @classmethod
    def _refuse_unknown(cls, given: dict[str, Any]) -> None:
        allowed = _LIBRARY_KEYS.union(GenerationConfig._get_default_generation_params())
        own = [f.name for f in fields(cls)]
        for key in given:
            if key not in allowed:
                near = difflib.get_close_matches(key, own, 1, 0.5)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise ValueError(f"unknown FarfieldConfig key '{key}'{hint}")
