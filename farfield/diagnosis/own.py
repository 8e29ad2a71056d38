"""The attention of farfield's models, through an engine that is passed with the call.

The engine computes the attention of all queries with the kernels that serve them anyway, and shows
the sampled ones to a session, written out. The model knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from farfield.algebra.contraction import CHUNK, ContractionTrail
from farfield.algebra.rotation import RotationFrame
from farfield.attention import Attention, engines, logit
from farfield.attention.engines.engine import FEATURES, FLOATS, Engine
from farfield.attention.logit import Visible
from farfield.attention.mechanism import Carry
from farfield.diagnosis.session import Session
from farfield.diagnosis.tiles import Attended, Bias, DotProducts, Keys, Scores, grouped
from farfield.model import FarfieldCache


@contextmanager
def attached(session: Session, fed: bool = False) -> Iterator[dict[str, Any]]:
    """The session sees the attention of a farfield model that is called with what this yields.

    Where steps contract there are no keys for an engine: the layer's projections are read instead.

    Raises: ValueError for a text that is `fed` in pieces where steps contract.
    """
    contracts = contracted(session.model)
    if contracts and fed:
        raise ValueError(
            "a text can't be fed in pieces where transports contract; expected feed=None"
        )
    watching = _Watching(session)
    with ExitStack() as stack:
        stack.enter_context(session.following())
        for layer in session.decoder:
            attention = layer.self_attn
            assert isinstance(attention, Attention)
            hook = attention.mechanism.register_forward_hook(watching.carry_of)
            stack.callback(hook.remove)
            for name in ("q_proj", "k_proj", "v_proj") if contracts else ():
                reading = getattr(attention, name).register_forward_hook(watching.reading(name))
                stack.callback(reading.remove)
            if contracts:
                before = attention.o_proj.register_forward_pre_hook(watching.contracted)
                stack.callback(before.remove)
        yield {} if contracts else {"engine": watching.engine}


def cache(model: Any) -> FarfieldCache:
    """A cache for a text that is fed in pieces; nothing in it is evicted."""
    kept = FarfieldCache(model.config.num_hidden_layers)
    kept.activate_past_recording()
    return kept


def contracted(model: Any) -> bool:
    """Whether a layer's steps are contractions: seen from the Carry of one token."""
    found: list[Carry] = []
    hooks = [
        mechanism.register_forward_hook(lambda _, __, carry: found.append(carry))
        for mechanism in model.mechanisms
    ]
    try:
        model.base_model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return any(carry.contraction is not None for carry in found)


class _Watching:
    """What is remembered of the layer at work: its Carry, and projections where they are read."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.carry = Carry()
        self.projected: dict[str, Tensor] = {}
        self.engine = Engine(
            name="probe",
            function=self.attend,
            devices=frozenset(),
            dtypes=FLOATS,
            gradients=frozenset(),
            serves=frozenset(FEATURES),
        )

    def carry_of(self, module: nn.Module, given: Any, carry: Carry) -> None:
        """A mechanism says how the tokens of its layer carry."""
        self.carry = carry

    def reading(self, name: str) -> Callable[..., None]:
        """Remembers what a projection gives."""

        def read(module: nn.Module, given: Any, output: Tensor) -> None:
            self.projected[name] = output

        return read

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        potential: Tensor | None = None,
        visible: Visible,
    ) -> Tensor:
        """The attention of all queries; the sampled ones are shown. Shapes: as in `Engine`."""
        layer = self.session.called()
        if self.session.wanted():
            heads = self.session.chosen(q.shape[1])
            groups, chosen = v.shape[1], torch.tensor(heads, device=q.device)
            if self.session.heads is not None:
                shared = chosen // (q.shape[1] // groups)
                u = _chosen(potential, chosen, q.shape[1])
                added = None if u is None else _bias(u, visible, len(heads))
                scores = DotProducts(
                    grouped(q[:, chosen], len(heads)),
                    k[:, shared],
                    logit.scale(q.shape[-1]),
                    None,
                    added,
                )
                self._show(layer, scores, v[:, shared], visible, heads)
            else:
                added = None if potential is None else _bias(potential, visible, groups)
                scores = DotProducts(grouped(q, groups), k, logit.scale(q.shape[-1]), None, added)
                self._show(layer, scores, v, visible, heads)
        return engines.attend("auto", q, k, v, potential=potential, visible=visible)

    def contracted(self, module: nn.Module, given: Any) -> None:
        """A layer whose steps contract is done: what it attended to follows from what was read."""
        layer = self.session.called()
        if not self.session.wanted():
            return
        if self.session.heads is not None:
            raise ValueError("heads can't be chosen where transports contract; expected all")
        carry, real = self.carry, self.session.tokens.real
        assert carry.contraction is not None
        dim = carry.contraction.w.shape[-1]
        q, k, v = (
            self.projected.pop(name).unflatten(-1, (-1, dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if carry.logit_scale is not None:
            q = q * carry.logit_scale[..., None]
        position = None if real is None or carry.window is None else self.session.tokens.position
        visible = Visible(q.shape[2], k.shape[2], real, position, carry.window, carry.sinks)
        added = None if carry.potential is None else _bias(carry.potential, visible, k.shape[1])
        trail = ContractionTrail.of(carry.contraction, k)
        scores = Contracted(grouped(q, k.shape[1]), trail, added)
        self._show(layer, scores, v, visible, self.session.chosen(q.shape[1]))

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


def _chosen(potential: Tensor | None, heads: Tensor, of: int) -> Tensor | None:
    """The potential of some query heads. Shapes: [B or 1, G or H, K] -> [B or 1, heads, K]."""
    if potential is None:
        return None
    return potential.repeat_interleave(of // potential.shape[1], 1)[:, heads]


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
