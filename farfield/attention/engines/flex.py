"""Attention compiled by FlexAttention: masks by block, potentials in the score.

The potential enters as two float32 parts, u = high + low: the difference of the high parts of near
keys is exact, so the two differences together are u_j - u_i wherever the keys lie. Blocks that no
query of theirs sees are not computed. Lengths are rounded up to whole blocks, two at least, so that
it is compiled once for each kind of call (type, heads, head dimension, one row or more, with a
potential or without) and not for each length.

Serves: the CPU without gradients and with a C++ compiler at hand; CUDA with gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from farfield.attention import logit
from farfield.attention.logit import Visible, per_query_head

_BLOCK = 128
"""Queries and keys of a block of the mask, FlexAttention's own default."""

_LENGTHS = ((2,), (2,), (2,), (3,), (3,), (3, 4))
"""Which dimensions of `_attend`'s tensors are lengths. All else is compiled as numbers, and tensors
are packed: the C++ generated for the CPU mixes up its names from the tenth unknown size on."""

_NOWHERE = 2**40
"""Position of a key that isn't real: after every query, in no window and no sink."""

_KINDS = 64
"""Kinds of calls that may be compiled, one after the other, in a process."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, potential: Tensor | None = None, visible: Visible
) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j for the last T of K tokens. Shapes: as in `Engine`."""
    batch, heads, queries, _ = q.shape
    keys, offset = visible.keys, visible.keys - visible.queries
    if queries == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    wide, long = _rounded(queries), _rounded(keys)
    most = max(long, wide + offset)  # what a query or key of padding may be asked for
    u = None
    if potential is not None:
        u = potential - potential[..., -1:]
        u = per_query_head(u, heads).expand(batch, -1, -1)
        u = F.pad(u, (0, most - keys))
        u = torch.stack((u.float(), (u - u.float()).float()))
    position = torch.arange(keys, device=q.device)[None]
    position = position if visible.position is None else visible.position
    of_key = position
    if visible.valid is not None:
        of_key = of_key.masked_fill(~visible.valid, _NOWHERE)
    of_query = F.pad(position.expand(batch, -1), (0, most - keys))
    of_key = F.pad(of_key.expand(batch, -1), (0, most - keys), value=_NOWHERE)
    window = keys if visible.window is None else visible.window
    some, every = _tables(visible, position, (wide, long))
    tables = [_listed(x.expand(batch, -1, -1)) for x in (some & ~every, every)]
    tensors = (
        *(F.pad(x, (0, 0, 0, n - x.shape[-2])) for x, n in ((q, wide), (k, long), (v, long))),
        u,
        torch.stack((of_query, of_key))[:, :, None],
        torch.stack(tables),
    )
    bounds = [torch.tensor(x, device=q.device) for x in (offset, window, visible.sinks)]
    return _run(tensors, bounds)[..., :queries, :]


def _rounded(count: int) -> int:
    return max(2, -(-count // _BLOCK)) * _BLOCK


def _tables(visible: Visible, position: Tensor, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Whether a block of queries may see some key of a block, and whether it sees every one.

    Shapes: [B or 1, blocks of queries, blocks of keys] bool.
    """
    keys, last = visible.keys, visible.keys - 1
    device = position.device
    first = torch.arange(0, lengths[0], _BLOCK, device=device) + keys - visible.queries
    of = torch.arange(0, lengths[1], _BLOCK, device=device)
    end = (first + _BLOCK - 1).clamp(max=last)[:, None]
    inside = (first <= last)[:, None] & (of <= last)
    some = (inside & (of <= end))[None]
    every = (inside & (of + _BLOCK - 1 <= first[:, None]))[None]
    if visible.window is not None:
        low, high = position[:, first.clamp(max=last), None], position[:, end.flatten(), None]
        near = position[:, None, (of + _BLOCK - 1).clamp(max=last)]
        far = position[:, None, of.clamp(max=last)]
        some = some & ((low - near < visible.window) | (far < visible.sinks))
        every = every & ((high - far < visible.window) | (near < visible.sinks))
    if visible.valid is not None:
        real = F.pad(visible.valid, (0, lengths[1] - keys)).unflatten(-1, (-1, _BLOCK)).all(-1)
        every = every & real[:, None]
    return some, every


def _listed(table: Tensor) -> Tensor:
    """For each block of queries how many blocks of keys are in the table, then those, then others.

    Shapes: [B, blocks of queries, blocks of keys] bool → [B, 1, the same, the same + 1] int32.
    """
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return torch.cat((table.sum(-1, keepdim=True), order), -1).to(torch.int32)[:, None]


def _run(tensors: tuple[Tensor | None, ...], bounds: list[Tensor]) -> Tensor:
    run: Callable[..., Tensor] = _attend
    if torch.compiler.is_compiling():
        return run(*tensors, *bounds)
    for x, lengths in zip(tensors, _LENGTHS, strict=True):
        for dim in range(x.dim()) if x is not None else ():
            mark = torch._dynamo.maybe_mark_dynamic if dim in lengths else torch._dynamo.mark_static
            mark(x, dim)
    with torch._dynamo.config.patch(recompile_limit=_KINDS):
        return _compiled()(*tensors, *bounds)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_attend, fullgraph=True)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None,
    positions: Tensor,
    tables: Tensor,
    offset: Tensor,
    window: Tensor,
    sinks: Tensor,
) -> Tensor:
    """Shapes: u [2, B, H, tokens], positions [2, B, 1, tokens] of queries and keys, tables
    [2, B, 1, blocks of queries, 1 + blocks of keys] of blocks seen in part and seen whole."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at, of = positions[0, b, 0, i + offset], positions[1, b, 0, j]
        near = (at >= of) & (at - of < window)
        return (j < i + offset) & (near | (of < sinks)) | (j == i + offset)

    def logits(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert u is not None
        at = i + offset
        return score + ((u[0, b, h, j] - u[0, b, h, at]) + (u[1, b, h, j] - u[1, b, h, at]))

    part, whole = tables
    mask = BlockMask.from_kv_blocks(
        part[..., 0].clone(),  # (the CPU's template knows buffers by name, views not)
        part[..., 1:].clone(),
        whole[..., 0].clone(),
        whole[..., 1:].clone(),
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen,
        seq_lengths=(q.shape[-2], k.shape[-2]),
    )
    return flex_attention(
        q,
        k,
        v,
        score_mod=None if u is None else logits,
        block_mask=mask,
        scale=logit.scale(q.shape[-1]),
        enable_gqa=q.shape[1] != k.shape[1],
    )
