"""torch.compile: a decoder layer is one graph, whatever its mechanism and its length."""

import pytest
import torch
from small import config_of, text
from torch._dynamo.testing import CompileCounterWithBackend

from farfield import FarfieldForCausalLM, mechanisms
from farfield.attention import Tokens

ONE_EACH = [row.name for row in mechanisms.table() if row.kind == "transport"]
LENGTHS = [*range(2, 100, 9), 5, 41, 300]
"""Within one block of an engine and beyond it."""


@pytest.mark.parametrize("name", [*ONE_EACH, "random+v+alibi", "learned+v+forget+window:9+logn"])
def test_a_decoder_layer_is_one_graph_for_all_lengths(name: str) -> None:
    """`fullgraph` refuses a break; the first length makes one graph and the others one more."""
    torch._dynamo.reset()
    model = FarfieldForCausalLM(config_of(name))
    model.initialise(0)
    layer = model.model.layers[0]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for length in LENGTHS:
        hidden = torch.randn(2, length, 16, requires_grad=True)
        tokens = Tokens(hidden, torch.arange(length)[None], text(2, length))
        ours, plain = compiled(hidden, tokens, None), layer(hidden, tokens, None)
        torch.testing.assert_close(ours, plain, rtol=0.0, atol=1e-5)
        grads = [torch.autograd.grad(out.square().sum(), hidden)[0] for out in (ours, plain)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 3
