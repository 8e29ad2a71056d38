"""The definitions as float64 loops: what every faster path is compared with.

Nothing here is absorbed, chunked or vectorised over tokens: a transport is the product of the
steps on its route, a row of attention is a loop over its keys. Everything is differentiable, so
that gradients can be compared as well as values.

Shape letters: B batch, H query heads, G key/value heads (G divides H; query head h reads
key/value head h // (H/G)), T tokens, N = d/2 planes of a head of dimension d, v value dimension.
"""

import math

import torch
from torch import Tensor


def rotation_step(angle: Tensor) -> Tensor:
    """M = R(-phi) on the pairs (x_b, x_{b+N}), R(t) = [[cos t, -sin t], [sin t, cos t]].

    Shapes: angle [N] -> [2N, 2N]. Units: radians.
    Source: docs/mechanisms.md; a constant phi_b = omega_b is Llama's rotary embedding.
    """
    cos, sin = torch.diag(torch.cos(angle)), torch.diag(torch.sin(angle))
    return torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)], dim=0)


def rotation_steps(angle: Tensor) -> Tensor:
    """M_t = R(-phi_t) for every token, in float64.

    Shapes: angle [..., T, N] -> [..., T, 2N, 2N]. Units: radians.
    """
    angle = angle.double()
    *leading, planes = angle.shape
    rows = [rotation_step(row) for row in angle.reshape(-1, planes)]
    steps = torch.stack(rows) if rows else angle.new_zeros(0, 2 * planes, 2 * planes)
    return steps.reshape(*leading, 2 * planes, 2 * planes)


def reflection_steps(vector: Tensor) -> Tensor:
    """M_t = I - 2 w w^T / |w|^2 for every token, in float64; the identity where w = 0.

    Shapes: vector [..., T, d] -> [..., T, d, d].
    Source: docs/mechanisms.md.
    """
    vector = vector.double()
    *leading, dim = vector.shape
    one = torch.eye(dim, dtype=torch.float64)
    rows = [
        one - 2.0 * torch.outer(w, w) / (w @ w) if w.any() else one for w in vector.reshape(-1, dim)
    ]
    steps = torch.stack(rows) if rows else vector.new_zeros(0, dim, dim)
    return steps.reshape(*leading, dim, dim)


def exponential(matrix: Tensor) -> Tensor:
    """exp(A) = (sum_k (A / 2^m)^k / k!)^(2^m), m the least with |A| / 2^m below 1, 24 terms.

    (torch.matrix_exp is off by up to 1.3e-10 in float64, where |A| is small.)

    Shapes: [d, d] -> [d, d].
    """
    halvings = max(0, math.frexp(float(matrix.detach().norm()))[1])
    part = matrix / 2.0**halvings
    term = total = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    for k in range(1, 24):
        term = term @ part / k
        total = total + term
    for _ in range(halvings):
        total = total @ total
    return total


def dense_steps(angle: Tensor) -> Tensor:
    """M_t = exp(S_t), block by block, for every token, in float64.

    S has the entries `angle` above its diagonal, row by row, and their negatives below. Block n of
    N is the space of coordinates n, n + N, n + 2N, ...

    Shapes: angle [..., T, N, b(b-1)/2] -> [..., T, N b, N b]. Units: radians.
    Source: docs/mechanisms.md.
    """
    angle = angle.double()
    *leading, blocks, pairs = angle.shape
    size = (1 + math.isqrt(1 + 8 * pairs)) // 2
    above = [(i, j) for i in range(size) for j in range(i + 1, size)]
    rows = []
    for token in angle.reshape(-1, blocks, pairs):
        step = torch.zeros(blocks * size, blocks * size, dtype=torch.float64)
        for n, entries in enumerate(token):
            skew = torch.zeros(size, size, dtype=torch.float64)
            for (i, j), entry in zip(above, entries, strict=True):
                place = torch.zeros(size, size, dtype=torch.float64)
                place[i, j], place[j, i] = 1.0, -1.0
                skew = skew + entry * place
            inside = torch.eye(blocks * size, dtype=torch.float64)[n::blocks]
            step = step + inside.T @ exponential(skew) @ inside
        rows.append(step)
    steps = torch.stack(rows) if rows else angle.new_zeros(0, blocks * size, blocks * size)
    return steps.reshape(*leading, blocks * size, blocks * size)


def frames(steps: Tensor) -> Tensor:
    """F_t = M_t M_{t-1} ... M_1, the step of token t included.

    Shapes: steps [T, d, d], T >= 1 -> [T, d, d].
    """
    frame = torch.eye(steps.shape[-1], dtype=torch.float64)
    found = []
    for step in steps:
        frame = step @ frame
        found.append(frame)
    return torch.stack(found)


def transport(steps: Tensor, source: int, query: int) -> Tensor:
    """P_{j->i} = M_i M_{i-1} ... M_{j+1} for j = source <= i = query; P_{i->i} = I.

    Shapes: steps [T, d, d] -> [d, d]. Tokens are counted from 0.
    """
    product = torch.eye(steps.shape[-1], dtype=torch.float64)
    for step in steps[source + 1 : query + 1]:
        product = step @ product
    return product


def visible(
    query: int, source: int, valid: Tensor, window: int | None = None, sinks: int = 0
) -> bool:
    """Row i sees key j if j <= i, key j is valid, and fewer than `window` valid tokens lie between
    them, i counted, or fewer than `sinks` before j. Shapes: valid [T] of bool. Units: tokens.
    """
    if source > query or not valid[source]:
        return False
    if window is None:
        return True
    between, before = int(valid[source:query].sum()), int(valid[:source].sum())
    return between < window or before < sinks


def logits(
    query: Tensor,
    key: Tensor,
    *,
    steps: Tensor | None = None,
    potential: Tensor | None = None,
    logit_scale: Tensor | None = None,
    valid: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """logit_ij = c_i q_i^T P_{j->i} k_j / sqrt(d) + (u_j - u_i), visible or -inf.

    Shapes: query [B, H, T, d]; key [B, G, T, d]; steps [1|B, 1|G, T, d, d] (None: identity);
    potential u, broadcast to [B, H, T] (None: 0); logit_scale c, likewise (None: 1);
    valid [B, T] of bool (None: all); window and sinks as in `visible` -> [B, H, T, T]. Units: nats.
    Source: `farfield.attention.logit`.
    """
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    query, key = query.double(), key.double()
    steps = _given(steps, torch.eye(dim).expand(length, dim, dim), (batch, groups))
    u = _given(potential, torch.zeros(length), (batch, heads))
    c = _given(logit_scale, torch.ones(length), (batch, heads))
    valid = torch.ones(batch, length, dtype=torch.bool) if valid is None else valid

    unseen = torch.tensor(-math.inf, dtype=torch.float64)
    entries = []
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(length):
                for j in range(length):
                    if visible(i, j, valid[b], window, sinks):
                        carried_key = transport(steps[b, g], j, i) @ key[b, g, j]
                        score = query[b, h, i] @ carried_key / math.sqrt(dim)
                        entries.append(c[b, h, i] * score + (u[b, h, j] - u[b, h, i]))
                    else:
                        entries.append(unseen)
    table = torch.stack(entries) if entries else query.new_zeros(0)
    return table.reshape(batch, heads, length, length)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    steps: Tensor | None = None,
    carry_values: bool = False,
    potential: Tensor | None = None,
    logit_scale: Tensor | None = None,
    valid: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """out_i = sum_j alpha_ij v_j, or sum_j alpha_ij P_{j->i} v_j; alpha_i = softmax_j logit_ij.

    A row that sees no key is zero.

    Shapes: value [B, G, T, v] (v = d where values are carried); the rest as in `logits`
    -> [B, H, T, v].
    """
    batch, heads, length, dim = query.shape
    groups, value_dim = value.shape[1], value.shape[-1]
    value = value.double()
    table = logits(
        query,
        key,
        steps=steps,
        potential=potential,
        logit_scale=logit_scale,
        valid=valid,
        window=window,
        sinks=sinks,
    )
    steps = _given(steps, torch.eye(dim).expand(length, dim, dim), (batch, groups))
    valid = torch.ones(batch, length, dtype=torch.bool) if valid is None else valid

    rows = []
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(length):
                keys = [j for j in range(length) if visible(i, j, valid[b], window, sinks)]
                alpha = torch.softmax(table[b, h, i, keys], dim=0)
                row = torch.zeros(value_dim, dtype=torch.float64)
                for weight, j in zip(alpha, keys, strict=True):
                    v = value[b, g, j]
                    row = row + weight * (transport(steps[b, g], j, i) @ v if carry_values else v)
                rows.append(row)
    out = torch.stack(rows) if rows else value.new_zeros(0)
    return out.reshape(batch, heads, length, value_dim)


def alibi_slopes(heads: int) -> Tensor:
    """m_h = 2^{-8 h / n}, h = 1..n, for n = heads a power of two; else, with n the closest lower
    power of two, those n followed by every second slope of 2n heads.

    Shapes: -> [heads] float64. Units: nats per token.
    Raises: ValueError for fewer than one head.
    Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), section 3 and its appendix.
    """
    if heads < 1:
        raise ValueError(f"alibi_slopes got heads={heads}, expected at least 1")

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-8.0 * head / count) for head in range(1, count + 1)]

    lower = 2 ** math.floor(math.log2(heads))
    slopes = geometric(lower) + geometric(2 * lower)[0::2][: heads - lower]
    return torch.tensor(slopes, dtype=torch.float64)


def alibi_potential(heads: int, length: int) -> Tensor:
    """u_t = m t, so that a score gains u_j - u_i = -m (i - j).

    Shapes: -> [heads, length] float64. Units: nats.
    """
    positions = torch.arange(length, dtype=torch.float64)
    return alibi_slopes(heads)[:, None] * positions


def _given(values: Tensor | None, default: Tensor, leading: tuple[int, int]) -> Tensor:
    """What the caller gave, or what stands for nothing, in float64 for every row and head.

    Shapes: values broadcast to, and default is, [*default.shape] -> [*leading, *default.shape].
    """
    values = default if values is None else values
    return values.double().expand(*leading, *default.shape)
