"""A causal language model whose loss at every target is known in closed form."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 11


def seed_everything(seed: int) -> None:
    """Seeds the three global generators that training code may draw from."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def draw_everything() -> tuple[float, float, float]:
    """The next number of each of them."""
    return random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: NPY002


class OracleConfig(PretrainedConfig):
    model_type = "oracle"


@dataclass
class Output:
    last_hidden_state: Tensor | None = None
    logits: Tensor | None = None


class OracleBody(nn.Module):
    """Hidden state of an input that n tokens end with: (one-hot of the input, 1/n)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)
        self.embedding.weight.data.copy_(torch.eye(VOCABULARY))
        self.calls: list[tuple[int, int]] = []

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Output:
        self.calls.append(tuple(input_ids.shape))
        seen = 1.0 / torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float32)
        seen = seen[None, :, None].expand(len(input_ids), -1, 1)
        return Output(last_hidden_state=torch.cat([self.embedding(input_ids), seen], dim=-1))


class Oracle(PreTrainedModel):
    """−log p(target | input x, n tokens seen) is `loss(x, target, n)`, and nothing else."""

    config_class = OracleConfig
    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__(OracleConfig())
        self.body = OracleBody()
        self.head = nn.Linear(VOCABULARY + 1, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(self.head.weight.shape, generator=generator)
        weight[:, -1] *= 3  # how many tokens are seen must show in the loss
        self.head.weight.data.copy_(weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.body.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool = False, **_: Any) -> Output:
        return Output(logits=self.head(self.body(input_ids).last_hidden_state))

    @property
    def calls(self) -> list[tuple[int, int]]:
        """Shapes of the inputs of the forwards so far, those of the probe left out."""
        return self.body.calls[2:]


def oracle_loss(model: Oracle, ids: np.ndarray, target: int, seen: int) -> float:
    """−log p of ids[target] where `seen` tokens before it are visible, in float64."""
    weight = model.head.weight.detach().double().numpy()
    logits = weight[:, ids[target - 1]] + weight[:, -1] / seen
    return float(np.logaddexp.reduce(logits) - logits[ids[target]])
