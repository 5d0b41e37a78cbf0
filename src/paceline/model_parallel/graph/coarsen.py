"""Merges operations into groups: those that share memory or cannot be sent, and those that are not worth a transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise

from paceline.errors import UsageError, shown
from paceline.model_parallel.graph.problem import Group, Problem, TensorInfo
from paceline.model_parallel.graph.schedule import in_order
from paceline.model_parallel.graph.trace import Node, Traced
from paceline.specs.text import closest

_ADDED_UP = ("forward_s", "backward_s", "state_bytes", "saved_bytes", "flops")
_MOST_GROUPS = 200  # chains are merged until no more than this remain


def find_nodes(traced: Traced, name: str) -> list[str]:
    """The operations that a user's name means: a single operation, or all of the module with that path.

    Raises:
        UsageError: there are none.
    """
    found = [n.name for n in traced.nodes if name in (n.name, n.path) or n.path.startswith(f"{name}.")]
    if not found:
        known = list(dict.fromkeys([n.path for n in traced.nodes if n.path] + [n.name for n in traced.nodes]))
        known += list(dict.fromkeys(part for one in known if "." in one for part in [one.split(".")[0]]))
        raise UsageError(
            f"The model has no module or operation {shown(name)} to pin.{closest(name, known)} It has"
            f" {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}."
        )
    return found


def blocks_of(
    traced: Traced, labels: Mapping[str, object] | None = None
) -> tuple[list[tuple[str, ...]], list[list[int]]]:
    """Groups operations by the graph alone; returns the groups' names, and sets of groups that must be on one device.

    An operation joins the one with which it shares memory, as a view does; an operation whose value is no tensor, such as a
    tuple, is joined by its readers; both only if the graph of groups stays acyclic. Otherwise the two must only be on one
    device, like operations that share a parameter, a buffer, or memory that one of them changes in place.

    `labels` maps names to labels: operations with different ones do not join.
    """
    nodes = [one for one in traced.nodes if not one.is_local]
    index = {one.name: at for at, one in enumerate(nodes)}
    edges = {(index[i], at) for at, one in enumerate(nodes) for i in one.inputs if i in index}
    changed = {i for one in nodes for i in one.changes}
    sharing = _sharing(nodes, lambda one: one.state)
    sharing += _sharing(nodes, lambda one: [i for i in one.storages if i in changed])
    in_order = {pair for users in sharing for pair in pairwise(users)}
    merger = _Merger(len(nodes), edges | in_order, [(labels or {}).get(one.name) for one in nodes])
    for u, v in sorted(edges):
        if not nodes[u].is_tensor or (nodes[u].storages & nodes[v].storages):
            merger.merge(u, v)
    sets = [[u, v] for u, v in edges if not nodes[u].is_tensor] + sharing
    _check_changes(nodes, edges, merger)
    groups = merger.sets()
    group_of = {one: at for at, members in enumerate(groups) for one in members}
    return [tuple(nodes[one].name for one in members) for members in groups], [
        [group_of[one] for one in members] for members in sets
    ]


def _check_changes(nodes: Sequence[Node], edges: set[tuple[int, int]], merger: _Merger) -> None:
    """Rejects an in-place change whose order relative to a reader of the same memory could differ from the model's."""
    behind: list[set[int]] = [set() for _ in nodes]  # the predecessors of each
    for u, v in sorted(edges, key=lambda one: one[1]):
        behind[v] |= behind[u] | {u}
    for at in (at for at, one in enumerate(nodes) if one.changes):
        for source, reader in edges:
            if reader == at or not nodes[source].storages & nodes[at].changes:
                continue
            is_with = merger.root(source) == merger.root(at)
            if reader < at:
                is_safe = reader in behind[at] or merger.root(reader) == merger.root(at)
            else:
                is_safe = is_with or source == at or at in behind[source]
            if not is_safe:
                raise UsageError(
                    f"{nodes[at].name} ({nodes[at].line}) changes in place a tensor that {nodes[reader].name} "
                    f"({nodes[reader].line}) reads, and nothing else determines their order: make a new tensor there "
                    "instead."
                )


def _sharing(nodes: Sequence[Node], what: Callable[[Node], Sequence[object]]) -> list[list[int]]:
    users: dict[object, list[int]] = {}
    for at, one in enumerate(nodes):
        for shared in what(one):
            users.setdefault(shared, []).append(at)
    return [one for one in users.values() if len(one) > 1]


def coarsened(problem: Problem, labels: Sequence[object], least_s: float | None = None) -> list[list[int]]:
    """Sets of groups to merge because they are not worth a transfer between them.

    A group and its only reader, or its only source, merge if moving the tensor there and its gradient back takes longer than
    the shorter of the two runs. If the reader has other sources, as the head of two towers has, the group itself must be
    shorter: a tower would otherwise wait for the other one. The same holds for a source with other readers. Pairs with the
    largest transfers merge first, so that cuts remain at small ones. If more than 200 groups remain, the shortest neighbours
    in chains merge, too.

    Groups with different `labels` do not merge. With `least_s`, groups merge with their only reader or source into blocks of
    at least that time, which are measured one after the other; transfers do not count.
    """
    move_s = problem.fastest_link.move_s
    edges = {(before, after) for after, earlier in enumerate(problem.earlier) for before in earlier}
    moved: dict[tuple[int, int], float] = {}
    for one in problem.tensors:
        for r in one.consumers:
            ways = 2 if one.has_gradient else 1
            moved[one.producer, r] = moved.get((one.producer, r), 0.0) + ways * move_s(one.num_bytes)
    merger = _Merger(len(problem.groups), edges, labels)
    took = [one.step_s for one in problem.groups]

    def merge_one(should: Callable[[int, int, float], bool]) -> bool:
        ways: dict[tuple[int, int], float] = {}
        for (u, v), moved_s in moved.items():
            a, b = merger.root(u), merger.root(v)
            if a != b:
                ways[a, b] = ways.get((a, b), 0.0) + moved_s
        for (a, b), ways_s in sorted(ways.items(), key=lambda one: (-one[1], one[0])):
            is_only = merger.after[a] == {b} or merger.before[b] == {a}
            if is_only and should(a, b, ways_s) and merger.merge(a, b):
                took[merger.root(a)] = took[a] + took[b]
                return True
        return False

    def should_merge(a: int, b: int, ways_s: float) -> bool:
        if least_s is not None:
            return min(took[a], took[b]) < least_s
        alone = [took[a]] * (merger.after[a] == {b}) + [took[b]] * (merger.before[b] == {a})
        return min(alone) < ways_s

    while merge_one(should_merge):
        pass
    while merger.number > _MOST_GROUPS:
        neighbours = {(merger.root(u), merger.root(v)) for u, v in moved}
        limit_s = 2 * min((took[a] + took[b] for a, b in neighbours if a != b), default=0.0)
        if not merge_one(lambda a, b, _, limit_s=limit_s: took[a] + took[b] <= limit_s):
            break
    return merger.sets()


class _Merger:
    """Merges groups while the graph between them stays acyclic."""

    def __init__(self, number: int, edges: set[tuple[int, int]], labels: Sequence[object]) -> None:
        self._root = list(range(number))
        self.after: dict[int, set[int]] = {one: set() for one in range(number)}
        self.before: dict[int, set[int]] = {one: set() for one in range(number)}
        for u, v in edges:
            self.after[u].add(v)
            self.before[v].add(u)
        self._labels = list(labels)
        self.number = number

    def root(self, one: int) -> int:
        while self._root[one] != one:
            one = self._root[one]
        return one

    def merge(self, u: int, v: int) -> bool:
        """Merges a group with one that reads from it, unless another path connects them."""
        a, b = self.root(u), self.root(v)
        if a == b:
            return True
        if self._labels[a] != self._labels[b] or self._leads(a, b):
            return False
        keep, gone = min(a, b), max(a, b)
        self._root[gone] = keep
        for mine, theirs in ((self.after, self.before), (self.before, self.after)):
            mine[keep] = (mine[keep] | mine.pop(gone)) - {keep, gone}
            for other in mine[keep]:
                theirs[other] = (theirs[other] - {gone}) | {keep}
        self.number -= 1
        return True

    def _leads(self, a: int, b: int) -> bool:
        """Whether a path of two or more edges leads from one to the other."""
        seen, todo = set(), [one for one in self.after[a] if one != b]
        while todo:
            one = todo.pop()
            if one == b:
                return True
            if one not in seen:
                seen.add(one)
                todo += self.after[one]
        return False

    def sets(self) -> list[list[int]]:
        """The members of each group; groups in topological order."""
        members: dict[int, list[int]] = {}
        for one in range(len(self._root)):
            members.setdefault(self.root(one), []).append(one)
        return [members[one] for one in in_order(self.before, lambda one: members[one][0])]


def tensors_of(traced: Traced, groups: Sequence[Sequence[str]], wire_bytes: Callable[[Node], int]) -> list[TensorInfo]:
    """The tensors that groups produce for others, or for the loss."""
    group_of = {name: at for at, names in enumerate(groups) for name in names}
    readers: dict[str, dict[int, list[str]]] = {}
    local = {one.name: one for one in traced.nodes if one.is_local}
    with_gradient = {one.name for one in traced.nodes if one.has_gradient}
    for one in traced.nodes:
        for i in one.inputs:
            if one.name in group_of and i in group_of and group_of[i] != group_of[one.name]:
                readers.setdefault(i, {}).setdefault(group_of[one.name], []).append(one.name)
    changed = {i for one in traced.nodes for i in one.changes}
    found = []
    for one in traced.nodes:
        is_output = one.name in traced.outputs
        if one.name in group_of and one.name not in local and (readers.get(one.name) or is_output) and one.is_tensor:
            consumers = tuple(sorted(readers.get(one.name, ())))
            added = tuple(reader.name for reader in traced.nodes if one.name in reader.inputs)
            from_consumers = not with_gradient.isdisjoint(chain(*readers.get(one.name, {}).values()))
            is_ordered = one.has_gradient and len(added) + is_output > 2 and not one.storages & changed
            found.append(
                TensorInfo(
                    node=one.name,
                    producer=group_of[one.name],
                    consumers=consumers,
                    num_bytes=wire_bytes(one),
                    has_gradient=one.has_gradient and from_consumers,
                    is_output=is_output,
                    shape=one.shape,
                    dtype=one.dtype,
                    readers=tuple(tuple(readers[one.name][group]) for group in consumers),
                    added=added if is_ordered else (),
                )
            )
    return found


def merged(problem: Problem, sets: Sequence[Sequence[int]]) -> list[Group]:
    """Each set of groups as one, with the name of its longest."""
    result = []
    for own in ([problem.groups[one] for one in members] for members in sets):
        sums = {name: sum(getattr(one, name) for one in own) for name in _ADDED_UP}
        nodes = tuple(name for one in own for name in one.nodes)
        states = tuple(dict.fromkeys(name for one in own for name in one.state))
        result.append(Group(name=max(own, key=lambda one: one.step_s).name, nodes=nodes, state=states, **sums))
    return result
