"""What a forward call is given, read once: which tokens are real, where they stand, and in which
document."""

from __future__ import annotations

import torch
from torch import Tensor

from farfield.attention import DecodingState
from farfield.attention.packing import Packing, segments_of


def valid_keys(
    mask: Tensor | None, batch: int, length: int, state: DecodingState | None
) -> Tensor | None:
    """Which of all keys are real: bool [B, earlier + T], or None where nothing is padding.

    A cached token's step is in the frame already, so a later mask can't change its mind about it;
    a call without a mask goes on from what is known.

    Raises: ValueError for another shape, a batch of another size, or a mask that disagrees.
    """
    past = 0 if state is None else state.length
    known = state.valid if state is not None and past else None
    if state is not None and state.batch not in (None, batch):
        raise ValueError(f"the cache holds {state.batch} rows, the input {batch}")
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
    return valid


def positions(past: int, length: int, valid: Tensor | None, device: torch.device) -> Tensor:
    """How many real tokens precede each one in its row: int64 [B or 1, T]."""
    if valid is None:
        return torch.arange(past, past + length, device=device).unsqueeze(0)
    return (valid.cumsum(-1) - 1).clamp(min=0)[:, past:]


def check_positions(given: Tensor | None, position: Tensor, here: Tensor | None) -> None:
    """Positions follow from the mask and the documents; others can't be honoured.

    Raises: ValueError where `given` says otherwise at a real token.
    """
    if given is None:
        return
    differs = given.to(position.device) != position
    if here is not None:
        differs = differs & here
    if bool(differs.any()):
        raise ValueError(
            "position_ids must count the tokens that attention_mask keeps, from 0, in each of the "
            "documents that segment_ids or cu_seqlens name; accumulated transports have no others"
        )


def packing(
    segment_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    embeds: Tensor,
    valid: Tensor | None,
    cached: bool,
) -> Packing | None:
    """The documents of the rows; None where each row is one.

    Shapes: segment_ids int [B, T]; cu_seqlens int [documents + 1] of a single row.
    Raises: ValueError for a shape or bounds that don't fit, for the two where they disagree, and
    for packed documents with a cache: only the last could be continued.
    """
    if segment_ids is None and cu_seqlens is None:
        return None
    if cached:
        raise ValueError(
            "packed documents can't be decoded with a cache; pass use_cache=False, or the "
            "documents as rows of a batch"
        )
    batch, length = embeds.shape[:2]
    if segment_ids is not None and tuple(segment_ids.shape) != (batch, length):
        raise ValueError(
            f"segment_ids has shape {list(segment_ids.shape)}; expected [{batch}, {length}]"
        )
    if cu_seqlens is not None:
        segment_ids = segments_of(cu_seqlens.to(embeds.device), batch, length, segment_ids)
    assert segment_ids is not None
    return Packing.of(segment_ids.to(embeds.device), valid)
