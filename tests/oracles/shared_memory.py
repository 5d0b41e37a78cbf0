"""Asynchronous SGD on one shared vector: each update is one worker's, in the order of versions."""


def locked(trace, start, make_optimizer, *, clip=None, factor=lambda staleness: 1.0):
    """The vector after all updates; each is a step of its worker's optimizer on the newest vector.

    `factor`: on the gradient, by staleness.
    """
    versions, optimizers = [start], {worker: make_optimizer() for worker in range(trace.workers)}
    for version in range(1, trace.versions + 1):
        (step,) = trace.making(version)
        g, has = step.gradient(versions[step.read], clip)
        x = optimizers[step.worker].step(versions[-1], factor(version - 1 - step.read) * g, has)
        versions.append(x)
    return versions[-1]


def leashed(trace, start, make_optimizer, *, clip=None, factor=lambda staleness: 1.0):
    """The same where a step is made once, on the vector at its first attempt to publish: retries add what it has changed."""
    versions, optimizers = [start], {worker: make_optimizer() for worker in range(trace.workers)}
    for version in range(1, trace.versions + 1):
        (step,) = trace.making(version)
        g, has = step.gradient(versions[step.read], clip)
        before = versions[step.ready]
        g = factor(step.ready - step.read) * g
        versions.append(versions[-1] + optimizers[step.worker].step(before, g, has) - before)
    return versions[-1]
