"""Every algorithm, and the specs by which they are named."""

from __future__ import annotations

from paceline.algorithms.ad_psgd import ADPSGD
from paceline.algorithms.adaptive_revision import AdaptiveRevision
from paceline.algorithms.all_reduce import AllReduce
from paceline.algorithms.backoff import Backoff, ConstantBackoff, ExponentialBackoff, LinearBackoff, NoBackoff
from paceline.algorithms.base import Algorithm
from paceline.algorithms.d_psgd import DPSGD
from paceline.algorithms.da_sgd import DaSGD
from paceline.algorithms.diloco import DiLoCo
from paceline.algorithms.downpour import Downpour
from paceline.algorithms.hogwild import Hogwild
from paceline.algorithms.leashed import Leashed
from paceline.algorithms.local_sgd import LocalSGD
from paceline.algorithms.locked import Locked
from paceline.algorithms.lockstep import Lockstep
from paceline.algorithms.parameter_server import ParameterServer
from paceline.algorithms.sequential import Sequential
from paceline.algorithms.server import registries
from paceline.algorithms.server.modes import Async, Bounded, Mode, Rennala, Ringleader, Ringmaster, Sync
from paceline.algorithms.step_size import ExponentialStep, FullStep, InverseStep, StepSize, TailStep
from paceline.algorithms.topology import Topology, topology_registry
from paceline.optim.outer import Nesterov, Outer, OuterSGD, outer_registry
from paceline.specs.registry import Registry

__all__ = [
    "ADPSGD",
    "DEFAULT_ALGORITHM",
    "DPSGD",
    "AdaptiveRevision",
    "Algorithm",
    "AllReduce",
    "Async",
    "Backoff",
    "Bounded",
    "ConstantBackoff",
    "DaSGD",
    "DiLoCo",
    "Downpour",
    "ExponentialBackoff",
    "ExponentialStep",
    "FullStep",
    "Hogwild",
    "InverseStep",
    "Leashed",
    "LinearBackoff",
    "LocalSGD",
    "Locked",
    "Lockstep",
    "Mode",
    "Nesterov",
    "NoBackoff",
    "OuterSGD",
    "ParameterServer",
    "Rennala",
    "Ringleader",
    "Ringmaster",
    "Sequential",
    "StepSize",
    "Sync",
    "TailStep",
    "backoff_registry",
    "parse",
    "registry",
    "spec",
    "step_size_registry",
]

DEFAULT_ALGORITHM = "all-reduce"

backoff_registry = Registry("back-off")
backoff_registry.register("none", NoBackoff)
backoff_registry.register("constant", ConstantBackoff)
backoff_registry.register("linear", LinearBackoff)
backoff_registry.register("exponential", ExponentialBackoff)

step_size_registry = Registry("step size")
step_size_registry.register("full", FullStep)
step_size_registry.register("inverse", InverseStep)
step_size_registry.register("exponential", ExponentialStep)
step_size_registry.register("tail", TailStep)

registry = Registry(
    "algorithm",
    nested={
        Backoff: backoff_registry,
        Outer: outer_registry,
        StepSize: step_size_registry,
        Topology: topology_registry,
        **registries.nested,
    },
)
registry.register("sequential", Sequential)
registry.register("lockstep", Lockstep)
registry.register("all-reduce", AllReduce)
registry.register("locked", Locked)
registry.register("hogwild", Hogwild)
registry.register("leashed", Leashed)
registry.register("local-sgd", LocalSGD)
registry.register("da-sgd", DaSGD)
registry.register("diloco", DiLoCo)
registry.register("d-psgd", DPSGD)
registry.register("ad-psgd", ADPSGD)
registry.register("parameter-server", ParameterServer)
registry.register("downpour", Downpour)
registry.register("adaptive-revision", AdaptiveRevision)


def parse(text: str) -> Algorithm:
    """The algorithm that a spec describes.

    Raises:
        UsageError: no such algorithm or argument, or a value out of range.
    """
    return registry.build(text)


def spec(algorithm: Algorithm) -> str:
    """The canonical spec of an algorithm; defaults are left out, and `parse(spec(a)) == a`."""
    return registry.spec(algorithm)
