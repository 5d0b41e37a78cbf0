"""Cluster files: TOML or JSON whose keys are `Cluster`'s fields, units in their names.

`compute_s` is a number, a spec such as "normal(average_s=0.01, deviation_s=0.001)", or a list: a recorded trace. The
table `slow` maps workers to factors on their compute time, `idle` to seconds that they sleep in every step, and `slow_link`
pairs of workers to factors on the time of their messages. In TOML: `workers = 16`, then under `[slow]`: `0 = 100`, and under
`[slow_link]`: `"0-1" = 10`. The table `traces` maps workers to lists of their own compute times. The table `codecs` maps
codecs to bytes of a vector that a core codes and decodes in a second: `qsgd = [1e9, 2e9]`. The table `sockets` has the
fields of `Sockets`: `count = 2`, `cores = 18`; empty, it is a two-socket machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from paceline.errors import UsageError, located
from paceline.simulator.compute import ComputeTime, Recorded, compute_registry
from paceline.simulator.hardware.sockets import Sockets
from paceline.specs.bounds import SIMULATED_WORKERS
from paceline.system import files
from paceline.system.plain_files import read_table
from paceline.system.toml_text import as_toml

# Left out where they are the default: they say nothing, and older files lack them.
_LEFT_OUT = ("slice_s", "crowding", "spin_s", "cold_s", "cold_factor", "cooling_s", "idle_s")
_WORKER = "[0-9]{1,12}"
_SOCKETS = tuple(field.name for field in dataclasses.fields(Sockets))


class ClusterFile:
    """Reads and writes a cluster; the base class of `Cluster`."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a cluster file, TOML or JSON by its suffix.

        Raises:
            UsageError: the file cannot be read, or has an unknown name; the message suggests the closest match.
        """
        path = Path(path)
        if path.suffix not in (".toml", ".json"):
            raise UsageError(f"A cluster file is .toml or .json, not {path.name}.")
        return cls.from_table(read_table(path, "The cluster file"), f"The cluster file {path}")

    @classmethod
    def from_table(cls, table: Any, where: str) -> Self:
        """A cluster from a file's content, which is checked; every message begins with `where`."""
        cls.check_names(table, where)
        arguments = {key: value for key, value in table.items() if key not in _TABLES}
        with located(where):
            for key, (field, read, _) in _TABLES.items():
                if key in table:
                    arguments[field] = read(table[key])
            if "compute_s" in arguments:
                arguments["compute_s"] = _compute_time(arguments["compute_s"])
            return cls(**arguments)

    @classmethod
    def check_names(cls, table: Any, where: str) -> None:
        """Rejects unknown names in a file's content, and an invalid number of workers."""
        if not isinstance(table, Mapping):
            raise UsageError(f"{where} must hold names and values, such as workers = 16.")
        known = (*cls._defaults(), *_TABLES)
        for key in table:
            if key not in known:
                raise UsageError(f"{where} has an unknown name '{key}'.{_closest(key, known)}")
        if "workers" in table:
            SIMULATED_WORKERS.check(f"{where}: workers", table["workers"])

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """By name, the defaults of the fields that a file has under the same name."""
        fields: Any = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        tables = {field for field, _, _ in _TABLES.values()}
        return {one.name: one.default for one in fields if one.name not in tables}

    def save(self, path: str | Path) -> Path:
        """Writes a cluster file, TOML or JSON by its suffix; `Cluster.load` reads it back."""
        path = Path(path)
        files.write_text(path, self.as_text(path))
        return path

    def as_text(self, path: Path) -> str:
        table = self.as_table()
        if path.suffix == ".json":
            return json.dumps(table, indent=2) + "\n"
        if path.suffix == ".toml":
            return as_toml(table)
        raise UsageError(f"A cluster file is .toml or .json, not {path.name}.")

    def as_table(self) -> dict[str, Any]:
        """A cluster as plain data, with a file's keys; omits None."""
        cluster: Any = self
        table = {
            key: value
            for key, default in self._defaults().items()
            if (value := getattr(self, key)) is not None and (key not in _LEFT_OUT or value != default)
        }
        compute = cluster.compute_s
        if isinstance(compute, Recorded):
            table["compute_s"] = list(compute.times_s)
        elif isinstance(compute, ComputeTime):
            table["compute_s"] = compute_registry.spec(compute)
        tables = {key: (getattr(cluster, field), write) for key, (field, _, write) in _TABLES.items()}
        return table | {key: write(value) for key, (value, write) in tables.items() if value not in ((), None)}


def _compute_time(value: Any) -> Any:
    if isinstance(value, str):
        return compute_registry.build(value)
    return Recorded(times_s=tuple(value)) if isinstance(value, list) else value


def _sockets(table: Any) -> Sockets:
    if not isinstance(table, Mapping):
        raise UsageError("'sockets' is a table, such as count = 2 under [sockets].")
    for key in table:
        if key not in _SOCKETS:
            raise UsageError(f"[sockets] has an unknown name '{key}'.{_closest(key, _SOCKETS)}")
    return Sockets(**table)


def _by_worker(table: Any, *, what: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(table, Mapping) or not all(re.fullmatch(_WORKER, str(worker)) for worker in table):
        raise UsageError(f"{what}.")
    return tuple(sorted((int(worker), factor) for worker, factor in table.items()))


def _traces(table: Any) -> tuple[tuple[int, tuple[float, ...]], ...]:
    what = "'traces' maps workers to lists of compute times, as 0 = [0.01, 0.02] under [traces]"
    pairs: Any = _by_worker(table, what=what)
    if not all(isinstance(times_s, list) for _, times_s in pairs):
        raise UsageError(f"{what}.")
    return tuple((worker, tuple(times_s)) for worker, times_s in pairs)


def _link_factors(table: Any) -> tuple[tuple[int, int, float], ...]:
    if not isinstance(table, Mapping) or not all(re.fullmatch(f"{_WORKER}-{_WORKER}", str(link)) for link in table):
        raise UsageError("'slow_link' maps links to factors, such as \"0-1\" = 10 under [slow_link].")
    pairs = ((sorted(map(int, link.split("-"))), factor) for link, factor in table.items())
    return tuple(sorted((a, b, factor) for (a, b), factor in pairs))


def _codecs(table: Any) -> tuple[tuple[str, float, float], ...]:
    if not isinstance(table, Mapping) or not all(isinstance(one, list) and len(one) == 2 for one in table.values()):
        raise UsageError(
            "'codecs' maps codecs to the bytes that they encode and decode per second, such as"
            " qsgd = [1e9, 2e9] under [codecs]."
        )
    return tuple(sorted((str(name), coded, decoded) for name, (coded, decoded) in table.items()))


def _closest(key: str, known: tuple[str, ...]) -> str:
    """The known name that was probably meant; prefers one with the same words and another unit."""
    stem = key.rpartition("_")[0] or key
    same = [name for name in known if name.startswith(f"{stem}_")]
    matches = same or difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.4)
    return f" Did you mean '{matches[0]}'?" if matches else f" Known: {', '.join(known)}."


# A table of a file -> a cluster's field, and the functions that read and write it.
_TABLES: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "slow": (
        "slowness",
        partial(_by_worker, what="'slow' maps workers to factors, as 0 = 100 under [slow]"),
        lambda pairs: {str(worker): factor for worker, factor in pairs},
    ),
    "idle": (
        "idleness",
        partial(_by_worker, what="'idle' maps workers to seconds, as 0 = 0.02 under [idle]"),
        lambda pairs: {str(worker): idle_s for worker, idle_s in pairs},
    ),
    "traces": (
        "traces",
        _traces,
        lambda pairs: {str(worker): list(times_s) for worker, times_s in pairs},
    ),
    "slow_link": ("link_factors", _link_factors, lambda links: {f"{a}-{b}": factor for a, b, factor in links}),
    "codecs": ("codecs", _codecs, lambda codecs: {name: list(rates) for name, *rates in codecs}),
    "sockets": (
        "sockets",
        _sockets,
        lambda one: {key: value for key, value in dataclasses.asdict(one).items() if value is not None},
    ),
}
