"""Matrix products that take half precision in and give single precision out."""

import torch
from torch import Tensor

_ROWS = 1 << 16
"""Rows of a product that is made beside what it is added to."""


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """A product of two of the same dtype, with sums and result in single precision or better."""
    if left.dtype not in (torch.float16, torch.bfloat16):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def halved(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A tensor in half precision, and what it was divided by so that it fits.

    A row's part in a batch of thousands is below what float16 can tell from zero; bfloat16 reaches
    as far as single precision does.

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
    """``total += left @ right`` with ``left`` in the dtype of products and ``right`` in single.

    The first product is written over whatever is there.
    """
    right, size = halved(right, left.dtype)
    if size is not None or (left.dtype == torch.bfloat16 and not left.is_cuda):
        # Nothing scales and adds at once: by blocks, so that little is made beside.
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
