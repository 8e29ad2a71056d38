"""The attention of farfield's models, through an engine that is passed with the call.

The engine computes the attention of all queries with the kernels that serve them anyway, and shows
the sampled ones to a session, written out. The model knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from farfield.algebra.contraction import CHUNK, Contraction, ContractionTrail
from farfield.algebra.rotation import RotationFrame
from farfield.attention import Attention, engines, logit
from farfield.attention.engines.engine import FEATURES, FLOATS, Engine
from farfield.attention.logit import Visible
from farfield.attention.mechanism import Carry
from farfield.diagnosis.session import Session
from farfield.diagnosis.tiles import Attended, Bias, DotProducts, Keys, Scores, grouped
from farfield.model import FarfieldCache


@contextmanager
def attached(session: Session) -> Iterator[dict[str, Any]]:
    """The session sees the attention of a farfield model that is called with what this yields.

    Raises: ValueError for heads that are chosen where steps contract.
    """
    check_heads(session.model, session.heads)
    watching = _Watching(session)
    with ExitStack() as stack:
        stack.enter_context(session.following())
        for layer in session.decoder:
            attention = layer.self_attn
            assert isinstance(attention, Attention)
            hook = attention.mechanism.register_forward_hook(watching.carry_of)
            stack.callback(hook.remove)
        yield {"engine": watching.engine}


def cache(model: Any) -> FarfieldCache:
    """A cache for a text that is fed in pieces; nothing in it is evicted."""
    kept = FarfieldCache(model.config.num_hidden_layers)
    kept.activate_past_recording()
    return kept


def contracts(model: Any) -> bool:
    """Whether steps of a farfield model are contractions, which no key can absorb."""
    return any(mechanism.contracts for mechanism in model.mechanisms)


def check_heads(model: Any, heads: Sequence[int] | None) -> None:
    """Raises ValueError for heads that are chosen where steps of a farfield model contract."""
    if heads is not None and contracts(model):
        raise ValueError("heads can't be chosen where transports contract; expected all")


class _Watching:
    """The engine of the probe; the Carry of the layer at work is remembered beside it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.carry = Carry()
        self.engine = Engine(
            name="probe",
            function=self.attend,
            devices=frozenset(),
            dtypes=FLOATS,
            gradients=frozenset(),
            serves=frozenset(FEATURES),
            along=self.attend,
            trail=self.attend,
        )

    def carry_of(self, module: nn.Module, given: Any, carry: Carry) -> None:
        """A mechanism says how the tokens of its layer carry."""
        self.carry = carry

    def attend(
        self,
        q: Tensor,
        k: Tensor | ContractionTrail,
        v: Tensor,
        contraction: Contraction | None = None,
        *,
        potential: Tensor | None = None,
        visible: Visible,
    ) -> Tensor:
        """The attention of all queries; the sampled ones are shown. Shapes: as in `Engine`."""
        layer = self.session.called()
        if self.session.wanted():
            heads = self.session.chosen(q.shape[1])
            scores, values = self._scores(q, k, v, contraction, potential, visible)
            self._show(layer, scores, values, visible, heads)
        return engines.attend("auto", q, k, v, contraction, potential=potential, visible=visible)

    def _scores(
        self,
        q: Tensor,
        k: Tensor | ContractionTrail,
        v: Tensor,
        contraction: Contraction | None,
        potential: Tensor | None,
        visible: Visible,
    ) -> tuple[Scores, Tensor]:
        """The logits of the heads that are looked at, and the values they read."""
        groups = v.shape[1]
        if self.session.heads is not None:
            assert isinstance(k, Tensor)
            heads = torch.tensor(self.session.chosen(q.shape[1]), device=q.device)
            shared = heads // (q.shape[1] // groups)
            if potential is not None:
                potential = logit.per_query_head(potential, q.shape[1])[:, heads]
            q, k, v, groups = q[:, heads], k[:, shared], v[:, shared], len(heads)
        added = None if potential is None else _bias(potential, visible, groups)
        query = grouped(q, groups)
        if contraction is not None:
            assert isinstance(k, Tensor)
            k = ContractionTrail.of(contraction, k)
        if isinstance(k, ContractionTrail):
            return Contracted(query, k, added), v
        return DotProducts(query, k, logit.scale(q.shape[-1]), None, added), v

    def _show(
        self, layer: int, scores: Scores, v: Tensor, visible: Visible, heads: tuple[int, ...]
    ) -> None:
        self.session.show(
            Attended(
                layer=layer,
                start=visible.keys - visible.queries,
                queries=visible.queries,
                first=0,
                scores=scores,
                values=v,
                visible=lambda rows: _seen(visible, rows),
                position=self.session.tokens.position,
                heads=heads,
                real=self.session.tokens.real,
                carried=self.carry.value_frame is not None,
                planes=isinstance(self.carry.frame, RotationFrame),
            )
        )


def _bias(potential: Tensor, visible: Visible, groups: int) -> Bias:
    """u_j − u_i of a tile."""
    u = potential.unflatten(1, (groups, -1))  # [B or 1, G, 1 or R, K]
    offset = visible.keys - visible.queries

    def added(rows: Tensor, keys: Keys) -> Tensor:
        here = u[..., keys].unsqueeze(-2) if isinstance(keys, slice) else u[..., keys]
        return here - u[..., rows + offset].unsqueeze(-1)

    return added


def _seen(visible: Visible, rows: Tensor) -> Tensor:
    """Which keys each of the queries sees: bool [B or 1, Q, K]."""
    offset = visible.keys - visible.queries
    if visible.plain:
        key = torch.arange(visible.keys, device=rows.device)
        return (key <= (rows + offset).unsqueeze(-1)).unsqueeze(0)
    found = [
        visible.tile(row + offset, row + offset + 1, 0, visible.keys, rows.device)
        for row in rows.tolist()
    ]
    seen = torch.cat(found, -2)
    return seen[:, 0] if seen.ndim == 4 else seen.unsqueeze(0)


class Contracted:
    """Scores along contractions: q_iᵀ H_i ⋯ H_{j+1} k_j / √d, for some queries at a time.

    What was computed for the last queries is kept, until others are asked for.

    Shapes: query [B, G, R, T, d], the last T tokens of the trail.
    """

    def __init__(self, query: Tensor, trail: ContractionTrail, added: Bias | None) -> None:
        self.query = query
        self.trail = trail.settled
        self.added = added
        self._known: tuple[list[int], Tensor] | None = None

    def content(self, rows: Tensor, keys: Keys) -> Tensor:
        """As in `Scores`."""
        table = self._table(rows)
        if isinstance(keys, slice):
            return table[..., keys]
        return table.gather(-1, keys.expand(*table.shape[:-2], *keys.shape))

    def bias(self, rows: Tensor, keys: Keys) -> Tensor | None:
        """As in `Scores`."""
        return None if self.added is None else self.added(rows, keys)

    def _table(self, rows: Tensor) -> Tensor:
        """[B, G, R, Q, K]."""
        wanted = rows.tolist()
        if self._known is None or not set(wanted) <= set(self._known[0]):
            start = self.trail.length - self.query.shape[-2]
            runs = [list(run) for _, run in groupby(wanted, lambda row: (row + start) // CHUNK)]
            self._known = wanted, torch.cat([self._run(run) for run in runs], -2)
        known, table = self._known
        return table if known == wanted else table[..., [known.index(row) for row in wanted], :]

    def _run(self, rows: list[int]) -> Tensor:
        """The scores of queries of one chunk [B, G, R, Q, K]; those of later keys mean nothing."""
        trail, shape = self.trail, (self.query.shape[2], len(rows))
        tokens = torch.tensor(rows, device=self.query.device)
        tokens = tokens + trail.length - self.query.shape[-2]
        index = int(tokens[0]) // CHUNK
        chunk = trail.chunk(index)
        wide = torch.promote_types(self.query.dtype, chunk.taking.dtype)
        query = self.query[..., rows, :].to(wide).flatten(2, 3)  # [B, G, R·Q, d]
        step = torch.arange(chunk.length, device=query.device)
        own = (step <= (tokens % CHUNK).unsqueeze(-1)).to(wide).repeat(shape[0], 1)
        near, moved = chunk.met(query, own)
        back = (moved @ trail.reach(index).flatten(-2)).unflatten(-1, (index, query.shape[-1]))
        waiting = trail.keys[:, :, : index * CHUNK].to(wide).unflatten(2, (index, CHUNK))
        far = torch.einsum("bgrcd,bgcnd->bgrcn", back, waiting).flatten(-2)
        scores = query.new_zeros(*query.shape[:-1], trail.length)
        scores[..., : index * CHUNK] = far
        scores[..., index * CHUNK : index * CHUNK + chunk.length] = near
        return scores.unflatten(2, shape) * logit.scale(query.shape[-1])
