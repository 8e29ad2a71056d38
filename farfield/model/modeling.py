"""The native model: a pre-norm decoder with RMSNorm, SwiGLU and an accumulated transport."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from farfield.attention import Attention, DecodingState, Tokens
from farfield.attention.mechanism import Mechanism
from farfield.model.cache import FarfieldCache, decoding_state, past_length
from farfield.model.configuration import FarfieldConfig

_renamed_cache = deprecate_kwarg("past_key_values", version="5.40.0", new_name="cache")


class FarfieldMLP(nn.Module):
    """SwiGLU: down(silu(gate x) ⊙ up x). Shapes: [B, T, D] in and out."""

    def __init__(self, config: FarfieldConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        assert inner is not None, "the configuration resolves it"
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward layer."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FarfieldDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: FarfieldConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.self_attn = Attention(config.mechanism, config.geometry(layer))
        self.mlp = FarfieldMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, tokens: Tokens, valid: Tensor | None, cache: Cache | None = None
    ) -> Tensor:
        """Shapes: hidden [B, T, D] in and out; valid bool [B, earlier + T] or None."""
        seen = replace(tokens, hidden=self.input_layernorm(hidden))
        hidden = hidden + self.self_attn(seen, decoding_state(cache, self.layer), valid)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FarfieldPreTrainedModel(PreTrainedModel):
    """What the models share: configuration, initialisation, what transformers may assume."""

    config: FarfieldConfig
    config_class = FarfieldConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FarfieldDecoderLayer"]  # noqa: RUF012 (transformers' own convention)
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self._initial_std(module))
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    def _initial_std(self, module: nn.Module) -> float:
        std: Any = getattr(module, "initial_std", self.config.initializer_range)
        return float(std)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every weight from a generator of its own, named by (seed, parameter name).

        Two models then start from the same values in every weight they have in common, whatever
        else the mechanism of one adds. Norms start at one, matrices normal with
        `initializer_range`, except where a module names its own `initial_std`.
        """
        for name, parameter in self.named_parameters():
            owner = self.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, nn.RMSNorm):
                parameter.fill_(1.0)
                continue
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            drawn = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float32, device="cpu"
            )
            parameter.copy_(drawn * self._initial_std(owner))

    @property
    def mechanisms(self) -> list[Mechanism]:
        """The mechanism of every layer, first to last."""
        return [module for module in self.modules() if isinstance(module, Mechanism)]

    @property
    def needs_nonce(self) -> bool:
        """Whether angles are drawn afresh each iteration, so that training must pass `nonce`."""
        return any(m.transport is not None and m.transport.fresh for m in self.mechanisms)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Embedding:
        """As transformers has it; mechanisms that look at token ids learn of the new size.

        Raises: ValueError where a mechanism has a learned row for each id.
        """
        if new_num_tokens is not None:
            for mechanism in self.mechanisms:
                if mechanism.transport is not None:
                    mechanism.transport.resize_vocabulary(new_num_tokens)
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def angle_parameters(self) -> list[str]:
        """Names of the parameters that fix angles; they may have a learning rate of their own."""
        return [
            f"{name}.transport.{own}"
            for name, module in self.named_modules()
            if isinstance(module, Mechanism) and module.transport is not None
            for own in module.transport.angle_parameters
        ]


class FarfieldModel(FarfieldPreTrainedModel):
    """The decoder without its head."""

    def __init__(self, config: FarfieldConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            FarfieldDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @_renamed_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        nonce: int | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states of tokens that follow those in `cache`.

        Positions follow from `attention_mask` alone; `position_ids` may be given and must agree.
        `nonce` names the draw of fresh random angles (default 0, the one of evaluation).

        Shapes: input_ids [B, T] or inputs_embeds [B, T, D]; attention_mask [B, earlier + T], 0 at
        padding; returns last_hidden_state [B, T, D].
        Raises: ValueError for an input that can't be expressed.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        use_cache = self._use_cache(use_cache, cache)
        if use_cache and cache is None:
            cache = FarfieldCache(len(self.layers))
        if cache is not None:
            cache = FarfieldCache.adopt(cache, len(self.layers))
        batch, length = inputs_embeds.shape[:2]
        valid = _valid(attention_mask, batch, length, decoding_state(cache, 0))
        tokens = self._tokens(input_ids, inputs_embeds, valid, position_ids, nonce, cache)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden, states = inputs_embeds, [inputs_embeds]
        for layer in self.layers:
            hidden = layer(hidden, tokens, valid, cache=cache)
            if output_hidden_states:
                states.append(hidden)
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            cache=cache if use_cache else None,
            hidden_states=(*states[:-1], hidden) if output_hidden_states else None,
        )

    def _use_cache(self, use_cache: bool | None, cache: Cache | None) -> bool:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if use_cache or cache is not None:
                raise ValueError("a cache can't go with gradient checkpointing")
            return False
        if use_cache is None:
            return self.config.use_cache and not self.training
        return use_cache

    def _tokens(
        self,
        ids: Tensor | None,
        embeds: Tensor,
        valid: Tensor | None,
        position_ids: Tensor | None,
        nonce: int | None,
        cache: Cache | None,
    ) -> Tokens:
        """The tokens of this call as a mechanism sees them."""
        if nonce is None:
            if self.training and self.needs_nonce:
                raise ValueError(
                    f"{self.config.mechanism} draws its angles afresh each iteration: pass "
                    "nonce=iteration when training (farfield's own training does)"
                )
            nonce = 0
        past, length = past_length(cache), embeds.shape[1]
        if valid is None:
            position = torch.arange(past, past + length, device=embeds.device).unsqueeze(0)
            here = None
        else:
            position = (valid.cumsum(-1) - 1).clamp(min=0)[:, past:]
            here = valid[:, past:]
        _check_positions(position_ids, position, here)
        return Tokens(embeds, position, ids, here, nonce)


def _valid(
    mask: Tensor | None, batch: int, length: int, state: DecodingState | None
) -> Tensor | None:
    """Which of all keys are real: bool [B, earlier + T], or None where nothing is padding.

    A cached token's step is in the frame already, so a later mask can't change its mind about it;
    a call without a mask goes on from what is known. The state remembers the answer.
    """
    past = 0 if state is None else state.length
    known = state.valid if state is not None and past else None
    if state is not None and state.keys is not None and state.keys.shape[0] != batch:
        raise ValueError(f"the cache holds {state.keys.shape[0]} rows, the input {batch}")
    if mask is None:
        valid = known
        if known is not None:
            valid = torch.cat((known, known.new_ones(batch, length)), -1)
    elif tuple(mask.shape) != (batch, past + length):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; expected [batch, cached + new tokens] = "
            f"[{batch}, {past + length}], 0 at padding"
        )
    else:
        valid = mask.bool()
        earlier = valid[:, :past]
        if not bool((earlier if known is None else earlier == known).all()):
            raise ValueError(
                "attention_mask disagrees with the one the cached tokens were read under; "
                "a token can't become padding, or stop being it, afterwards"
            )
        valid = None if bool(valid.all()) else valid
    if state is not None:
        state.valid = valid
    return valid


def _check_positions(given: Tensor | None, position: Tensor, here: Tensor | None) -> None:
    """Positions follow from the mask; ones that say otherwise can't be honoured."""
    if given is None:
        return
    differs = given.to(position.device) != position
    if here is not None:
        differs = differs & here
    if bool(differs.any()):
        raise ValueError(
            "position_ids must count the tokens that attention_mask keeps, from 0; accumulated "
            "transports have no other positions"
        )


class FarfieldForCausalLM(FarfieldPreTrainedModel, GenerationMixin):
    """The decoder with its (tied) language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FarfieldConfig) -> None:
        super().__init__(config)
        self.model = FarfieldModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @_renamed_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        nonce: int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits, and with `labels` the mean next-token loss (labels are shifted here).

        Shapes and errors as `FarfieldModel.forward`; labels [B, T], -100 where not scored;
        `logits_to_keep`: only the last so many positions, or those of an index tensor.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            nonce=nonce,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
        )

    def _prepare_cache_for_generation(  # type: ignore[override]  # it is declared to return bool
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Put our own cache in place before the first forward.

        Assisted decoding asks the cache to record *before* anything is decoded, so adopting a
        dynamic cache during the first forward would come too late.
        """
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation '{implementation}' is not supported; expected 'dynamic'"
            )
        if model_kwargs.get("cache") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            if model_kwargs.get("cache") is not None:
                FarfieldCache.adopt(model_kwargs["cache"], self.config.num_hidden_layers)
            return
        model_kwargs["cache"] = FarfieldCache(self.config.num_hidden_layers)
        if generation_config.is_assistant:
            model_kwargs["cache"].activate_past_recording()
