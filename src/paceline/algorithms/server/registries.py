"""The names of a server's parts in specs: `mode=sync(backups=1)`, `apply=momentum(beta=0.9)`, `codec=top-k(fraction=0.01)`."""

from __future__ import annotations

from paceline.algorithms.server.adagrad import Adagrad, AsyncAdagrad, RowwiseAdagrad
from paceline.algorithms.server.adaptive import Adam, RMSProp
from paceline.algorithms.server.adaptive_revision import AdaptiveRevision
from paceline.algorithms.server.apply import SGD, ApplyRule, Momentum, StalenessScaled
from paceline.algorithms.server.delay import ConstantDelay, Delay, RandomDelay, RecordedDelay
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.modes import Async, Bounded, Mode, Rennala, Ringleader, Ringmaster, Sync
from paceline.algorithms.server.user import UserOptimizer
from paceline.compression.codec import Codec
from paceline.compression.registry import codec_registry
from paceline.errors import UsageError
from paceline.specs.registry import Registry

delay_registry = Registry("delay")
delay_registry.register("constant", ConstantDelay)
delay_registry.register("random", RandomDelay)
delay_registry.register("recorded", RecordedDelay)

_undelayed = Registry("apply rule")
_undelayed.register("user", UserOptimizer)
_undelayed.register("sgd", SGD)
_undelayed.register("momentum", Momentum)
_undelayed.register("rmsprop", RMSProp)
_undelayed.register("adagrad", Adagrad)
_undelayed.register("rowwise-adagrad", RowwiseAdagrad)
_undelayed.register("adam", Adam)
_undelayed.register("staleness-scaled", StalenessScaled)
_undelayed.register("async-adagrad", AsyncAdagrad)
_undelayed.register("adaptive-revision", AdaptiveRevision)

apply_registry = Registry("apply rule", nested={ApplyRule: _undelayed, Delay: delay_registry})
for _name, _rule in _undelayed.items():
    apply_registry.register(_name, _rule)
apply_registry.register("delayed", Delayed)

mode_registry = Registry("mode")
mode_registry.register("sync", Sync)
mode_registry.register("async", Async)
mode_registry.register("bounded", Bounded)
mode_registry.register("rennala", Rennala)
mode_registry.register("ringmaster", Ringmaster)
mode_registry.register("ringleader", Ringleader)

#: For the registry of algorithms.
nested: dict[type, Registry] = {
    ApplyRule: apply_registry,
    Codec: codec_registry,
    Delay: delay_registry,
    Mode: mode_registry,
}


def delay_spec(wanted: int | str) -> str:
    """The canonical spec of a delay, given as a number of updates or as a spec.

    >>> delay_spec("20")
    'constant(updates_late=20)'

    Raises:
        UsageError: no such delay.
    """
    text = str(wanted).strip()
    try:
        updates_late = int(text)
    except ValueError:
        return delay_registry.spec(delay_registry.build(text))
    if updates_late < 0:
        raise UsageError(
            f"The staleness to inject must be 0 updates or more, not {updates_late}: leave it out to inject none."
        )
    return delay_registry.spec(ConstantDelay(updates_late=updates_late))
