"""A study as data: its question, factors and levels, machines and limits, and its file."""

from __future__ import annotations

import dataclasses
import math
import re
import runpy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.errors import UsageError, located, shown
from paceline.records.run_data import is_number
from paceline.run.config import TrainConfig
from paceline.specs.bounds import PARAMETERS, SEED, TRIALS
from paceline.specs.text import closest
from paceline.specs.types import check_fields
from paceline.specs.user_file import run_user_code
from paceline.study.parts import Design, Level, Limits, Range, is_whole, read_levels
from paceline.system.plain_files import read_table
from paceline.system.toml_text import as_toml

TARGETS = (75.0, 50.0, 25.0, 10.0, 5.0, 2.5)
_GIVEN_ELSEWHERE = {
    "seed": "seeds",
    "task": "task",
    "backend": "backend",
    "epochs": "[limits]",
    "steps": "[limits]",
    "limit_s": "[limits] seconds",
    "target_fraction": "target",
}
_NO_FACTOR = {*_GIVEN_ELSEWHERE, "data", "checkpoint_every_s", "slow"}
_PLAIN = tuple(one.name for one in dataclasses.fields(TrainConfig) if one.name not in _NO_FACTOR)
_DOTTED = ("algorithm", "optimizer", "partition", "placement", "cluster")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, and the trials that answer it.

    >>> Study(name="steps", factors={"workers": (1, 2)}, limits=Limits(epochs=1)).smallest_target
    2.5

    Args:
        name: for titles and folders.
        question: the study's question, for the report.
        task: built-in name, or `path/to/file.py:function`.
        backend: "processes", "threads" or "simulator".
        timing_only: for the simulator: compute no gradients, only times.
        parameters: for timing only: length of the vectors; with `limits.steps` no data are loaded either.
        factors: name -> levels, or a `Range`. Names are `TrainConfig`'s fields, and fields of what a spec or the cluster
            names: "algorithm.persistence", "algorithm.backoff.base", "optimizer.weight_decay", "placement.pin",
            "cluster.slow.0"; "backoff" is short for "algorithm.backoff", and "cluster" takes names of `clusters`. An algorithm
            that lacks the field is tried once, without it.
        settings: what all trials share, by the same names.
        seeds: every combination is tried with each of them; trials with the same seed begin with the same parameters, and
            see batches in the same order under every method.
        targets: percentages of the initial loss, whose times are measured.
        target: which of them counts as converged, and, with `stop_at_target`, ends a trial; None: the smallest.
        stop_at_target: whether a trial ends there.
        limits: when it ends otherwise.
        baseline: levels that others are compared with; the centre of a one-at-a-time design.
        design: which combinations are tried.
        cluster: for the simulator: a cluster file's content.
        clusters: more of them by name, for the factor "cluster".
        data: folder with data sets; None: what PACELINE_DATA names.
        keep_events: whether each trial's folder has its workers' records, for trace lanes and targets added later.
    """

    name: str
    question: str = ""
    task: str = "digits-mlp"
    backend: Literal["processes", "threads", "simulator"] = "processes"
    timing_only: bool = False
    parameters: Annotated[int, PARAMETERS] | None = None
    factors: Mapping[str, tuple[Level, ...] | Range] = field(default_factory=dict)
    settings: Mapping[str, Level] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    targets: tuple[float, ...] = TARGETS
    target: float | None = None
    stop_at_target: bool = True
    limits: Limits = field(default_factory=Limits)
    baseline: Mapping[str, Level] = field(default_factory=dict)
    design: Design = field(default_factory=Design)
    cluster: Mapping[str, Any] | None = None
    clusters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: Path | None = None
    keep_events: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.data, str):
            object.__setattr__(self, "data", Path(self.data))
        check_fields(self)
        if not self.name:
            raise UsageError('A study needs a name: add name = "my-study".')
        try:
            self.as_text().encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"A study's names and paths must be UTF-8, as its file is, and {shown(error.object)} is not."
            ) from error
        if self.backend != "simulator":
            for name in ("timing_only", "parameters", "cluster", "clusters"):
                if getattr(self, name):
                    raise UsageError(f'{name} is for simulated workers; add backend = "simulator", or leave it out.')
        if self.parameters is not None and not self.timing_only:
            raise UsageError(
                "a declared number of parameters needs timing_only = true; add it, or leave out parameters."
            )
        for seed in self.seeds:
            SEED.check("Each of the seeds", seed)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError("seeds must be different whole numbers from 0, at least one.")
        if not self.targets or not all(is_number(one) and 0 < one < 100 for one in self.targets):
            raise UsageError(
                f"targets are percentages of the initial loss, between 0 and 100, not {shown(list(self.targets))}."
            )
        if self.target is not None and self.target not in self.targets:
            raise UsageError(
                f"target {self.target} is not one of the targets {_listed(self.targets)}; add it there, or leave it "
                "out."
            )
        measured = re.fullmatch(r"(?:time_to_(.+)_s|steps_to_(.+))", self.design.measure or "")
        if measured and (measured[1] or measured[2]) not in [f"{one:g}" for one in self.targets]:
            raise UsageError(
                f"The design's measure {self.design.measure} is for none of the targets {_listed(self.targets)}; add "
                "its target there, or choose another measure."
            )
        for where, names in (("[factors]", self.factors), ("[settings]", self.settings), ("[baseline]", self.baseline)):
            for name in names:
                _check_factor(name, where)
        if both := set(self.factors) & set(self.settings):
            raise UsageError(f"'{min(both)}' is both in [factors] and in [settings]; leave it out of one.")
        for name, levels in self.factors.items():
            if isinstance(levels, Range):
                if self.design.kind not in ("random", "optuna"):
                    raise UsageError(
                        f"[factors] '{name}' is a range without steps, which a {self.design.kind} design cannot try: add step"
                        " or factor, or write a list."
                    )
            elif not levels or len(set(map(repr, levels))) < len(levels):
                raise UsageError(f"[factors] '{name}' needs different levels, at least one.")
        for name in self.baseline:
            if name not in self.factors:
                raise UsageError(f"[baseline] '{name}' is not a factor; leave it out, or add it to [factors].")

    @property
    def smallest_target(self) -> float:
        """The percentage of the initial loss that counts as converged."""
        return min(self.targets) if self.target is None else self.target

    @property
    def centre(self) -> dict[str, Level]:
        """The baseline, with the first level of each factor that it does not name."""
        first = {name: levels.low if isinstance(levels, Range) else levels[0] for name, levels in self.factors.items()}
        return {**first, **self.baseline}

    def as_table(self) -> dict[str, Any]:
        """The study as a study file's content, without defaults."""
        own = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in own.items() if name in _ALWAYS or value != _DEFAULTS.get(name)}

    def as_text(self) -> str:
        """The study as the text of a TOML file; `read_study` gives an equal one."""
        return as_toml(self.as_table())


_ALWAYS = ("name", "task", "backend")  # are in a table even if they are as by default
_DEFAULTS = {
    one.name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
    for one in dataclasses.fields(Study)
}


def read_study(path: Path) -> Study:
    """Reads a study file: TOML, or Python that defines `study`, a `Study` or a function that returns one.

    Raises:
        UsageError: it cannot be read, or describes no study; the message names the file, the place and the remedy.
    """
    if path.suffix not in (".toml", ".py"):
        raise UsageError(f"A study file is .toml or .py, not {path.name}.")
    if path.suffix == ".py" and path.is_file():
        with located(path):
            return run_user_code(path, "The study file", lambda: _from_python(path))
    table = read_table(path, "The study file")
    with located(path):
        return study_from_table({"name": path.stem, **table}, folder=path.parent)


def study_from_table(table: Mapping[str, Any], *, folder: Path = Path()) -> Study:
    """A study from a study file's content; cluster files named in it are looked for in `folder`."""
    arguments = dict(table)
    if "repetitions" in arguments:
        if "seeds" in arguments:
            raise UsageError("repetitions and seeds mean the same; leave one out.")
        arguments["seeds"] = arguments.pop("repetitions")
    _check_names(arguments, _names_of(Study), "unknown name")
    for name, kind in (("limits", Limits), ("design", Design)):
        if name in arguments:
            arguments[name] = _part(kind, f"[{name}]", arguments[name])
    for name in ("factors", "settings", "baseline", "clusters"):
        if not isinstance(arguments.get(name, {}), Mapping):
            raise UsageError(f"[{name}] holds names and values, such as workers = 2.")
    factors = {name: read_levels(name, levels) for name, levels in dotted(arguments.get("factors", {})).items()}
    arguments["factors"] = _by_long_names("[factors]", factors)
    for part in ("settings", "baseline"):
        arguments[part] = _by_long_names(f"[{part}]", dotted(arguments.get(part, {})))
        for name, value in arguments[part].items():
            if not isinstance(value, Level):
                raise UsageError(f"[{part}] '{name}' must be a number, a word, true or false, not {shown(value)}.")
    arguments["seeds"] = _seeds(arguments.get("seeds", 3))
    if "targets" in arguments:
        targets = arguments["targets"]
        arguments["targets"] = tuple(map(_number, targets if isinstance(targets, list) else [targets]))
    if "target" in arguments:
        arguments["target"] = _number(arguments["target"])
    if "cluster" in arguments:
        arguments["cluster"] = _cluster("cluster", arguments["cluster"], folder)
    clusters = arguments.get("clusters", {})
    arguments["clusters"] = {name: _cluster(f"[clusters] '{name}'", one, folder) for name, one in clusters.items()}
    return Study(**arguments)


def _from_python(path: Path) -> Study:
    found = runpy.run_path(str(path)).get("study")
    study = found() if callable(found) else found
    if not isinstance(study, Study):
        raise UsageError("the study file must define study, such as study = paceline.study.Study(name=...).")
    return study


def _part(kind: Any, where: str, table: Any) -> Any:
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} holds names and values; known: {', '.join(_names_of(kind))}.")
    _check_names(table, _names_of(kind), f"{where} has an unknown name")
    with located(where):
        return kind(**table)


def _check_names(names: Iterable[str], known: Sequence[str], refusal: str) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{refusal} '{name}'.{closest(name, known)} Known: {', '.join(known)}.")


def _names_of(kind: Any) -> list[str]:
    return [one.name for one in dataclasses.fields(kind)]


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`algorithm.persistence = [1]` without quotes is a table in TOML; it is meant as one dotted name.

    >>> dotted({"algorithm": {"backoff": {"base": [1]}}, "workers": {"from": 1, "to": 4}})
    {'algorithm.backoff.base': [1], 'workers': {'from': 1, 'to': 4}}
    """
    flat: dict[str, Any] = {}
    for name, value in table.items():
        is_table = isinstance(value, Mapping) and "from" not in value
        flat |= dotted(value, f"{prefix}{name}.") if is_table else {prefix + name: value}
    return flat


def _by_long_names(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in values.items():
        if (long := long_name(name)) in named:
            raise UsageError(
                f"{where} 'backoff' is short for 'algorithm.backoff', so '{long}' is given twice; leave one out."
            )
        named[long] = value
    return named


def long_name(name: str) -> str:
    """A factor's full name: `algorithm.backoff.base` for `backoff.base`."""
    return f"algorithm.{name}" if name.partition(".")[0] == "backoff" else name


def _check_factor(name: str, where: str) -> None:
    head, dot, rest = name.partition(".")
    if name in _GIVEN_ELSEWHERE:
        raise UsageError(f"{where} '{name}' is set elsewhere, as {_GIVEN_ELSEWHERE[name]}; move it there.")
    if (dot and rest and head in _DOTTED) or (not dot and (name in _PLAIN or name in ("cluster", "parameters"))):
        return
    known = [*_PLAIN, "cluster", *(f"{one}.<field>" for one in _DOTTED)]
    _check_names([name], known, f"{where} has an unknown name")


def _seeds(value: Any) -> tuple[int, ...]:
    if is_whole(value):
        TRIALS.check("The number of seeds", value)
        return tuple(range(value))
    if isinstance(value, list | tuple):
        return tuple(value)
    raise UsageError(f"seeds must be a number of seeds, such as 5, or a list of whole numbers, not {shown(value)}.")


def _cluster(where: str, value: Any, folder: Path) -> Mapping[str, Any]:
    """A cluster file's content, whether named or written out."""
    from paceline.simulator.cluster import Cluster

    if isinstance(value, Mapping):
        Cluster.check_names(value, where)
        return dict(value)
    with located(where):
        return Cluster.load(folder / str(value)).as_table()


def _plain(value: Any) -> Any:
    if isinstance(value, Range):
        return value.as_table()
    if isinstance(value, Limits | Design):
        return {one.name: own for one in dataclasses.fields(value) if (own := getattr(value, one.name)) != one.default}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _number(value: Any) -> Any:
    return float(value) if is_number(value) and -math.inf < value < 10**300 else value


def _listed(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{one:g}" for one in numbers)
