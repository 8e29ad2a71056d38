"""Every test runs on one thread, from a fixed seed, with uninitialised floating memory poisoned."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

# One fixed set of examples: a failure seen once is seen by everybody, and time is bounded.
settings.register_profile("farfield", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("farfield")


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`allocate`, whose floating or complex result is NaN instead of whatever memory held."""

    def poisoned(*args: Any, **options: Any) -> Tensor:
        tensor = allocate(*args, **options)
        floating = tensor.is_floating_point() or tensor.is_complex()
        if floating and not tensor.is_meta:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return poisoned


@pytest.fixture(scope="session", autouse=True)
def one_thread_and_poisoned_memory() -> Iterator[None]:
    """What reads memory it never wrote gets NaN, so that it can't pass by luck."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _poisoned(torch.empty))
        patch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what other libraries draw from)
    torch.manual_seed(0)
