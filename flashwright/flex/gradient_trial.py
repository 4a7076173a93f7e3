"""The first gradients of a new backward: some rows of dQ and some keys of dK and dV against the
user's own functions in fp64.

With x = scale * q.k and s = score_mod(x), P = exp(s - LSE) where the mask shows the key:

    dX = P * (dO V^T - Delta) * ds/dx      dQ = scale dX K, dK = scale dX^T Q, dV = P^T dO

Delta is rowsum(dO * O) - dLSE. O and LSE are the forward's own outputs. What is allowed is relative
to the sum of absolute values: a gradient may vanish, and the roundings of its terms do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashwright.flex.fallback import mask_of, over, score_of
from flashwright.flex.task import ROWS, WrongKernel
from flashwright.generate.store import tell
from flashwright.spec import AttentionSpec

Function = Callable[..., Any]
LIMIT = {"bf16": 0.03, "fp16": 0.01}
"""Of an error, relative to what the absolute values of the terms add up to."""


@dataclass(frozen=True)
class GradientTrial:
    """A look at the first gradients of an operator; see rules.BackwardTrial."""

    spec: AttentionSpec
    score_mod: Function | None
    mask_mod: Function | None
    extras: Mapping[str, Any]
    """Slopes, sink and bias of the call, if there are any."""

    def __call__(self, given: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Raise WrongKernel if gradients are not what the functions give. If PyTorch cannot compute
        the functions, that is told instead."""
        if "lse" not in given or not all(given[name].numel() for name in ("q", "k")):
            return
        q, k = given["q"], given["k"]
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        with torch.no_grad():
            for b, h in {(0, 0), (q.shape[0] - 1, heads - 1)}:
                shared = h // group
                rows, keys = _some(q.shape[2], q.device), _some(k.shape[2], q.device)
                try:
                    dq = [self._part(given, b, h, rows, None)[0]]
                    parts = [
                        self._part(given, b, one, None, keys)[1:]
                        for one in range(shared * group, (shared + 1) * group)
                    ]
                except RuntimeError as error:  # vmap of CUDA's logsigmoid fails
                    tell(f"the first gradients are not checked: PyTorch fails: {error}")
                    return
                dk, dv = zip(*parts, strict=True)
                source = b if k.shape[0] > 1 else 0
                self._compare("dQ", found.get("dq"), (b, h, rows), dq)
                self._compare("dK", found.get("dk"), (source, shared, keys), dk)
                self._compare("dV", found.get("dv"), (source, shared, keys), dv)

    @property
    def _bias(self) -> Any:
        bias = self.extras.get("bias")
        return bias.detach() if bias is not None else None

    def _part(self, given: Mapping[str, Any], b: int, h: int, rows: Any, keys: Any) -> list[Any]:
        """dQ, dK and dV of one head, each with the sum of the absolute values of its terms: of some
        rows (all keys), or of some keys (all rows)."""
        q, k, v = given["q"], given["k"], given["v"]
        source, shared = (b if k.shape[0] > 1 else 0), h * k.shape[1] // q.shape[1]
        rows = torch.arange(q.shape[2], device=q.device) if rows is None else rows
        keys = torch.arange(k.shape[2], device=q.device) if keys is None else keys
        q, do, out = (given[name][b, h, rows].double() for name in ("q", "do", "o"))
        k, v = (x[source, shared, keys].double() for x in (k, v))
        lse, scale = given["lse"][b, h, rows].double()[:, None], self.spec.softmax_scale
        score, chain, seen = self._scores(q @ k.T * scale, given, b, h, rows, keys)
        empty = torch.isinf(lse)
        p = torch.where(seen & ~empty, torch.exp(score - torch.where(empty, 0, lse)), 0)
        dp, delta = do @ v.T, (do * out).sum(-1, keepdim=True)
        if "dlse" in given:
            delta = delta - given["dlse"][b, h, rows].double()[:, None]
        dx, most = p * (dp - delta) * chain, p * (abs(dp) + abs(delta)) * abs(chain)
        least = torch.finfo(given["q"].dtype).smallest_normal  # a smaller number loses its digits
        terms = ((dx, most + least, k), (dx.T, most.T + least, q), (p.T, p.T + least, do))
        factors = (scale, scale, 1.0)
        pairs = zip(terms, factors, strict=True)
        return [(f * a @ x, f * m @ abs(x)) for (a, m, x), f in pairs]

    def _scores(
        self, products: Any, given: Mapping[str, Any], b: int, h: int, rows: Any, keys: Any
    ) -> tuple[Any, Any, Any]:
        """The scores, their derivatives with respect to the scaled products, and which are seen."""
        spec, shift = self.spec, given["k"].shape[2] - given["q"].shape[2]
        slopes = self.extras["slopes"].detach().double() if spec.alibi else None
        score = score_of(spec.softcap, shift, slopes, self._bias, self.score_mod)
        mask = mask_of(spec.causal, spec.window, shift, self.mask_mod)
        alone = (torch.tensor([n], device=rows.device) for n in (b, h))
        places = (*alone, rows, keys)
        with torch.enable_grad():
            x = products.detach().requires_grad_()
            made = over(score, with_score=True)(x[None, None], *places).double()[0, 0]
            (chain,) = torch.autograd.grad(made.sum(), x)
        return made.detach(), chain, over(mask, with_score=False)(*places)[0, 0]

    def _compare(self, name: str, found: Any, place: tuple[Any, ...], parts: Any) -> None:
        """Raise WrongKernel if a gradient is not the sum of its parts."""
        if found is None:
            return
        wanted, most = (sum(each) for each in zip(*parts, strict=True))
        size = most.square().mean(-1, keepdim=True).sqrt() + 1e-6
        error = float(((found[place].double() - wanted).abs() / size).max())
        if not error <= LIMIT[self.spec.dtype]:
            where = "batch {}, head {}".format(*place[:2])
            raise WrongKernel(
                f"a new backward is wrong: at {where} {name} is {error:.2g} of its terms' size "
                "from what the functions give. Please report the functions and the shapes"
            )


def _some(count: int, device: Any) -> Any:
    return torch.linspace(0, count - 1, min(ROWS, count)).long().to(device)
