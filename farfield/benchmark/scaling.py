"""Section `scaling`: reflections beside `rope` as length grows; PaTH and reflections beside T×T."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.algebra.contraction import Contraction
from farfield.algebra.reflection import ReflectionFrame
from farfield.attention.engines import path
from farfield.attention.logit import Visible
from farfield.benchmark import definition
from farfield.benchmark.layer import BASELINE, attention_layer, compare, forward, inputs, work
from farfield.benchmark.pairing import Report, median_interval, paired
from farfield.benchmark.plan import CALLS, Job, Setting, attention, where
from farfield.benchmark.rows import LeftOut, Row, quantity, timed
from farfield.benchmark.targets import LAYER

SECTION = "scaling"
NAIVE = "fla's naive PaTH"
PLAIN = "sdpa"
TRIANGLES = "T×T definition"

Maps = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attention from q, k, v, w [B, H, T, d] and beta [B, H, T]."""


def jobs(setting: Setting) -> list[Job | LeftOut]:
    """The layer at one length, growth, and each T×T definition."""
    sizes = setting.sizes
    short, long = sizes.growth
    layer = CALLS * 2.5 * work(sizes.reflection, sizes)
    grown = CALLS * 2.5 * (attention(long, 1, sizes.head_dim) + attention(short, 1, sizes.head_dim))
    # Three products of T×T matrices forward, twice as many backward.
    cubes = 9.0 * sizes.path**3 * sizes.heads
    naive = naive_path()
    found: list[Job | LeftOut] = [
        Job(
            SECTION,
            f"reflection at T = {sizes.reflection:,}",
            layer,
            partial(compare, SECTION, setting, sizes.reflection, ["reflection"]),
        ),
        Job(SECTION, f"growth from {short:,} to {long:,}", grown, partial(_growth, setting)),
        Job(
            SECTION,
            f"reflection and T×T at T = {sizes.path:,}",
            CALLS * cubes,
            partial(_reflection, setting),
        ),
        Job(
            SECTION,
            f"path and T×T at T = {sizes.path:,}",
            CALLS * 1.5 * cubes,
            partial(_path, setting, naive if callable(naive) else None),
        ),
    ]
    if not callable(naive):
        found.append(LeftOut(SECTION, NAIVE, naive))
    return found


def _growth(setting: Setting, allowance: float, report: Report) -> list[Row]:
    """Time at the longer length over that at the shorter, of one head; and one growth over the
    other's, round by round."""
    sizes = setting.sizes
    dim, (short, long) = sizes.head_dim, sizes.growth
    given = {tokens: inputs(tokens, dim, setting.seed) for tokens in sizes.growth}
    calls = {}
    for name in (BASELINE, "reflection"):
        layer = attention_layer(name, dim, 1, setting.seed)
        for tokens in sizes.growth:
            calls[f"{name} {tokens}"] = forward(layer, given[tokens])
    samples = paired(calls, allowance, report=report)
    seconds = samples.seconds
    grown = {
        name: seconds[f"{name} {long}"] / seconds[f"{name} {short}"]
        for name in (BASELINE, "reflection")
    }
    fields = where(
        setting,
        SECTION,
        measure=f"growth from {short:,}",
        tokens=long,
        sizes=f"forward, width {dim}, 1 head, batch 1",
    )
    rows = [
        timed(
            samples, f"{name} {long}", f"{name} {short}", **{**fields, "case": name, "baseline": ""}
        )
        for name in grown
    ]
    ratio = median_interval(grown["reflection"] / grown[BASELINE])
    over = {"case": "reflection", "baseline": BASELINE, "rounds": samples.rounds}
    return [*rows, quantity(ratio, **over, **fields)]


def _reflection(setting: Setting, allowance: float, report: Report) -> list[Row]:
    maps = {"reflection": reflected, TRIANGLES: definition.attend}
    return _maps(setting, maps, [("reflection", TRIANGLES)], 2.0, allowance, report)


def _path(setting: Setting, naive: Maps | None, allowance: float, report: Report) -> list[Row]:
    maps: dict[str, Maps] = {"path": contracted, PLAIN: plain, TRIANGLES: definition.attend}
    pairs = [("path", PLAIN), ("path", TRIANGLES)]
    if naive is not None:
        maps[NAIVE] = naive
        pairs += [(NAIVE, PLAIN), ("path", NAIVE)]
    return _maps(setting, maps, pairs, None, allowance, report)


def _maps(
    setting: Setting,
    maps: Mapping[str, Maps],
    pairs: list[tuple[str, str]],
    strength: float | None,
    allowance: float,
    report: Report,
) -> list[Row]:
    sizes = setting.sizes
    given = steps(sizes.path, sizes.heads, sizes.head_dim, setting.seed, strength)
    calls = {name: gradients(function, given) for name, function in maps.items()}
    samples = paired(calls, allowance, report=report)
    fields = where(
        setting,
        SECTION,
        measure=LAYER,
        tokens=sizes.path,
        sizes=f"{sizes.heads} heads of {sizes.head_dim}, batch 1, from q, k, v, w, β",
    )
    return [timed(samples, case, baseline, **fields) for case, baseline in pairs]


def steps(
    tokens: int, heads: int, dim: int, seed: int, strength: float | None = None
) -> tuple[Tensor, ...]:
    """q, k, v and unit w [1, heads, tokens, dim]; beta [1, heads, tokens], 2·sigmoid of normal
    numbers unless its one strength is given."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, w = (torch.randn(1, heads, tokens, dim, generator=generator) for _ in range(4))
    beta = 2.0 * torch.randn(1, heads, tokens, generator=generator).sigmoid()
    if strength is not None:
        beta = torch.full_like(beta, strength)
    return q, k, v, w / w.norm(dim=-1, keepdim=True), beta


def gradients(function: Maps, given: tuple[Tensor, ...]) -> Callable[[], None]:
    """A call of the function and of its gradients to everything it is given and depends on."""
    leaves = tuple(x.detach().requires_grad_() for x in given)

    def call() -> None:
        out = function(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

    return call


def plain(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Causal attention without any steps."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def contracted(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """The `path` engine."""
    tokens = q.shape[-2]
    return path.attend(q, k, v, Contraction(w, beta), visible=Visible(tokens, tokens))


def reflected(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Frames of the reflections across w; beta is 2 and not looked at."""
    frame = ReflectionFrame.from_vectors(w)
    return F.scaled_dot_product_attention(frame.pull(q), frame.pull(k), v, is_causal=True)


def naive_path() -> Maps | str:
    """flash-linear-attention's definition in plain PyTorch, or why it isn't there.

    Its package asks for Triton as soon as it is imported; the one file that doesn't is loaded
    alone.
    """
    package = importlib.util.find_spec("fla")
    places = [] if package is None else list(package.submodule_search_locations or ())
    files = [Path(place) / "ops" / "path_attn" / "naive.py" for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return "not installed (flash-linear-attention)"
    spec = importlib.util.spec_from_file_location("farfield_benchmark_naive_path", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function = module.naive_path_attn
    except (ImportError, AttributeError) as error:
        return f"{file.name} of flash-linear-attention can't be used here: {error}"

    def attend(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
        tokens_first = (x.transpose(1, 2) for x in (q, k, v, w, beta))
        gate = torch.zeros_like(beta).transpose(1, 2)
        out: Tensor = function(*tokens_first, gate, q.shape[-1] ** -0.5)
        return out.transpose(1, 2)

    return attend
