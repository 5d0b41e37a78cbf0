"""Checks that saved state fits the object that loads it: the same keys and types, and tensors of equal shape and dtype."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UsageError


def check_fits(found: Any, like: Any, what: str, *, sizes: bool = True) -> None:
    """Refuses state that the loading object cannot have written.

    Args:
        found: nested dicts and lists of tensors and plain values.
        like: state of the same kind, such as the object's own before it is loaded; a type stands for any value of it.
        what: whose state it is, for the message.
        sizes: whether tensors must be of the same shape; if not, of as many dimensions.

    Raises:
        UsageError: names the first difference.
    """
    if difference := _difference(found, like, sizes):
        raise unfit(what, difference)


def fits(found: Any, like: Any) -> bool:
    """Whether `check_fits` accepts it."""
    return not _difference(found, like, sizes=True)


def unfit(what: str, difference: str) -> UsageError:
    """The error that names a difference."""
    return UsageError(
        f"The checkpoint does not fit this run: of {what}, {difference}. Resume with the task, the layout, the algorithm and"
        " the optimizer that the run was started with, or start the run again."
    )


def _difference(found: Any, like: Any, sizes: bool, place: str = "the state") -> str:
    if isinstance(like, type):
        return "" if type(found) is like else f"{place} is {_kind(found)} in place of {like.__name__}"
    if isinstance(like, torch.Tensor) and isinstance(found, torch.Tensor) and found.dtype == like.dtype:
        same = found.shape == like.shape if sizes else found.dim() == like.dim()
        return "" if same else f"{place} is {_kind(found)} in place of {_kind(like)}"
    if isinstance(like, torch.Tensor) or type(found) is not type(like):
        return f"{place} is {_kind(found)} in place of {_kind(like)}"
    if isinstance(like, dict):
        for key in [*like, *found]:
            if key not in found or key not in like:
                return f"{place} {'lacks' if key in like else 'has besides'} {key!r}"
        inside = [(found[key], like[key], repr(key)) for key in like]
    elif isinstance(like, list | tuple):
        if len(found) != len(like):
            return f"{place} has {len(found)} entries in place of {len(like)}"
        inside = [(one, own, f"entry {number}") for number, (one, own) in enumerate(zip(found, like, strict=True))]
    else:
        return ""
    return next((said for one, own, key in inside if (said := _difference(one, own, sizes, key))), "")


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
