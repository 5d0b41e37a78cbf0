"""One trial: a combination of levels and a seed as the configuration of a run, and the hash that names it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.algorithms import DEFAULT_ALGORITHM, Algorithm, registry
from paceline.data.plan import partition_registry
from paceline.errors import UsageError, located
from paceline.memory.placement import placement_registry
from paceline.run.config import TrainConfig
from paceline.simulator.cluster import Cluster
from paceline.specs.registry import check_optimizer
from paceline.specs.text import Spec, Value, closest, parse_spec
from paceline.study.parts import Level
from paceline.study.study_file import Study
from paceline.tasks.load import BUILT_IN, load_task
from paceline.worker.supervised import check_launch

_HASH_LENGTH = 16
_NOT_IN_HASH = ("data", "checkpoint_every_s")  # without effect on the result
_REGISTRIES = {"algorithm": registry, "partition": partition_registry, "placement": placement_registry}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a study."""

    factors: Mapping[str, Level | None]  # name -> level, `seed` last; None if the algorithm has no such field
    config: TrainConfig  # with all defaults filled in
    cluster: Cluster | None = None  # None: real workers
    timing_only: bool = False
    parameters: int | None = None  # for timing only: length of the vectors
    task_digest: str = ""  # of the task's file; empty for a built-in task

    @functools.cached_property
    def hash(self) -> str:
        """The name of the trial's folder, which equal configurations share, also in different studies.

        Defaults are left out, so that new options of Paceline change no name.
        """
        config = {
            one.name: _plain(getattr(self.config, one.name))
            for one in dataclasses.fields(TrainConfig)
            if one.name not in _NOT_IN_HASH and getattr(self.config, one.name) != one.default
        }
        identity: dict[str, Any] = {"config": config}
        if self.cluster is not None:
            identity["cluster"] = self.cluster.as_table()
        for name in ("timing_only", "parameters", "task_digest"):
            if getattr(self, name):
                identity[name] = getattr(self, name)
        text = json.dumps(identity, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]

    def with_seed(self, seed: int) -> Trial:
        return dataclasses.replace(
            self, factors={**self.factors, "seed": seed}, config=dataclasses.replace(self.config, seed=seed)
        )

    @property
    def setting(self) -> tuple[tuple[str, Level | None], ...]:
        """The trial's factors except the seed: its repetitions share them."""
        return tuple((name, level) for name, level in self.factors.items() if name != "seed")


class TrialMaker:
    """Makes a study's trials, and rejects combinations that cannot run."""

    def __init__(self, study: Study) -> None:
        self.applied: set[str] = set()  # names of factors that at least one combination uses
        self.notes: dict[str, None] = {}  # sentences on settings that were changed so that trials can run
        self._study = study
        self._task = load_task(study.task)
        self._task_digest = ""
        if study.task not in BUILT_IN:
            source = Path(study.task.rpartition(":")[0]).read_bytes()
            self._task_digest = hashlib.sha256(source).hexdigest()[:_HASH_LENGTH]
        self._built = functools.cache(lambda function, *arguments: function(*arguments))

    def make(self, levels: Mapping[str, Level], seed: int) -> Trial:
        """The trial of a combination; raises `UsageError`, which names the levels, if it cannot be run."""
        named = ", ".join(f"{name} = {level}" for name, level in levels.items())
        with located(f"The combination {named or 'of the defaults'} is not possible"):
            return self._make(levels, seed)

    def _make(self, levels: Mapping[str, Level], seed: int) -> Trial:
        study = self._study
        values: dict[str, Any] = {**study.settings, **levels}
        used: dict[str, Level | None] = dict(levels)
        plain = {name: value for name, value in values.items() if "." not in name}
        plain.setdefault("algorithm", DEFAULT_ALGORITHM)
        for name in ("algorithm", "optimizer", "partition", "placement"):
            dotted = {key.partition(".")[2]: one for key, one in values.items() if key.startswith(f"{name}.")}
            if name not in plain and not dotted:
                continue
            text = plain.get(name, TrainConfig.__dataclass_fields__[name].default)
            plain[name], lacking = self._spec(name, _text(name, text), dotted)
            used |= {f"{name}.{field}": None for field in lacking if f"{name}.{field}" in used}
        used.setdefault("algorithm", plain["algorithm"])
        used["algorithm"] = str(parse_spec(str(used["algorithm"])))
        algorithm = self._built(registry.build, plain["algorithm"])
        plain["workers"] = used["workers"] = self._workers(algorithm, plain, str(used["algorithm"]))
        parameters, named_cluster = plain.pop("parameters", study.parameters), plain.pop("cluster", None)
        self.applied |= {name for name, level in used.items() if level is not None}
        config = TrainConfig(
            **plain,
            task=study.task,
            backend=study.backend,
            seed=seed,
            epochs=study.limits.epochs,
            steps=study.limits.steps,
            limit_s=study.limits.seconds,
            target_fraction=None if study.timing_only or not study.stop_at_target else study.smallest_target / 100,
            data=study.data,
        ).resolved(self._task)
        cluster = self._cluster(config.workers, named_cluster, values) if study.backend == "simulator" else None
        self._check(config, algorithm)
        if cluster is not None and cluster.sockets is None:
            config = dataclasses.replace(config, placement=TrainConfig.placement)  # it has no effect
        factors = {name: used[name] for name in dict.fromkeys(["algorithm", "workers", *used])}
        return Trial(
            factors={**factors, "seed": seed},
            config=config,
            cluster=cluster,
            timing_only=study.timing_only,
            parameters=parameters,
            task_digest=self._task_digest,
        )

    def _spec(self, name: str, text: str, fields: Mapping[str, Level]) -> tuple[str, list[str]]:
        """A spec with fields replaced, and the names of fields that it lacks."""
        if name == "optimizer":
            spec = parse_spec(text)
            for field, value in fields.items():
                spec.arguments[field] = _value(value)
            return str(spec), []
        kind = _REGISTRIES[name]
        lacking = []
        for field, value in fields.items():
            full = parse_spec(kind.spec(self._built(kind.build, text), defaults=True))
            if _replace(full, field.split("."), _value(value)):
                text = kind.spec(kind.build(full))
            else:
                lacking.append(field)
        return kind.spec(self._built(kind.build, text)), lacking

    def _workers(self, algorithm: Algorithm, plain: Mapping[str, Any], name: str) -> Any:
        workers, limit = plain.get("workers", TrainConfig.workers), algorithm.max_workers
        if limit is None or not isinstance(workers, int) or workers <= limit:
            return workers
        self.notes[f"{name} runs with {limit} worker at most, so it is tried with {limit}."] = None
        return limit

    def _cluster(self, workers: int, name: str | None, values: Mapping[str, Level]) -> Cluster:
        clusters = self._study.clusters
        if name is not None and name not in clusters:
            raise UsageError(
                f"unknown cluster '{name}'.{closest(str(name), clusters)} Known in [clusters]: {', '.join(clusters)}."
            )
        table = dict(clusters[name] if name is not None else self._study.cluster or {})
        for key, value in values.items():
            head, _, field = key.partition(".")
            if head == "cluster" and field:
                part, _, rest = field.partition(".")
                table[part] = {**table.get(part, {}), rest: value} if rest else value
        return Cluster.from_table({**table, "workers": workers}, "the cluster")

    def _check(self, config: TrainConfig, algorithm: Algorithm) -> None:
        """Raises errors now that a run would raise later."""
        algorithm.check(config.workers)
        algorithm.check_min_workers(config.min_workers, config.workers)
        self._built(check_optimizer, config.optimizer, config.learning_rate, config.momentum)
        if self._study.backend != "simulator":
            check_launch(num_workers=1, backend=config.backend, placement=config.placement)
        elif config.optimizer_state == "shared":
            raise UsageError("simulated trials do not support optimizer state that workers share; leave it per worker.")
        elif config.restarts or config.min_workers > 1:
            raise UsageError("simulated trials have no faults; leave out restarts and min_workers.")


def _plain(value: Any) -> Any:
    """`epochs = 1` and `epochs = 1.0` are the same trial."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a spec, such as hogwild, not {value!r}.")
    return value


def _value(level: Level) -> Value:
    return parse_spec(f"x(y={level})").arguments["y"] if isinstance(level, str) else level


def _replace(spec: Spec, path: list[str], value: Value) -> bool:
    """Sets an argument, given by its path; returns whether it exists."""
    if path[0] not in spec.arguments:
        return False
    if len(path) == 1:
        spec.arguments[path[0]] = value
        return True
    inner = spec.arguments[path[0]]
    return isinstance(inner, Spec) and _replace(inner, path[1:], value)
