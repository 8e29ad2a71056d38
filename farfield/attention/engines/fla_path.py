"""PaTH attention by the Triton kernels of flash-linear-attention, on explicit request.

The same logits as `path`, at the speed and in the precision of those kernels, which multiply in
the type of the queries. Their gate is multiplied by 1/√d like a score and ours is not, so that it
is handed over times √d, in float32.

Serves: CUDA, with `flash-linear-attention` installed; whole sequences without padding or window;
heads of 16, 32, 64 or 128; steps in float32. Anything else raises.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farfield.algebra.contraction import Contraction
from farfield.attention.logit import Visible, per_query_head

_HEAD_DIMS = (16, 32, 64, 128)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    contraction: Contraction,
    *,
    potential: Tensor | None = None,
    visible: Visible,
) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j of a whole sequence.

    Shapes: as in `path.attend`. Raises: ValueError for what the kernels don't serve, or where they
    are not there.
    """
    _check(q, v, contraction)
    try:
        from fla.ops.path_attn import parallel_path_attn
    except ImportError as error:
        raise ValueError(
            f"engine 'fla_path' needs the package flash-linear-attention: {error}"
        ) from error
    w = contraction.w.expand_as(k).transpose(1, 2).contiguous()
    beta = contraction.beta.expand(k.shape[:-1]).transpose(1, 2).contiguous()
    gate = None if potential is None else log_gate(potential, q)
    given = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, _ = parallel_path_attn(*given, w=w, beta=beta, g=gate)
    return out.transpose(1, 2)


def log_gate(potential: Tensor, q: Tensor) -> Tensor:
    """The kernels' gate √d · (u_{t-1} - u_t) of every query head, 0 for the first token.

    Shapes: potential [B or 1, Hk or H, T]; q [B, H, T, d]; returns float32 [B, T, H].
    """
    batch, heads, _, dim = q.shape
    gate = torch.nn.functional.pad(-potential.diff(dim=-1), (1, 0)) * math.sqrt(dim)
    gate = per_query_head(gate, heads).expand(batch, -1, -1)
    return gate.transpose(1, 2).to(torch.float32).contiguous()


def _check(q: Tensor, v: Tensor, contraction: Contraction) -> None:
    for name, x in (("head dimension", q), ("value dimension", v)):
        if x.shape[-1] not in _HEAD_DIMS:
            raise ValueError(f"{name} is {x.shape[-1]}; engine 'fla_path' serves {_HEAD_DIMS}")
    if contraction.w.dtype != torch.float32:
        raise ValueError(f"steps are {contraction.w.dtype}; engine 'fla_path' takes float32")
