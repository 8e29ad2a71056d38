"""A call that fails loses nothing: the cache goes on as if it had not been made."""

from typing import Any

import pytest
import torch
from small import NAMES, model_of, text
from torch import nn
from transformers import StaticCache

from farfield.model import FarfieldCache

CLOSE: Any = {"rtol": 0.0, "atol": 1e-5}


@pytest.mark.parametrize("kind", ["growing", "fixed", "recording"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused in the first layer, or interrupted in the last, whose neighbours have gone on, and
    have evicted what they could."""
    monkeypatch.setattr("farfield.attention.state._SPARE", 1)
    model, ids = model_of(name), text(2, 12)
    whole = model(ids, use_cache=False).logits
    cache: Any = FarfieldCache(model.config.num_hidden_layers)
    if kind == "fixed":
        cache = StaticCache(config=model.config, max_cache_len=16)
    if kind == "recording":
        cache.activate_past_recording()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def fail(count: int) -> None:
        with pytest.raises(ValueError, match="no engine 'sdap'"):
            model(ids[:, :count], cache=cache, use_cache=True, engine="sdap")
        last: nn.Module = model.model.layers[-1].mlp
        hook = last.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :count], cache=cache, use_cache=True)
        hook.remove()

    fail(5)
    assert cache.get_seq_length() == 0
    first = model(ids[:, :7], cache=cache, use_cache=True).logits
    fail(1)
    fail(5)
    assert cache.get_seq_length() == 7
    rest = model(ids[:, 7:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(torch.cat((first, rest), 1), whole, **CLOSE)
