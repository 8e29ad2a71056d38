"""Counter-based randomness: a number is a hash of its keys, never of who asked before.

A batch row alone, a chunk, a cached token and a recomputed checkpoint all see the same values, and
there is neither a table nor a generator state to store.
"""

from __future__ import annotations

import torch
from torch import Tensor

Key = int | Tensor


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value


_INCREMENT = _signed(0x9E37_79B9_7F4A_7C15)
_MULTIPLIER_1 = _signed(0xBF58_476D_1CE4_E5B9)
_MULTIPLIER_2 = _signed(0x94D0_49BB_1331_11EB)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own shift of int64 copies the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _mix(word: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit words in which every bit reaches every bit."""
    word = (word ^ _shift_right(word, 30)) * _MULTIPLIER_1
    word = (word ^ _shift_right(word, 27)) * _MULTIPLIER_2
    return word ^ _shift_right(word, 31)


def hash64(*keys: Key) -> Tensor:
    """64 well-mixed bits of the keys, in order: h ← mix(h + γ + mix(key + γ)).

    Shapes: the keys are Python integers or int64 tensors that broadcast; the result has their
    common shape (int64). Source: Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators" (2014), for the mixer and γ.
    """
    device = next((key.device for key in keys if isinstance(key, Tensor)), torch.device("cpu"))
    word = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        if not isinstance(key, Tensor):
            key = torch.tensor(_signed(key), dtype=torch.int64, device=device)
        word = _mix(word + _INCREMENT + _mix(key + _INCREMENT))
    return word


def uniform(*keys: Key) -> Tensor:
    """A uniform number in (0, 1) from the hash of the keys: (⌊h / 2^12⌋ + ½) / 2^52.

    Shapes: as `hash64`, float64. Neither end is ever reached.
    """
    return (_shift_right(hash64(*keys), 12).to(torch.float64) + 0.5) * 2.0**-52


def normal(*keys: Key) -> Tensor:
    """A standard normal number from the hash of the keys: the normal quantile of `uniform`.

    Shapes: as `hash64`, float64.
    """
    return torch.special.ndtri(uniform(*keys))
