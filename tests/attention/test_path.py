"""The engine `path` against attention written out with products of steps."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from farfield.algebra import contraction as algebra
from farfield.algebra.contraction import Contraction, ContractionTrail
from farfield.algebra.reflection import ReflectionFrame
from farfield.attention.engines import path, path_chunks
from farfield.attention.logit import Visible

CLOSE: Any = {"rtol": 0.0, "atol": 1e-11}


@pytest.fixture(params=[(4, 2**20), (3, 1)], ids=["chunks of 4", "chunks of 3, one at a time"])
def short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences in many chunks, met all at once or one after the other."""
    chunk, scores = request.param
    for module in (algebra, path, path_chunks):
        monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(path_chunks, "_SCORES", scores)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Case:
    """Random arguments of attention with gradients, and the same attention by definition."""

    def __init__(
        self,
        length: int = 14,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (6, 6),
        potential: str = "",
        holes: bool = False,
        window: int | None = None,
        sinks: int = 0,
    ) -> None:
        query_heads, key_heads = heads
        self.length, self.window, self.sinks = length, window, sinks
        self.q = drawn(2, query_heads, length, dims[0])
        self.k = drawn(2, key_heads, length, dims[0])
        self.v = drawn(2, key_heads, length, dims[1])
        self.w = torch.nn.functional.normalize(drawn(2, key_heads, length, dims[0]), dim=-1)
        self.beta = 2.0 * torch.rand(2, key_heads, length, dtype=torch.float64)
        shapes = {"query": (1, query_heads), "group": (2, key_heads)}
        self.u = None
        if potential:
            self.u = torch.rand(*shapes[potential], length, dtype=torch.float64).cumsum(-1)
        self.valid = torch.rand(2, length) < 0.7 if holes else None
        if self.valid is not None:
            self.valid[1, : length // 2] = False
            self.beta = self.beta * self.valid[:, None]
        for x in self.given:
            x.requires_grad_()

    @property
    def given(self) -> list[Tensor]:
        known = [self.q, self.k, self.v, self.w, self.beta]
        return known if self.u is None else [*known, self.u]

    def visible(self, start: int = 0, stop: int | None = None) -> Visible:
        stop = self.length if stop is None else stop
        valid = None if self.valid is None else self.valid[:, :stop]
        position = None
        if self.window is not None and valid is not None:
            position = (valid.cumsum(-1) - 1).clamp(min=0)
        return Visible(stop - start, stop, valid, position, self.window, self.sinks)

    def seen(self, row: int, i: int, j: int) -> bool:
        """Whether query i sees key j, by its words."""
        if i == j:
            return True
        real = [True] * self.length if self.valid is None else self.valid[row].tolist()
        if j > i or not real[j]:
            return False
        at, of = (max(sum(real[: t + 1]) - 1, 0) for t in (i, j))
        return self.window is None or at - of < self.window or of < self.sinks

    def definition(self) -> Tensor:
        """Σ_j softmax_j(q_iᵀ H_i ⋯ H_{j+1} k_j/√d + u_j - u_i) v_j, a route at a time."""
        groups = self.q.shape[1] // self.k.shape[1]
        k, v, w = (x.repeat_interleave(groups, 1) for x in (self.k, self.v, self.w))
        beta = self.beta.repeat_interleave(groups, 1)
        identity = torch.eye(k.shape[-1], dtype=torch.float64)
        steps = identity - beta[..., None, None] * w[..., :, None] * w[..., None, :]
        out = []
        for i in range(self.length):
            transport, scores = identity.expand_as(steps[:, :, 0]), []
            for j in range(i, -1, -1):
                key = (transport @ k[:, :, j, :, None]).squeeze(-1)
                score = (self.q[:, :, i] * key).sum(-1) / math.sqrt(k.shape[-1])
                if self.u is not None:
                    u = self.u.repeat_interleave(self.q.shape[1] // self.u.shape[1], 1)
                    score = score + u[..., j] - u[..., i]
                unseen = torch.tensor([not self.seen(row, i, j) for row in range(2)])
                scores.append(score.masked_fill(unseen[:, None], -math.inf))
                transport = transport @ steps[:, :, j]
            weight = torch.stack(scores[::-1], -1).softmax(-1)
            out.append((weight[..., None] * v[:, :, : i + 1]).sum(-2))
        return torch.stack(out, -2)

    def contraction(self, start: int, stop: int) -> Contraction:
        return Contraction(self.w[:, :, start:stop], self.beta[:, :, start:stop])

    def attend(self) -> Tensor:
        return path.attend(
            self.q,
            self.k,
            self.v,
            self.contraction(0, self.length),
            potential=self.u,
            visible=self.visible(),
        )

    def trail(self, start: int, stop: int) -> ContractionTrail:
        return ContractionTrail.of(self.contraction(start, stop), self.k[:, :, start:stop])

    def cached(self, trail: ContractionTrail, start: int, stop: int) -> Tensor:
        return path.attend_cached(
            self.q[:, :, start:stop],
            trail,
            self.v[:, :, :stop],
            potential=None if self.u is None else self.u[..., :stop],
            visible=self.visible(start, stop),
        )

    def in_parts(self, parts: list[int], recording: bool) -> Tensor:
        """The whole, from calls that see `parts` tokens each."""
        trail, start, out = None, 0, []
        for count in parts:
            new = self.trail(start, start + count)
            trail = new if trail is None else trail.joined(new)
            out.append(self.cached(trail, start, start + count))
            trail = trail if recording else trail.last()
            start += count
        return torch.cat(out, -2)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"length": 1},
    "one chunk": {"length": 3},
    "whole chunks": {"length": 12, "heads": (2, 2)},
    "value dimension": {"dims": (6, 3)},
    "potential of query heads": {"potential": "query"},
    "potential of key heads": {"potential": "group", "heads": (4, 1), "dims": (4, 7)},
    "padding": {"holes": True, "potential": "group"},
    "window": {"window": 5, "length": 16},
    "window and sinks": {"window": 3, "sinks": 2, "length": 16},
    "window and padding": {"window": 4, "sinks": 1, "holes": True, "length": 14},
    "all of it": {"window": 6, "sinks": 1, "holes": True, "potential": "query", "length": 14},
}


def close_with_gradients(ours: Tensor, want: Tensor, given: list[Tensor]) -> None:
    torch.testing.assert_close(ours, want, **CLOSE)
    weight = drawn(*want.shape)
    found = torch.autograd.grad(ours, given, weight)
    expected = torch.autograd.grad(want, given, weight, materialize_grads=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_values_and_gradients_equal_products_of_steps(options: dict[str, Any]) -> None:
    case = Case(**options)
    close_with_gradients(case.attend(), case.definition(), case.given)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ["plain", "value dimension", "window and sinks", "all of it"])
def test_every_split_gives_the_whole(name: str) -> None:
    case = Case(**CASES[name])
    want = case.definition()
    with torch.no_grad():
        splits = [[cut, case.length - cut] for cut in range(1, case.length)]
        for parts in [*splits, [1] * case.length, [case.length]]:
            torch.testing.assert_close(case.in_parts(parts, False), want, **CLOSE)
    parts = [5, 1, case.length - 6]
    close_with_gradients(case.in_parts(parts, True), want, case.given)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_tokens_that_are_cropped_leave_no_trace(count: int) -> None:
    case, wrong = Case(length=17, potential="group"), Case(length=17)
    want = case.definition()
    with torch.no_grad():
        trail = case.trail(0, 6).last().joined(case.trail(6, 8))
        guess = ContractionTrail.of(wrong.contraction(8, 8 + count), wrong.k[:, :, 8 : 8 + count])
        for back in (0, 1, 2):  # the guess, and real tokens before it
            cut = trail.joined(guess).cropped(count + back)
            whole = cut.joined(case.trail(8 - back, 17))
            found = case.cached(whole, 8 - back, 17)
            torch.testing.assert_close(found, want[:, :, 8 - back :], **CLOSE)


@pytest.mark.usefixtures("short")
def test_beams_change_places() -> None:
    case, order = Case(length=13), torch.tensor([1, 1, 0])
    want = case.definition()[order]
    with torch.no_grad():
        trail = case.trail(0, 9).last().mapped(lambda x: x[order])
        for name in ("q", "k", "v", "w", "beta"):
            setattr(case, name, getattr(case, name)[order])
        found = case.cached(trail.joined(case.trail(9, 13)), 9, 13)
    torch.testing.assert_close(found, want[:, :, 9:], **CLOSE)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention as one matrix."""
    length = q.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    table = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
    return table.softmax(-1) @ v


@pytest.mark.parametrize("length", [40, 300])
def test_strength_2_is_the_reflection_and_0_no_position_at_all(length: int) -> None:
    case = Case(length=length, heads=(2, 2), dims=(8, 8))
    q, k, v, w = (x.detach().requires_grad_() for x in (case.q, case.k, case.v, case.w))
    frame = ReflectionFrame.from_vectors(w)
    for beta, pull in ((2.0, frame.pull), (0.0, lambda x: x)):
        contraction = Contraction(w, torch.full_like(w[..., 0], beta))
        ours = path.attend(q, k, v, contraction, visible=Visible(length, length))
        torch.testing.assert_close(ours, attention(pull(q), pull(k), v), **CLOSE)
    contraction = Contraction(w, torch.full_like(w[..., 0], 2.0))
    ours = path.attend(q, k, v, contraction, visible=Visible(length, length))
    # The frame's vector is made a unit one, so that its gradient has no part along the vector.
    weight = drawn(*ours.shape)
    *found, of_w = torch.autograd.grad(ours, (q, k, v, w), weight)
    *expected, want_w = torch.autograd.grad(
        attention(frame.pull(q), frame.pull(k), v), (q, k, v, w), weight
    )
    across = of_w - (of_w * w).sum(-1, keepdim=True) * w
    for one, other in zip((*found, across), (*expected, want_w), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_are_rounded_once(kind: torch.dtype) -> None:
    case = Case(length=300, dims=(16, 16), potential="group")
    q, k, v = (x.detach().to(kind) for x in (case.q, case.k, case.v))
    contraction = Contraction(case.w.detach().float(), case.beta.detach().float())
    wide = [x.double() for x in (q, k, v)]
    exact = Contraction(contraction.w.double(), contraction.beta.double())
    seen = case.visible()
    given = {"potential": case.u.detach() if case.u is not None else None, "visible": seen}
    want = path.attend(*wide, exact, **given)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours = path.attend(q, k, v, contraction, **given)
        cached = path.attend_cached(q, ContractionTrail.of(contraction, k), v, **given)
    assert ours.dtype == cached.dtype == kind
    bound = 2 * torch.finfo(kind).eps * want.abs().max() + 5e-6
    assert (ours.double() - want).abs().max() < bound
    assert (cached.double() - want).abs().max() < 2 * bound


def test_what_is_kept_for_the_backward_pass_is_linear_in_length() -> None:
    def kept(length: int) -> int:
        case, sizes = Case(length=length, dims=(16, 16)), []

        def measured(x: Tensor) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(measured, lambda x: x):
            assert case.attend().requires_grad
        return sum(sizes)

    assert kept(1024) < 2.1 * kept(512)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("learned", [False, True])
def test_the_operators_keep_their_promises_to_the_compiler(learned: bool) -> None:
    case = Case(length=9, window=5, sinks=1, holes=True, potential="query")
    case.valid, seen = None, case.visible()
    q, u = case.q.unflatten(1, (2, 2)), case.u
    assert u is not None
    u = u.unflatten(1, (2, 2)).detach().requires_grad_(learned)
    given = (q, case.k, case.w, case.beta, case.v, u, seen.valid, seen.position, 5, 1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    found = torch.library.opcheck(torch.ops.farfield.path.default, given, test_utils=checks)
    out = torch.ops.farfield.path(*given)
    back = (torch.randn_like(out[0]), *given[:6], *out, *given[6:], learned)
    back = tuple(x.detach() if isinstance(x, Tensor) else x for x in back)
    again = torch.library.opcheck(torch.ops.farfield.path_backward.default, back, test_utils=checks)
    assert set(found.values()) == set(again.values()) == {"SUCCESS"}


def test_chunks_that_no_query_sees_are_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[int, int]] = []
    chunks_of = path_chunks.chunks_of

    def counted(x: Tensor, first: int, last: int) -> Tensor:
        met.append((first, last))
        return chunks_of(x, first, last)

    monkeypatch.setattr(path_chunks, "chunks_of", counted)
    case = Case(length=1000, window=100, sinks=3)
    case.attend()
    # Keys and values of: chunk 0 as sinks' for all but the first two, and the one before each.
    assert sorted(set(met)) == [(0, 1), *((i, i + 1) for i in range(1, 7))]


def test_no_tokens_at_all() -> None:
    case = Case(length=7)
    none = path.attend(
        *(x[:, :, :0] for x in (case.q, case.k, case.v)),
        case.contraction(0, 0),
        visible=Visible(0, 0),
    )
    assert none.shape == (2, 4, 0, 6)
    trail = case.trail(0, 7).last().joined(case.trail(7, 7))
    assert case.cached(trail, 7, 7).shape == (2, 4, 0, 6)
    assert trail.length == 7


def test_steps_of_other_tokens_are_refused() -> None:
    case = Case(length=7)
    with pytest.raises(ValueError, match="same tokens"):
        path.attend(case.q, case.k, case.v, case.contraction(0, 6), visible=case.visible())
