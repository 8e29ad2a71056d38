"""Peak memory of one piece of work, in a process of its own.

A process that is given a `Work` prints by how many bytes the work raised the most memory that the
process ever held: VmHWM of Linux after the work, less VmHWM when its inputs were built. VmHWM
belongs to the address space and so starts anew with a process. (`ru_maxrss` doesn't: a child
inherits what its parent held when it was forked.)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_PROGRAM = "import sys; from farfield.benchmark.peak import main; main(sys.argv[1])"
_WARM = 128
"""Tokens of a first call: what libraries load is no memory of the work."""


@dataclass(frozen=True)
class Work:
    """What a process does: attention of `case` over so many tokens.

    `case` is a mechanism's name, for an attention layer at inference; `sdpa`, for the same
    projections around plain attention; or `path, backward` and `T×T definition, backward`, for
    attention along contractions and its gradients, from q, k, v, w, β.
    """

    case: str
    tokens: int
    heads: int
    head_dim: int
    seed: int = 0
    threads: int = 1


def growth(work: Work) -> int:
    """Bytes by which the work raises the peak of a fresh process that has built its inputs.

    Raises: ValueError where the system doesn't say, or the process fails.
    """
    if not available():
        raise ValueError("peak memory is read from /proc/self/status; this system has none")
    command = [sys.executable, "-c", _PROGRAM, json.dumps(asdict(work))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        why = lines[-1].strip() if lines else f"status {ran.returncode}"
        raise ValueError(f"{work.case} at {work.tokens:,} tokens: {why}")
    return int(ran.stdout.split()[-1])


def available() -> bool:
    """Whether this system says what a process held at most."""
    return _STATUS.is_file() and "VmHWM" in _STATUS.read_text(encoding="utf-8")


def high_water() -> int:
    """The most bytes that this process has held at a time."""
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"{_STATUS} has no VmHWM")


def _prepared(work: Work, tokens: int) -> Callable[[], object]:
    """A call of the work, its inputs built."""
    from farfield.benchmark import definition, layer, scaling

    along = {
        "path, backward": scaling.contracted,
        "T×T definition, backward": definition.attend,
    }
    if work.case in along:
        given = scaling.steps(tokens, work.heads, work.head_dim, work.seed)
        return scaling.gradients(along[work.case], given)
    width = work.heads * work.head_dim
    tokens_given = layer.inputs(tokens, width, work.seed)
    if work.case != "sdpa":
        made = layer.attention_layer(work.case, width, work.heads, work.seed)
        return layer.forward(made, tokens_given)
    return layer.plain(layer.attention_layer("nope", width, work.heads, work.seed), tokens_given)


def main(described: str) -> None:
    """Do the work that JSON describes, and print the growth of the peak in bytes."""
    import torch

    work = Work(**json.loads(described))
    torch.set_num_threads(work.threads)
    _prepared(work, min(_WARM, work.tokens))()
    call = _prepared(work, work.tokens)
    before = high_water()
    call()
    print(high_water() - before)
