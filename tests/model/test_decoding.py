"""Cached decoding equals the full forward, whichever way transformers drives it."""

import itertools
from typing import Any

import pytest
import torch
from small import FEW, NAMES, TRAINED, VOCABULARY, model_of, text
from torch import Tensor
from transformers import DynamicCache, StaticCache

from farfield import FarfieldForCausalLM
from farfield.model import FarfieldCache

CLOSE: Any = {"rtol": 0.0, "atol": 1e-5}
NEW = 9
LONG = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, "suppress_tokens": [0]}
"""A token 0 that was said would be taken for padding where generate infers a mask."""


def greedy(model: FarfieldForCausalLM, ids: Tensor, count: int = NEW) -> Tensor:
    """The likeliest token again and again, from full forwards without a cache."""
    for _ in range(count):
        logits = model(ids, use_cache=False).logits[:, -1]
        logits[:, 0] = -torch.inf
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
    return ids


def generate(model: FarfieldForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    return model.generate(ids, **{"do_sample": False, **LONG, **options})


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_split_of_prefill_and_decoding_is_the_full_forward(name: str) -> None:
    """T is past the training length, so each split also crosses that boundary."""
    model, ids = model_of(name), text(2, TRAINED + 2)
    whole = model(ids, use_cache=False).logits
    for split in range(1, ids.shape[1]):
        first = model(ids[:, :split], use_cache=True)
        rest = model(ids[:, split:], cache=first.cache, use_cache=True)
        assert rest.cache is first.cache
        assert rest.cache.get_seq_length() == ids.shape[1]
        torch.testing.assert_close(first.logits, whole[:, :split], **CLOSE)
        torch.testing.assert_close(rest.logits, whole[:, split:], **CLOSE)
    cache, steps = None, []
    for t in range(ids.shape[1]):
        out = model(ids[:, t : t + 1], cache=cache, use_cache=True)
        assert out.logits.shape == (2, 1, VOCABULARY)
        cache = out.cache
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_greedy_decoding_across_the_training_length(name: str) -> None:
    model, prompt = model_of(name), text(2, 4)
    assert prompt.shape[1] < TRAINED < prompt.shape[1] + NEW
    want = greedy(model, prompt)
    assert len(want[:, 4:].unique()) > 3, "a model that says one thing tests nothing"
    assert torch.equal(generate(model, prompt), want)


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_unequal_prompts_padded_on_the_left_are_the_prompts_alone(name: str) -> None:
    model = model_of(name)
    prompts = [text(1, length, seed=length) for length in (2, 5, 7)]
    alone = [greedy(model, prompt) for prompt in prompts]
    longest = max(prompt.shape[1] for prompt in prompts)
    batch = torch.zeros(3, longest, dtype=torch.int64)
    mask = torch.zeros_like(batch)
    for row, prompt in enumerate(prompts):
        batch[row, longest - prompt.shape[1] :] = prompt
        mask[row, longest - prompt.shape[1] :] = 1
    out = generate(model, batch, attention_mask=mask)
    for row, want in enumerate(alone):
        assert torch.equal(out[row, longest:], want[0, -NEW:])
    one = generate(model, batch[:1], attention_mask=mask[:1])
    assert torch.equal(one[:, longest:], alone[0][:, -NEW:])
    ones = torch.ones_like(prompts[2])
    assert torch.equal(generate(model, prompts[2], attention_mask=ones), alone[2])
    assert torch.equal(generate(model, prompts[2]), alone[2])
    # The same batch by beams, whose rows are repeated and reordered, mask and all.
    beams = {"num_beams": 2, "attention_mask": mask}
    cached = generate(model, batch, **beams)
    assert torch.equal(cached, generate(model, batch, **beams, use_cache=False))


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_sampling_and_beams_are_the_same_without_a_cache(name: str) -> None:
    model, prompt = model_of(name), text(2, 5)
    drawn = []
    for options in ({}, {}, {"use_cache": False}):
        torch.manual_seed(11)
        drawn.append(generate(model, prompt, do_sample=True, temperature=1.5, **options))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], generate(model, prompt))
    beams = {"num_beams": 3, "num_return_sequences": 2}
    cached = generate(model, prompt, **beams)
    assert cached.shape == (4, 5 + NEW)
    assert torch.equal(cached, generate(model, prompt, **beams, use_cache=False))


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_assisted_decoding_and_prompt_lookup_are_greedy(name: str) -> None:
    model, prompt = model_of(name), text(1, 5).repeat(1, 2)
    want = greedy(model, prompt)
    # A draft that is often wrong (other weights) and one that is always right.
    for draft in (model_of(name, seed=2), model_of(name)):
        assert torch.equal(generate(model, prompt, assistant_model=draft), want)
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=3), want)
    given = {"assistant_model": model_of("rope", seed=2), "cache": DynamicCache()}
    assert torch.equal(generate(model, prompt, **given), want)


@torch.no_grad()
def test_chunked_prefill_is_the_whole_prompt() -> None:
    model, prompt = model_of("learned+v+alibi"), text(2, 7)
    assert torch.equal(generate(model, prompt, prefill_chunk_size=3), greedy(model, prompt))


@pytest.mark.parametrize("make", [DynamicCache, lambda: FarfieldCache(2)], ids=["theirs", "ours"])
@torch.no_grad()
def test_an_empty_cache_of_the_callers_own(make: Any) -> None:
    model, ids = model_of("random+v+alibi"), text(2, 6)
    whole, cache = model(ids).logits, make()
    model(ids[:, :3], cache=cache)
    out = model(ids[:, 3:], cache=cache)
    torch.testing.assert_close(out.logits, whole[:, 3:], **CLOSE)
    assert cache.get_seq_length() == 6
    assert len(cache) == 2
    want, again = greedy(model, ids), make()
    assert torch.equal(generate(model, ids, cache=again), want)
    # A conversation goes on from what the cache holds. (Without a mask, generate would take the
    # zeros it may have said for padding.)
    longer = torch.cat((want, text(2, 2, seed=5)), 1)
    said = generate(model, longer, cache=again, attention_mask=torch.ones_like(longer))
    assert torch.equal(said, greedy(model, longer))
    configured = DynamicCache(config=model.config)
    assert torch.equal(generate(model, ids, cache=configured), want)


@torch.no_grad()
def test_the_old_name_of_the_cache_still_works() -> None:
    model, ids = model_of("learned"), text(2, 6)
    whole, cache = model(ids).logits, DynamicCache()
    for start, stop in ((0, 4), (4, 6)):
        with pytest.warns(FutureWarning, match="past_key_values"):
            out = model(ids[:, start:stop], past_key_values=cache).logits
        torch.testing.assert_close(out, whole[:, start:stop], **CLOSE)
    assert cache.get_seq_length() == 6
    with pytest.warns(FutureWarning, match="past_key_values"):
        base = model.model(ids[:, :1], past_key_values=cache).last_hidden_state
    assert base.shape == (2, 1, 16)
    assert cache.get_seq_length() == 7


@torch.no_grad()
def test_caches_that_cannot_remember_frames_are_refused() -> None:
    model, ids = model_of("rope"), text(1, 4)
    for implementation in ("offloaded", "quantized"):
        with pytest.raises(ValueError, match=f"cache_implementation '{implementation}' is not"):
            generate(model, ids, cache_implementation=implementation)
    with pytest.raises(ValueError, match="DynamicCache is not supported"):
        model(ids, cache=DynamicCache(offloading=True))
    filled = DynamicCache()
    filled.update(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), 0)
    with pytest.raises(ValueError, match="holds keys of another model"):
        model(ids, cache=filled)
    with pytest.raises(ValueError, match="this cache has 3 layers, the model 2"):
        model(ids, cache=FarfieldCache(3))


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_a_cache_of_a_fixed_size_is_the_growing_one(name: str) -> None:
    model, ids = model_of(name), text(2, 6)
    want = greedy(model, ids)
    assert torch.equal(generate(model, ids, cache_implementation="static"), want)
    theirs: Any = StaticCache(config=model.config, max_cache_len=6 + NEW)
    assert torch.equal(generate(model, ids, cache=theirs), want)
    assert theirs.layers[0].get_max_length() == 6 + NEW
    full = FarfieldCache(2, capacity=7)
    first = model(ids, cache=full).logits
    with pytest.raises(ValueError, match="holds 7 tokens at most: 6 are there, 2 more don't fit"):
        model(text(2, 2), cache=full)
    torch.testing.assert_close(first, model(ids).logits, **CLOSE)
    assert full.layers[0].state.keys is None or full.layers[0].keys.shape[-2] == 6


@torch.no_grad()
def test_recording_does_not_grow_with_the_text() -> None:
    """A crop is final: what was recorded before it is folded."""
    model = model_of("learned+v")
    cache = FarfieldCache(2)
    cache.activate_past_recording()
    for _ in range(5):
        model(text(1, 4), cache=cache)
        cache.crop(-1)
    state = cache.layers[0].state  # type: ignore[union-attr]
    assert state.length == 15
    assert [trail.spare for trail in state.trails.values()] == [0]
    with pytest.raises(ValueError, match="was not kept"):
        cache.crop(-1)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", ["rope+window:8", "learned+v+window:8,sinks=2", "alibi+window:8"])
@torch.no_grad()
def test_a_windowed_cache_stays_small_and_exact(name: str, padded: bool) -> None:
    model, ids = model_of(name), text(2, 220)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
        mask[1, 20:23] = 0
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    cache, out = FarfieldCache(2), []
    cuts = [0, 3, 4, 5, 19, 20, 22, *range(23, 190, 7), *range(190, 221)]
    for start, stop in itertools.pairwise(cuts):
        made = model(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache)
        out.append(made.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(out, 1)[real], whole[real], **CLOSE)
    assert cache.get_seq_length() == 220
    assert cache.layers[0].keys.shape[-2] < 90  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"evicted|was not kept"):
        cache.crop(-20)


@torch.no_grad()
def test_eviction_comes_with_a_proof() -> None:
    model, ids = model_of("random+v+alibi", initializer_range=0.02), text(1, 5600)
    whole = model(ids, use_cache=False).logits
    cache = FarfieldCache.evicting(model, 1e-5)
    reach = cache.layers[0].state.reach  # type: ignore[union-attr]
    assert 4000 < reach < 4500  # (11.5 + 5.5 nats and twice the cap, over a slope of 1/256)
    out = [model(ids[:, start : start + 400], cache=cache).logits for start in range(0, 5600, 400)]
    torch.testing.assert_close(torch.cat(out, 1), whole, **CLOSE)
    assert cache.layers[0].keys.shape[-2] < 5000  # type: ignore[union-attr]
    for name in ("rope", "forget", "alibi+logn"):
        with pytest.raises(ValueError, match="no key can be proved never to matter again"):
            FarfieldCache.evicting(model_of(name))
    assert FarfieldCache.evicting(model_of("rope+window:5")).layers[0].state.reach == 5  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="epsilon is 0; expected"):
        FarfieldCache.evicting(model, 0)


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_the_cache_crops_reorders_repeats_selects_and_resets(name: str) -> None:
    model, ids = model_of(name), text(2, 8)
    whole = model(ids).logits
    cache: Any = FarfieldCache(2)
    cache.activate_past_recording()
    assert cache.is_recording_past(0)
    assert cache.is_croppable
    model(ids[:, :4], cache=cache)
    model(text(2, 3, seed=9), cache=cache)
    cache.crop(-3)
    cache.crop(0)
    assert cache.get_seq_length() == 4
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    out = model(ids.flip(0)[:, 4:], cache=cache).logits
    torch.testing.assert_close(out, whole.flip(0)[:, 4:], **CLOSE)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, cache=cache).logits, whole, **CLOSE)
    for layer in cache.layers:
        layer.record_past = False  # what transformers does when it hands a cache back
    assert not cache.is_recording_past(0)


@torch.no_grad()
def test_a_crop_that_cannot_be_exact_raises_and_loses_nothing() -> None:
    model, ids = model_of("learned+v"), text(2, 6)
    cache = model(ids[:, :4], use_cache=True).cache
    with pytest.raises(ValueError, match="the frame before them was not kept"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="cannot crop 5 tokens: only 4 are cached"):
        cache.crop(-5)
    with pytest.raises(ValueError, match="crop takes a count of at most 0, got 2"):
        cache.crop(2)
    out = model(ids[:, 4:], cache=cache).logits
    torch.testing.assert_close(out, model(ids).logits[:, 4:], **CLOSE)


def test_what_the_cache_layer_refuses() -> None:
    layer: Any = FarfieldCache(1).layers[0]
    with pytest.raises(ValueError, match="filled by farfield's own attention layers"):
        layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    with pytest.raises(ValueError, match="can't be offloaded"):
        layer.offload()
    with pytest.raises(ValueError, match="can't be offloaded"):
        layer.prefetch()
    assert layer.get_mask_sizes(3) == (3, 0)
    assert layer.get_max_length() == -1
    assert not layer.is_initialized


def test_training_keeps_no_cache_unless_asked() -> None:
    model, ids = model_of("rope"), text(1, 3)
    assert model(ids).cache is not None
    assert model(ids, use_cache=False).cache is None
    model.train()
    assert model(ids).cache is None
    assert model(ids, use_cache=True).cache.get_seq_length() == 3


def test_a_mask_can_not_change_its_mind_about_cached_tokens() -> None:
    model, ids = model_of("random+v+alibi"), text(2, 9)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    more = torch.ones(2, 3, dtype=torch.long)
    whole = model(ids, attention_mask=torch.cat((mask, more), 1)).logits[:, 6:]

    def prefilled() -> Any:
        return model(ids[:, :6], attention_mask=mask, use_cache=True).cache

    for given in (None, torch.cat((mask, more), 1)):
        rest = model(ids[:, 6:], attention_mask=given, cache=prefilled(), use_cache=True).logits
        torch.testing.assert_close(rest, whole, rtol=0, atol=1e-5)
    revised = torch.cat((mask, more), 1)
    revised[0, 0] = 0
    for given in (torch.ones(2, 9, dtype=torch.long), revised):
        with pytest.raises(ValueError, match="disagrees"):
            model(ids[:, 6:], attention_mask=given, cache=prefilled(), use_cache=True)
    cache = prefilled()
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = model(ids[:, 6:].flip(0), cache=cache, use_cache=True).logits
    torch.testing.assert_close(swapped.flip(0), whole, rtol=0, atol=1e-5)


def test_a_cache_of_other_rows_is_refused() -> None:
    model, ids = model_of("random+v"), text(2, 6)
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match="the cache holds 2 rows, the input 1"):
        model(ids[:1, :2], cache=cache, use_cache=True)
