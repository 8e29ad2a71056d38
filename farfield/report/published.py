"""The published numbers that a study is set beside.

Source: "Why Do Accumulated Transformations Extrapolate?" (arXiv 2606.24975), as its abstract and
published summaries give them: decoder-only transformers of 16 layers and width 768 on
OpenWebText, trained at 512 tokens; perplexity at 8,192 (16 L₀) and 65,536 (128 L₀) over
perplexity at 512.
"""

from __future__ import annotations

SOURCE = "arXiv 2606.24975"
MULTIPLES = (16, 128)
_NEAR_ONE = "near 1"
_RATIOS: dict[str, dict[int, float | str]] = {
    "rope": {16: 16.2},
    "random": {16: 1.60, 128: 7.49},
    "random+v": {128: 1.59},
    "learned": {16: _NEAR_ONE, 128: _NEAR_ONE},
    "learned+v": {16: _NEAR_ONE, 128: _NEAR_ONE},
    "alibi": {128: 0.96},
}


def published(mechanism: str, multiple: int) -> str:
    """The published ratio of a mechanism at a multiple of L₀ as text, "" where there is none."""
    value = _RATIOS.get(mechanism, {}).get(multiple, "")
    return value if isinstance(value, str) else f"{value:.2f}" if value < 10 else f"{value:.1f}"
