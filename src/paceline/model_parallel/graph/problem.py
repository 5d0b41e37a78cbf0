"""The input of a placement, as data: groups of operations, tensors, devices and links; lower bounds on a step's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise

from paceline.errors import UsageError


@dataclass(frozen=True)
class Group:
    """Operations that run together, one after the other, on one device."""

    name: str  # of its last operation
    nodes: tuple[str, ...] = ()  # names of its operations, in the order of the model's forward pass
    forward_s: float = 0.0  # of its forward pass on a device of speed 1
    backward_s: float = 0.0  # of its backward pass on such a device
    state: tuple[str, ...] = ()  # names of the parameters and buffers that it uses
    state_bytes: int = 0  # of this state and what training keeps for it: gradients and optimizer state
    saved_bytes: int = 0  # of the values kept between its forward and its backward pass
    flops: float = 0.0  # of its forward pass, as far as known

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class TensorInfo:
    """The output of one operation, which others, or the loss, read.

    Args:
        added: names of all operations that read it, including its producer's own, in the model's order, in which their
            gradients must be summed; empty: fewer than three, whose sum does not depend on the order, or a reader changes it
            in place.
    """

    node: str  # the operation's name
    producer: int  # index of its group
    consumers: tuple[int, ...]  # indices of the other groups that read it
    num_bytes: int  # on the wire
    has_gradient: bool = True  # whether it receives a gradient from a consumer
    is_output: bool = False  # of the model: sent to every worker, since every worker's loop computes the loss
    shape: tuple[int, ...] = ()  # for the example
    dtype: str = "float32"  # its name in torch
    readers: tuple[tuple[str, ...], ...] = ()  # by consumer, names of the operations that read it; empty: one each
    added: tuple[str, ...] = ()

    def readers_in(self, group: int) -> tuple[str, ...]:
        """The operations of a consumer that read it."""
        return self.readers[self.consumers.index(group)] if self.readers else ("",)


@dataclass(frozen=True)
class Device:
    """A worker's device, on which groups run.

    Args:
        slowness: time per operation relative to the device on which it was measured.
        memory_bytes: capacity; None: unlimited.
        kind: such as "cpu"; groups may require one.
    """

    slowness: float = 1.0
    memory_bytes: int | None = None
    kind: str = "cpu"


@dataclass(frozen=True)
class Link:
    """The cost of a transfer between two devices; the defaults are those of two processes of one machine.

    Measured with the mailbox (`benchmarks/results/mailbox.md`): 54 us in `send`, 52 us in `receive`, 22 us on the way, and
    4 MB in some 3 ms.
    """

    latency_s: float = 2.2e-5  # from the end of sending to arrival of an empty message
    bytes_per_s: float = 1.4e9  # of a link, which carries one transfer after the other
    busy_s: float = 5e-5  # time per transfer in which the sender, and the receiver, cannot compute
    #: One queue carries the transfers of all devices, as in one machine's memory; otherwise each pair has its own in
    #: each direction.
    is_shared: bool = False

    def move_s(self, num_bytes: int) -> float:
        """From the sender's last operation to the receiver's first, without contention."""
        return 2 * self.busy_s + self.latency_s + num_bytes / self.bytes_per_s

    def slowed(self, factor: float) -> Link:
        """The link with `factor` times the time between sender and receiver."""
        return replace(self, latency_s=self.latency_s * factor, bytes_per_s=self.bytes_per_s / factor)


@dataclass(frozen=True)
class Problem:
    """Groups in topological order, devices, and constraints on the placement."""

    groups: tuple[Group, ...]  # by index
    tensors: tuple[TensorInfo, ...]  # between them
    devices: tuple[Device, ...]  # by worker
    link: Link = field(default_factory=Link)  # between two devices that `link_factors` does not name
    allowed: tuple[tuple[int, ...], ...] = ()  # by group, the devices that may run it; empty: any
    #: Sets of groups that must be on one device because they share state or memory.
    together: tuple[tuple[int, ...], ...] = ()
    microbatches: int = 1  # parts of a batch that are in flight; a group's times are for one of them
    link_factors: tuple[tuple[int, int, float], ...] = ()  # two devices, and the factor on the time of their transfers

    @cached_property
    def links(self) -> tuple[tuple[Link, ...], ...]:
        """By two devices, the link between them."""
        numbers = range(len(self.devices))
        factors = {frozenset((a, b)): factor for a, b, factor in self.link_factors}
        return tuple(tuple(self.link.slowed(factors.get(frozenset((a, b)), 1.0)) for b in numbers) for a in numbers)

    @property
    def fastest_link(self) -> Link:
        pairs = combinations(range(len(self.devices)), 2)
        return min((self.links[a][b] for a, b in pairs), key=lambda one: one.move_s(1), default=self.link)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """By group, the indices of the tensors that it reads from other groups."""
        return _listed(len(self.groups), [(g, t) for t, one in enumerate(self.tensors) for g in one.consumers])

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        """By group, the indices of the tensors that it makes."""
        return _listed(len(self.groups), [(one.producer, t) for t, one in enumerate(self.tensors)])

    @cached_property
    def class_of(self) -> tuple[int, ...]:
        """By group, the first group of its class: the groups that share its device in every placement."""
        first = list(range(len(self.groups)))
        for members in self.together:
            least = min(first[one] for one in members)
            joined = {first[one] for one in members}
            first = [least if one in joined else one for one in first]
        return tuple(first)

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """By the first group of a class, all of its groups."""
        found: dict[int, list[int]] = {}
        for group, first in enumerate(self.class_of):
            found.setdefault(first, []).append(group)
        return {first: tuple(groups) for first, groups in found.items()}

    @cached_property
    def earlier(self) -> tuple[frozenset[int], ...]:
        """By group, the groups that run before it in every order.

        These are the groups that it reads from, and the last earlier group that shares state with it. Batch norm's averages
        depend on the order, and so do the last bits of a tied weight's gradient.
        """
        found = [{self.tensors[t].producer for t in reads} for reads in self.reads]
        for groups in self.members.values():
            for before, after in pairwise(groups):
                found[after].add(before)
        return tuple(map(frozenset, found))

    @cached_property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """By group, the devices that may run it and all groups that must be with it.

        Raises:
            UsageError: two groups must be together but have no device in common; the message names both.
        """
        everywhere = tuple(range(len(self.devices)))
        own = [one or everywhere for one in self.allowed] or [everywhere] * len(self.groups)
        found: dict[int, tuple[int, ...]] = {}
        for first, groups in self.members.items():
            common = everywhere
            for group in groups:
                common = tuple(d for d in common if d in own[group])
                if not common:
                    other = next(one for one in groups if not set(own[one]) & set(own[group]) or one == group)
                    raise UsageError(
                        f"{self.groups[other].name} is asked for on {_devices(own[other])} and {self.groups[group].name} on"
                        f" {_devices(own[group])}, but both must be on one device, as they share state or memory: pin both to"
                        " the same."
                    )
            found[first] = common
        return tuple(found[first] for first in self.class_of)

    def memory_of_class(self, first: int) -> int:
        """Bytes that a class of groups needs on its device; the same state counts once."""
        groups = [self.groups[group] for group in self.members[first]]
        state_bytes = {one.state: one.state_bytes for one in reversed(groups)}
        return sum(state_bytes.values()) + sum(one.saved_bytes for one in groups) * self.microbatches

    def memory_of(self, device_of: Sequence[int]) -> list[int]:
        """Bytes by device."""
        used = [0] * len(self.devices)
        for first in self.members:
            used[device_of[first]] += self.memory_of_class(first)
        return used

    def fits(self, device_of: Sequence[int]) -> bool:
        """Whether every device has enough memory, and every group is on an allowed device."""
        limits = [one.memory_bytes for one in self.devices]
        has_room = all(
            limit is None or used <= limit for used, limit in zip(self.memory_of(device_of), limits, strict=True)
        )
        together = all(device_of[group] == device_of[first] for group, first in enumerate(self.class_of))
        return has_room and together and all(d in own for d, own in zip(device_of, self.choices, strict=True))


@dataclass(frozen=True)
class Bounds:
    """Seconds that a step needs in every placement."""

    #: The longest path through one micro-batch's forward and backward pass, without transfers, on the fastest device.
    path_s: float
    work_s: float  # all work divided by the sum of all devices' speeds

    @property
    def least_s(self) -> float:
        """The higher of the two."""
        return max(self.path_s, self.work_s)


def bounds(problem: Problem) -> Bounds:
    """Both bounds of a problem; they ignore pinned groups, so they may be lower than necessary."""
    fastest = min(one.slowness for one in problem.devices)
    path = [0.0] * len(problem.groups)
    for group in range(len(problem.groups)):
        before = max((path[problem.tensors[t].producer] for t in problem.reads[group]), default=0.0)
        path[group] = before + problem.groups[group].step_s
    work_s = sum(one.step_s for one in problem.groups) * problem.microbatches
    speed = sum(1.0 / one.slowness for one in problem.devices)
    return Bounds(max(path, default=0.0) * fastest, work_s / speed)


def check_memory(problem: Problem) -> None:
    """Rejects a problem that no placement fits in memory.

    Raises:
        UsageError: the message names the groups, the memory that they need, and the memory available.
    """
    limits = [one.memory_bytes for one in problem.devices]
    needs = {first: problem.memory_of_class(first) for first in problem.members}
    for first, need in needs.items():
        room = [limits[device] for device in problem.choices[first]]
        largest = max((one for one in room if one is not None), default=None)
        if None not in room and largest is not None and need > largest:
            raise UsageError(
                f"{problem.groups[first].name} and the operations that must share its device need "
                f"{need / 1e6:,.1f} MB, and the largest device that they may be on has {largest / 1e6:,.1f} MB: give it "
                "more memory, or cut the model there."
            )
    total = sum(needs.values())
    if None not in limits and total > (there := sum(one or 0 for one in limits)):
        raise UsageError(
            f"The model needs {total / 1e6:,.1f} MB, and the {len(limits)} devices have {there / 1e6:,.1f} MB together: add a"
            " device or memory, or make the batch smaller."
        )


def _listed(length: int, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(length)]
    for key, value in pairs:
        found[key].append(value)
    return tuple(map(tuple, found))


def _devices(ids: Sequence[int]) -> str:
    return f"device {ids[0]}" if len(ids) == 1 else f"devices {', '.join(map(str, ids[:-1]))} or {ids[-1]}"
