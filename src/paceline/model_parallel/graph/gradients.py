"""Gradients of a placed model that differ from one process: sent as messages, and summed in the model's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from paceline.errors import UsageError
from paceline.model_parallel.graph.exchange import Exchange
from paceline.model_parallel.graph.partition import Transfer, adds_up
from paceline.model_parallel.graph.plan_data import PlanData
from paceline.system.torch_internals import graph_task

#: The loss as a reader of the model's outputs.
LOSS = ""


def added_in_another_order(plan: PlanData, worker: int) -> dict[str, tuple[str, ...]]:
    """By operation, the readers whose gradients this worker sums, in the model's order, if the plan's order differs."""
    problem, placement = plan.problem, plan.placement
    in_plan = {name: at for at, name in enumerate(name for g in placement.order for name in problem.groups[g].nodes)}
    found = {}
    for index, tensor in enumerate(problem.tensors):
        ranks = [in_plan[reader] for reader in tensor.added]
        if ranks != sorted(ranks) and adds_up(problem, placement.device_of, index) == worker:
            found[tensor.node] = (*tensor.added, *([LOSS] if tensor.is_output else ()))
    return found


def pass_none_on(made: Iterable[torch.Tensor], before: Iterable[Any]) -> None:
    """Lets functions of the user's own that get no gradient give none: their backward would get zeros, and so give zeros.

    One process does not run them at all, and their parameters have no gradient there, which optimizers with momentum or
    weight decay tell from zero.

    Args:
        made: the results of an operation.
        before: the `grad_fn` of what it has read.
    """
    left: list[Any] = [one.grad_fn for one in made]
    seen = {None, *before}
    while left:
        one = left.pop()
        if one in seen:
            continue
        seen.add(one)
        left += [further for further, _ in one.next_functions]
        if isinstance(one, BackwardCFunction):
            one.register_hook(lambda own, given: None if any(map(torch.is_tensor, given)) else (None,) * len(own))


def whole_passes(leaf: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook that refuses backward passes for some gradients only, which leave out sends, and for gradients of gradients.

    Autograd reaches the `leaf` of `Anchor` before it goes on to the model, but not in passes for the gradients of others.
    """
    passed = [-1]
    leaf.register_post_accumulate_grad_hook(lambda _: passed.append(graph_task()))

    def check(_: torch.Tensor) -> None:
        if passed[-1] != graph_task() or torch.is_grad_enabled():
            raise UsageError(
                "The gradients of a placed model come in messages, all in one pass, and have no gradients of their own: call "
                "loss.backward() and read p.grad instead of torch.autograd.grad, and leave out inputs= and create_graph=True."
            )

    return check


class Anchor(torch.autograd.Function):
    """Identity on an output of the model, tied to `Tokens`: the backward pass of any output runs that of all tokens.

    It is tied to a leaf as well, which only passes for the gradients of all leaves reach.
    Each output has its own, so that operations whose outputs the loss leaves out do not run backwards.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, token: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], torch.zeros(()), torch.zeros(())


class Tokens(torch.autograd.Function):
    """One token for all; its backward pass runs every send and receive of this worker."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.number = exchange, len(tokens)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        ctx.exchange.begin_backward()
        return None, *(torch.zeros(()) for _ in range(ctx.number))


class InOrder(torch.autograd.Function):
    """One tensor for several readers; its backward pass sums their gradients as one process does, the last reader's first.

    Autograd sums gradients as they arrive: in the order in which the plan has run the readers, latest first.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, readers: int) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        total = None
        for one in reversed(gradients):
            if one is not None:
                total = one if total is None else total + one
        return total, None


class Take(torch.autograd.Function):
    """A token; its backward pass receives the gradient of a tensor that was sent."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, exchange: Exchange, transfer: Transfer, tensor: Any, number: int) -> Any:
        ctx.about = exchange, transfer, tensor, number
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        exchange, transfer, tensor, number = ctx.about
        return exchange.receive(transfer.to, "return", number, tensor), None, None, None, None


class Give(torch.autograd.Function):
    """A received tensor and a token; the backward pass sends the gradient, or that there is none."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, *about: Any) -> Any:
        ctx.about = about  # exchange, transfer, tensor, number
        ctx.set_materialize_grads(False)
        return value.view_as(value), torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        exchange, transfer, tensor, number = ctx.about
        exchange.send(transfer.source, "return", number, gradients[0], tensor)
        return None, None, None, None, None, None
