"""Asynchronous SGD on one shared vector: each update is one worker's, in the order of versions.

`factor(staleness, earlier)` is on a gradient, by its own staleness and that of all updates before it; None: 1.
"""


def locked(trace, start, make_optimizer, *, clip=None, factor=None):
    """The vector after all updates; each is a step of its worker's optimizer on the newest vector, under the lock."""
    versions, optimizers = [start], {worker: make_optimizer() for worker in range(trace.workers)}
    for version in range(1, trace.versions + 1):
        (step,) = trace.making(version)
        g, has = step.gradient(versions[step.read], clip)
        g = _weight(trace, factor, version - 1 - step.read, version - 1) * g
        versions.append(optimizers[step.worker].step(versions[-1], g, has))
    return versions[-1]


def leashed(trace, start, make_optimizer, *, clip=None, factor=None):
    """The same where a step is made once, on the vector at its first attempt to publish: retries add what it has changed.

    A gradient that is dropped has made its optimizer step all the same, unless it was found before the first attempt.
    """
    versions, optimizers = [start], {worker: make_optimizer() for worker in range(trace.workers)}
    changes = {}

    def attempt(step):
        g, has = step.gradient(versions[step.read], clip)
        g = _weight(trace, factor, step.ready - step.read, step.ready) * g
        before = versions[step.ready]
        changes[step.worker, step.number] = optimizers[step.worker].step(before, g, has) - before

    waiting = sorted((one for one in trace.steps if one.applied), key=lambda one: (one.ready, one.number))
    for version in range(1, trace.versions + 1):
        while waiting and waiting[0].ready < version:
            attempt(waiting.pop(0))
        (step,) = trace.making(version)
        versions.append(versions[-1] + changes[step.worker, step.number])
    return versions[-1]


def hogwild(trace, start, make_optimizer, *, clip=None, factor=None):
    """The same where nobody excludes anybody: gradients are of what the loop saw, perhaps torn, and all changes add up."""
    optimizers, x = {worker: make_optimizer() for worker in range(trace.workers)}, start
    for step in sorted((one for one in trace.steps if one.applied), key=lambda one: one.number):
        g, has = step.gradient(clip=clip)
        g = _weight(trace, factor, step.ready - step.read, step.ready) * g
        x = x + optimizers[step.worker].step(step.before, g, has) - step.before
    return x


def _weight(trace, factor, staleness, versions):
    if factor is None:
        return 1.0
    return factor(staleness, [version - 1 - trace.making(version)[0].read for version in range(1, versions + 1)])
