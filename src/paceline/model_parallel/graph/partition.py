"""Each device's operations in a step, in order: its groups, and one Send and one Receive per tensor and destination.

The white paper's canonical form: a tensor is sent to a device once, however many groups there read it. All devices follow
one global order of groups, which prevents deadlocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.model_parallel.graph.problem import Problem

#: Most readers of a tensor on one device: the numbers of gradient messages count readers within the tensor's number.
MOST_READERS = 2**12


class Transfer(NamedTuple):
    """One tensor on its way to one device."""

    tensor: int
    source: int
    to: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of a device's forward pass; its backward pass is the same list, read backwards.

    Args:
        kind: "run" a group; "send" or "receive" a tensor, in the forward pass only; or, in the backward pass only, "give"
            the gradient of a received tensor, and "take" that of a sent one.
    """

    kind: Literal["run", "send", "receive", "give", "take"]
    group: int = -1  # of "run"
    transfer: Transfer | None = None  # of the other kinds
    reader: int = 0  # of "give" and "take": which of the tensor's readers there, if their gradients travel one by one
    node: str = ""  # that reader's name; empty: all readers


def transfers_of(problem: Problem, device_of: Sequence[int]) -> list[Transfer]:
    """All transfers of a forward pass, by tensor and destination."""
    found = []
    for index, tensor in enumerate(problem.tensors):
        source = device_of[tensor.producer]
        readers = {device_of[group] for group in tensor.consumers}
        if tensor.is_output:
            readers = set(range(len(problem.devices)))
        found += [Transfer(index, source, to) for to in sorted(readers - {source})]
    return found


def programs(problem: Problem, device_of: Sequence[int], order: Sequence[int]) -> list[list[Operation]]:
    """By device, the operations of the forward pass, or of its beginning if `order` has only the first groups.

    A tensor is sent as soon as it is made, and received just before its first reader on that device. If a tensor has readers
    on several devices, each reader's gradient is taken where that reader runs in the global order, one by one, so that the
    producer can add them up as one process does, bit for bit. If all readers are on one device, that device adds them up, and
    the sum is taken as late as possible.
    """
    result: list[list[Operation]] = [[] for _ in problem.devices]
    given: dict[tuple[int, int], int] = {}  # gradients that will travel, by tensor and destination
    for group in order:
        here = device_of[group]
        for index in problem.reads[group]:
            tensor = problem.tensors[index]
            source = device_of[tensor.producer]
            if source == here:
                continue
            transfer, is_first = Transfer(index, source, here), (index, here) not in given
            if is_first:
                result[here].append(Operation("receive", transfer=transfer))
                given[index, here] = 0
            if not tensor.has_gradient:
                continue
            if not _has_several(problem, device_of, index):
                if is_first:
                    result[here].append(Operation("give", transfer=transfer))
                continue
            for node in tensor.readers_in(group):
                number = given[index, here]
                result[source].append(Operation("take", transfer=transfer, reader=number, node=node))
                result[here].append(Operation("give", transfer=transfer, reader=number, node=node))
                given[index, here] += 1
        result[here].append(Operation("run", group))
        for index in problem.makes[group]:
            tensor = problem.tensors[index]
            readers = {device_of[one] for one in tensor.consumers}
            to_all = set(range(len(problem.devices))) if tensor.is_output else set()
            for to in sorted((readers | to_all) - {here}):
                transfer = Transfer(index, here, to)
                result[here].append(Operation("send", transfer=transfer))
                if tensor.has_gradient and to in readers and not _has_several(problem, device_of, index):
                    result[here].append(Operation("take", transfer=transfer))
    for index, tensor in enumerate(problem.tensors):
        source = device_of[tensor.producer]
        if tensor.is_output and len(order) == len(problem.groups):
            for to in range(len(problem.devices)):
                if to != source and (index, to) not in given:
                    result[to].append(Operation("receive", transfer=Transfer(index, source, to)))
    return result


def adds_up(problem: Problem, device_of: Sequence[int], index: int) -> int:
    """The device that adds up the gradients of a tensor's readers: the producer's, unless all readers are on one other."""
    tensor = problem.tensors[index]
    source, elsewhere = device_of[tensor.producer], {device_of[group] for group in tensor.consumers}
    in_own_group = len(tensor.added) - sum(len(tensor.readers_in(group)) for group in tensor.consumers)
    if len(elsewhere) != 1 or tensor.is_output or (tensor.added and in_own_group):
        return source
    return elsewhere.pop()


def _has_several(problem: Problem, device_of: Sequence[int], index: int) -> bool:
    return adds_up(problem, device_of, index) == device_of[problem.tensors[index].producer]
