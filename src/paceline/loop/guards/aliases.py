"""Find tensors that share a trained parameter's memory; attach moves the parameters and would separate them."""

from __future__ import annotations

import gc
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.system.torch_internals import forward_pre_hooks, num_storage_users, storage_id


def check_aliases(model: nn.Module, *, warns: bool) -> None:
    """Refuses nested buffers and tensors that share a trained parameter's memory; warns of aliases outside the model.

    Raises:
        UsageError: with the remedy.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_nested:
            raise UsageError(
                f"The buffer {name} is a nested tensor, which workers cannot share: register its values and its offsets as two"
                " buffers, and make the nested tensor of them in forward."
            )
    by_storage: dict[int, list[tuple[str, torch.Tensor, range]]] = defaultdict(list)
    for name, one in _held_by(model):
        if _has_memory(one):
            by_storage[storage_id(one)].append((name, one, _bytes_of(one)))
    num_known: dict[int, int] = {}
    for storage, held in by_storage.items():
        trained = [row for row in held if isinstance(row[1], nn.Parameter) and row[1].requires_grad]
        for name, parameter, own in trained:
            for other, one, theirs in held:
                is_near = own.start < theirs.stop and theirs.start < own.stop
                if other and is_near and one is not parameter and _overlap(parameter, one):
                    raise UsageError(
                        f"{other} and {name} share memory, as after `b.weight.data = a.weight.data`, and attach would separate"
                        " them: tie the parameters themselves, as in `b.weight = a.weight`, and make views in forward."
                    )
        if trained:
            num_known[storage] = len(held)

    def is_shared() -> bool:
        return any(num_storage_users(storage) > num for storage, num in num_known.items())

    if warns and is_shared():
        gc.collect()  # garbage is no alias: in PyTorch 2.8 and 2.9, `torch.save` leaves some that refers to the storages
        if not is_shared():
            return
        warnings.warn(
            "Something outside the model shares its parameters' memory, such as a state_dict(), detach() or a NumPy array from"
            " before attach. Inside the `with` the parameters have other memory, so it does not change with them: copy it, or"
            " make it inside the `with`.",
            stacklevel=4,
        )


def _held_by(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors in modules' attributes; the name is empty if a hook makes the tensor again."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        remade = {getattr(hook, "name", None) for hook in forward_pre_hooks(module)}  # by spectral_norm
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            values: Any = value.values() if isinstance(value, dict) else value
            for one in values if isinstance(value, dict | list | tuple) else [value]:
                if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter):
                    yield "" if name in remade else f"{prefix}.{name}".lstrip("."), one


def _has_memory(tensor: torch.Tensor) -> bool:
    return (
        not tensor.is_nested
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.device.type in ("cpu", "cuda")
    )


def _bytes_of(tensor: torch.Tensor) -> range:
    """From a tensor's first byte in its storage to its last one; bytes between them may be another tensor's."""
    first, size = tensor.storage_offset(), tensor.element_size()
    last = first + sum((num - 1) * stride for num, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(first * size, (last + 1) * size)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a storage have an element in common: rows or columns of one matrix have none."""
    if one.dtype != other.dtype:
        return True
    mask = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    mask.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(mask.as_strided(other.shape, other.stride(), other.storage_offset()).any())
