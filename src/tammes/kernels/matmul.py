"""Matrix products with inputs in half precision and results in single precision."""

import torch
from torch import Tensor

_ROWS = 1 << 16
"""Rows of a temporary product that is added to a total."""


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of one dtype, accumulating and returning single precision or better."""
    if left.dtype not in (torch.float16, torch.bfloat16):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def halved(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Cast to half precision; also return the divisor that makes the tensor fit, or none.

    In a batch of thousands, the gradient of a row underflows in float16. bfloat16 has the range of
    single precision and needs no divisor.

    Example:
        >>> tiny, size = halved(torch.tensor([3e-9, -6e-9]), torch.float16)
        >>> tiny
        tensor([ 0.5000, -1.0000], dtype=torch.float16)
    """
    if dtype != torch.float16:
        return tensor.to(dtype), None
    size = tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())
    size = torch.where(size > 0, size, 1.0)
    return (tensor / size).to(dtype), size


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool = False) -> None:
    """``total += left @ right``, with ``right`` in single precision cast to the dtype of ``left``.

    With ``first``, ``total`` is overwritten.
    """
    right, size = halved(right, left.dtype)
    if size is not None or (left.dtype == torch.bfloat16 and not left.is_cuda):
        # No operation scales and adds at once; in blocks, to keep temporaries small.
        for start in range(0, len(total), _ROWS):
            block = slice(start, start + _ROWS)
            product = multiply(left[block], right)
            product = product if size is None else product * size
            total[block] = product if first else total[block] + product
    elif left.dtype == torch.bfloat16:
        beta = 0 if first else 1
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, out=total)
    else:
        total.addmm_(left, right, beta=0 if first else 1)
