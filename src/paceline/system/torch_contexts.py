"""PyTorch's contexts, such as autocast: each simulated worker has its own, although all take turns in one process.

Without it, a `with` of one worker would apply to the others, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from paceline.system.torch_internals import clear_parametrizations, read_contexts, write_contexts


class TorchContexts:
    """The contexts at this object's creation; `outside` runs functions in them. Costs: some microseconds per call."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._outside = read_contexts()

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            inside = read_contexts()
            changes = torch.is_inference_mode_enabled() is not self._inference
            with torch.inference_mode(self._inference) if changes else nullcontext():
                self.leave()
                try:
                    return function(*arguments)
                finally:
                    write_contexts(inside)

        return call

    def leave(self) -> None:
        """Leaves all contexts that were entered since."""
        write_contexts(self._outside)
        clear_parametrizations()  # not what one worker's `cached()` has filled
