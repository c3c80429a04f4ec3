"""Per-sample gradients as low-rank factors, and what can be computed from them.

For a weight matrix used as ``y_t = M a_t`` the gradient of sample i is ``sum_t e_t a_t^T`` with a_t the input and e_t
the gradient at the output, so it is known from two thin matrices, the *factors* ``left`` [tokens, rows] and ``right``
[tokens, columns]. An embedding is the same with one-hot rows. A tied matrix has several such uses; they are added.

Squared norms need no gradient matrix at all: ``||sum_t e_t a_t^T||^2 = sum_{t,s} (e_t . e_s)(a_t . a_s)``. That costs
tokens^2 (rows + columns) instead of tokens * rows * columns, so each parameter takes the cheaper of the two. Inner
products and weighted sums over the group materialise the gradients of the group for a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 1 << 23
"""Most floats of per-sample gradients held at once (32 MiB in float32)."""


@dataclass(frozen=True)
class Use:
    """One use of a matrix by a batch of samples.

    Attributes:
        left: Gradients at the outputs ``[samples, tokens, rows]``, or, for an embedding, token ids
            ``[samples, tokens]``, which stand for one-hot rows.
        right: Inputs ``[samples, tokens, columns]``, or, for an embedding, the gradients at its outputs.
    """

    left: Float[Tensor, "samples tokens rows"] | Int[Tensor, "samples tokens"]
    right: Float[Tensor, "samples tokens columns"]

    @property
    def one_hot(self) -> bool:
        """Whether the left factor is a list of rows instead of numbers."""
        return not self.left.is_floating_point()


@dataclass
class Factors:
    """Gradients of a batch of samples with respect to one parameter.

    Attributes:
        shape: Rows and columns of the parameter (a vector has one row).
        uses: Its uses as a matrix.
        dense: Gradients that were cheap to form, ``[samples, rows * columns]`` (biases, norms), added up.
    """

    shape: tuple[int, int]
    uses: list[Use] = field(default_factory=list)
    dense: Tensor | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return self.shape[0] * self.shape[1]

    def add_dense(self, gradient: Float[Tensor, "samples numel"]) -> None:
        """Add gradients that are given in full."""
        self.dense = gradient if self.dense is None else self.dense + gradient

    def cheaper_from_factors(self) -> bool:
        """Whether norms are cheaper from the factors than from the materialised gradients."""
        tokens = sum(use.right.shape[1] for use in self.uses)
        return self.dense is None and tokens**2 * sum(self.shape) / 2 < (tokens + 1) * self.numel

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Form the gradients in blocks of rows: pairs of offset and ``[samples, part]``."""
        rows, columns = self.shape
        if not self.uses:
            if self.dense is not None:
                yield 0, self.dense
            return
        samples, device = len(self.uses[0].right), self.uses[0].right.device
        step = max(1, BLOCK // (samples * columns))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            block = torch.zeros(samples, stop - start, columns, device=device)
            for use in self.uses:
                _add_rows(block, use, start, stop)
            flat = block.view(samples, -1)
            if self.dense is not None:
                flat += self.dense[:, start * columns : stop * columns]
            yield start * columns, flat


def sq_norms(factors: Iterable[Factors], samples: int, device: torch.device) -> Float[Tensor, " samples"]:
    """Squared norm of each sample's whole gradient, float64 ``[samples]``.

    Parameters that read the same input (queries, keys and values of a layer) share its tokens' inner products.
    """
    total = torch.zeros(samples, dtype=torch.float64, device=device)
    same_input: dict[int, list[Use]] = {}
    for factor in factors:
        if not factor.cheaper_from_factors():
            for _, block in factor.blocks():
                total += torch.linalg.vecdot(block, block)
        elif len(factor.uses) == 1 and not factor.uses[0].one_hot:
            same_input.setdefault(id(factor.uses[0].right), []).append(factor.uses[0])
        else:
            for i, u in enumerate(factor.uses):
                for v in factor.uses[: i + 1]:
                    total += _inner(u, v) * (1 if u is v else 2)
    for uses in same_input.values():
        joined = Use(torch.cat([u.left for u in uses], 2), uses[0].right)
        total += _inner(joined, joined)
    return total.clamp_min_(0.0)  # rounding of cancelling tokens must not make a norm negative


def _add_rows(block: Tensor, use: Use, start: int, stop: int) -> None:
    """Add rows start..stop of a use's gradient to a block ``[samples, stop - start, columns]``."""
    samples, rows, columns = block.shape
    if not use.one_hot:
        block.baddbmm_(use.left[..., start:stop].transpose(1, 2), use.right)
        return
    inside = (use.left >= start) & (use.left < stop)
    row = use.left - start + rows * torch.arange(samples, device=block.device)[:, None]
    block.view(samples * rows, columns).index_add_(0, row[inside], use.right[inside])


def _inner(u: Use, v: Use) -> Float[Tensor, " samples"]:
    """sum_{t,s} (left_t . left'_s)(right_t . right'_s) for each sample, float64."""
    right = torch.bmm(u.right, v.right.transpose(1, 2))
    if u.one_hot and v.one_hot:
        left = (u.left[:, :, None] == v.left[:, None, :]).to(right.dtype)
    elif u.one_hot:
        left = v.left.gather(2, u.left[:, None, :].expand(-1, v.left.shape[1], -1)).transpose(1, 2)
    elif v.one_hot:
        left = u.left.gather(2, v.left[:, None, :].expand(-1, u.left.shape[1], -1))
    else:
        left = torch.bmm(u.left, v.left.transpose(1, 2))
    return (left * right).sum((1, 2), dtype=torch.float64)
