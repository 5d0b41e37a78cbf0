"""Shared parameter vectors: atomics, locks, slot pool, placement. Knows no algorithm.

Four kinds of parameter vectors that all workers of a machine see, each in the module that explains it: `racing`
(everyone writes at once), `locked` (one writer at a time), `slots` (immutable versions behind one head word),
`replicated` (one per worker). It also has `collectives` (all-reduce), and `staleness` and `ring` for counts and records.
All lie in one `segment.Segment` according to a `segment.Layout`. Importing the package alone is cheap; its modules load
torch and compiled kernels.
"""

from __future__ import annotations

import importlib
import pkgutil

__all__ = ["warm_up"]


def warm_up() -> None:
    """Loads everything in this package, so that a process forked afterwards compiles and imports nothing.

    Takes about a second; the first call after an installation also compiles the kernels, which takes about ten.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
