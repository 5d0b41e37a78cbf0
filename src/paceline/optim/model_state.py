"""A model's tensors by name, and as bytes for comparing and sending."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_ROW_BYTES = 8 * 1021  # a prime number of words: the rows of a permutation matrix of 256 would all have the same sum


def dense_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that can be views of shared memory, by their names in arenas and checkpoints."""
    return {f"buffer {name}": one for name, one in model.named_buffers() if _is_dense(one)}


def untrained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Frozen parameters, and the buffers that are not dense."""
    dense = {id(one) for one in dense_buffers(model).values()}
    others = {name: one for name, one in state_of(model).items() if not one.requires_grad and id(one) not in dense}
    return {f"untrained {name}": one.detach() if _is_dense(one) else one for name, one in others.items()}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors with values, by name."""
    named: Iterable[tuple[str, torch.Tensor]] = (*model.named_parameters(), *model.named_buffers())
    return {name: one for name, one in named if not is_lazy(one) and not one.is_meta and one.numel()}


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values, (n,) uint8 on the CPU; shares its memory if it can."""
    if _is_dense(tensor):
        return _memory(tensor).cpu()
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


@torch.no_grad()
def from_bytes(tensor: torch.Tensor, raw: torch.Tensor) -> None:
    """Gives a tensor the values that `to_bytes` returned of another with the same shape, type and layout."""
    if _is_dense(tensor):
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
        return
    value = torch.load(io.BytesIO(raw.cpu().numpy().tobytes()), map_location=tensor.device, weights_only=True)
    if tensor.layout is torch.strided:
        tensor.data = value
    else:
        tensor.resize_as_sparse_(value).copy_(value)


def digest(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of bytes that `to_bytes` returns, and a 64-bit hash of them.

    Costs two passes over the tensor on its own device, which sum its rows and columns; only the sums are hashed.
    """
    raw = _memory(tensor) if _is_dense(tensor) else to_bytes(tensor)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    num_rows = raw.numel() // _ROW_BYTES
    rows, rest = raw[: num_rows * _ROW_BYTES], raw[num_rows * _ROW_BYTES :]
    words = rows.view(torch.int64).view(num_rows, _ROW_BYTES // 8)
    found = hashlib.blake2b(digest_size=8)
    for part in (words.sum(0), words.sum(1), rest):
        found.update(part.cpu().numpy().tobytes())
    return raw.numel(), int.from_bytes(found.digest(), "little", signed=True)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain and strided, has elements, and no two of them share memory."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    overlaps = any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.numel() > 0 and not tensor.is_meta and not overlaps
