"""Meshes in one process: each worker is a thread, and collectives meet in memory."""

import threading

import torch

from paceline.model_parallel.axes import Axis
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.traffic import Traffic, sent_elements

AGAINST_HANGS_S = 60.0


class JoinPoint:
    """Where the workers of one axis put what they give to an operation."""

    def __init__(self, size):
        self.size = size
        self.given, self.taken = {}, {}
        self.changed = threading.Condition()
        self.failed = False

    def put(self, number, index, x):
        with self.changed:
            self.given.setdefault(number, {})[index] = x
            self.changed.notify_all()

    def take(self, number, sources):
        with self.changed:
            came = self.changed.wait_for(
                lambda: self.failed or all(one in self.given.get(number, {}) for one in sources), AGAINST_HANGS_S
            )
            assert came, "another worker makes other collectives"
            assert not self.failed, "another worker has failed"
            found = [self.given[number][one] for one in sources]
            self.taken[number] = self.taken.get(number, 0) + 1
            if self.taken[number] == self.size:
                del self.given[number], self.taken[number]
            return found


class ThreadAxis:
    def __init__(self, join_point, index):
        self.size, self.index = join_point.size, index
        self._join_point = join_point
        self._number = 0

    def _start(self, x, finish, sources=None):
        self._number += 1
        self._join_point.put(self._number, self.index, x.clone())
        return _Operation(self._join_point, self._number, range(self.size) if sources is None else sources, finish)

    def all_gather(self, x):
        return self._start(x, torch.stack).wait()

    def reduce_scatter(self, x):
        return self._start(x, lambda all_: sum(one[self.index] for one in all_)).wait()

    def start_all_reduce(self, x):
        return self._start(x, lambda all_: x.copy_(sum(all_)))

    def start_broadcast(self, x, source):
        return self._start(x, lambda all_: x if self.index == source else x.copy_(all_[0]), [source])

    def start_reduce(self, x, to):
        return self._start(x, lambda all_: x.copy_(sum(all_)) if self.index == to else x.fill_(float("nan")))


class _Operation:
    def __init__(self, join_point, number, sources, finish):
        self._arguments, self._finish = (number, sources), finish
        self._join_point = join_point

    def wait(self):
        with torch.no_grad():
            return self._finish(self._join_point.take(*self._arguments))


def meshes(shape, **options):
    """One mesh for each worker."""
    axes = [{} for _ in range(shape.workers)]
    for name, along in shape.axes.items():
        for members in along.lists(shape.workers):
            join_point = JoinPoint(len(members))
            for index, worker in enumerate(members):
                axes[worker][name] = ThreadAxis(join_point, index) if len(members) > 1 else Axis()
    return [Mesh(shape, one, **options) for one in axes]


def on_each(shape, program, wrap=None, **options):
    """What `program(mesh)` returns for each worker."""
    every, results, errors = meshes(shape, **options), [None] * shape.workers, []
    if wrap is not None:
        for mesh in every:
            mesh.axes.update({name: wrap(name, axis) for name, axis in mesh.axes.items()})
            mesh.gradients._axes = mesh.axes

    def work(number):
        try:
            results[number] = program(every[number])
        except BaseException as error:
            errors.append(error)
            for mesh in every:
                for axis in mesh.axes.values():
                    _fail(axis)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(shape.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _fail(axis):
    axis = getattr(axis, "axis", axis)
    if isinstance(axis, ThreadAxis):
        with axis._join_point.changed:
            axis._join_point.failed = True
            axis._join_point.changed.notify_all()


class CountedAxis:
    """An axis that keeps what goes through it."""

    def __init__(self, name, axis, found):
        self.axis, self.size, self.index = axis, axis.size, axis.index
        self._name, self._found = name, found

    def __getattr__(self, operation):
        kind = operation.removeprefix("start_").replace("_", "-")

        def counted(x, *arguments):
            if self.size > 1:
                self._found[self._name, kind] += Traffic(1, sent_elements(kind, self.size, x.numel()))
            return getattr(self.axis, operation)(x, *arguments)

        return counted
