"""What every statement asks of its arguments: read once, refused by name.

Each function takes the argument's name and what was passed, and returns a float64 (or complex128)
array, or raises a ValueError that says which argument, what was got and what was expected. The
statements then compute on arrays and give 0-dimensional results back as numbers (`plain`).
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Complexes = npt.NDArray[np.complex128]
Reals = npt.ArrayLike

# An empirical |e^{iω}| exceeds 1 by rounding; a harmonic beyond this is a mistake.
_UNIT_SLACK = 1e-9


def refuse(name: str, got: Any, expected: str) -> NoReturn:
    """Raise the one error a caller can cause here: `name` is `got`; expected `expected`."""
    raise ValueError(f"{name} is {_shown(got)}; expected {expected}")


def _shown(got: Any) -> str:
    text = np.array2string(got, threshold=6) if isinstance(got, np.ndarray) else repr(got)
    return text if len(text) <= 80 else text[:77] + "..."


def _array(name: str, value: Any, dtype: type, expected: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
        if dtype is np.float64 and np.iscomplexobj(array):
            raise TypeError
        array = array.astype(dtype)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {_shown(value)}; expected {expected}") from None
    if array.size == 0:
        refuse(name, f"an empty array of shape {array.shape}", expected)
    if np.isnan(array).any():
        refuse(name, array, f"{expected}, not NaN")
    return array


def extended_reals(name: str, value: Reals) -> Floats:
    """Real numbers or ±∞ (a log-sum-exp over no key is −∞)."""
    return _array(name, value, np.float64, "real numbers")


def reals(name: str, value: Reals) -> Floats:
    """Finite real numbers."""
    array = extended_reals(name, value)
    if np.isinf(array).any():
        refuse(name, array, "finite real numbers")
    return array


def nonnegative(name: str, value: Reals) -> Floats:
    """Finite numbers, at least 0."""
    array = reals(name, value)
    if (array < 0).any():
        refuse(name, array, "numbers of at least 0")
    return array


def positive(name: str, value: Reals) -> Floats:
    """Finite numbers above 0."""
    array = reals(name, value)
    if (array <= 0).any():
        refuse(name, array, "numbers above 0")
    return array


def rates(name: str, value: Reals) -> Floats:
    """Numbers in [0, 1]: ρ = |E e^{iθ}|, or a probability."""
    array = reals(name, value)
    if ((array < 0) | (array > 1)).any():
        refuse(name, array, "numbers in [0, 1]")
    return array


def fractions(name: str, value: Reals) -> Floats:
    """Numbers in the open interval (0, 1): ε, δ, η, a far mass to be reached."""
    array = reals(name, value)
    if ((array <= 0) | (array >= 1)).any():
        refuse(name, array, "numbers strictly between 0 and 1")
    return array


def counts(name: str, value: Reals, least: int = 0, infinite: bool = False) -> Floats:
    """Whole numbers of at least `least`, as floats (exact up to 2⁵³); ∞ where it has a limit."""
    expected = f"whole numbers of at least {least}" + (" or infinity" if infinite else "")
    array = extended_reals(name, value)
    finite = array[np.isfinite(array)]
    if (array < least).any() or (finite != np.floor(finite)).any():
        refuse(name, array, expected)
    if not infinite and finite.size != array.size:
        refuse(name, array, expected)
    return array


def harmonics(name: str, value: npt.ArrayLike) -> Floats | Complexes:
    """Characteristic numbers c with |c| ≤ 1: float64 when all are real, complex128 otherwise."""
    array = _array(name, value, np.complex128, "numbers with |c| ≤ 1")
    if not (np.abs(array) <= 1 + _UNIT_SLACK).all():
        refuse(name, array, "numbers with |c| ≤ 1")
    return array if array.imag.any() else array.real.copy()


def vector(name: str, array: npt.NDArray[Any], dimensions: int = 1) -> None:
    """Refuse an array with fewer axes than its statement sums over."""
    if array.ndim < dimensions:
        refuse(name, f"an array of shape {array.shape}", f"at least {dimensions} axes")


def square(name: str, matrix: npt.NDArray[Any]) -> None:
    """Refuse what is not [..., d, d]."""
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        refuse(name, f"an array of shape {matrix.shape}", "square matrices [..., d, d]")


def matching(axis: int = -1, **arrays: npt.NDArray[Any]) -> None:
    """Refuse arrays whose axis `axis` (blocks, keys) does not have one length."""
    lengths = {}
    for name, array in arrays.items():
        vector(name, array, -axis)
        lengths[name] = array.shape[axis]
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"axis {axis}: {listed}; expected one length")


def plain(array: Any) -> Any:
    """A 0-dimensional result as a number, anything else as it is."""
    return np.asarray(array)[()]
