"""Probability rows and uniforms: everything that enters the contract passes here.

A row is one next-token distribution. Rows have equal vocabularies, finite non-negative entries, and unit mass within
``MASS_TOLERANCE`` (a float32 softmax passes, a bfloat16 one does not). They are copied to float64 on the CPU and
divided by their mass, so that acceptance and replacement use the same numbers and no caller's buffer is kept.

A uniform is a finite number in [0, 1). Grids, seeded streams and recorded draws are all passed the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MASS_TOLERANCE = 1e-5

Rows = Tensor | Sequence[Tensor]  # [n, vocabulary], or n rows of [vocabulary]; any floating dtype
Uniforms = Tensor | Sequence[float]  # [n]


def as_rows(rows: Rows, name: str, count: int | None = None, vocabulary: int | None = None) -> Tensor:
    """Checked rows: float64 [n, vocabulary], normalised, independent of the input.

    ``count`` and ``vocabulary``: what they must be, where the caller knows. ``ValueError`` names the row and its value.
    """
    if count is not None and len(rows) != count:
        raise ValueError(f"{name}: expected {count} rows, got {len(rows)}")
    if not len(rows):
        return torch.zeros(0, vocabulary or 0, dtype=torch.float64)
    shapes = {tuple(row.shape) for row in rows}
    if any(len(shape) != 1 or not shape[0] for shape in shapes):
        raise ValueError(f"{name}: a row has one dimension, the vocabulary, got shapes {sorted(shapes)}")
    sizes = {shape[0] for shape in shapes} | ({vocabulary} if vocabulary is not None else set())
    if len(sizes) > 1:
        raise ValueError(f"{name}: rows must have equal vocabularies, got sizes {sorted(sizes)}")
    for row in rows:
        if not row.is_floating_point():
            raise ValueError(f"{name}: rows must be floating-point probabilities, got {row.dtype}")
    stacked = torch.stack([row.detach().to("cpu", torch.float64) for row in rows])
    _refuse_first(~stacked.isfinite(), stacked, name, "is not finite")
    _refuse_first(stacked < 0, stacked, name, "is negative")
    masses = [row.sum() for row in stacked]  # row by row: equal rows stay equal in whatever company
    for at, mass in enumerate(masses):
        if abs(mass.item() - 1) > MASS_TOLERANCE:
            raise ValueError(f"{name}[{at}] has mass {mass.item()}, a distribution has 1 within {MASS_TOLERANCE}")
    return stacked / torch.stack(masses).unsqueeze(1)


def as_row(row: Tensor, name: str, vocabulary: int | None = None) -> Tensor:
    """One checked row: float64 [vocabulary]."""
    return as_rows([row], name, vocabulary=vocabulary)[0]


def as_uniforms(uniforms: Uniforms, name: str, count: int) -> list[float]:
    """``count`` checked uniforms as Python floats; ``ValueError`` for any that is not finite or not in [0, 1)."""
    values: list[float] = _uniform_tensor(uniforms, name, count).tolist()
    return values


def as_uniform(uniform: float, name: str) -> float:
    """One checked uniform."""
    value = float(uniform)
    if not math.isfinite(value):
        raise ValueError(f"{name} = {value} is not finite, a uniform lies in [0, 1)")
    if not 0 <= value < 1:
        raise ValueError(f"{name} = {value} is outside [0, 1)")
    return value


def as_token(token: int, name: str, vocabulary: int) -> int:
    """One checked token id: an integer below ``vocabulary``."""
    value = int(token)
    if value != token or not 0 <= value < vocabulary:
        raise ValueError(f"{name} = {token} is not a token id of a vocabulary of {vocabulary}")
    return value


def draw(row: Tensor, uniforms: Uniforms) -> Tensor:
    """Inverse-CDF draws from one row: int64 [n], one for each uniform.

    Token x is drawn where CDF(x - 1) <= u < CDF(x). A token of probability zero is never drawn: the CDF runs over the
    other tokens only, and a product that rounds up to its end takes the last of them.
    """
    return _inverse_cdf(as_row(row, "row"), _uniform_tensor(uniforms, "uniforms", len(uniforms)))


def draw_token(weights: Tensor, uniform: float) -> int:
    """One draw from checked weights, float64 [vocabulary], of any positive mass; see :func:`draw`."""
    return int(_inverse_cdf(weights, torch.tensor([uniform], dtype=torch.float64)))


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    support = weights.nonzero().squeeze(1)
    cdf = weights[support].cumsum(0)
    at = torch.searchsorted(cdf, uniforms * cdf[-1], right=True)
    return support[at.clamp_(max=len(support) - 1)]


def residual(p: Tensor, q: Tensor) -> Tensor | None:
    """normalise(max(p - q, 0)) of checked rows, float64 [vocabulary]; None where nothing is left.

    Leviathan et al. 2023, section 2.3. Its support lies inside p's.
    """
    return normalise((p - q).clamp_(min=0))


def normalise(weights: Tensor) -> Tensor | None:
    """Checked weights divided by their mass; None where the mass is zero."""
    mass = weights.sum()
    return weights / mass if mass > 0 else None


def _uniform_tensor(uniforms: Uniforms, name: str, count: int) -> Tensor:
    values = torch.as_tensor(uniforms, dtype=torch.float64, device="cpu").detach()
    if values.dim() != 1 or len(values) != count:
        raise ValueError(f"{name}: expected {count} uniforms, got shape {tuple(values.shape)}")
    good = (values >= 0) & (values < 1)
    if not good.all():
        at = int((~good).nonzero()[0])
        as_uniform(float(values[at]), f"{name}[{at}]")
    return values


def _refuse_first(bad: Tensor, rows: Tensor, name: str, complaint: str) -> None:
    if bad.any():
        at, token = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}[{at}][{token}] = {rows[at, token].item()} {complaint}")
