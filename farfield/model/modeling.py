"""The native model: a pre-norm decoder with RMSNorm, SwiGLU and an accumulated transport."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from farfield.attention import Attention, Tokens
from farfield.attention.engines import Engine
from farfield.attention.mechanism import Mechanism
from farfield.model.cache import FarfieldCache, decoding_state, past_length, untouched_by_failure
from farfield.model.configuration import FarfieldConfig
from farfield.model.inputs import check_positions, packing, positions, valid_keys

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
        self,
        hidden: Tensor,
        tokens: Tokens,
        valid: Tensor | None,
        engine: Engine | str = "auto",
        cache: Cache | None = None,
    ) -> Tensor:
        """Shapes: hidden [B, T, D] in and out; valid bool [B, earlier + T] or None."""
        seen = replace(tokens, hidden=self.input_layernorm(hidden))
        hidden = hidden + self.self_attn(seen, decoding_state(cache, self.layer), valid, engine)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FarfieldPreTrainedModel(PreTrainedModel):
    """What the models share: configuration, initialisation, what transformers may assume."""

    config: FarfieldConfig
    config_class = FarfieldConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FarfieldDecoderLayer"]  # noqa: RUF012 (transformers' own convention)
    _supports_sdpa = True
    # What fixes angles and gates adds up over a route: a rounded weight is a drift.
    _keep_in_fp32_modules_strict = ["mechanism"]  # noqa: RUF012

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if attn_implementation not in (None, "sdpa"):
            raise ValueError(
                f"attn_implementation is '{attn_implementation}'; farfield's attention chooses its "
                "engine with each call: leave it unset, and pass engine=... to the forward"
            )
        return "sdpa"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            given = _given_start(module, name)
            if given is None:
                nn.init.normal_(parameter, std=self._initial_std(module))
            else:
                initialization.copy_(parameter, given)

    def _initial_std(self, module: nn.Module) -> float:
        std: Any = getattr(module, "initial_std", self.config.initializer_range)
        return float(std)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every weight from a generator of its own, named by (seed, parameter name).

        Two models then start from the same values in every weight they have in common, whatever
        else the mechanism of one adds. Norms start at one, matrices normal with
        `initializer_range`, except where a module names its own `initial_std` or, for some of its
        parameters, `initial_values`.
        """
        for name, parameter in self.named_parameters():
            path, _, own = name.rpartition(".")
            owner = self.get_submodule(path)
            given = _given_start(owner, own)
            if given is not None:
                parameter.copy_(given)
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


def _given_start(module: nn.Module, name: str) -> Tensor | None:
    """The values a parameter of the module starts from, or None where they are drawn."""
    if isinstance(module, nn.RMSNorm):
        return torch.ones(1)
    values: Any = getattr(module, "initial_values", {})
    return torch.tensor(values[name]) if name in values else None


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
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        nonce: int | None = None,
        engine: Engine | str = "auto",
    ) -> BaseModelOutputWithPast:
        """Hidden states of tokens that follow those in `cache`.

        Positions follow from `attention_mask` and the documents alone; `position_ids` may be given
        and must agree. Packed documents are named by `segment_ids` (a run of equal ids is one), or
        by the bounds `cu_seqlens` of a single flattened row; they know nothing of each other.
        `nonce` names the draw of fresh random angles (default 0, the one of evaluation), `engine`
        what computes the softmax attention (default: the best that serves).

        Shapes: input_ids [B, T] or inputs_embeds [B, T, D]; attention_mask [B, earlier + T], 0 at
        padding; segment_ids int [B, T]; cu_seqlens int [documents + 1]; returns last_hidden_state
        [B, T, D].
        Raises: ValueError for an input that can't be expressed.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache is None and (segment_ids is not None or cu_seqlens is not None):
            use_cache = False
        use_cache = self._use_cache(use_cache, cache)
        if use_cache and cache is None:
            cache = FarfieldCache(len(self.layers))
        if cache is not None:
            cache = FarfieldCache.adopt(cache, len(self.layers))
        batch, length = inputs_embeds.shape[:2]
        valid = valid_keys(attention_mask, batch, length, decoding_state(cache, 0))
        past = past_length(cache)
        position = positions(past, length, valid, inputs_embeds.device)
        here = None if valid is None else valid[:, past:]
        packed = packing(segment_ids, cu_seqlens, inputs_embeds, valid, cache is not None)
        check_positions(position_ids, position if packed is None else packed.position, here)
        tokens = Tokens(
            inputs_embeds, position, input_ids, here, self._nonce(nonce), packing=packed
        )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden, states = inputs_embeds, [inputs_embeds]
        with untouched_by_failure(cache):
            for layer in self.layers:
                hidden = layer(hidden, tokens, valid, engine, cache=cache)
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

    def _nonce(self, nonce: int | None) -> int:
        if nonce is None and self.training and self.needs_nonce:
            raise ValueError(
                f"{self.config.mechanism} draws its angles afresh each iteration: pass "
                "nonce=iteration when training (farfield's own training does)"
            )
        return 0 if nonce is None else nonce


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
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        nonce: int | None = None,
        engine: Engine | str = "auto",
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
            segment_ids=segment_ids,
            cu_seqlens=cu_seqlens,
            nonce=nonce,
            engine=engine,
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
        if implementation not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation '{implementation}' is not supported; expected 'dynamic' or "
                "'static'"
            )
        if model_kwargs.get("cache") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            if model_kwargs.get("cache") is not None:
                FarfieldCache.adopt(model_kwargs["cache"], self.config.num_hidden_layers)
            return
        capacity = max_cache_length if implementation == "static" else None
        model_kwargs["cache"] = FarfieldCache(self.config.num_hidden_layers, capacity)
        if generation_config.is_assistant:
            model_kwargs["cache"].activate_past_recording()
