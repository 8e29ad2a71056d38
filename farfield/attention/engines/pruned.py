"""Attention that stops where a potential has left nothing, with a bound on what it leaves out.

Each block of queries takes its keys from near to far. After some of them Z_i = Σ_done e^logit_ij is
a lower bound of the whole normaliser, and everything further is bounded from above by norms alone,

    Σ_skipped e^logit_ij ≤ Σ_blocks e^(|q_i| max|k| / √d - u_i) Σ_{j in block} e^u_j,

so the block stops once the right side is at most ε Z_i for every row. Then, with w the share that
was skipped, w ≤ ε,

    |out - exact| = w |mean of skipped v - out| ≤ ε (max|v_skipped| + |out|).

Nothing is assumed of the potential: where it doesn't fall with distance, nothing is skipped. Heads
work apart, so that one with a long memory doesn't hold up the others. A window's sinks are never
skipped.

Serves: everything a call can ask for, on the CPU, without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farfield.attention import logit
from farfield.attention.engines import kernel
from farfield.attention.logit import Visible

_GRANULE = 64
"""Keys, and queries, that share one bound."""

_QUERIES = 1024
"""Most queries that stop together, and ..."""

_RANGE = 64.0
"""... by how many nats the potential may change between them, if that leaves a granule: it is what
float32 rounds, and how much longer the last row's reach is than it need be."""

_SLACK = 1e-3
"""Nats by which the bound must hold: Z is known from a float32 logarithm, to some 1e-5."""

Report = Callable[[Tensor], None]
"""Called with the share of the causal (query, key) pairs that were skipped, float64 [B, H]."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    potential: Tensor | None = None,
    visible: Visible,
    epsilon: float | None = None,
    report: Report | None = None,
) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j to within ε (max|v_skipped| + |out|) in every row.

    Shapes: as in `Engine`. `epsilon` is the rounding of float32 (float64 for float64) unless given.
    Raises: ValueError for an epsilon outside [0, 1).
    """
    if epsilon is None:
        epsilon = torch.finfo(kernel.wide_dtype(q.dtype)).eps
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}; expected a share of the normaliser in [0, 1)")
    if potential is None:
        potential = k.new_zeros(1, k.shape[1], k.shape[2], dtype=torch.float64)
    out, skipped = pruned(
        q, k, v, potential, visible.valid, visible.position, visible.window, visible.sinks, epsilon
    )
    if report is not None:
        report(skipped)
    return out


@torch.library.custom_op(
    "farfield::pruned",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor potential, Tensor? valid, Tensor? position, "
    "int? window, int sinks, float epsilon) -> (Tensor, Tensor)",
)
def pruned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    potential: Tensor,
    valid: Tensor | None,
    position: Tensor | None,
    window: int | None,
    sinks: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The output, and the share of causal pairs that were skipped, float64 [B, H]."""
    batch, heads = q.shape[:2]
    groups = heads // k.shape[1]
    visible = Visible(q.shape[-2], k.shape[-2], valid, position, window, sinks)
    potential = potential.expand(batch, -1, -1)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    skipped = q.new_zeros(batch, heads, dtype=torch.float64)
    together = groups if potential.shape[1] == k.shape[1] else 1  # query heads that share u
    least = math.log(epsilon) if epsilon else -math.inf
    for b in range(batch):
        row = replace(visible, valid=_row(valid, b), position=_row(position, b))
        for first in range(0, heads, together):
            some, head = slice(first, first + together), first // groups
            u = potential[b, first // (heads // potential.shape[1])]
            unit = _Unit.of(k[b, head], v[b, head], u, row, least)
            skipped[b, some] = unit.attend(q[b, some], out[b, some])
    return out, skipped


@pruned.register_fake
def _(q, k, v, potential, valid, position, window, sinks, epsilon):
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:2], dtype=torch.float64)


def _row(x: Tensor | None, b: int) -> Tensor | None:
    """Row b of a batch, or the one that all rows share."""
    return x if x is None or x.shape[0] == 1 else x[b : b + 1]


@dataclass(frozen=True)
class _Unit:
    """The query heads of one row that share keys and a potential.

    Shapes: k and v [K, width], u float64 [K]; norms and mass, of each granule the largest |k| and
    log Σ exp u, float64 [granules].
    """

    k: Tensor
    v: Tensor
    u: Tensor
    norms: Tensor
    mass: Tensor
    dim: int
    value_dim: int
    visible: Visible
    log_epsilon: float

    @classmethod
    def of(cls, k: Tensor, v: Tensor, u: Tensor, visible: Visible, log_epsilon: float) -> _Unit:
        """The unit of one key head."""
        keys, dim = k.shape
        width, dtype = kernel.riding_width(dim, v.shape[-1]), kernel.wide_dtype(k.dtype)
        wide = k.new_zeros(keys, width, dtype=dtype)
        wide[:, :dim] = k
        norms, mass = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float64), u
        if visible.valid is not None:
            unreal = ~visible.valid[0]
            norms, mass = norms.masked_fill(unreal, 0.0), u.masked_fill(unreal, -math.inf)
        short = -keys % _GRANULE
        norms = torch.nn.functional.pad(norms, (0, short)).unflatten(0, (-1, _GRANULE)).amax(-1)
        mass = torch.nn.functional.pad(mass, (0, short), value=-math.inf)
        mass = mass.unflatten(0, (-1, _GRANULE)).logsumexp(-1)
        values = kernel.padded(v.to(dtype), width)
        return cls(wide, values, u, norms, mass, dim, v.shape[-1], visible, log_epsilon)

    def attend(self, q: Tensor, out: Tensor) -> float:
        """Write the heads' output; returns the share of pairs skipped. Shapes: q [heads, T, d]."""
        keys, offset = self.visible.keys, self.visible.keys - self.visible.queries
        start, done, pairs = offset, 0, 0
        while start < keys:
            stop = self._stop(start)
            rows = slice(start - offset, stop - offset)
            found, reached, sinks = self._block(q[:, rows], start, stop)
            out[:, rows] = found[..., : self.value_dim]
            triangle = (stop - start) * (stop - start + 1) // 2
            done += triangle + (stop - start) * (start - reached + sinks)
            pairs += triangle + (stop - start) * start
            start = stop
        return 1.0 - done / pairs if pairs else 0.0

    def _stop(self, start: int) -> int:
        stop = min(start + _QUERIES, self.visible.keys)
        while stop - start > _GRANULE:
            low, high = self.u[start:stop].aminmax()
            if high - low <= _RANGE:
                break
            stop = start + max(_GRANULE, (stop - start) // 2)
        return stop

    def _block(self, q: Tensor, start: int, stop: int) -> tuple[Tensor, int, int]:
        """Output of the queries [start, stop), the first key reached, and sinks seen before it."""
        low, high = self.u[start:stop].aminmax()
        centre = (low + high) / 2
        wide = q.new_zeros(1, *q.shape[:-1], self.k.shape[-1], dtype=self.k.dtype)
        torch.mul(q, logit.scale(self.dim), out=wide[0, ..., : self.dim])
        wide[..., self.dim] = 1.0
        growth = self._growth(q, start) - centre
        out, lse = self._piece(wide, start, stop, start, stop, centre)
        reached, first = start, self.visible.first_key(start)
        while True:
            need = max(self._needed(growth, lse), first)
            if need >= reached:
                break
            take = reached - need
            if reached == start:  # what a quarter of them adds to Z may spare some of the rest
                take = min(take, max(stop - start, take // 4))
            more = self._piece(wide, start, stop, reached - take, reached, centre)
            out, lse = _merged(out, lse, *more)
            reached -= take
        windowed = self.visible.window is not None
        sinks = min(self.visible.sink_stop(), reached) if windowed else 0
        if sinks:
            out, lse = _merged(out, lse, *self._piece(wide, start, stop, 0, sinks, centre))
        return out[0], reached, sinks

    def _growth(self, q: Tensor, start: int) -> Tensor:
        """For granules of queries, the logarithm of the bound on all keys before each granule.

        Shapes: [heads · granules of q, granules before start + 1] float64; the first is -∞.
        """
        norms = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float64) * logit.scale(self.dim)
        norms = torch.nn.functional.pad(norms, (0, -norms.shape[-1] % _GRANULE))
        largest = norms.unflatten(-1, (-1, _GRANULE)).amax(-1).reshape(-1, 1)
        before = -(-start // _GRANULE)
        each = largest * self.norms[:before] + self.mass[:before]
        nothing = each.new_full((each.shape[0], 1), -math.inf)
        return torch.cat((nothing, each.logcumsumexp(-1)), -1)

    def _needed(self, growth: Tensor, lse: Tensor) -> int:
        """The first key that may not be skipped, for the sums known so far."""
        short = -lse.shape[-1] % _GRANULE
        known = torch.nn.functional.pad(lse[0].double(), (0, short), value=math.inf)
        least = known.unflatten(-1, (-1, _GRANULE)).amin(-1).reshape(-1, 1)
        spare = (growth <= least + self.log_epsilon - _SLACK).all(0)
        return (int(spare.sum()) - 1) * _GRANULE

    def _piece(
        self, q: Tensor, start: int, stop: int, first: int, last: int, centre: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of the queries [start, stop) to the keys [first, last) alone."""
        self.k[first:last, self.dim] = self.u[first:last] - centre
        k, v = self.k[None, None, first:last], self.v[None, None, first:last]
        mask, causal = None, first == start
        if not self.visible.plain:
            seen = self.visible.tile(start, stop, first, last, q.device)
            mask, causal = kernel.float_mask(seen, q.dtype), False
        out, lse = kernel.attend(q, k, v, mask, causal, 1.0)
        if lse is None:
            raise ValueError(f"pruned needs a log-sum-exp, and {q.device.type} gives none")
        return out, lse


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to two sets of keys from that to each."""
    both = torch.logaddexp(lse, more_lse)
    ours, theirs = (lse - both).exp().unsqueeze(-1), (more_lse - both).exp().unsqueeze(-1)
    return out * ours + more * theirs, both
