"""What a loop does to its parameters outside the optimizer's step: whether it has changed them since it got them."""

from __future__ import annotations

import torch

from paceline.flat import FlatBinding
from paceline.loaded_weights import Loads

__all__ = ["OutsideChanges"]

_PROBES = 32  # 8-byte words of the vector that are looked at every time
_WHOLE_AT_FIRST = 50  # times that the whole vector is looked at; after that, every tenth
_WHOLE_EVERY = 10


class OutsideChanges:
    """A fingerprint of the parameters, taken whenever the loop gets them.

    It has their addresses, which replacing `p.data` changes; PyTorch's counts of changes, which in-place operations and
    `load_state_dict` move; 32 words of the vector, for what goes by `p.data`; and a sum over all of it the first 50 times and
    every tenth time after that. Where other workers write the vector meanwhile, and on a GPU, which would have to be waited
    for, it has addresses and counts alone.

    Costs some 4 us a time for ten parameters; and one pass over the vector each time that it has the sum.

    Args:
        binding: the parameters.
        loads: what is loaded into them.
        written_by_others: a vector that other workers or programs write, too; None: there is none.
        idle_is_own: whether what the parameters are bound to between two steps is nobody else's to write.
    """

    def __init__(
        self,
        binding: FlatBinding,
        loads: Loads,
        *,
        written_by_others: torch.Tensor | None = None,
        idle_is_own: bool = True,
    ) -> None:
        self._binding = binding
        self._loads = loads
        self._parameters = binding.parameters
        self._others = written_by_others.data_ptr() if written_by_others is not None else None
        self._idle_is_own = idle_is_own
        self._known: dict[int, tuple[list[int], torch.Tensor, torch.Tensor]] = {}  # by address of a vector
        self._num_taken = 0
        self._addresses: list[int] = []
        self._counts: list[int] = []
        self._words: torch.Tensor | None = None
        self._probe: torch.Tensor | None = None
        self._sum: int | None = None
        self._probed = 0

    def take(self, *, idle: bool = False, whole: bool = False) -> None:
        """The loop gets the parameters as they are bound now; `idle`: between two steps; `whole`: with the sum."""
        if self._loads.any:
            self._loads.forget()
        x = self._binding.bound_to
        assert x is not None
        key = x.data_ptr()
        known = self._known.get(key)
        if known is None:
            addresses = [view.data_ptr() for view in self._binding.views(x)]
            words = x.view(torch.int64)
            known = self._known[key] = addresses, words, words[:: max(1, len(words) // _PROBES)]
        self._addresses, words, probe = known
        self._counts = [parameter._version for parameter in self._parameters]
        self._words = self._sum = None
        if x.is_cpu and key != self._others and (self._idle_is_own or not idle):
            self._num_taken += 1
            self._words, self._probe = words, probe
            self._probed = int(probe.sum())
            if whole or self._num_taken <= _WHOLE_AT_FIRST or self._num_taken % _WHOLE_EVERY == 0:
                self._sum = int(words.sum())

    def found(self) -> bool:
        """Whether the loop has changed its parameters since then; what it has changed and put back does not count."""
        if not self._addresses:
            return False
        if [parameter.data_ptr() for parameter in self._parameters] != self._addresses:
            return True
        if self._words is not None and self._sum is not None:
            return int(self._words.sum()) != self._sum
        if [parameter._version for parameter in self._parameters] != self._counts:
            return True
        return self._words is not None and self._probe is not None and int(self._probe.sum()) != self._probed
