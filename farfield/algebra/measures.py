"""What is measured of attention, defined once: on a trained model and on the stylised one alike.

A row of attention is summed up by a few numbers for each set of keys (`LogitSums`, `ValueSums`).
Sums over disjoint sets of keys merge into those of their union, so a row may be read in tiles of
keys, in any order and grouping, without a row of weights ever existing whole. Every measure is a
function of such sums.

Shape letters: `...` batch, heads and queries; K keys of a tile; v value dimension. A set without a
key has log-sum-exp −∞; what has no meaning there (a mean, a gap) is NaN and never a made-up number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitSums:
    """What is kept of the logits s of one set of keys, one entry per row; all [...], float64.

    count   M, how many keys
    largest max s (−∞ without keys)
    least   min s (+∞ without keys)
    total   Σ s
    lse     ln Σ e^s
    lse2    ln Σ e^{2s}
    tilted  Σ s e^s / Σ e^s, the mean logit as softmax weighs it (0 without keys)
    """

    count: Tensor
    largest: Tensor
    least: Tensor
    total: Tensor
    lse: Tensor
    lse2: Tensor
    tilted: Tensor

    def merged(self, other: LogitSums) -> LogitSums:
        """The sums of the union of two disjoint sets. Shapes: both [...] alike."""
        lse = torch.logaddexp(self.lse, other.lse)
        return LogitSums(
            count=self.count + other.count,
            largest=torch.maximum(self.largest, other.largest),
            least=torch.minimum(self.least, other.least),
            total=self.total + other.total,
            lse=lse,
            lse2=torch.logaddexp(self.lse2, other.lse2),
            tilted=_share(self.lse, lse) * self.tilted + _share(other.lse, lse) * other.tilted,
        )


@dataclass(frozen=True)
class ValueSums:
    """What is kept of the values v_j of one set of keys under weights a_j = e^{s_j}, per row.

    Values count as they arrive at the query (carried ones in the query's frame, or in the root
    frame: norms are the same). All but `lse` are in units of the set's own weight, A = Σ a.

    lse         ln A                          [...]
    mean        Σ a v / A                     [..., v]
    coherent    Σ a |v| / A                   [...], what |mean| would be, all values aligned
    incoherent  Σ a² |v|² / A²                [...], what E |mean|² would be, directions independent
    """

    lse: Tensor
    mean: Tensor
    coherent: Tensor
    incoherent: Tensor

    def merged(self, other: ValueSums) -> ValueSums:
        """The sums of the union of two disjoint sets. Shapes: both alike."""
        lse = torch.logaddexp(self.lse, other.lse)
        mine, others = _share(self.lse, lse), _share(other.lse, lse)
        return ValueSums(
            lse=lse,
            mean=mine.unsqueeze(-1) * self.mean + others.unsqueeze(-1) * other.mean,
            coherent=mine * self.coherent + others * other.coherent,
            incoherent=mine**2 * self.incoherent + others**2 * other.incoherent,
        )


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """e^{part − whole}, 0 for an empty part of an empty whole."""
    return torch.where(part == -torch.inf, 0.0, torch.exp(part - whole))


def _divided(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator; NaN where the denominator is 0, whatever the numerator."""
    return torch.where(denominator == 0, torch.nan, numerator / denominator)


def logit_sums(logits: Tensor, mask: Tensor) -> LogitSums:
    """The sums of the logits where the mask is true, over the last axis.

    Exponentials are taken against the row's own maximum in the logits' type (float32 at least);
    what is kept is float64.

    Shapes: logits [..., K] and bool mask, broadcast together -> [...]. Units: nats, as softmax sees
    them (scale, bias and softcap included). K may be 0.
    Raises: ValueError for a logit in the set that is NaN or +∞.
    """
    logits, mask = torch.broadcast_tensors(logits, mask)
    inside, largest, weight = _weights(logits, mask)
    amount = weight.sum(-1, dtype=torch.float64)
    square = weight.square().sum(-1, dtype=torch.float64)
    zeroed = torch.where(mask, logits, 0.0).to(weight.dtype)
    shifted = torch.where(mask & (inside > -torch.inf), inside - _finite(largest), 0.0)
    least = torch.where(mask, logits, torch.inf)
    peak = largest.squeeze(-1).double()
    base = torch.where(peak == -torch.inf, 0.0, peak)
    tilted = (weight * shifted).sum(-1, dtype=torch.float64)
    return LogitSums(
        count=mask.sum(-1).double(),
        largest=peak,
        least=least.amin(-1).double() if logits.shape[-1] else torch.full_like(peak, torch.inf),
        total=zeroed.sum(-1, dtype=torch.float64),
        lse=amount.log() + base,
        lse2=square.log() + 2 * base,
        tilted=torch.where(amount == 0, 0.0, base + tilted / amount.clamp(min=1.0)),
    )


def value_sums(
    logits: Tensor, values: Tensor, mask: Tensor, norms: Tensor | None = None
) -> ValueSums:
    """The sums of the values where the mask is true, weighted by e^logit, over the keys.

    `norms` are the values' sizes |v| where they are known: transport keeps them, so they need to
    be taken once per key and not once per query.

    Shapes: logits [..., K] and bool mask, broadcast together; values [..., K, v] with leading axes
    that broadcast to those of a row's (add a query axis of size 1 for values all queries share);
    norms [..., K] likewise. Units: those of the values.
    Raises: ValueError for a logit in the set that is NaN or +∞.
    """
    logits, mask = torch.broadcast_tensors(logits, mask)
    # The largest weight of a set is 1: `scale` is A but for a set without weight.
    _, largest, weight = _weights(logits, mask)
    amount = weight.sum(-1, dtype=torch.float64)
    scale = amount.clamp(min=1.0)
    kind = torch.promote_types(values.dtype, torch.float32)
    size = torch.linalg.vector_norm(values, dim=-1, dtype=kind) if norms is None else norms
    size = size.to(weight.dtype)
    mean = (weight.to(kind).unsqueeze(-2) @ values.to(kind)).squeeze(-2).double()
    peak = largest.squeeze(-1).double()
    return ValueSums(
        lse=amount.log() + torch.where(peak == -torch.inf, 0.0, peak),
        mean=mean / scale.unsqueeze(-1),
        coherent=(weight * size).sum(-1, dtype=torch.float64) / scale,
        incoherent=(weight * size).square().sum(-1, dtype=torch.float64) / scale**2,
    )


def _weights(logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, −∞ outside the mask; their maximum [..., 1]; e^{logit − maximum})."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    inside = torch.where(mask, logits.to(wide), -torch.inf)
    if not inside.shape[-1]:
        return inside, inside.new_full((*inside.shape[:-1], 1), -torch.inf), inside
    largest = inside.amax(-1, keepdim=True)
    if bool((largest.isnan() | (largest == torch.inf)).any()):
        raise ValueError("logits hold NaN or +inf; expected finite numbers or -inf")
    return inside, largest, torch.exp(inside - _finite(largest))


def _finite(largest: Tensor) -> Tensor:
    return torch.where(largest == -torch.inf, 0.0, largest)


def far_mass(near: LogitSums | ValueSums, far: LogitSums | ValueSums) -> Tensor:
    """ρ_D = Z_D/(Z_D + Z_N) = σ(LSE_D − LSE_N): the attention weight on the far set.

    Shapes: [...]. Units: 0 to 1; NaN for a row that sees no key.
    """
    return torch.sigmoid(far.lse - near.lse)


def score_gap(near: LogitSums, far: LogitSums) -> Tensor:
    """max near − max far logit. Shapes: [...]. Units: nats, may be negative; NaN without both."""
    gap = near.largest - far.largest
    return torch.where((near.count > 0) & (far.count > 0), gap, torch.nan)


def mean_logit(sums: LogitSums) -> Tensor:
    """Σ s / M. Shapes: [...]. Units: nats; NaN without keys."""
    return _divided(sums.total, sums.count)


def log_mean_exp(sums: LogitSums) -> Tensor:
    """ℓ = ln((1/M) Σ e^s): what one far key adds, ln Z_D = ln M + ℓ.

    Shapes: [...]. Units: nats; NaN without keys.
    """
    return torch.where(sums.count == 0, torch.nan, sums.lse - sums.count.log())


def log_second_moment(sums: LogitSums) -> Tensor:
    """ln E2 = ln(M Σ e^{2s} / (Σ e^s)²), 0 for equal logits: how unequal the weights are.

    Shapes: [...]. Units: –; NaN without keys.
    """
    value = sums.count.log() + sums.lse2 - 2 * sums.lse
    return torch.where(sums.count == 0, torch.nan, value)


def half_range(sums: LogitSums) -> Tensor:
    """λ = (max s − min s)/2 over all the keys of a row: |s − centre| ≤ λ, and softmax can't see
    the centre.

    Give it the sums of every visible key (near merged with far), bias included.
    Shapes: [...]. Units: nats; NaN without keys.
    """
    return torch.where(sums.count == 0, torch.nan, 0.5 * (sums.largest - sums.least))


def entropy(sums: LogitSums) -> Tensor:
    """−Σ p ln p = ln Z − Σ p s over a set of keys, softmax confined to it.

    Shapes: [...]. Units: nats; NaN without keys.
    """
    return torch.where(sums.count == 0, torch.nan, (sums.lse - sums.tilted).clamp(min=0.0))


def effective_keys(sums: LogitSums) -> Tensor:
    """e^entropy: how many equal weights have this entropy. Shapes: [...]. Units: keys, 1 to M."""
    return entropy(sums).exp()


def inverse_participation(sums: LogitSums) -> Tensor:
    """1/Σp² = Z²/Σe^{2s}: how many equal weights have this sum of squares, at most e^entropy.

    Shapes: [...]. Units: keys, 1 to M; NaN without keys.
    """
    return torch.where(sums.count == 0, torch.nan, (2 * sums.lse - sums.lse2).exp())


@dataclass(frozen=True)
class SplitOutput:
    """A row's output as near part plus far part, both in the output's units.

    near, far [..., v]; out = near + far, the softmax output itself.
    far_mass [...]; cosine [...] between the parts (NaN where one is absent or zero).
    """

    near: Tensor
    far: Tensor
    far_mass: Tensor
    cosine: Tensor

    @property
    def out(self) -> Tensor:
        """The whole row. Shapes: [..., v]."""
        return self.near + self.far


def split_output(near: ValueSums, far: ValueSums) -> SplitOutput:
    """out = (1 − ρ_D) E_near v + ρ_D E_far v.

    Shapes: ValueSums of [...] rows. Units: those of the values; NaN for a row that sees no key.
    """
    mass = far_mass(near, far)
    close, distant = (1 - mass).unsqueeze(-1) * near.mean, mass.unsqueeze(-1) * far.mean
    sizes = torch.linalg.vector_norm(close, dim=-1) * torch.linalg.vector_norm(distant, dim=-1)
    return SplitOutput(close, distant, mass, _divided((close * distant).sum(-1), sizes))


def value_coherence(sums: ValueSums) -> Tensor:
    """(|Σav|² − Σa²|v|²)/((Σa|v|)² − Σa²|v|²): 1 for aligned values, 0 in mean for independent
    directions, negative where they cancel.

    Shapes: [...]. Units: –; NaN for fewer than two keys with a value.
    """
    power = sums.mean.square().sum(-1)
    room = sums.coherent**2 - sums.incoherent
    alone = room <= 1e-14 * sums.coherent**2
    return torch.where(alone, torch.nan, (power - sums.incoherent) / room)


def coherence_gain(sums: ValueSums) -> Tensor:
    """(Σa|v|)²/|Σav|²: by how much carried values' power falls short of the coherent sum (T5's
    gain). Shapes: [...]. Units: –; NaN where nothing arrives."""
    return _divided(sums.coherent**2, sums.mean.square().sum(-1))
