"""Every mechanism of the table as a case: its name, a small layer, and its steps by definition.

A row that is registered later is a case as well; without a definition here its steps are read off
its own frames, which tests all but the step itself.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import combinations
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from farfield.algebra import reference
from farfield.algebra.hashing import normal
from farfield.attention import Attention, Geometry, Tokens, mechanisms
from farfield.attention.mechanism import Mechanism

WIDTH, VOCABULARY, WINDOW, LENGTH = 10, 11, 32, 16


TOGETHER: dict[tuple[str, str], list[str]] = {
    ("rope", "scaling"): [f"{rule},factor=3" for rule in ("linear", "ntk", "yarn")],
    ("rope", "factor"): [],
}
"""Options that say something only together: the other values to give such an option, spelled."""


OTHER = {"size": 2, "rank": 2, "conv": 2, "block": 3, "longest": 7, "scaling": None, "factor": None}
"""What an option is changed to, where 0 or 1 would not do (None: not alone)."""


def _spellings(row: mechanisms.Row) -> list[str]:
    """The row's name with every option at its default, and with each one away from it in turn."""
    spelled = [row.name]
    hints = get_type_hints(row.options)
    for option in fields(row.options):
        kind = hints[option.name]
        others: list[Any]
        if (row.name, option.name) in TOGETHER:
            others = TOGETHER[row.name, option.name]
        elif get_origin(kind) is Literal:
            others = [choice for choice in get_args(kind) if choice != option.default]
        else:
            others = [OTHER.get(option.name, 0 if option.default else 1)]
        if OTHER.get(option.name, 0) is None:
            continue
        spelled += [f"{row.name}:{option.name}={other}" for other in others]
    return spelled


STACKS = ("alibi+window:3,sinks=1", "forget+window:3+logn")
"""Controls together: each sets another field of the Carry."""


def _controls() -> list[str]:
    """No control, every control (a window small enough to matter), and some together."""
    small = {"window": "window:3"}
    rows = [row.name for row in mechanisms.table() if row.kind == "control"]
    return ["", *(small.get(row, row) for row in rows), *STACKS]


def names() -> list[str]:
    """Transports × {left, carried} × controls, and each option of a part away from its default."""
    found = []
    for row in mechanisms.table():
        spelled = _spellings(row)
        if row.kind == "control":
            found += spelled
            continue
        for carried in ("", "+v") if not row.values_stay else ("",):
            found += [text + carried for text in spelled]
            found += [f"{row.name}{carried}+{control}" for control in _controls() if control]
    found += [f"rope:scaling={rule},factor=3" for rule in ("linear", "ntk", "yarn")]
    return list(dict.fromkeys(mechanisms.canonical(name) for name in found))


NAMES = names()
FULLEST = [
    name
    for name in NAMES
    if (composition := mechanisms.parse(name)).controls
    and (composition.carried or composition.transport.row.values_stay)
]
"""Cases for every transport: values carried where they can be, and controls."""


def geometry(**changes: Any) -> Geometry:
    """Four query heads on two key heads of dimension 6, unless changed."""
    plain = Geometry(
        hidden_size=WIDTH,
        heads=4,
        kv_heads=2,
        head_dim=6,
        vocab_size=VOCABULARY,
        mixing_window=WINDOW,
        layer=1,
        seed=3,
        train_length=LENGTH,
    )
    return replace(plain, **changes)


def layer_of(name: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Attention:
    """An attention layer, not for training, whose parameters are all large enough to matter."""
    torch.manual_seed(1)
    layer = Attention(name, geometry(**changes)).double()
    for parameter in layer.parameters():  # (a zero W would hide the learned part)
        nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype).requires_grad_(False)


def sequence(
    batch: int,
    length: int,
    valid: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 2,
) -> Tokens:
    """Random tokens from the start of a row; valid [B, T] of bool, or None."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    ids = torch.randint(VOCABULARY, (batch, length), generator=draw)
    if valid is None:
        position = torch.arange(length).unsqueeze(0)
    else:
        position = (valid.cumsum(-1) - 1).clamp(min=0)
    return Tokens(hidden, position, ids, valid, nonce=5)


def part(tokens: Tokens, start: int, stop: int) -> Tokens:
    """Tokens [start, stop) of each row."""
    cut = {
        name: value[:, start:stop]
        for name in ("hidden", "position", "ids", "valid")
        if (value := getattr(tokens, name)) is not None
    }
    return replace(tokens, **cut)


def rows(tokens: Tokens, index: list[int]) -> Tokens:
    """Some rows of a batch, in that order."""
    found: dict[str, Any] = {"hidden": tokens.hidden[index]}
    assert tokens.ids is not None
    found["ids"] = tokens.ids[index]
    if tokens.valid is not None:
        found["valid"] = tokens.valid[index]
    if tokens.position.shape[0] > 1:
        found["position"] = tokens.position[index]
    return replace(tokens, **found)


# The steps by their definition, computed here from nothing of the mechanism but its parameters.


def rotary(shape: Geometry) -> Tensor:
    """ω_b = 10000^(-2b/d)."""
    dim = shape.head_dim
    return torch.tensor([10000.0 ** (-2 * b / dim) for b in range(dim // 2)], dtype=torch.float64)


def mixing(shape: Geometry) -> Tensor:
    """σ_b from 1 down to √(2 ln 10 / window), evenly in the logarithm."""
    smallest = math.sqrt(2 * math.log(10) / shape.mixing_window)
    last = max(shape.head_dim // 2 - 1, 1)
    scales = [smallest ** (b / last) for b in range(shape.head_dim // 2)]
    return torch.tensor(scales, dtype=torch.float64)


FREQUENCIES = {"rotary": rotary, "mixing": mixing}


def _constant(mechanism: Mechanism, options: Any, shape: Geometry, tokens: Tokens) -> Tensor:
    batch, length = tokens.hidden.shape[:2]
    omega = _scaled(FREQUENCIES[options.frequencies](shape), options, shape)
    return omega.expand(batch, shape.kv_heads, length, -1)


def _scaled(omega: Tensor, options: Any, shape: Geometry) -> Tensor:
    """Block by block: over s; over s^(b/(N-1)); or, by the turns within L₀, in between."""
    found, last = [], max(len(omega) - 1, 1)
    fall = math.log(float(omega[0] / omega[-1])) / last
    for block, frequency in enumerate(omega.tolist()):
        share = {"none": 0.0, "linear": 1.0, "ntk": 0.0, "yarn": 0.0}[options.scaling]
        if options.scaling == "yarn":
            assert shape.train_length is not None
            places = [
                math.log(float(omega[0]) * shape.train_length / (2 * math.pi * turns)) / fall
                for turns in (32, 1)
            ]
            low, high = max(math.floor(places[0]), 0), min(math.ceil(places[1]), 2 * last + 1)
            share = min(max((block - low) / (high - low), 0.0), 1.0)
        if options.scaling == "ntk":
            frequency /= options.factor ** (block / last)
        found.append(share * frequency / options.factor + (1 - share) * frequency)
    return torch.tensor(found, dtype=torch.float64)


@functools.cache
def _draw(*keys: int) -> float:
    return float(normal(*keys))


def _drawn(first: tuple[int, ...], keys: Tensor, shape: Geometry) -> Tensor:
    scales = mixing(shape)
    angle = [
        [
            [
                [_draw(*first, shape.layer, head, block, int(key)) for block in range(len(scales))]
                for key in row
            ]
            for head in range(shape.kv_heads)
        ]
        for row in keys
    ]
    return (
        torch.tensor(angle, dtype=torch.float64).reshape(
            keys.shape[0], shape.kv_heads, keys.shape[1], len(scales)
        )
        * scales
    )


def _by_id(mechanism: Mechanism, options: Any, shape: Geometry, tokens: Tokens) -> Tensor:
    assert tokens.ids is not None
    return _drawn((shape.seed,), tokens.ids, shape)


def _by_position(mechanism: Mechanism, options: Any, shape: Geometry, tokens: Tokens) -> Tensor:
    position = tokens.position.expand(tokens.hidden.shape[0], -1)
    return _drawn((shape.seed, tokens.nonce), position, shape)


def _by_weight(mechanism: Mechanism, options: Any, shape: Geometry, tokens: Tokens) -> Tensor:
    (weight,) = mechanism.transport.parameters()
    if options.source == "token":
        assert tokens.ids is not None
        data = nn.functional.one_hot(tokens.ids, VOCABULARY).double() @ weight.double()
    else:
        data = tokens.hidden.double() @ weight.double().T
    omega = FREQUENCIES[options.frequencies](shape)
    data = data.reshape(*data.shape[:2], shape.kv_heads, -1).transpose(1, 2)
    return omega * (options.c + data)


ANGLES: dict[str, Callable[[Mechanism, Any, Geometry, Tokens], Tensor]] = {
    "rope": _constant,
    "random": _by_id,
    "random_iid": _by_position,
    "learned": _by_weight,
}


def _vectors(mechanism: Mechanism, options: Any, shape: Geometry, tokens: Tokens) -> Tensor:
    """W x, through the short convolution over real tokens if there is one: [B, Hk, T, d]."""
    weights = dict(mechanism.named_parameters())
    source = weights["transport.weight.weight"].double()
    if getattr(options, "source", "hidden") == "token":
        assert tokens.ids is not None
        data = nn.functional.one_hot(tokens.ids, VOCABULARY).double() @ source
    else:
        data = tokens.hidden.double() @ source.T
    if options.rank:
        data = data @ weights["transport.spread.weight"].double().T
    if options.conv:
        taps = weights["transport.taps"].double()
        out = torch.zeros_like(data)
        for row in range(data.shape[0]):
            real = range(data.shape[1])
            if tokens.valid is not None:
                real = [t for t in real if tokens.valid[row, t]]
            for place, t in enumerate(real):
                for back in range(min(options.conv, place + 1)):
                    out = out.index_put(
                        (torch.tensor(row), torch.tensor(t)),
                        taps[:, -1 - back] * data[row, real[place - back]],
                        accumulate=True,
                    )
        data = out * torch.sigmoid(out)
    data = data.reshape(*data.shape[:2], shape.kv_heads, -1).transpose(1, 2)
    return data if tokens.valid is None else data * tokens.valid[:, None, :, None]


def _reflections(mechanism: Mechanism, options: Any, shape: Geometry, tokens: Tokens) -> Tensor:
    return reference.reflection_steps(_vectors(mechanism, options, shape, tokens))


def _contractions(mechanism: Mechanism, options: Any, shape: Geometry, tokens: Tokens) -> Tensor:
    """I - β w wᵀ, the identity at padding."""
    vectors = _vectors(mechanism, options, shape, tokens)
    length = vectors.square().sum(-1, keepdim=True)
    w = vectors / torch.where(length > 0, length, 1.0).sqrt()
    if options.beta:
        beta = torch.full(w.shape[:-1], options.beta, dtype=torch.float64)
    else:
        weights = dict(mechanism.named_parameters())
        raw = tokens.hidden.double() @ weights["transport.strength.weight"].double().T
        raw = raw + weights["transport.strength.bias"].double()
        beta = 2.0 / (1.0 + torch.exp(-raw)).transpose(1, 2)
    outer = beta[..., None, None] * w[..., :, None] * w[..., None, :]
    return torch.eye(shape.head_dim, dtype=torch.float64) - outer


def _exponentials(mechanism: Mechanism, options: Any, shape: Geometry, tokens: Tokens) -> Tensor:
    """exp of each block's skew matrix: pairs, planes and scales from the options alone."""
    size = options.block or max(b for b in range(2, 9) if shape.head_dim % b == 0)
    blocks, planes = shape.head_dim // size, size // 2
    omega = FREQUENCIES[options.frequencies](replace(shape, head_dim=2 * blocks * planes))
    (weight,) = mechanism.transport.parameters()
    data = tokens.hidden.double() @ weight.double().T
    data = data.reshape(*data.shape[:2], shape.kv_heads, blocks, -1).transpose(1, 2)
    angle = torch.zeros_like(data)
    for block in range(blocks):
        each = [omega[block * planes + min(i // 2, planes - 1)] for i in range(size)]
        for pair, (i, j) in enumerate(combinations(range(size), 2)):
            root = (each[i] * each[j]).sqrt()
            angle[..., block, pair] = root * data[..., block, pair] / math.sqrt(size - 1)
            if i % 2 == 0 and j == i + 1:
                angle[..., block, pair] += options.c * root
    if tokens.valid is not None:
        angle = angle * tokens.valid[:, None, :, None, None]
    return reference.dense_steps(angle)


STEPS: dict[str, Callable[[Mechanism, Any, Geometry, Tokens], Tensor]] = {
    "reflection": _reflections,
    "dense": _exponentials,
    "path": _contractions,
}


def angles(layer: Attention, name: str, shape: Geometry, tokens: Tokens) -> Tensor | None:
    """The angles of the definition [B, Hk, T, N] float64, zero at padding; None if not known."""
    part = mechanisms.parse(name).transport
    define = ANGLES.get(part.row.name)
    if define is None:
        return None
    angle = define(layer.mechanism, part.options, shape, tokens)
    return angle if tokens.valid is None else angle * tokens.valid[:, None, :, None]


def steps(layer: Attention, name: str, shape: Geometry, tokens: Tokens) -> Tensor | None:
    """M_t [B, Hk, T, d, d]: by definition, or for an unknown transport from its own frames."""
    angle = angles(layer, name, shape, tokens)
    if angle is not None:
        return reference.rotation_steps(angle)
    part = mechanisms.parse(name).transport
    if part.row.name in STEPS:
        return STEPS[part.row.name](layer.mechanism, part.options, shape, tokens)
    frame = layer.mechanism(tokens, {}).frame
    if frame is None:
        return None
    batch, length = tokens.hidden.shape[:2]
    one = torch.eye(shape.head_dim, dtype=torch.float64)
    columns = [
        frame.push(row.expand(batch, shape.kv_heads, length, -1).contiguous()) for row in one
    ]
    frames = torch.stack(columns, -1)
    before = torch.cat((one.expand_as(frames[:, :, :1]), frames[:, :, :-1]), 2)
    return frames @ before.transpose(-1, -2)


def _control(name: str, kind: str) -> Any:
    """The options of a control in the name, or None where it isn't there."""
    found = [p.options for p in mechanisms.parse(name).controls if p.row.name == kind]
    return found[0] if found else None


def potential(layer: Attention, name: str, shape: Geometry, tokens: Tokens) -> Tensor | None:
    """u [B or 1, H, T]: by definition for alibi and forget, else from the control itself."""
    if _control(name, "alibi"):
        slopes = reference.alibi_slopes(shape.heads)
        return slopes[:, None] * tokens.position[:, None, :].double()
    groups = shape.heads // shape.kv_heads
    if _control(name, "forget"):
        (gate,) = (c for c in layer.mechanism.controls if hasattr(c, "log_gate"))
        score = tokens.hidden.double() @ gate.weight.double().T + gate.bias.double()
        log = torch.log(1.0 / (1.0 + torch.exp(-score)))
        if tokens.valid is not None:
            log = log * tokens.valid[..., None]
        return -log.cumsum(1).transpose(1, 2).repeat_interleave(groups, 1)
    found = layer.mechanism(tokens, {}).potential
    return None if found is None else found.repeat_interleave(shape.heads // found.shape[1], 1)


def logit_scale(layer: Attention, name: str, shape: Geometry, tokens: Tokens) -> Tensor | None:
    """c [B or 1, H, T]: s log(number of keys the row sees) for logn; YaRN's temperature squared."""
    own = mechanisms.parse(name).transport.options
    if getattr(own, "scaling", None) == "yarn":
        square = torch.tensor((0.1 * math.log(own.factor) + 1.0) ** 2, dtype=torch.float64)
        return square.expand(1, shape.heads, tokens.hidden.shape[1])
    options = _control(name, "logn")
    if options is None:
        return None
    (control,) = (c for c in layer.mechanism.controls if type(c).__name__ == "Logn")
    scale = torch.full((shape.heads,), 1.0 / math.log(LENGTH), dtype=torch.float64)
    if options.scale == "learned":
        scale = control.scale.double()
    window = _control(name, "window")
    seen = tokens.position + 1
    if window is not None:
        size = window.size or LENGTH
        near, sinks = seen.clamp(max=size), (seen - size).clamp(0, window.sinks)
        seen = near + sinks
    return scale[:, None] * seen.double().log()[:, None]


def expected(layer: Attention, name: str, shape: Geometry, tokens: Tokens) -> Tensor:
    """The layer's output by the definition, in float64 loops."""

    def heads(projection: nn.Linear, count: int) -> Tensor:
        out = tokens.hidden.double() @ projection.weight.double().T
        return out.unflatten(-1, (count, -1)).transpose(1, 2)

    window = _control(name, "window")
    out = reference.attention(
        heads(layer.q_proj, shape.heads),
        heads(layer.k_proj, shape.kv_heads),
        heads(layer.v_proj, shape.kv_heads),
        steps=steps(layer, name, shape, tokens),
        carry_values=mechanisms.parse(name).carried,
        potential=potential(layer, name, shape, tokens),
        logit_scale=logit_scale(layer, name, shape, tokens),
        valid=tokens.valid,
        window=(window.size or LENGTH) if window else None,
        sinks=window.sinks if window else 0,
    )
    return out.transpose(1, 2).flatten(-2) @ layer.o_proj.weight.double().T
