"""CUDA's mathematical functions, which PTX computes by polynomials, tables and slow paths."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.own import EmulatedKernel
from tests.unit.emulated import needs_compilers

pytestmark = [needs_compilers, pytest.mark.slow]

Kernels = dict[str, EmulatedKernel]
Function = Callable[..., float]
# The error of fp64 and of fp32 in units of the last place, as the CUDA C++ Programming Guide states
# it, and the arguments: from, to, and whether huge ones too.
ONE: dict[str, tuple[int, int, float, float, bool]] = {
    "sin": (2, 2, -20, 20, True),
    "cos": (2, 2, -20, 20, True),
    "tan": (2, 4, -20, 20, True),
    "exp": (1, 2, -80, 80, False),
    "exp2": (1, 2, -100, 100, False),
    "expm1": (1, 1, -20, 20, False),
    "log": (1, 1, 1e-6, 1e6, True),
    "log2": (1, 1, 1e-6, 1e6, True),
    "log10": (1, 2, 1e-6, 1e6, True),
    "log1p": (1, 1, -0.99, 100, False),
    "cbrt": (1, 1, -1e6, 1e6, True),
    "sinh": (2, 3, -20, 20, False),
    "cosh": (1, 2, -20, 20, False),
    "tanh": (1, 2, -5, 5, False),
    "asin": (2, 2, -1, 1, False),
    "acos": (2, 2, -1, 1, False),
    "atan": (2, 2, -100, 100, True),
    "asinh": (3, 3, -100, 100, False),
    "acosh": (3, 4, 1.01, 100, False),
    "atanh": (2, 3, -0.99, 0.99, False),
    "erf": (2, 2, -3, 3, False),
    "erfc": (5, 4, -3, 8, False),
    "tgamma": (10, 5, 0.1, 30, False),
    "lgamma": (4, 6, 8, 100, False),
}
TWO = {"pow": (2, 4), "atan2": (2, 3), "hypot": (2, 3), "fmod": (0, 0)}
HUGE = [1e5, 1e8, 123456789.0, 1e15, 1e22, 1e30, 3.4e38]


def source() -> str:
    """Kernels that compute a function by its number."""
    text = ""
    for type_, end in (("double", ""), ("float", "f")):
        for names, given, call in ((ONE, "", "(x[i])"), (TWO, "", "(x[i], z[i])")):
            cases = "".join(
                f"    case {n}: y[i] = {name}{end}{call}; break;\n" for n, name in enumerate(names)
            )
            name = f"{type_}_{'one' if names is ONE else 'two'}{given}"
            text += (
                f'extern "C" __global__ void {name}(const {type_}* x, const {type_}* z, '
                f"{type_}* y, int which) {{\n  int i = threadIdx.x;\n  switch (which) {{\n{cases}"
                "  }\n}\n"
            )
    return text


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    first = flashwright.emulate.kernel(source(), "double_one")
    kinds = ("double_one", "double_two", "float_one", "float_two")
    return {kind: first.other(kind) for kind in kinds}


def computed(kernels: Kernels, kind: str, which: int, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    y = np.zeros_like(x)
    done = kernels[kind](1, len(x), x, z, y, which)
    assert done.ok, done
    return y


def errors(found: np.ndarray, wanted: list[float]) -> np.ndarray:
    """In units of the last place; the reference's own error may be half of one in fp64."""
    exact = np.array(wanted, np.float64)
    unit = np.spacing(np.abs(exact.astype(found.dtype))).astype(np.float64)
    off: np.ndarray = np.abs(found.astype(np.float64) - exact) / unit
    return off


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("kind", ["double", "float"])
def test_functions_of_one_number(kernels: Kernels, kind: str, name: str) -> None:
    *bounds, low, high, huge = ONE[name]
    dtype = np.dtype(kind if kind == "double" else "float32")
    x = np.random.default_rng(0).uniform(low, high, 64).astype(dtype)
    x[-len(HUGE) :] = HUGE if huge else x[: len(HUGE)]
    found = computed(kernels, f"{kind}_one", list(ONE).index(name), x, x)
    python: Function = {
        "tgamma": math.gamma,
        "cbrt": lambda value: float(np.cbrt(value)),
        "exp2": lambda value: float(np.exp2(value)),
    }.get(name) or getattr(math, name)
    worst = errors(found, [python(float(value)) for value in x])
    assert worst.max() <= bounds[kind == "float"] + (1 if kind == "double" else 0), x[
        worst.argmax()
    ]


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("kind", ["double", "float"])
def test_functions_of_two_numbers(kernels: Kernels, kind: str, name: str) -> None:
    dtype = np.dtype(kind if kind == "double" else "float32")
    rng = np.random.default_rng(1)
    x, z = (rng.uniform(0.1, 20, 64).astype(dtype) for _ in range(2))
    found = computed(kernels, f"{kind}_two", list(TWO).index(name), x, z)
    wanted = [getattr(math, name)(float(a), float(b)) for a, b in zip(x, z, strict=True)]
    assert errors(found, wanted).max() <= TWO[name][kind == "float"] + (kind == "double")


def test_large_arguments_are_reduced_exactly(kernels: Kernels) -> None:
    x = np.array([1e22, 1e300, -1e22, 2.0**60], np.float64)
    for which, function in enumerate((math.sin, math.cos)):
        found = computed(kernels, "double_one", which, x, x)
        assert errors(found, [function(value) for value in x]).max() <= 3
