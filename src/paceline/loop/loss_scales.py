"""The factor by which a `torch.amp.GradScaler` has scaled the loss of the running backward pass."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paceline.system.torch_internals import call_after_backward

_pass = threading.local()  # of the thread that computes gradients: `scale`, a reference to that of the last scaled loss
_lock = threading.Lock()
_unpatch: list[Callable[[], None]] = []  # as many as watch


def scale_of_pass() -> torch.Tensor | None:
    """The loss scale of the backward pass that calls this, a number (); None: no GradScaler scaled the loss.

    Known only while `watch_scales` is active.
    """
    held = getattr(_pass, "scale", _nothing)()
    return held.scale if held is not None else None


def watch_scales() -> Callable[[], None]:
    """Makes every GradScaler of this process mark the losses that it scales; returns an undo function.

    The scaler itself is unknown before its first step, and its scale can change between two steps, by growth, by `update` or
    by a loaded state. Only the call of `scale` tells a loss's factor.

    Costs: a product of two numbers and a hook for every call of `scale`, while an attached loop watches.
    """
    with _lock:
        if not _unpatch:
            original = torch.amp.GradScaler.scale
            torch.amp.GradScaler.scale = _marking(original)  # type: ignore[method-assign]
            _unpatch.append(partial(setattr, torch.amp.GradScaler, "scale", original))
        else:
            _unpatch.append(_nothing)

    def undo() -> None:
        with _lock:
            last = _unpatch.pop()
            last()

    return undo


def _nothing() -> None:
    """Others still watch, or no loss was scaled."""


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        return _marked(scaled, partial(original, scaler)) if scaler.is_enabled() else scaled

    return scale


def _marked(scaled: Any, scale: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(scaled, torch.Tensor):
        if scaled.requires_grad and not torch.compiler.is_compiling():
            scaled.register_hook(partial(_begin_pass, scale(torch.ones((), device=scaled.device))))
        return scaled
    if isinstance(scaled, (list, tuple)):
        for one in scaled:
            _marked(one, scale)
        return scaled
    return (_marked(one, scale) for one in scaled)


class _Scale:
    """A loss scale that a backward pass keeps alive, as its final callback, until it ends or raises an error."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale

    def __call__(self) -> None:
        """The pass has ended."""


def _begin_pass(scale: torch.Tensor, _: torch.Tensor) -> None:
    held = _Scale(scale)
    _pass.scale = weakref.ref(held)
    call_after_backward(held)
