"""Tiny models of every mechanism, with weights large enough for positions to matter."""

from typing import Any

import torch
from torch import Tensor

from farfield import FarfieldConfig, FarfieldForCausalLM, mechanisms

VOCABULARY, TRAINED = 23, 8


def names() -> list[str]:
    """Every transport × {left, carried}, the latter with a control, each in its turn."""
    rows = mechanisms.table()
    controls = [row.name for row in rows if row.kind == "control"] + ["forget+window:3+logn"]
    found = [*controls]
    for row in rows:
        if row.kind == "transport":
            found.append(row.name)
            carried = "" if row.values_stay else "+v"
            found += [row.name + carried, f"{row.name}{carried}+{controls[len(found) % 5]}"]
    return list(dict.fromkeys(mechanisms.canonical(name) for name in found))


NAMES = names()
FEW = [
    mechanisms.canonical(row.name + ("" if row.values_stay else "+v") + "+alibi")
    for row in mechanisms.table()
    if row.kind == "transport"
] + ["rope", "learned:source=token", "random+v+forget", "rope+window:5,sinks=1"]
"""Each transport once, with all that stacks on it, and some plain ones."""


def config_of(mechanism: str = "rope", **changes: Any) -> FarfieldConfig:
    """Two layers of width 16, two query heads on one key head."""
    settings: dict[str, Any] = {
        "mechanism": mechanism,
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "train_length": TRAINED,
        "initializer_range": 0.25,
    }
    return FarfieldConfig(**{**settings, **changes})


def model_of(name: str = "rope", seed: int = 1, **changes: Any) -> FarfieldForCausalLM:
    """A model in evaluation mode whose learned angles differ much from token to token."""
    model = FarfieldForCausalLM(config_of(name, **changes))
    model.initialise(seed)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for angle in model.angle_parameters():
            parameters[angle].mul_(10)
    return model.eval()


def text(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids [batch, length], none of them 0."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=draw)
