"""The decoding state as a transformers cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from farfield.attention import DecodingState


class FarfieldCacheLayer(CacheLayerMixin):
    """One layer's `DecodingState` behind transformers' interface.

    The attention layer extends the state itself, since it alone knows the frames; `update` is
    therefore refused. Beam and batch operations move every tensor of the state.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, capacity: int | None = None, reach: int | None = None) -> None:
        self.state = DecodingState(capacity, reach)

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
        """The fixed capacity; -1 where the layer grows."""
        return -1 if self.state.capacity is None else self.state.capacity

    def activate_past_recording(self) -> None:
        """Keep the frame after each token from now on, so that `crop` can go back to it."""
        self.state.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last |tokens_to_remove| tokens exactly (a count ≤ 0, as transformers has it).

        What is left is final: what was recorded to crop it is folded, as transformers' own layers
        do, so that recording doesn't grow with the text.

        Raises: ValueError for a positive count, or where earlier frames were not kept.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a count of at most 0, got {tokens_to_remove}")
        self.state.crop(-tokens_to_remove)
        self.state.commit()

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
    """A cache of pulled keys and values for every layer of a farfield model.

    It grows; with `capacity` it holds so many tokens at most, in buffers of that size.
    """

    def __init__(self, layers: int, capacity: int | None = None) -> None:
        super().__init__(layers=[FarfieldCacheLayer(capacity) for _ in range(layers)])

    @classmethod
    def evicting(cls, model: Any, epsilon: float = 1e-6) -> FarfieldCache:
        """A cache that drops keys as soon as it is proved that they can never matter again.

        The proof is a cap on logits, from the norms of the projections, and a control that takes
        more from a far key than the cap can give (ALiBi), or hides it (a window; which is evicted
        from without being asked, too). What is dropped has at most `epsilon` times the weight of a
        query's own key, so an output errs by at most ε (max‖v‖ + ‖out‖) in each layer, and memory
        is bounded whatever the length.

        Raises: ValueError for a model that can't promise it (a forget gate may stay at 1, a
        rotation keeps norms, log-n lets logits grow) or an epsilon outside (0, 1).
        """
        if not 0.0 < epsilon < 1.0:
            raise ValueError(f"epsilon is {epsilon}; expected a number between 0 and 1")
        cache = cls(0)
        for layer in model.get_decoder().layers:
            cap = layer.self_attn.logit_cap(layer.input_layernorm.weight)
            reach = layer.self_attn.mechanism.reach(cap, epsilon)
            if reach is None:
                raise ValueError(
                    f"{model.config.mechanism}: no key can be proved never to matter again; "
                    "expected a mechanism with alibi or a window, and without logn"
                )
            cache.layers.append(FarfieldCacheLayer(reach=reach))
        return cache

    @staticmethod
    def adopt(cache: Cache, layers: int) -> Cache:
        """Make any *empty* transformers cache one that can remember frames, in place.

        Raises: ValueError for one that already holds tokens, is of another model's depth, or does
        what ours doesn't (a window of its own, quantised or offloaded keys).
        """
        if all(isinstance(layer, FarfieldCacheLayer) for layer in cache.layers) and cache.layers:
            if len(cache.layers) != layers:
                raise ValueError(f"this cache has {len(cache.layers)} layers, the model {layers}")
            return cache
        if cache.get_seq_length() > 0:
            raise ValueError("this cache holds keys of another model; pass an empty one")
        kinds = {type(layer) for layer in cache.layers} | {cache.layer_class_to_replicate}
        if not kinds <= {DynamicLayer, StaticLayer, None} or cache.offloading:
            raise ValueError(
                f"{type(cache).__name__} is not supported; use a DynamicCache or a StaticCache, or "
                "pass none"
            )
        recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
        sizes = {layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)}
        capacity = sizes.pop() if sizes else None
        cache.layers = [FarfieldCacheLayer(capacity) for _ in range(layers)]
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


@contextmanager
def untouched_by_failure(cache: Cache | None) -> Iterator[None]:
    """A call that is refused or interrupted within leaves an adopted cache as it was."""
    layers = [] if cache is None else cache.layers
    restores = [layer.state.mark() for layer in layers]  # type: ignore[union-attr]
    try:
        yield
    except BaseException:
        for restore in restores:
            restore()
        raise


__all__ = [
    "FarfieldCache", "FarfieldCacheLayer", "decoding_state", "past_length", "untouched_by_failure",
]  # fmt: skip
