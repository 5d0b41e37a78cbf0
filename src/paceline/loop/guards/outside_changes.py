"""Parameter changes outside the optimizer's step: they take effect, as in plain PyTorch, or raise an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Any, Literal

import torch

from paceline.algorithms import Algorithm, registry
from paceline.errors import AlgorithmWarning, UsageError
from paceline.loop.guards.loaded_weights import Loads
from paceline.optim.flat import FlatBinding
from paceline.optim.ranges import Ranges, outside

Effect = Literal["lasts", "lasts if alike", "moves", "is added", "lost"]

_data_ptr = torch.Tensor.data_ptr
_version = attrgetter("_version")

_PROBES = 32  # 8-byte words of the vector that are looked at every time
_WHOLE_AT_FIRST = 50  # times that the whole vector is looked at; after that, every tenth, or more rarely if it is large
_WHOLE_EVERY = 10
_SUMMED = 1 << 16  # words at most that a sum of a part has, beside sparse gradients
_SEEN_MOVING = (
    "The loop moves its parameters while a step is under way, where other workers of {} see them: from the next step on this"
    " worker computes on a copy of the parameters."
)


@dataclass(eq=False)
class OutsideChanges:
    """Takes a fingerprint of the parameters when the loop gets them, and compares it before the program's next step.

    The effect of a change, such as clamping the weights, depends on the vector that the parameters were views of:

    - *The trained vector*, which other workers write at any time (`hogwild`; also `locked` and `ad-psgd`, right after a step):
      the change takes effect immediately, like an update, and others may overwrite it. A comparison is impossible. During a
      step, others would compute at values that the loop may restore. If PyTorch's counts or addresses show a change, a
      warning says so once, and this worker computes on a copy from then on. Changes left in the copy are added to the trained
      vector. Earlier changes by `p.data`, such as `p.data.add_`, go unseen.
    - *The worker's own model* (`local-sgd`, `d-psgd`): the change takes effect, and counts in means, like a step of this
      worker. Under `d-psgd` this holds until the model is sent to the neighbours, at the beginning of the next step.
    - *The worker's replica of the common model* (`lockstep`, `all-reduce`): the change takes effect if all workers make the
      same one. If one worker sees a change, all compare their parameters (`EqualReplicas`). Sharded, each worker steps on a
      part and gets the rest from the others: during a step, a part of the change would be lost.
    - *A copy*: of a gradient, of parameters sent by servers, before the first batch, between two epochs, and under `leashed`
      between two steps and when weights are loaded. A lone worker's copy, or a replica's, is written back; any other change
      would be lost, or undo others' work, and raises an error. So does a change of the published version that `leashed`
      computes on, which is detected and warned of as above; the first step is on a copy, where most loops show what they do.

    A fingerprint has the addresses of the parameters, which replacing `p.data` changes; PyTorch's counts of changes, which
    in-place operations and `load_state_dict` move; 32 words of the vector; and a sum over all of it where a change would be
    refused, elsewhere the first 50 times and every tenth time after that. The sum is compared the first 50 times, every tenth
    time, and where counts have moved: what is changed and put back is no change. So later on a change by `p.data` that happens
    once and misses the 32 words can go unseen; what a loop does in every step cannot. Beside sparse gradients, a sum
    over the whole vector would take longer than the step: between two such sums, which are rarer, 65,536 words are added up,
    and a count that has moved is taken for a change, even if the values have been put back. On a GPU, which would have to be
    waited for, there are addresses and counts alone.

    Costs some 8 us a step for ten parameters, 3 us for a lone worker, where addresses are looked at once a step; a pass over
    memory for each sum, of which there are two per step if the loop uses `worker.batches`.

    Attributes:
        lasting: a lone worker's vector on which its racing program computes, as long as the parameters are views of it. It
            need not be taken again, and `settle` is needed only before a step is applied, as no worker reads it before. None:
            there is no such vector.
        is_idle: whether the loop has the parameters between two steps.
        moves: whether gradients are to be computed on a copy: the loop has been seen to change parameters that others see,
            while a step is under way, or would read a published version and has made no step that shows it.
    """

    binding: FlatBinding
    loads: Loads  # what is loaded into the parameters
    _: KW_ONLY
    spec: str  # the algorithm, for messages
    #: What becomes of a change of the vector (P,) that the parameters are views of, and whether between two steps.
    fate_of: Callable[[torch.Tensor, bool], Effect]
    put: Callable[[torch.Tensor], None]  # gives the trained vector the values of a copy (P,)
    is_published: bool = False  # whether a gradient is computed on a vector that others read, too
    #: A vector that other workers or programs write, too; None: there is none.
    written_by_others: torch.Tensor | None = None
    is_alone: bool = False  # whether there are no others
    #: Whether the parameters are of the racing kind, whose program reads them for gradients and nothing else.
    is_racing: bool = False
    lasts_after_steps: bool = True  # whether a change right after a step takes effect

    def __post_init__(self) -> None:
        self._parameters = self.binding.parameters
        self._taken = written = self.written_by_others
        self._others = written.data_ptr() if written is not None else None
        self.moves = self.is_published and not self.is_alone
        self._has_moved = self._is_seen = False
        # By a vector's address: those of its parameters, its words, some of these, and what becomes of a change of it.
        self._known: dict[int, tuple[list[int], list[torch.Tensor], list[torch.Tensor], tuple[Effect, Effect]]] = {}
        self._left_out: Ranges = ()
        self._num_taken = 0
        self._moves = False  # the loop moves its parameters, and perhaps puts them back
        self._addresses: list[int] = []
        self._counts: list[int] = []
        self._fate: Effect = "lasts"
        self.is_idle = self._compares = False
        self.lasting: torch.Tensor | None = None
        self._words: list[torch.Tensor] = []
        self._probe: list[torch.Tensor] = []
        self._sum: int | None = None
        self._stride = 1  # every how many words are added up
        self._probed = 0

    @property
    def is_shared(self) -> bool:
        """Whether other workers write the vector that the parameters are views of."""
        x = self.binding.bound_to
        return x is not None and x.data_ptr() == self._others

    def take(
        self, *, idle: bool = False, whole: bool = False, is_sparse: bool = False, keeps_loads: bool = False
    ) -> None:
        """The loop gets the parameters as they are bound now.

        Args:
            idle: between two steps.
            whole: with the sum; they are a copy, which others do not see.
            is_sparse: the gradient is sparse, so that a sum over all parameters would take longer than the step.
            keeps_loads: the loop has them already, and may have begun to load values.
        """
        if self.loads.were_any and not keeps_loads:
            self.loads.forget()
        x = self.binding.bound_to
        assert x is not None
        key = x.data_ptr()
        known = self._known.get(key)
        if known is None:
            words = self._words_of(x)
            stride = max(1, sum(map(len, words)) // _PROBES)
            known = self._known[key] = (
                [*map(_data_ptr, self.binding.views(x))],
                words,
                [one[::stride] for one in words],
                (self.fate_of(x, False), self.fate_of(x, True)),
            )
        self._addresses, words, probe, fates = known
        self._fate, self.is_idle = fates[idle], idle
        self._words = []
        self._sum = self.lasting = None
        self._is_seen = not (idle or whole or self._has_moved or self.is_alone) and (
            key == self._others or self.is_published
        )
        if self.moves and self.is_racing and not idle:
            self._fate, self._taken = "is added", x.clone()
        if self._fate == "lasts" and self.is_alone:
            if self.is_racing and not idle and not self.loads.were_any:
                self.lasting = x
            return
        self._counts = [*map(_version, self._parameters)]
        if key == self._others:
            return
        self._num_taken += 1
        stride = sum(map(len, words)) // _SUMMED + 1 if is_sparse else 1
        self._compares = (
            whole
            or self._moves
            or self._num_taken <= _WHOLE_AT_FIRST
            or self._num_taken % max(_WHOLE_EVERY, stride) == 0
        )
        self._compares &= x.is_cpu
        if x.is_cpu:
            self._probe, self._probed = probe, _total(probe)
        self._stride = 1 if self._compares else stride
        self._words = words if self._stride == 1 else [one[:: self._stride] for one in words]
        if self._compares or (self._fate in ("lost", "moves", "is added") and x.is_cpu):
            self._sum = _total(self._words)

    def leave_out(self, ranges: Ranges) -> None:
        """Looks at all but these elements of the vectors from now on; they change while the loop has them."""
        is_taken = bool(self._addresses) and not self.found()
        self._left_out = ranges
        self._known.clear()
        if is_taken:
            self.take(idle=self.is_idle, whole=True, keeps_loads=True)

    def _words_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        per_word = 8 // x.element_size()
        ranges = tuple((first // per_word, -(-last // per_word)) for first, last in self._left_out)
        words = x.view(torch.int64)
        return [words[part] for part in outside(ranges, 0, len(words))]

    def found(self) -> bool:
        """Whether the loop has changed its parameters since then; what it has changed and put back does not count."""
        if not self._addresses:
            return False
        if self._are_replaced():
            return True
        if self.is_alone and self._fate == "lasts":
            return False
        # Checked once: if others write the vector meanwhile, a second check could find what the first did not.
        may_have = self._have_counts_moved() or (bool(self._words) and _total(self._probe) != self._probed)
        self._moves |= may_have
        if self._words and self._sum is not None and (self._compares or may_have):
            return _total(self._words) != self._sum or (self._stride > 1 and may_have)
        return may_have

    def settle(self) -> bool:
        """The program is about to go on: what the loop has changed takes effect.

        Returns:
            whether it has changed anything of which all must have the same.

        Raises:
            UsageError: that would be lost.
        """
        is_seen = self._is_seen and bool(self._addresses) and self._have_counts_moved() | self._are_replaced()
        is_seen &= not (self.moves and self.loads.were_any)  # what is loaded goes into a copy in every step
        looked = self.found() if is_seen and self._fate == "lost" else None
        if is_seen and not looked:
            self._has_moved = True
            warnings.warn(_SEEN_MOVING.format(self.spec), AlgorithmWarning, stacklevel=2)
        if self._addresses and not self.is_idle:
            self.moves = self._has_moved
        if self._fate == "lasts" and (not self._addresses or [*map(_data_ptr, self._parameters)] == self._addresses):
            if self.lasting is None or self.loads.were_any:
                self._addresses, self.lasting = [], None
            return False
        has_changed = self.found() if looked is None else looked
        are_elsewhere, self._addresses, self.lasting = has_changed and self._are_elsewhere(), [], None
        if not has_changed:
            return False
        if self._fate == "lost":
            raise UsageError(self._refusal())
        x = self.binding.bound_to
        assert x is not None
        if are_elsewhere:
            for parameter, view in zip(self._parameters, self.binding.views(x), strict=True):
                if parameter.shape != view.shape:
                    raise UsageError(
                        f"The loop has given a parameter of shape {tuple(view.shape)} the shape {tuple(parameter.shape)}:"
                        " change the model before attach."
                    )
                view.copy_(parameter.detach())
            self.binding.rebind(x)
        if self._fate == "is added":
            assert self.written_by_others is not None
            assert self._taken is not None
            self.written_by_others.add_(x - self._taken)
        elif self._fate != "lasts":
            self.put(x)
        return self._fate == "lasts if alike"

    def _are_elsewhere(self) -> bool:
        return bool(self._addresses) and [*map(_data_ptr, self._parameters)] != self._addresses

    def _are_replaced(self) -> bool:
        """Whether the parameters lie elsewhere and their values differ; if the values are equal, they are bound as before."""
        x = self.binding.bound_to
        if x is None or not self._are_elsewhere():
            return False
        if any(map(lambda one, view: one.shape != view.shape, self._parameters, self.binding.views(x))):
            return True
        values = self.binding.zeros()
        self.binding.read(values)
        if self._sum is None and not torch.equal(values, x):
            return True
        if self._sum is not None:
            if _total([one[:: self._stride] for one in self._words_of(values)]) != self._sum:
                return True
            x.copy_(values)
        self.binding.rebind(x)
        return False

    def _have_counts_moved(self) -> bool:
        return [*map(_version, self._parameters)] != self._counts

    def _refusal(self) -> str:
        when = (
            "between two steps"
            if self.is_idle
            else "while a step was under way, as without worker.batches one always is,"
        )
        remedy = "for clamps and projections take lockstep, all-reduce or local-sgd, where they last right after a step"
        if self.lasts_after_steps:
            remedy = "clamp and project right after optimizer.step(), with batches from worker.batches"
        return (
            f"The loop has changed its parameters {when} other than by optimizer.step(), and under {self.spec} that would be"
            f" lost: load weights before attach, or after the last step; {remedy}."
        )


def _total(words: list[torch.Tensor]) -> int:
    return sum(map(int, map(torch.sum, words)))


def watch_outside(
    binding: FlatBinding, shared: Any, algorithm: Algorithm, loads: Loads, num_workers: int
) -> OutsideChanges:
    """For a worker's parameters, with what becomes of changes of each vector that they may be views of."""
    kind, is_alone = algorithm.needs.kind, num_workers == 1
    trained = shared.x if kind != "slots" and (kind != "served" or is_alone) else None
    if trained is not None and trained.device != binding.device:
        trained = None  # the loop has copies only
    is_common = kind == "replicated" and not algorithm.gossip
    averages_at_any_time = algorithm.gossip and not algorithm.lockstep
    is_raced = kind in ("racing", "locked") or averages_at_any_time
    sends_before_gradient = algorithm.lockstep and algorithm.needs.mailbox

    def fate(x: torch.Tensor, idle: bool) -> Effect:
        is_trained = trained is not None and x.data_ptr() == trained.data_ptr()
        if is_alone:
            return "lasts" if is_trained else "moves"
        if is_common:
            return "lasts if alike" if idle or not algorithm.splits_update else "lost"
        return "lasts" if is_trained and (idle or not sends_before_gradient) else "lost"

    def put(x: torch.Tensor) -> None:
        if trained is None:
            shared.replace(x)
        elif x.data_ptr() != trained.data_ptr():
            trained.copy_(x)

    return OutsideChanges(
        binding,
        loads,
        spec=registry.spec(algorithm),
        fate_of=fate,
        put=put,
        is_published=kind == "slots" and binding.device.type == "cpu",
        written_by_others=trained if is_raced and not is_alone else None,
        is_alone=is_alone,
        is_racing=kind == "racing",
        lasts_after_steps=trained is not None,
    )
