"""Habits of loops: one file each, with a `loop(attach)` that returns what it has trained.

`attach` is `paceline.attach`, or `plain_attach`, under which the same loop is plain PyTorch.
"""

from contextlib import contextmanager, nullcontext


class PlainWorker:
    """What `attach` gives a loop, for one without Paceline."""

    worker_id, num_workers = 0, 1

    def batches(self, loader):
        return loader

    def report(self, loss, samples=None):
        pass

    def accumulate(self):
        return nullcontext()

    def follow(self, scheduler):
        return scheduler

    def sum(self, value):
        return value

    mean = sum


@contextmanager
def plain_attach(model, optimizer, *_, **__):
    yield PlainWorker()
