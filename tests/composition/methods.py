"""Which oracle says what a case's run must come to."""

from typing import Any, NamedTuple

import numpy as np

import paceline as pl
from composition.loop import Lost, Model, Refused, Untrained
from oracles import (
    adaptive_revision,
    downpour,
    gossip,
    local_sgd,
    lockstep,
    outer,
    power,
    ringleader,
    server_rules,
    servers,
    shared_memory,
    step_sizes,
    waiting,
)  # fmt: skip
from oracles.events import Codec, close
from oracles.problem import SHAPES, START, Optimizer
from paceline.compression.power import Factored, Power
from paceline.optim.flat import FlatBinding

REMEMBER = ("sign", "top-k", "feedback=true", "power")
EXACT, CODED = 1e-10, 1e-6


def check(case, outcome):
    """Compares a run with its oracle; returns "right", "refused", "lost" or "untrained"."""
    if isinstance(outcome, Refused | Lost):
        return type(outcome).__name__.lower()
    if isinstance(outcome, Untrained):
        assert outcome.gradients < getattr(pl.parse(case.algorithm).mode, "gradients", 1), outcome
        return "untrained"
    algorithm = pl.parse(case.algorithm)
    if "kill" not in algorithm.tolerates and len(outcome.models) < case.workers:
        return "lost"  # and the others ended before they needed it
    codec = None
    if "codec=" in case.algorithm:
        codec = Codec(CODED, any(name in case.algorithm for name in REMEMBER))
    name = case.algorithm.split("(")[0]
    expected = METHODS[name](outcome, Asked(case, algorithm, codec))
    for worker, model in outcome.models.items():
        wanted = expected[worker] if isinstance(expected, dict) else expected
        close(model, wanted, CODED if codec else EXACT, f"the parameters of worker {worker}")
    return "right"


class Asked(NamedTuple):
    """What an oracle is given beside the trace: the case, its algorithm's options and its codec, if there is one."""

    case: Any
    options: Any
    codec: Codec | None

    def optimizer(self):
        """The user's."""
        return Optimizer(self.case.optimizer, self.case.rate)

    def means(self, trace, has=None):
        """What makes means of these parameters through a codec of matrices; None: any other. `has` None: of all."""
        codec = self.options.codec
        if not isinstance(codec, Power):
            return None
        ranges = FlatBinding([p for p in Model().parameters() if p.requires_grad]).ranges
        if has is not None and not all(has):  # a fragment, which leaves nothing between its parameters
            sizes = [int(own) * (end - begin) for own, (begin, end) in zip(has, ranges, strict=True)]
            ranges = [(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]
        rights = {
            name: Factored(begin, *SHAPES[name]).first_factor(codec.rank).double().numpy().T
            for name, (begin, _) in zip(SHAPES, ranges, strict=True)
            if len(SHAPES[name]) == 2 and codec.min_rate * codec.rank * sum(SHAPES[name]) <= np.prod(SHAPES[name])
        }
        return power.LowRank(trace, rights, codec.warmup_steps)


STEP_SIZES = {
    "FullStep": lambda rule, workers: None,
    "InverseStep": lambda rule, workers: step_sizes.inverse,
    "ExponentialStep": lambda rule, workers: step_sizes.exponential(rule.threshold or workers + 1),
    "TailStep": lambda rule, workers: step_sizes.tail(rule.amplitude, workers),
}


def _shared(run):
    def expected(trace, one):
        rule = one.options.step_size
        factor = STEP_SIZES[type(rule).__name__](rule, one.case.workers)
        return run(trace, START, one.optimizer, clip=one.case.clip, factor=factor)

    return expected


#: By the name of a server's rule: it, its options and the learning rate -> what applies gradients.
RULES = {
    "SGD": lambda rule, rate: server_rules.Rule(rate),
    "StalenessScaled": lambda rule, rate: server_rules.Rule(rate),
    "Momentum": lambda rule, rate: server_rules.Momentum(rate, beta=rule.beta, nesterov=rule.nesterov),
    "Adagrad": lambda rule, rate: server_rules.AdaGrad(rate, initial=rule.initial, eps=rule.eps),
    "RMSProp": lambda rule, rate: server_rules.RMSProp(rate, alpha=rule.alpha, eps=rule.eps, beta=rule.momentum),
    "Adam": lambda rule, rate: server_rules.Adam(rate, beta1=rule.beta1, beta2=rule.beta2, eps=rule.eps),
    "AsyncAdagrad": lambda rule, rate: (
        server_rules.AdaGrad(rate, initial=1.0, eps=0.0) if rule.form == "descent" else server_rules.DualAveraging(rate)
    ),
}


def _at_server(one, rule):
    """What applies gradients."""
    make = RULES.get(type(rule).__name__)
    return make(rule, one.case.rate) if make else one.optimizer()


def _parameter_server(trace, one):
    mode, rule, clip = one.options.mode, one.options.apply, one.case.clip
    waits = type(rule).__name__ == "Delayed"
    applied = rule.rule if waits else rule
    if type(applied).__name__ == "AdaptiveRevision":
        return adaptive_revision.run(trace, START, applied.alpha or one.case.rate, clip=clip, codec=one.codec)
    server = _at_server(one, applied)
    if type(mode).__name__ == "Ringleader":
        return ringleader.run(trace, START, server, clip=clip, codec=one.codec)
    rate = getattr(mode, "rate", "none")
    weight = _late if type(applied).__name__ == "StalenessScaled" else _alike
    weight = step_sizes.rescaled(trace.trips) if rate == "rescaled" else weight
    if waits or weight is not _alike:
        return waiting.run(trace, START, server, clip=clip, codec=one.codec, weight=weight)
    return servers.run(trace, START, server, clip=clip, codec=one.codec, linear=rate == "linear")


def _alike(steps):
    return 1.0


def _late(steps):
    return 1 / max(1, steps[0].applied - 1 - steps[0].read)


def _downpour(trace, one):
    method = one.options
    return downpour.run(
        trace, START, _at_server(one, method.apply), one.optimizer, fetch=method.fetch, push=method.push,
        overlap=method.overlap, clip=one.case.clip, codec=one.codec,
    )  # fmt: skip


def _mean(models):
    return np.mean([models[worker] for worker in sorted(models)], axis=0)


def _all_reduce(trace, one):
    marked = one.case.marked or one.case.passes == 1
    return lockstep.run(
        trace, START, one.optimizer(), clip=one.case.clip, marked=marked, codec=one.codec, means=one.means(trace)
    )


def _averaged(*names):
    """Of local SGD and its kin, with these of its options."""

    def expected(trace, one):
        options = {name: getattr(one.options, name) for name in names}
        if "warmup_steps" in options:
            options["warmup"] = options.pop("warmup_steps")
        options |= {"clip": one.case.clip, "codec": one.codec, "means": one.means(trace)}
        return _mean(local_sgd.run(trace, START, one.optimizer, **options))

    return expected


def _diloco(trace, one):
    options, step = one.options, one.options.outer
    means = (lambda has: one.means(trace, has)) if isinstance(options.codec, Power) else None
    return _mean(
        outer.run(
            trace, START, one.optimizer, period=options.period, rate=step.rate, momentum=getattr(step, "momentum", None),
            fragments=options.fragments, delay=options.delay, local_weight=options.local_weight,
            clip=one.case.clip, codec=one.codec, means=means,
        )
    )  # fmt: skip


NEIGHBOURS = {
    "Ring": gossip.ring,
    "Complete": gossip.complete,
    "Exponential": gossip.exponential,
    "OnePeerExponential": gossip.one_peer,
}


def _d_psgd(trace, one):
    neighbours = NEIGHBOURS[type(one.options.topology).__name__]
    return _mean(gossip.d_psgd(trace, START, one.optimizer, neighbours, clip=one.case.clip))


#: By the method's name: trace, `Asked` -> the vector (SIZE,) that all workers end with, or each by worker.
METHODS = {
    "sequential": lambda trace, one: waiting.run(trace, START, one.optimizer(), clip=one.case.clip),
    "hogwild": _shared(shared_memory.hogwild),
    "locked": _shared(shared_memory.locked),
    "leashed": _shared(shared_memory.leashed),
    "lockstep": lambda trace, one: lockstep.run(trace, START, one.optimizer(), clip=one.case.clip, clips_mean=False),
    "all-reduce": _all_reduce,
    "local-sgd": _averaged("period", "warmup_steps"),
    "da-sgd": _averaged("period", "delay", "local_weight", "merge", "compensate"),
    "diloco": _diloco,
    "d-psgd": _d_psgd,
    "ad-psgd": lambda trace, one: _mean(gossip.ad_psgd(trace, START, one.optimizer, clip=one.case.clip)),
    "parameter-server": _parameter_server,
    "downpour": _downpour,
    "adaptive-revision": lambda trace, one: adaptive_revision.run(
        trace, START, one.options.alpha or one.case.rate, clip=one.case.clip
    ),
}
