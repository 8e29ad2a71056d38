"""Tiny models of other architectures, with random weights large enough to matter."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 97
WINDOW = 17

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_SHARED = {**_SIZES, "num_key_value_heads": 2}
_WIDE = {**_SHARED, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHARED),
    "mistral": lambda: transformers.MistralConfig(**_SHARED, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(**_SHARED),
    "qwen3": lambda: transformers.Qwen3Config(**_WIDE),
    "gemma2": lambda: transformers.Gemma2Config(
        **_WIDE, sliding_window=WINDOW, attn_logit_softcapping=1.5
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_WIDE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=400
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_SIZES),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=400,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_WIDE, **_EXPERTS, num_local_experts=4, sliding_window=WINDOW
    ),
}
"""Architectures on transformers' attention interface."""

ADAPTED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4
    ),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=400
    ),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        window_size=WINDOW,
        max_position_embeddings=400,
    ),
}
"""Architectures off it."""

OTHERS: dict[str, Callable[[], Any]] = {
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_WIDE,
        **_EXPERTS,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "falcon_alibi": lambda: transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
    ),
}


def build(name: str, seed: int = 0) -> Any:
    """A model in evaluation mode; the random state of the caller stays as it was."""
    config = {**CONFIGS, **ADAPTED, **OTHERS}[name]()
    auto: Any = transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def text(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids [batch, length]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=draw)
