"""What a potential forgets: the gates of a head, and what is kept over n tokens.

score_ij gains u_j − u_i, so a key n tokens back is weighted by the product of n gates. For ALiBi
they all are e^{−m}; a forget gate sets each from its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Gates:
    """Gates f_t = e^{u_{t−1} − u_t} of one layer, added up text by text.

    `rows`: mean gate φ, the rate that bounds far mass (T4: not the mean of log gates); memory
    1/(1 − φ), the tokens that weigh as many as all of the past; slope −ln φ, the ALiBi slope that
    would forget as much. `lag_rows`: what is kept over n tokens, mean e^{u_{t−n} − u_t}, beside
    φ^n.
    """

    def __init__(self, lags: Sequence[int]) -> None:
        self.lags = list(lags)
        self.logs: list[Tensor] = []
        self.kept: list[Tensor] = []

    def add(self, potential: Tensor) -> None:
        """One text's potential, [heads, T] float64."""
        self.logs.append(-potential.diff(dim=-1))
        kept = [(potential[:, :-n] - potential[:, n:]).exp().mean(-1) for n in self.lags]
        self.kept.append(torch.stack(kept, -1))

    def rows(self) -> list[dict[str, Any]]:
        """One row for each head of the potential."""
        logs = torch.cat(self.logs, -1)
        gate = logs.exp()
        found = []
        for head, own in enumerate(gate):
            mean = float(own.mean())
            left = float(-torch.expm1(logs[head]).mean())  # 1 − φ, exact for gates near 1
            found.append(
                {
                    "head": head,
                    "heads": len(gate),
                    "gate": mean,
                    "log_gate": float(logs[head].mean()),
                    "quantiles": dict(
                        zip(
                            map(str, QUANTILES),
                            own.quantile(own.new_tensor(QUANTILES)).tolist(),
                            strict=True,
                        )
                    ),
                    "constant": bool((own.amax() - own.amin()) < 1e-9),
                    "slope": -float(torch.log1p(torch.tensor(-left, dtype=torch.float64))),
                    "memory": 1 / left if left > 0 else None,
                }
            )
        return found

    def lag_rows(self) -> list[dict[str, Any]]:
        """One row for each head and lag."""
        kept = torch.stack(self.kept).mean(0)
        slopes = [row["slope"] for row in self.rows()]
        return [
            {
                "kind": "gate",
                "head": head,
                "block": None,
                "lag": lag,
                "left": float(own[at]),
                "floor": 0.0,
                "independent": float(torch.tensor(-slopes[head] * lag).exp()),
            }
            for head, own in enumerate(kept)
            for at, lag in enumerate(self.lags)
        ]
