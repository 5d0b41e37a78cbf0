"""A plan: where each part of a model runs; it prints, and makes the parts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from paceline.membership.environment import Invitation, current_environment
from paceline.model_parallel.graph.execute import PlacedPart
from paceline.model_parallel.graph.explain import explain
from paceline.model_parallel.graph.plan_data import PlanData


@dataclass(frozen=True)
class Plan(PlanData):
    """The workers that run each part of a model, the order of the parts, and the transfers.

    Args:
        model: name of its class.
        digest: of its graph.
        arguments: names of the arguments of its `forward`.
        inputs: shape and type of each tensor among them, of one micro-batch.
        outputs: names of the operations whose values it returns.
        constants: values that follow from shapes, by the operation's name.
        random: names of the operations that draw random numbers; each gets its own generator.
        any_mode: whether its graph is the same for training and for evaluation.
        problem: groups, tensors, devices, links.
        placement: the chosen one.
        others: the other placers, by name, with their simulated step in seconds.
        bounds: lower bounds for every placement.
        objective: "latency" of a step, or "throughput" with several micro-batches in flight.
        step_s: of a whole forward and backward pass on one device, measured.
        sum_s: of its blocks, measured one by one.
        wire: the type that float32 is cast to for transfers: "" (no cast), "bfloat16", or "bfloat16-truncated".
        seed: of the operations that draw random numbers.
        cut: whether each tensor of `inputs` is cut into micro-batches; empty: there is one.
        is_verified: whether a step of its parts on the example was compared with the model's own.
    """

    def part(self, model: nn.Module, worker: int | None = None) -> PlacedPart:
        """One worker's part of the model; call it like the model.

        Under torchrun, the worker's rank says which part it has. A worker of `paceline launch -- SCRIPT` or `--join` takes
        its place in the run here: the first free one, or the one that `worker` names.

        Args:
            model: built like the placed one, on all workers.
            worker: whose part; None: this worker's, in a function that `launch` runs, or in a script.

        Raises:
            UsageError: the model is a different one, or the worker does not exist.
        """
        environment = current_environment()
        if not isinstance(environment, Invitation):
            return PlacedPart(self, model, worker)
        from paceline.model_parallel.graph.joined import join

        run = join(environment, self, model, worker)
        part = PlacedPart(self, model, run.worker_id)
        part.joined = run
        return part

    def explain(self) -> str:
        """The plan as text and a table."""
        return explain(self)
