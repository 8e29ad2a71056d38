"""The attention of Hugging Face models, through transformers' attention and mask interfaces.

While attached, a model's attention is ours: its own softmax (scale, soft cap, learned sinks, mask),
computed without a table of queries × keys. The mask stays a rule (`LazyMask`) of which a tile at a
time is made. All queries go through a fast kernel; the sampled ones are shown to the session too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import causal_mask_function, sdpa_mask

from farfield.diagnosis.session import Session, Tokens
from farfield.diagnosis.tiles import Attended, DotProducts, grouped

_BLOCK = 256
"""Queries of a block of the whole output."""

_KEYS = 1024
"""Keys of a tile where no kernel knows the softmax (soft caps, learned sinks)."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What a layer may hand to its attention function that changes nothing here: the mask already says
# it, or it is about the output's form.
_WITHOUT_EFFECT = _words(
    "is_causal sliding_window position_ids cache_position use_cache output_attentions "
    "output_hidden_states return_dict logits_to_keep cu_seq_lens_q cu_seq_lens_k max_length_q "
    "max_length_k num_items_in_batch position_embeddings deterministic"
)

_number = itertools.count()


@dataclass(frozen=True)
class LazyMask:
    """A mask as a rule: which keys [kv_offset, +keys) the queries [q_offset, +queries) see."""

    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    rule: Callable[..., Tensor]
    padding: Tensor | None
    reach: int | None
    by_vmap: bool

    ndim = 4
    dtype = torch.bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of the table it stands for."""
        return self.batch, 1, self.queries, self.keys

    @property
    def plain(self) -> bool:
        """Whether causality alone decides, with queries and keys the same tokens."""
        bounded = self.reach is not None and self.keys > self.reach
        return (
            self.rule is causal_mask_function
            and self.q_offset == self.kv_offset == 0
            and self.queries == self.keys
            and not bounded
            and (self.padding is None or bool(self.padding.all()))
        )

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """[first, last) beyond which no query of [start, stop) sees a key."""
        own = self.q_offset - self.kv_offset
        first = 0 if self.reach is None else max(0, start + own - self.reach + 1)
        if self.by_vmap:  # a rule of the model's own, which may look ahead
            return 0, self.keys
        return first, min(self.keys, stop + own)

    def rows(self, rows: Tensor, first: int = 0, stop: int | None = None) -> Tensor:
        """Which of the keys [first, stop) each of the rows sees: bool [B or 1, Q, stop − first]."""
        stop = self.keys if stop is None else stop
        if self.by_vmap:
            return torch.cat([self._run(run, first, stop) for run in _runs(rows)], dim=1)
        batch = torch.arange(self.batch, device=rows.device)[:, None, None, None]
        query = (rows + self.q_offset)[None, None, :, None]
        key = torch.arange(first, stop, device=rows.device)[None, None, None] + self.kv_offset
        seen = self.rule(batch, torch.zeros_like(batch[:1]), query, key)
        if self.padding is not None:
            seen = seen & self._padding(first, stop)[:, None, None]
        return seen.expand(-1, 1, len(rows), stop - first)[:, 0]

    def _padding(self, first: int, stop: int) -> Tensor:
        assert self.padding is not None
        there = self.padding[:, first + self.kv_offset : stop + self.kv_offset]
        return F.pad(there, (0, stop - first - there.shape[-1]))

    def _run(self, run: tuple[int, int], first: int, stop: int) -> Tensor:
        # Rules of this kind may not be index-based: transformers' own function knows how.
        seen = sdpa_mask(
            batch_size=self.batch,
            q_length=run[1] - run[0],
            kv_length=stop - first,
            q_offset=run[0] + self.q_offset,
            kv_offset=first + self.kv_offset,
            mask_function=self.rule,
            attention_mask=self.padding,
            allow_is_causal_skip=False,
            use_vmap=True,
            device="cpu" if self.padding is None else self.padding.device,
        )
        assert seen is not None
        return seen[:, 0]


@dataclass(frozen=True)
class DenseMask:
    """A mask that came as a table [B or 1, 1 or H, queries, keys]: bool, or added to the logits."""

    table: Tensor
    queries: int
    keys: int

    plain = False
    kv_offset = 0
    by_vmap = True

    @property
    def q_offset(self) -> int:
        """The queries are the last tokens."""
        return self.keys - self.queries

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Nothing is known of it."""
        return 0, self.keys

    def rows(self, rows: Tensor, first: int = 0, stop: int | None = None) -> Tensor:
        """As in `LazyMask`."""
        part = self.table[:, 0, rows, first : self.keys if stop is None else stop]
        return part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2


Mask = LazyMask | DenseMask


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_of_other_kinds_of_mask: Any,
) -> LazyMask:
    """What transformers' mask interface is answered: the rule itself."""
    return LazyMask(
        batch=batch_size,
        queries=q_length,
        keys=kv_length,
        q_offset=int(q_offset),
        kv_offset=int(kv_offset),
        rule=mask_function,
        padding=None if attention_mask is None else attention_mask.bool(),
        reach=local_size,
        by_vmap=use_vmap,
    )


@contextmanager
def attached(session: Session) -> Iterator[dict[str, Any]]:
    """The session's model attends through the probe; afterwards it is as it was.

    Raises: ValueError, on leaving, where a layer's attention was not seen; see `Session.missing`.
    """
    name = f"farfield_probe_{next(_number)}"

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        return _attend(session, module, (query, key, value), mask, given)

    kept = [(config, config._attn_implementation_internal) for config in _configs(session.model)]
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lazy_mask)
    try:
        for config, _ in kept:
            config._attn_implementation_internal = name
        with session.following():
            yield {}
    finally:
        for config, before in kept:
            config._attn_implementation_internal = before
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    session.missing()


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """The model attends as its own eager code does; afterwards it is as it was."""
    kept = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        for config, _ in kept:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, before in kept:
            config._attn_implementation_internal = before


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration that a part of the model looks at, each once."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _attend(
    session: Session,
    module: nn.Module,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    given: dict[str, Any],
) -> tuple[Tensor, None]:
    """The attention function of the interface: (output [B, T, H, v], no weights)."""
    layer = session.called()
    query, key, value = inputs
    softmax = _Softmax.of(module, query, given)
    rule = _mask(mask, query, key, module)
    if session.wanted():
        session.show(_attended(session, layer, inputs, rule, softmax))
    out = _whole(query, key, value, rule, softmax)
    return out.transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class _Softmax:
    """What a layer's softmax does to scores: cap · tanh(scale · s / cap), and its learned sink."""

    scale: float
    cap: float | None
    sink: Tensor | None

    @classmethod
    def of(cls, module: nn.Module, query: Tensor, given: dict[str, Any]) -> _Softmax:
        """Read from what the layer hands over; refuses what isn't known to be without effect."""
        left = dict(given)
        scale, cap = left.pop("scaling", None), left.pop("softcap", None)
        sink = left.pop("s_aux", None)
        dropout = left.pop("dropout", 0.0)
        unknown = sorted(k for k, v in left.items() if v is not None and k not in _WITHOUT_EFFECT)
        if unknown:
            raise ValueError(
                f"{type(module).__name__} hands {', '.join(unknown)} to its attention; the probe "
                "knows scaling, softcap and sinks alone"
            )
        if dropout:
            raise ValueError(f"{type(module).__name__} drops weights; expected evaluation mode")
        return cls(query.shape[-1] ** -0.5 if scale is None else float(scale), cap, sink)


def _mask(mask: Any, query: Tensor, key: Tensor, module: nn.Module) -> Mask:
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(mask, LazyMask):
        if (mask.queries, mask.keys) != (queries, keys):
            raise ValueError(
                f"{type(module).__name__}: a mask of {mask.queries} queries and {mask.keys} keys "
                f"for {queries} and {keys}; expected self-attention"
            )
        return mask
    if mask is None:
        table = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
        return DenseMask(table.expand(1, 1, queries, keys), queries, keys)
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == 1:
        if mask.dtype.is_floating_point:
            odd = (mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)
            if bool(odd.any()):
                raise ValueError(
                    f"{type(module).__name__}: its mask holds a bias; expected 0 or −∞"
                )
        return DenseMask(mask[..., :keys], queries, keys)
    raise ValueError(
        f"{type(module).__name__}: a mask of type {type(mask).__name__}; expected that of the mask "
        "interface, or a table with a row for each query"
    )


def _attended(
    session: Session,
    layer: int,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Mask,
    softmax: _Softmax,
) -> Attended:
    query, key, value = inputs
    heads = session.chosen(query.shape[1])
    sink = None if softmax.sink is None else softmax.sink.reshape(-1).float()
    if session.heads is not None:
        per = query.shape[1] // key.shape[1]
        chosen = torch.tensor(heads, device=query.device)
        query, key, value = query[:, chosen], key[:, chosen // per], value[:, chosen // per]
        sink = None if sink is None else sink[chosen]
    groups = key.shape[1]
    tokens = session.tokens
    return Attended(
        layer=layer,
        start=mask.q_offset,
        queries=query.shape[2],
        first=mask.kv_offset,
        scores=DotProducts(grouped(query, groups), key, softmax.scale, softmax.cap),
        values=value,
        visible=lambda rows: _checked(mask, rows, tokens),
        position=tokens.position,
        heads=heads,
        real=tokens.real,
        sink=None if sink is None else sink.unflatten(0, (groups, -1)),
    )


def _checked(mask: Mask, rows: Tensor, tokens: Tokens) -> Tensor:
    """What the rows see. Raises: ValueError where that is a later token, or another document's."""
    seen = mask.rows(rows)
    key = torch.arange(mask.keys, device=rows.device)
    own = (rows + mask.q_offset - mask.kv_offset).unsqueeze(-1)
    if bool((seen & (key > own)).any()):
        raise ValueError("a query sees a later token; expected causal attention")
    begin = own - tokens.position.to(rows.device)[:, rows + mask.q_offset].unsqueeze(-1)
    other = seen & (key < begin)
    if tokens.real is not None:  # what padding sees nobody reads
        other = other & tokens.real.to(rows.device)[:, rows + mask.q_offset].unsqueeze(-1)
    if bool(other.any()):
        raise ValueError(
            "a query sees another document than its own: this architecture doesn't keep packed "
            "documents apart; expected them as rows of a batch"
        )
    return seen


def _whole(query: Tensor, key: Tensor, value: Tensor, mask: Mask, softmax: _Softmax) -> Tensor:
    """The attention of all queries: [B, H, T, v]."""
    shared = query.shape[1] != key.shape[1]
    width = max(query.shape[-1], value.shape[-1])
    plain = softmax.cap is None and softmax.sink is None
    if plain and width != value.shape[-1]:
        value, size = F.pad(value, (0, width - value.shape[-1])), value.shape[-1]
        return _whole(query, key, value, mask, softmax)[..., :size]
    if plain and width != query.shape[-1]:  # one size for the kernel; zeros change no score
        pad = (0, width - query.shape[-1])
        query, key = F.pad(query, pad), F.pad(key, pad)
    if plain and mask.plain:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=softmax.scale, enable_gqa=shared
        )
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    for start in range(0, query.shape[2], _BLOCK):
        rows = torch.arange(start, min(query.shape[2], start + _BLOCK), device=query.device)
        first, stop = mask.span(start, start + len(rows))
        block = query[:, :, start : start + _BLOCK]
        if plain:
            seen = mask.rows(rows, first, stop)[:, None]
            seen = seen | ~seen.any(-1, keepdim=True)  # rows of padding, which nobody reads
            out[:, :, start : start + _BLOCK] = F.scaled_dot_product_attention(
                block,
                key[:, :, first:stop],
                value[:, :, first:stop],
                attn_mask=seen,
                scale=softmax.scale,
                enable_gqa=shared,
            )
        else:
            found = _online(block, key, value, mask, softmax, rows, (first, stop))
            out[:, :, start : start + _BLOCK] = found
    return out


def _online(
    block: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    softmax: _Softmax,
    rows: Tensor,
    keys: tuple[int, int],
) -> Tensor:
    """A block of queries, tile of keys by tile of keys, against the largest logit so far."""
    groups = key.shape[1]
    scores = DotProducts(grouped(block, groups), key, softmax.scale, softmax.cap)
    own = torch.arange(len(rows), device=rows.device)
    shape = scores.query.shape[:4]
    wide = torch.promote_types(block.dtype, torch.float32)
    largest = torch.full(shape, torch.finfo(wide).min, dtype=wide, device=block.device)
    total = torch.zeros_like(largest)
    if softmax.sink is not None:
        largest = softmax.sink.to(wide).view(1, groups, -1, 1).expand(shape).clone()
        total = torch.ones_like(largest)
    out = torch.zeros(*shape, value.shape[-1], dtype=wide, device=block.device)
    for first in range(keys[0], keys[1], _KEYS):
        stop = min(keys[1], first + _KEYS)
        part = slice(first, stop)
        seen = mask.rows(rows, first, stop)[:, None, None]
        logits = torch.where(seen, scores.content(own, part), -torch.inf)
        higher = torch.maximum(largest, logits.amax(-1))
        weight = torch.exp(logits - higher.unsqueeze(-1))
        shrink = torch.exp(largest - higher)
        total = total * shrink + weight.sum(-1)
        found = weight @ value[:, :, None, part].to(wide)
        out, largest = out * shrink.unsqueeze(-1) + found, higher
    out = out / total.clamp(min=torch.finfo(wide).tiny).unsqueeze(-1)
    return out.flatten(1, 2).to(value.dtype)


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """Runs [start, stop) of consecutive numbers."""
    cuts = (rows.diff() != 1).nonzero().flatten().tolist()
    ends = [*(cut + 1 for cut in cuts), len(rows)]
    begins = [0, *ends[:-1]]
    return [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in zip(begins, ends, strict=True)]
