"""The decoding state as a transformers cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from farfield.attention import DecodingState


class FarfieldCacheLayer(CacheLayerMixin):
    """One layer's `DecodingState` behind transformers' interface.

    The attention layer extends the state itself, since it alone knows the frames; `update` is
    therefore refused. Beam and batch operations move every tensor of the state.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        self.state = DecodingState()

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Pulled keys [B, kv heads, tokens, d]."""
        return self.state.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Values, pulled where they are carried [B, kv heads, tokens, d]."""
        return self.state.values

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether any token is remembered."""
        return self.state.length > 0

    @property
    def record_past(self) -> bool:
        """Whether the frames of tokens that may be cropped are being kept."""
        return self.state.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self.state.recording = recording

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the state grows with its first tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refused: keys are stored in the root frame, which only the attention layer knows."""
        raise ValueError("a farfield cache is filled by farfield's own attention layers")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys visible at most, and the offset of the first."""
        return self.state.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens remembered."""
        return self.state.length

    def get_max_length(self) -> int:
        """-1: the layer grows without bound."""
        return -1

    def activate_past_recording(self) -> None:
        """Keep the frame after each token from now on, so that `crop` can go back to it."""
        self.state.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last |tokens_to_remove| tokens exactly (a count ≤ 0, as transformers has it).

        Raises: ValueError for a positive count, or where earlier frames were not kept.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a count of at most 0, got {tokens_to_remove}")
        self.state.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        self.state.crop(self.state.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Move rows to where their beams went."""
        self.state.map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.state.map_batch(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some rows."""
        self.state.map_batch(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        """Refused: offloading would move keys without the frames that go with them."""
        raise ValueError("a farfield cache can't be offloaded; leave cache_implementation unset")

    prefetch = offload


class FarfieldCache(Cache):
    """A growing cache of pulled keys and values for every layer of a farfield model."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[FarfieldCacheLayer() for _ in range(layers)])

    @staticmethod
    def adopt(cache: Cache, layers: int) -> Cache:
        """Make any *empty* transformers cache one that can remember frames, in place.

        Raises: ValueError for one that already holds tokens, is of another model's depth, or does
        more than grow (a fixed size, a window, quantised or offloaded keys).
        """
        if all(isinstance(layer, FarfieldCacheLayer) for layer in cache.layers) and cache.layers:
            if len(cache.layers) != layers:
                raise ValueError(f"this cache has {len(cache.layers)} layers, the model {layers}")
            return cache
        if cache.get_seq_length() > 0:
            raise ValueError("this cache holds keys of another model; pass an empty one")
        kinds = {type(layer) for layer in cache.layers} | {cache.layer_class_to_replicate}
        if not kinds <= {DynamicLayer, None} or cache.offloading:
            raise ValueError(
                f"{type(cache).__name__} is not supported; use a DynamicCache, or pass none"
            )
        recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
        cache.layers = [FarfieldCacheLayer() for _ in range(layers)]
        cache.layer_class_to_replicate = None
        if recording:
            cache.activate_past_recording()
        return cache


def past_length(cache: Cache | None) -> int:
    """Tokens a cache remembers; 0 for none."""
    return 0 if cache is None else int(cache.get_seq_length())


def decoding_state(cache: Cache | None, layer: int) -> DecodingState | None:
    """The state of one layer of an adopted cache."""
    return None if cache is None else cache.layers[layer].state  # type: ignore[union-attr]


__all__ = ["FarfieldCache", "FarfieldCacheLayer", "decoding_state", "past_length"]
