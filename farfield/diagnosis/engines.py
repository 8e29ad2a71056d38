"""The engines of interventions: attention that treats far keys in another way.

Near and far attention are computed apart, by the engines that serve them anyway, and joined by
their log-sum-exps: one softmax, in memory linear in the keys. Along contractions, which no key can
absorb, the far keys are not apart from the near ones: `far_logits_mean` and `far_frame` don't serve
them, and the others serve whole sequences.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farfield.attention import logit
from farfield.attention.engines import explicit, kernel, path, sdpa
from farfield.attention.engines.engine import FEATURES, FLOATS, Engine
from farfield.attention.logit import Visible, per_query_head
from farfield.attention.mechanisms.alibi import slopes

NONE = "none"
_SERVES = frozenset(FEATURES) - {"padding", "positions"}
_Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Far:
    """What an intervention needs to know.

    near_window w: keys at a distance of at least w are far. train_length L₀. planes: frames are
    rotations of planes, and so is the random map (else any orthogonal one); carried: values ride
    along, and are moved as keys are. seed names the random map, one for each key head.

    Units: tokens. Raises: ValueError for a window or a length below 1 or 2.
    """

    near_window: int
    train_length: int
    planes: bool = True
    carried: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.near_window < 1:
            raise ValueError(f"near_window is {self.near_window}; expected at least 1 token")
        if self.train_length < 2:
            raise ValueError(f"train_length is {self.train_length}; expected at least 2 tokens")


def engine(name: str, far: Far) -> Engine:
    """The engine of an intervention; `none` is the model's own attention.

    Serves grouped heads, potentials and windows, without gradients and padding. Raises: ValueError
    for an unknown name; when it is called, for what it doesn't serve, and a near window that leaves
    no far key in the model's own.
    """
    if name == NONE:
        return Engine(
            NONE, sdpa.attend, frozenset(), FLOATS, frozenset(), frozenset(FEATURES),
            along=path.attend, trail=path.attend_cached,
        )  # fmt: skip
    check_names([name])
    attend, along = _TABLE[name]
    return Engine(
        name, attend(far), frozenset(), FLOATS, frozenset(), _SERVES,
        along=None if along is None else along(far),
    )  # fmt: skip


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError, naming the nearest, for one that is no intervention."""
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"intervention {name!r}: expected one of {', '.join(NAMES)}{hint}")


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, potential: Tensor | None, visible: Visible
) -> tuple[Tensor, Tensor]:
    engine_ = sdpa if kernel.gives_lse(q.device) else explicit
    return engine_.with_lse(q, k, v, potential=potential, visible=visible)


@dataclass(frozen=True)
class _Parts:
    """Near and far attention of one call, apart.

    `first` is the first query that has far keys. Far keys of query i are those up to i − w, so far
    attention is plain causal attention of the later queries to the earlier keys.
    """

    far: Far
    q: Tensor
    k: Tensor
    v: Tensor
    potential: Tensor | None
    visible: Visible

    @property
    def first(self) -> int:
        """The first query with a far key: all before it see near keys alone."""
        return max(0, self.far.near_window - self.visible.keys + self.visible.queries)

    def near(self) -> tuple[Tensor, Tensor]:
        """Attention to near keys alone, and its log-sum-exp."""
        return _with_lse(self.q, self.k, self.v, self.potential, _near(self.far, self.visible))

    def distant(self, turn: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attention of queries `first`, … to far keys alone, and its log-sum-exp.

        `turn` [Hk, d, d] moves every key: qᵀ R k = (Rᵀ q)ᵀ k.
        """
        keys = self.visible.keys - self.far.near_window
        q = self.q[..., self.first :, :]
        if turn is not None:
            q = _turned(q, turn.mT)
        window = self.visible.window
        seen = Visible(
            q.shape[-2], keys, window=None if window is None else window - self.far.near_window,
            sinks=self.visible.sinks,
        )  # fmt: skip
        u = None if self.potential is None else self.potential[..., :keys]
        out, lse = _with_lse(q, self.k[..., :keys, :], self.v[..., :keys, :], u, seen)
        return out, lse + self._shift(q.shape[-2])

    def _shift(self, queries: int) -> Tensor | float:
        """u_{i−w} − u_i: the kernel took the former for the query's own. [B or 1, H, queries]."""
        if self.potential is None:
            return 0.0
        at_query = self.potential[..., -queries:]
        taken = self.potential[..., : -self.far.near_window][..., -queries:]
        return per_query_head(taken - at_query, self.q.shape[1])

    def joined(
        self, near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor], keep_far: bool = True
    ) -> Tensor:
        """One softmax over both; `keep_far` False leaves the far values out, not their weights."""
        out, lse = near[0].double(), near[1].double()
        whole = torch.logaddexp(lse[..., self.first :], far[1].double())
        out[..., self.first :, :] *= (lse[..., self.first :] - whole).exp().unsqueeze(-1)
        if keep_far:
            out[..., self.first :, :] += far[0] * (far[1] - whole).exp().unsqueeze(-1)
        return out.to(self.v.dtype)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """R x for query heads that share R with their group. Shapes: x [B, H, T, d], R [Hk, d, d]."""
    groups = turn.shape[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    turned = x.unflatten(1, (groups, -1)).to(wide) @ turn.to(wide).mT.unsqueeze(1)
    return turned.flatten(1, 2).to(x.dtype)


class _Masked:
    """Near keys alone."""

    def __init__(self, far: Far, attend: _Attention) -> None:
        self.far, self.attend = far, attend

    def __call__(self, *vectors: Any, potential: Tensor | None = None, visible: Visible) -> Tensor:
        near = _near(self.far, visible)
        return self.attend(*vectors, potential=potential, visible=near)


def _near(far: Far, visible: Visible) -> Visible:
    """Of the keys that are seen, the near ones. Raises: ValueError where none could be far."""
    window = visible.window
    if window is not None and window <= far.near_window:
        raise ValueError(
            f"near_window is {far.near_window}, and the model's window {window}; expected a "
            "smaller near window, or nothing is far"
        )
    return replace(visible, window=far.near_window, sinks=0)


class _Joined:
    """Near attention as it is, joined with something else for the far keys."""

    def __init__(self, far: Far) -> None:
        self.far = far

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, potential: Tensor | None = None, visible: Visible
    ) -> Tensor:
        near = _near(self.far, visible)
        if visible.keys <= self.far.near_window:
            return sdpa.attend(q, k, v, potential=potential, visible=near)
        return self.parts(_Parts(self.far, q, k, v, potential, visible))

    def parts(self, parts: _Parts) -> Tensor:
        """The output of a call that has far keys."""
        raise NotImplementedError


class _ValuesDropped(_Joined):
    def parts(self, parts: _Parts) -> Tensor:
        return parts.joined(parts.near(), parts.distant(), keep_far=False)


class _ValuesDroppedAlong:
    """Near attention with the near keys' share of the weight, e^{near lse − lse}."""

    def __init__(self, far: Far) -> None:
        self.far = far

    def __call__(self, *vectors: Any, potential: Tensor | None = None, visible: Visible) -> Tensor:
        near = _near(self.far, visible)
        out, part = path.with_lse(*vectors, potential=potential, visible=near)
        _, whole = path.with_lse(*vectors, potential=potential, visible=visible)
        return (out * (part - whole).exp().unsqueeze(-1)).to(out.dtype)


class _OtherFrame(_Joined):
    def parts(self, parts: _Parts) -> Tensor:
        heads, dim = parts.k.shape[1], parts.k.shape[-1]
        turn = random_maps(self.far.seed, heads, dim, self.far.planes).to(parts.q.device)
        out, lse = parts.distant(turn)
        if self.far.carried:
            out = _turned(out, turn)
        return parts.joined(parts.near(), (out, lse))


class _LogitsMean(_Joined):
    """Far weights all e^{s̄}: ln Z_D = ln M + s̄ and the far output is the mean far value.

    s̄_i = c_i q_i·k̄/√d + ū − u_i needs means of keys, values and potentials over a range alone.
    """

    def parts(self, parts: _Parts) -> Tensor:
        first, visible, w = parts.first, parts.visible, self.far.near_window
        query = torch.arange(
            visible.keys - visible.queries + first, visible.keys, device=parts.q.device
        )
        stop = query - w + 1
        start = torch.zeros_like(query)
        if visible.window is not None:
            start = (query - visible.window + 1).clamp(min=0)
        sinks = torch.minimum(start, torch.full_like(start, visible.sinks))
        mean = _RangeMean(start, stop, sinks)
        q = parts.q[..., first:, :].double()
        key = per_query_head(mean(parts.k), q.shape[1])
        score = (q * key).sum(-1) * logit.scale(q.shape[-1])
        if parts.potential is not None:
            u = parts.potential
            added = mean(u.unsqueeze(-1)).squeeze(-1) - u[..., query]
            score = score + per_query_head(added, q.shape[1])
        value = per_query_head(mean(parts.v), q.shape[1])
        return parts.joined(parts.near(), (value, score + mean.count.log()))


class _RangeMean:
    """Means over keys [start, stop) and the sinks before them, for each query, from sums."""

    def __init__(self, start: Tensor, stop: Tensor, sinks: Tensor) -> None:
        self.start, self.stop, self.sinks = start, stop, sinks
        self.count = (stop - start + sinks).double()

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [..., K, ·] -> [..., queries, ·] float64."""
        sums = torch.nn.functional.pad(x.double().cumsum(-2), (0, 0, 1, 0))
        total = sums[..., self.stop, :] - sums[..., self.start, :] + sums[..., self.sinks, :]
        return total / self.count.unsqueeze(-1)


class _Alibi:
    """ALiBi's slopes, one for every query head, on top of the model's own potential."""

    def __init__(self, far: Far, attend: _Attention) -> None:
        self.attend = attend

    def __call__(
        self, q: Tensor, *keys: Any, potential: Tensor | None = None, visible: Visible
    ) -> Tensor:
        index = torch.arange(visible.keys, dtype=torch.float64, device=q.device)
        added = (slopes(q.shape[1]).to(q.device)[:, None] * index)[None]
        if potential is not None:
            added = added + per_query_head(potential, q.shape[1])
        return self.attend(q, *keys, potential=added, visible=visible)


class _LogN:
    """c_i = max(1, ln n_i / ln L₀), n_i the keys that query i sees."""

    def __init__(self, far: Far, attend: _Attention) -> None:
        self.far, self.attend = far, attend

    def __call__(
        self, q: Tensor, *keys: Any, potential: Tensor | None = None, visible: Visible
    ) -> Tensor:
        seen = torch.arange(visible.keys - visible.queries, visible.keys, device=q.device) + 1
        if visible.window is not None:
            outside = (seen - visible.window).clamp(min=0)
            seen = seen - outside + outside.clamp(max=visible.sinks)
        scale = (seen.double().log() / math.log(self.far.train_length)).clamp(min=1.0)
        q = (q * scale[:, None]).to(q.dtype)
        return self.attend(q, *keys, potential=potential, visible=visible)


def random_maps(seed: int, heads: int, dim: int, planes: bool) -> Tensor:
    """One random orthogonal map for each head: uniform turns of the planes (b, b + d/2), or Haar.

    Shapes: -> [heads, d, d] float64.
    """
    generator = torch.Generator().manual_seed(seed)
    if not planes:
        drawn = torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(drawn)
        return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    half = dim // 2
    angle = 2 * math.pi * torch.rand(heads, half, generator=generator, dtype=torch.float64)
    cos, sin = torch.diag_embed(angle.cos()), torch.diag_embed(angle.sin())
    top, bottom = torch.cat((cos, -sin), -1), torch.cat((sin, cos), -1)
    return torch.cat((top, bottom), -2)


_Made = Callable[[Far], _Attention]

_TABLE: dict[str, tuple[_Made, _Made | None]] = {
    "far_masked": (partial(_Masked, attend=sdpa.attend), partial(_Masked, attend=path.attend)),
    "far_values_dropped": (_ValuesDropped, _ValuesDroppedAlong),
    "far_logits_mean": (_LogitsMean, None),
    "far_frame": (_OtherFrame, None),
    "alibi": (partial(_Alibi, attend=sdpa.attend), partial(_Alibi, attend=path.attend)),
    "log_n": (partial(_LogN, attend=sdpa.attend), partial(_LogN, attend=path.attend)),
}
"""What makes the engine of each, for keys in a common frame and along a contraction (None: not)."""

NAMES = tuple(_TABLE)
"""All interventions."""

ALONG = tuple(name for name, (_, along) in _TABLE.items() if along is not None)
"""Those that serve steps that contract."""
