"""Laws that are drawn have the harmonics that are claimed of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from farfield.theory import laws
from farfield.theory.stylised import walked_phases

LAWS = [
    laws.Normal(0.7, 0.2),
    laws.Uniform(1.3, -0.4),
    laws.VonMises(2.0, 0.3),
    laws.TwoPoint(1.1),
    laws.Sometimes(0.3, 2.0),
    laws.Constant([0.3, 0.01]),
    laws.Markov([[0.1, 0.9], [0.3, 0.7]], [1.0, -0.5]),
]
MAPS = [laws.Householder(6), laws.Haar(6), laws.Cayley(6, 0.4)]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_steps_have_the_harmonics_claimed(law: laws.Rotations) -> None:
    angles = law.walk(20_000, 2, laws.Draws(3))(2)[:, 1].double().numpy()
    assert angles.shape == (20_000, 2)
    for order in (1, 2, 3):
        turned = np.exp(1j * order * angles)
        claimed = np.broadcast_to(law.harmonic(order), 2)
        for part in (np.real, np.imag):
            error = part(turned).std(axis=0) / np.sqrt(len(turned)) + 1e-6
            assert (np.abs(part(turned).mean(axis=0) - part(claimed)) < 4 * error).all()


def test_planes_may_have_laws_of_their_own() -> None:
    angles = laws.Normal([0.0, 2.0], [0.5, 0.0]).walk(4000, 2, laws.Draws(0))(1)
    assert torch.equal(angles[..., 0], torch.full((4000, 1), 0.5))
    assert angles[..., 1].std().item() == pytest.approx(2.0, rel=0.05)


def test_a_chain_is_drawn_backwards_in_time() -> None:
    kernel = np.array([[0.0, 1.0, 0.0], [0.0, 0.2, 0.8], [0.9, 0.0, 0.1]])
    chain = laws.Markov(kernel, [0.0, 1.0, 2.0])
    assert np.allclose(chain.stationary @ kernel, chain.stationary)
    visited = chain.walk(400, 1, laws.Draws(1))(100)[..., 0].long().numpy()[:, ::-1]
    seen = np.zeros((3, 3))
    np.add.at(seen, (visited[:, :-1], visited[:, 1:]), 1)
    assert np.abs(seen / seen.sum(1, keepdims=True) - kernel).max() < 0.02


@pytest.mark.parametrize("law", MAPS, ids=lambda law: type(law).__name__)
def test_maps_are_orthogonal_and_routes_grow_on_the_key_s_side(law: laws.Maps) -> None:
    start = torch.linalg.qr(torch.randn(50, 6, 6, generator=torch.Generator().manual_seed(0)))[0]
    longer = law.extend(start, laws.Draws(5))
    step = law.extend(torch.eye(6).expand(50, 6, 6), laws.Draws(5))
    assert torch.allclose(longer, start @ step, atol=1e-5)
    assert torch.allclose(longer @ longer.mT, torch.eye(6).expand(50, 6, 6), atol=1e-5)


def test_uniform_reflections_keep_1_minus_2_over_d() -> None:
    step = laws.Householder(6).extend(torch.eye(6).expand(20_000, 6, 6), laws.Draws(2))
    assert torch.allclose(step.mean(0), (1 - 2 / 6) * torch.eye(6), atol=0.02)
    haar = laws.Haar(6).extend(torch.eye(6).expand(20_000, 6, 6), laws.Draws(2))
    assert haar.mean(0).abs().max() < 0.02
    assert torch.allclose(haar.square().mean(0), torch.full((6, 6), 1 / 6), atol=0.01)


def test_one_seed_names_all_draws() -> None:
    law = laws.VonMises(1.0)
    first, again = (law.walk(3, 2, laws.Draws(9))(4) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, law.walk(3, 2, laws.Draws(10))(4))


def test_phases_on_a_circle_are_uniform() -> None:
    phase = laws.Draws(0).phases(100_001).double().numpy()
    assert phase.shape == (100_001,)
    for order in (1, 2, 7):
        assert abs(np.exp(1j * order * phase).mean()) < 4 / np.sqrt(100_000)
    assert phase.min() == pytest.approx(-np.pi, abs=1e-3)
    assert phase.max() == pytest.approx(np.pi, abs=1e-3)


def test_phases_add_up_over_chunks_and_do_not_drift() -> None:
    walk = walked_phases(laws.Constant([1.0, 0.001]), 2, 2, laws.Draws(0), first=5)
    sizes = [1, 7, 1000, 3000] + [4000] * 50
    phase = torch.cat([walk(size) for size in sizes], dim=1)[0].double()
    distance = torch.arange(5, 5 + phase.shape[0]).double()
    exact = distance[:, None] * torch.tensor([1.0, 0.001]).double()
    off = torch.remainder(phase - exact + np.pi, 2 * np.pi) - np.pi
    assert off.abs().max() < 5e-3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: laws.Normal(-1.0), "sigma"),
        (lambda: laws.Uniform(float("nan")), "half_width"),
        (lambda: laws.VonMises(-2.0), "kappa"),
        (lambda: laws.Sometimes(1.5, 1.0), "probability"),
        (lambda: laws.Markov([[0.5, 0.6], [0.5, 0.5]], [1, 2]), "rows that sum to 1"),
        (lambda: laws.Markov([[0.5, 0.5], [0.5, 0.5]], [1, 2, 3]), "one for each of 2"),
        (lambda: laws.Householder(0), "head_dim"),
        (lambda: laws.Cayley(4, -1.0), "scale"),
        (lambda: laws.Draws(-1), "seed"),
    ],
)
def test_laws_that_are_none_are_refused(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()
