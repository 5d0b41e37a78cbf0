"""The algorithms and numbers of workers that are compared by default, and why others are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.advice.answer import Candidate
from paceline.algorithms import registry
from paceline.errors import UsageError

ALONE = "sequential"  # every algorithm with one worker
DEFAULT = (
    ALONE,
    "lockstep",
    "all-reduce",
    "all-reduce(codec=qsgd)",
    "local-sgd",
    "da-sgd",
    "diloco(period=20)",
    "hogwild",
    "leashed",
    "parameter-server(mode=async)",
    "parameter-server(mode=sync(backups=1))",
    "d-psgd",
    "ad-psgd",
)
OMITTED: Mapping[str, str] = {
    "locked": "it makes the updates of leashed and hogwild one at a time",
    "parameter-server": "without backups it makes the same updates as lockstep and all-reduce, at a higher cost",
    "downpour": "its servers replace your optimizer and learning rate by their own",
    "adaptive-revision": "its servers replace your optimizer and learning rate by their own",
}
_IN_ONE_MEMORY = ("racing", "locked", "slots")
_APART = {"all-reduce(codec=qsgd)": "encoding gradients takes longer than copying them within one machine"}
_ALL = 4  # each number of workers up to this one is tried


def counts(max_workers: int) -> list[int]:
    """Numbers of workers to try, from 2 on: all up to 4, then about 1.5 times as many each time, and always the largest.

    >>> counts(4), counts(16)
    ([2, 3, 4], [2, 3, 5, 7, 11, 16])
    """
    if max_workers <= _ALL:
        return list(range(2, max_workers + 1))
    found, m = [], float(max_workers)
    while round(m) > 2:
        found.append(round(m))
        m /= 1.5
    return sorted({2, *found})


def candidates(
    max_workers: int, algorithms: Sequence[str] | None = None, *, one_machine: bool = True
) -> tuple[list[Candidate], list[str]]:
    """The candidates, one worker first, and sentences on those left out.

    Args:
        max_workers: largest number of workers, 1 or more.
        algorithms: specs; None: `DEFAULT`, without the algorithms that need shared memory if the workers do not share a
            machine.
        one_machine: whether the workers share a machine.

    Raises:
        UsageError: a spec is invalid, or none of them can run.
    """
    specs = list(dict.fromkeys(registry.spec(registry.build(one)) for one in (algorithms or DEFAULT)))
    found: list[Candidate] = []
    refused: dict[str, list[str]] = {}
    tried = counts(max_workers)
    apart: list[str] = []
    for spec in specs:
        algorithm = registry.build(spec)
        if algorithm.needs.averaged:
            raise UsageError(
                f"{spec} keeps a moving average, which your own training loop evaluates itself: leave out average."
            )
        if algorithm.max_workers == 1:
            found.insert(0, Candidate(algorithm=spec, workers=1))
            continue
        if algorithms is None and one_machine and spec in _APART:
            continue
        if algorithms is None and not one_machine and algorithm.needs.kind in _IN_ONE_MEMORY:
            apart.append(spec)
            continue
        for m in tried:
            try:
                algorithm.check(m)
            except UsageError as why:
                refused.setdefault(str(why), []).append(f"{spec} with {m} workers")
                continue
            found.append(Candidate(algorithm=spec, workers=m))
    if not found:
        raise UsageError(
            f"None of {', '.join(specs)} can run with up to {max_workers} workers: name other algorithms, or allow "
            "more workers."
        )
    said = [f"{', '.join(which)}: {why}" for why, which in refused.items()]
    if apart:
        said.append(
            f"{', '.join(apart)}, which need shared memory: the cluster file gives neither cores nor sockets, so each"
            " worker has its own machine."
        )
    if algorithms is None:
        omitted = {**OMITTED, **(_APART if one_machine else {})}
        said += [f"{name}, because {why}." for name, why in omitted.items()]
    between = sorted(set(range(2, max_workers + 1)) - set(tried))
    if between:
        listed = ", ".join(map(str, between)) if len(between) < 8 else f"{len(between)} other numbers of"
        said.append(f"{listed} workers, because numbers between them were tried.")
    return found, said
