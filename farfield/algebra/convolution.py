"""A short causal convolution over the tokens of a row that are not padding."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_convolution(
    x: Tensor, weight: Tensor, tail: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y_t = Σ_{i=0..k-1} weight_{k-1-i} x_{t-i} for every channel, and the tail after every token.

    t counts the valid tokens of a row: padding, wherever it stands, is passed over as though it
    weren't there, and its own y is zero. Tokens before the first are zero. A tail is the k-1 valid
    inputs that precede the next token, oldest first: so the whole is its chunks, exactly.
    Differentiable in x and weight; what comes from the tail is a constant.

    Shapes: x [B, T, D]; weight [D, k], the current token's last; tail [B or 1, 1, (k-1)·D], None at
    the start; valid bool [B, T], None where all are -> y [B, T, D], tails [B, T, (k-1)·D], which
    are a view of one [B, T+k-1, D] where `valid` is None.
    Raises: ValueError for a weight or a tail of another shape.
    """
    batch, length, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; a convolution of {channels} channels has "
            f"[{channels}, k], k at least 1"
        )
    before = weight.shape[1] - 1
    if tail is None:
        tail = x.new_zeros(1, 1, before * channels)
    if tuple(tail.shape[1:]) != (1, before * channels) or tail.shape[0] not in (1, batch):
        raise ValueError(
            f"tail has shape {list(tail.shape)}; {before + 1} taps over {channels} channels "
            f"continue from [{batch} or 1, 1, {before * channels}]"
        )
    past = tail.detach().to(x.dtype).reshape(tail.shape[0], before, channels).expand(batch, -1, -1)
    if valid is None:
        row = torch.cat((past, x), 1)
        return _convolved(row, weight, length), _windows(row.detach(), length, before)
    # The valid tokens of each row, moved up to its start: the r-th of them stands at r - 1.
    rank = valid.cumsum(1)
    order = torch.argsort(~valid, dim=1, stable=True)
    row = torch.cat((past, _rows(x, order)), 1)
    y = _rows(_convolved(row, weight, length), (rank - 1).clamp_min(0))
    y = torch.where(valid[..., None], y, 0.0)
    tails = [_rows(row.detach(), rank + i) for i in range(before)]
    return y, torch.cat(tails, -1) if tails else x.new_zeros(batch, length, 0)


def _convolved(row: Tensor, weight: Tensor, length: int) -> Tensor:
    """y_t of a row that begins with the k-1 inputs before its first token."""
    y = row.new_zeros(row.shape[0], length, row.shape[2])
    for index, factor in enumerate(weight.unbind(1)):
        y = torch.addcmul(y, row[:, index : index + length], factor)
    return y


def _windows(row: Tensor, length: int, size: int) -> Tensor:
    """The `size` inputs up to each token, itself included: a view [B, T, size · D] of the row."""
    channels = row.shape[-1]
    windows = row.contiguous().flatten(1).unfold(1, size * channels, channels)
    return windows[:, 1 : 1 + length]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, t]]. Shapes: x [B, n, D], index [B, T] -> [B, T, D]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
