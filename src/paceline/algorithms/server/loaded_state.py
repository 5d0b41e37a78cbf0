"""The state that a loop has loaded into its optimizer, on its way to the servers, which have the optimizer.

A state is sent as NumPy's archive of plain arrays: nothing in it is pickled. NumPy has no bfloat16, so the bits of such a
vector are sent as integers, under a name that says so.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.plain_files import read_npz

__all__ = ["state_from_bytes", "state_to_bytes"]

_BITS_OF_BFLOAT16 = ".bfloat16"


def state_to_bytes(state: dict[str, Tensor], elements: tuple[int, int]) -> Tensor:
    """Vectors (P,) and numbers, of which a shard gets its `elements`, as bytes to be sent."""
    own = {key: (value[slice(*elements)] if value.dim() else value).cpu() for key, value in state.items()}
    arrays: dict[str, Any] = {
        key + _BITS_OF_BFLOAT16 * (value.dtype == torch.bfloat16): (
            value.view(torch.int16) if value.dtype == torch.bfloat16 else value
        ).numpy()
        for key, value in own.items()
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def state_from_bytes(sent: Tensor, x: Tensor) -> dict[str, Tensor]:
    """What was sent to a shard whose parameters are `x` (n,).

    Raises:
        ValueError: it is something else, or another shard's.
    """
    try:
        arrays = read_npz(io.BytesIO(sent.numpy().tobytes()), "it was changed on its way")
        state = {key: torch.from_numpy(array) for key, array in arrays.items()}
    except (UsageError, TypeError) as error:
        raise ValueError(str(error)) from error
    for key in [key for key in state if key.endswith(_BITS_OF_BFLOAT16)]:
        bits = state.pop(key)
        if bits.dtype != torch.int16:
            raise ValueError(f"{key!r} in {bits.dtype}")
        state[key.removesuffix(_BITS_OF_BFLOAT16)] = bits.view(torch.bfloat16)
    for key, value in state.items():
        if value.shape not in ((), x.shape):
            raise ValueError(f"{key!r}, which is no state of {len(x):,} parameters")
    return {key: value.to(x.device) for key, value in state.items()}
