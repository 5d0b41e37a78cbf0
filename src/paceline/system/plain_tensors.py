"""Encodes tensors for untrusted channels: as NumPy's archive of plain arrays, without pickle.

NumPy has no bfloat16, so the bits of such a tensor are sent as integers, under a name that marks them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.system.plain_files import read_npz

_BITS_OF_BFLOAT16 = ".bfloat16"


def tensors_to_bytes(tensors: Mapping[str, Tensor]) -> bytearray:
    """Encodes tensors by name; copies them to the CPU."""
    arrays: dict[str, Any] = {}
    for name, one in tensors.items():
        if one.dtype == torch.bfloat16:
            arrays[name + _BITS_OF_BFLOAT16] = one.detach().cpu().view(torch.int16).numpy()
        else:
            arrays[name] = one.detach().cpu().numpy()
    file = io.BytesIO()
    np.savez(file, **arrays)
    return bytearray(file.getbuffer())


def tensors_from_bytes(data: bytes) -> dict[str, Tensor]:
    """Decodes the bytes from `tensors_to_bytes`; raises `ValueError` for bytes of another format."""
    try:
        arrays = read_npz(io.BytesIO(data), "it was changed on its way")
        found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    except (UsageError, TypeError) as error:
        raise ValueError(str(error)) from error
    for name in [name for name in found if name.endswith(_BITS_OF_BFLOAT16)]:
        bits = found.pop(name)
        if bits.dtype != torch.int16:
            raise ValueError(f"{name!r} in {bits.dtype}")
        found[name.removesuffix(_BITS_OF_BFLOAT16)] = bits.view(torch.bfloat16)
    return found
