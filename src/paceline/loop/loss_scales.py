"""By what a `torch.amp.GradScaler` has scaled the loss of a backward pass, known while the pass runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paceline.loop.step_calls import call_after_backward

__all__ = ["scale_of_pass", "watch_scales"]

_pass = threading.local()  # of the thread that computes gradients: `scale`, a reference to that of the last scaled loss
_lock = threading.Lock()
_unpatch: list[Callable[[], None]] = []  # as many as watch


def scale_of_pass() -> torch.Tensor | None:
    """By what the loss of the backward pass that calls this was multiplied, a number (); None: no GradScaler scaled it.

    That is known only while somebody watches (`watch_scales`).
    """
    held = getattr(_pass, "scale", _nothing)()
    return held.scale if held is not None else None


def watch_scales() -> Callable[[], None]:
    """Lets every GradScaler of this process mark the losses that it scales; returns the undoing.

    The scaler itself is unknown before its first step, and its scale may change between two steps, by growth, by `update` or
    by a state that is loaded. What a loss was multiplied by is known from the call that did so.

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
    """A loss scale that a backward pass keeps alive until it ends or raises an error, as it would call this at its end."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale

    def __call__(self) -> None:
        """The pass has ended."""


def _begin_pass(scale: torch.Tensor, _: torch.Tensor) -> None:
    held = _Scale(scale)
    _pass.scale = weakref.ref(held)
    call_after_backward(held)
