"""What the Triton attention kernels take, checked in one place: by "auto", and by the kernels' own front doors."""

from __future__ import annotations

import torch
from torch import Tensor

from centroidkv.errors import BackendError, CentroidKVError, DtypeError, ShapeError
from centroidkv.kernels import LARGEST_SIZE, TYPES, require_triton


def require_kernel(query: Tensor, keys: Tensor, values: Tensor) -> None:
    """Refuse what the Triton attention kernels cannot compute; sizes are the tensors' last dimensions.

    Raises:
        BackendError: Triton cannot run on the device, values are of another type, or a gradient would be lost.
        DtypeError: not bfloat16, float16 or float32.
        ShapeError: a head size above 256.
    """
    require_triton(query.device)
    other = "use backend='auto' or 'reference'"
    if query.dtype not in TYPES:
        raise DtypeError(f"the Triton kernels compute in {list(TYPES)}, got {query.dtype}; {other}")
    if values.dtype != query.dtype:
        raise BackendError(
            f"the Triton kernels take queries, keys and values of one type, got {query.dtype} and values of "
            f"{values.dtype}; {other}"
        )
    for name, size in (("keys", keys.shape[-1]), ("values", values.shape[-1])):
        if size > LARGEST_SIZE:
            raise ShapeError(f"the Triton kernels take head sizes up to {LARGEST_SIZE}, {name} have {size}; {other}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, keys, values)):
        raise BackendError(
            f"the Triton kernels have no gradient, and an input requires one; {other}, or torch.no_grad()"
        )


def kernel_fits(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether :func:`require_kernel` lets these tensors pass.

    >>> kernel_fits(*torch.ones(3, 8, device="meta"))
    False
    """
    try:
        require_kernel(query, keys, values)
    except CentroidKVError:
        return False
    return True
