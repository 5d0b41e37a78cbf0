"""Which oracle says what a case's run must come to."""

from composition.loop import Lost, Refused
from oracles import local_sgd, lockstep, servers, shared_memory
from oracles.events import Codec, close
from oracles.problem import START, Optimizer

REMEMBER = ("sign", "top-k", "feedback=true", "power")
EXACT, CODED = 1e-10, 1e-6


def check(case, outcome):
    """Compares a run with its oracle; returns "right", "refused" or "lost"."""
    if isinstance(outcome, Refused | Lost):
        return type(outcome).__name__.lower()
    codec = None
    if "codec=" in case.algorithm:
        codec = Codec(CODED, any(name in case.algorithm for name in REMEMBER))
    expected = _expected(case, outcome, codec)
    for worker, model in outcome.models.items():
        wanted = expected[worker] if isinstance(expected, dict) else expected
        close(model, wanted, CODED if codec else EXACT, f"the parameters of worker {worker}")
    return "right"


def _expected(case, trace, codec):
    name, clip = case.algorithm.split("(")[0], case.clip
    marked = case.marked or case.passes == 1
    make = lambda: Optimizer(case.optimizer, case.rate)  # noqa: E731
    factor = (lambda tau: 1 / (1 + tau)) if "inverse" in case.algorithm else (lambda tau: 1.0)
    if name == "all-reduce":
        return lockstep.run(trace, START, make(), clip=clip, marked=marked, codec=codec)
    if name == "lockstep":
        return lockstep.run(trace, START, make(), clip=clip, clips_mean=False)
    if name == "local-sgd":
        models = local_sgd.run(trace, START, make, period=3, clip=clip)
        return sum(models.values()) / len(models)
    if name == "locked":
        return shared_memory.locked(trace, START, make, clip=clip, factor=factor)
    if name == "leashed":
        return shared_memory.leashed(trace, START, make, clip=clip, factor=factor)
    return servers.run(trace, START, make(), clip=clip, codec=codec, linear="linear" in case.algorithm)
