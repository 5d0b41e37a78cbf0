"""Command lines drawn from the commands' own parameters: a new verb, option or field of a spec is drawn without being told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import typer

from fuzz import values
from fuzz.values import ADDRESSES, DATA, FILES, OPTIMIZERS, PAIRS, TASKS, TIMES, WORDS, any_of
from paceline.algorithms import backoff_registry, registry
from paceline.algorithms.server.registries import delay_registry
from paceline.cli.app import app
from paceline.data.plan import partition_registry
from paceline.memory.placement import placement_registry
from paceline.run.config import TrainConfig
from paceline.simulator.cluster import Cluster
from paceline.simulator.compute import compute_registry
from paceline.simulator.hardware.sockets import Sockets
from paceline.specs import bounds
from paceline.specs.types import allowed_types
from paceline.study.parts import Design, Limits
from paceline.study.study_file import Study


@dataclass(frozen=True)
class Line:
    """A command line, and files that it may name."""

    words: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verb:
    """A command of the tree, with its parameters."""

    path: tuple[str, ...]
    parameters: tuple[Any, ...]


# What makes a verb run, and end soon. One that takes many seconds is given something that it must refuse in the end.
TASK = ("--task", "tiny.py:make")
BASES: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("train",): (
        (*TASK, "--steps", "1", "--backend", "threads", "--out", "new"),
        (*TASK, "--steps", "1", "--workers", "1", "--backend", "threads"),
        (*TASK, "--steps", "1", "--out", "new"),
        (*TASK, "--resume", "run"),
    ),
    ("compare",): ((*TASK, "--steps", "1", "--backend", "threads", "--algorithm", "hogwild", "--out", "new"),),
    ("simulate",): (
        (*TASK, "--steps", "1", "--out", "new"),
        (*TASK, "--steps", "1", "--timing-only"),
        ("--steps", "1", "--timing-only", "--parameters", "100"),
        (*TASK, "--steps", "1", "--cluster", "cluster.toml"),
    ),
    ("launch",): (("script.py:go", "--out", "new"), ("--deadline", "1", "--join", "127.0.0.1:x", "--", "script.py")),
    ("calibrate",): ((*TASK, "--quick", "--workers", "0"), ("--task", "tiny.py:fails", "--quick")),
    ("key",): (("new",),),
    ("algorithms",): ((),),
    ("doctor",): (("extra",),),
    ("advise", "training"): (("script.py:go", "--target-loss", "0.1", "--budget", "1s"),),
    ("advise", "layers"): ((*TASK, "--workers", "4", "--flops-per-s", "1e9"),),
    ("advise", "backups"): (("--cluster", "cluster.toml", "--workers", "4"),),
    ("place",): (("tiny.py:net", "--force"), ("tiny.py:net", "--force", "--plan", "new"), ("tiny.py:make",)),
    ("plan", "backups"): (("run",),),
    ("sparse", "fit"): (
        ("data.svm", "--passes", "2", "--n-jobs", "1"), ("data.npz", "--passes", "2", "--model", "new.npz"),
        ("ratings.csv", "--passes", "2"),
    ),
    ("sparse", "predict"): (
        ("model.npz", "data.svm"), ("ratings-model.npz", "ratings.csv"), ("model.npz", "data.npz", "--out", "new"),
    ),
    ("study", "run"): (
        ("study.toml", "--out", "new"), ("study.toml", "--dry-run"),
        (*TASK, "--backend", "simulator", "--steps", "1", "--seeds", "1", "--dry-run"),
    ),
    ("study", "table"): (("study",),),
    ("study", "report"): (("study",),),
    ("study", "compare"): (("study", "--by", "workers"), ("study",)),
}  # fmt: skip

_BOUNDS = {**bounds._RUN, "limit": bounds.SECONDS_ABOVE_0, "passes": bounds.PASSES, "repeats": bounds.RUNS}


def verbs() -> list[Verb]:
    """Every command of the tree that is no group."""
    return list(_leaves(typer.main.get_command(app), ()))


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[Verb]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield Verb(path, tuple(command.params))


def lines(seed: int, count: int) -> Iterator[Line]:
    """The first lines of a seed."""
    random, known = Random(seed), verbs()
    weights = [1 + len(verb.parameters) for verb in known]
    for _ in range(count):
        yield _line(random, random.choices(known, weights)[0])


def _line(random: Random, verb: Verb) -> Line:
    if random.random() < 0.03:
        groups = (WORDS, FILES, verb.path, ("-h", "--help", "--version"))
        return Line(tuple(any_of(random, *groups) for _ in range(random.randrange(4))))
    base = list(random.choice(BASES.get(verb.path, ((),))))
    files: dict[str, str] = {}
    for parameter in random.choices(verb.parameters, k=random.choices((0, 1, 2, 3), (1, 8, 5, 2))[0]):
        if parameter.param_type_name == "argument":
            _replace_argument(random, base, parameter)
        else:
            base = _with_option(random, base, parameter)
    if random.random() < 0.2:
        _with_file(random, base, files)
    if random.random() < 0.06:
        word = any_of(random, WORDS, ("--unknown", "--task=", "-x", "--", "--json"))
        base.insert(random.randrange(len(base) + 1), word)
    words = (*(verb.path if verb.path != ("advise", "training") else ("advise",)), *base)
    return Line(tuple(word.replace("\0", "") for word in words), files)


def _with_option(random: Random, base: list[str], parameter: Any) -> list[str]:
    """The line with an option added, or another value in its place."""
    option = random.choice(parameter.opts)
    end = base.index("--") if "--" in base else len(base)
    ours, rest = base[:end], base[end:]
    if parameter.is_flag:
        return [*ours, option, *rest]
    value = value_for(random, parameter)
    if option in ours and random.random() < 0.8:
        at = ours.index(option)
        return [*ours[: at + 1], value, *ours[at + 2 :], *rest]
    return [*ours, *((option, value) if random.random() < 0.7 else (f"{option}={value}",)), *rest]


def _replace_argument(random: Random, base: list[str], parameter: Any) -> None:
    def is_value(at: int) -> bool:
        return at > 0 and base[at - 1].startswith("--")

    places = [at for at, word in enumerate(base) if not word.startswith("-") and not is_value(at)]
    value = value_for(random, parameter)
    if places:
        base[random.choice(places)] = value
    else:
        base.insert(0, value)


def value_for(random: Random, parameter: Any) -> str:
    """A value, mostly a wrong one, for what the parameter is called and of which type it is."""
    name = parameter.name
    if name in _TEXTS and random.random() < 0.85:
        return _TEXTS[name](random)
    kind = repr(getattr(parameter, "type_descriptor", None) or parameter.type).lower()
    if "path" in kind:
        return any_of(random, FILES, DATA)
    if "int" in kind.split("parameter_info")[0] or "float" in kind.split("parameter_info")[0]:
        return values.number(random, _BOUNDS.get(name)) if random.random() < 0.95 else any_of(random, WORDS)
    return any_of(random, WORDS, WORDS, FILES, values.NUMBERS, DATA, ("shared", "processes", "simulator"))


def _list_of(one: Callable[[Random], str]) -> Callable[[Random], str]:
    return lambda random: ",".join(one(random) for _ in range(random.choice((1, 1, 2, 3))))


def _optimizer(random: Random) -> str:
    fields = ("lr", "momentum", "weight_decay", "nesterov", "beta1", "eps", "fused", "foreach", "maximize", "x")
    name = random.choice(OPTIMIZERS)
    return (
        name
        if random.random() < 0.4
        else f"{name}({random.choice(fields)}={any_of(random, values.NUMBERS, ('true', 'none', 'x'))})"
    )


def _factor(random: Random) -> str:
    named = [f"algorithm.{one}" for one in values.field_names(registry)] + [
        f"cluster.{one}" for one in allowed_types(Cluster)
    ]
    name = any_of(
        random,
        tuple(allowed_types(TrainConfig)),
        tuple(named),
        ("cluster.slow.0", "optimizer.lr", "algorithm.backoff.base"),
    )
    return f"{name}={_list_of(lambda r: any_of(r, values.NUMBERS, WORDS))(random)}"


def _spec_of(kinds: Any) -> Callable[[Random], str]:
    return lambda random: values.spec(random, kinds)


def _delay(random: Random) -> str:
    return values.spec(random, delay_registry) if random.random() < 0.7 else values.number(random)


def _one_of(*groups: tuple[str, ...]) -> Callable[[Random], str]:
    return lambda random: any_of(random, *groups)


_TEXTS: dict[str, Callable[[Random], str]] = {
    **dict.fromkeys(("task", "program", "command"), _one_of(TASKS, TASKS, FILES)), "algorithm": _list_of(_spec_of(registry)),
    "partition": _spec_of(partition_registry), "placement": _spec_of(placement_registry),
    "backoff": _list_of(_spec_of(backoff_registry)), "inject_staleness": _delay, "optimizer": _optimizer,
    "factor": _factor, "where": _factor, "slow": _one_of(PAIRS), "slow_link": _one_of(PAIRS), "kill": _one_of(PAIRS),
    "join": _one_of(ADDRESSES), "deadline": _one_of(TIMES, values.NUMBERS), "kill_rate": _one_of(TIMES),
    "budget": _one_of(("1s", "0s"), values.NUMBERS[-20:], TIMES[:3]), "targets": _list_of(_one_of(values.NUMBERS)),
    "workers": _list_of(values.number),
}  # fmt: skip


# Files


def _with_file(random: Random, base: list[str], files: dict[str, str]) -> None:
    """Puts a drawn study or cluster file in the place of one that the line names."""
    for at, word in enumerate(base):
        if word == "cluster.toml":
            base[at], files["drawn.toml"] = "drawn.toml", cluster_text(random)
        elif word == "study.toml":
            base[at], files["drawn.toml"] = "drawn.toml", study_text(random)


def cluster_text(random: Random) -> str:
    """A cluster file with wrong values."""
    fields = allowed_types(Cluster)
    chosen = {
        key: values.toml_value(random, fields[key]) for key in random.sample(list(fields), k=random.choice((1, 2, 3)))
    }
    if random.random() < 0.3:
        chosen["compute_s"] = values.quoted(values.spec(random, compute_registry))
    if random.random() < 0.2:
        sockets = allowed_types(Sockets)
        table = ", ".join(
            f"{key} = {values.toml_value(random, sockets[key])}" for key in random.sample(list(sockets), k=2)
        )
        chosen["sockets"] = "{ " + table + " }"
    for name in ("slow", "idle", "slow_link"):
        if random.random() < 0.1:
            key = any_of(random, ("0", "1", "0-1", "9", "-1", "0-0", 5000 * "9"), WORDS)
            chosen[name] = "{ " + f"{values.quoted(key)} = {values.toml_value(random)}" + " }"
    return _text(random, chosen)


def study_text(random: Random) -> str:
    """A study file with wrong values."""
    chosen = {"task": '"tiny.py:make"', "backend": '"simulator"', "seeds": "1", "limits.steps": "1"}
    for part, cls in (("", Study), ("", Study), ("limits.", Limits), ("design.", Design)):
        fields = allowed_types(cls)
        if part == "" or random.random() < 0.3:
            key = random.choice(list(fields))
            chosen[part + key] = values.toml_value(random, fields[key])
    for part in ("factors", "settings", "baseline"):
        if random.random() < 0.4:
            name, _, levels = _factor(random).partition("=")
            level = values.toml_value(random) if random.random() < 0.7 else values.quoted(levels)
            chosen[f"{part}.{values.quoted(name)}"] = (
                level if part != "factors" or random.random() < 0.5 else f"[{level}]"
            )
    if random.random() < 0.2:
        fields = allowed_types(Cluster)
        key = random.choice(list(fields))
        chosen[f"cluster.{key}"] = values.toml_value(random, fields[key])
    return _text(random, chosen)


def _text(random: Random, chosen: dict[str, str]) -> str:
    text = "".join(f"{key} = {value}\n" for key, value in chosen.items())
    if random.random() < 0.08:
        at = random.randrange(len(text) + 1)
        text = random.choice(
            (text[:at], text + text, text[:at] + random.choice("[]{}=\"'\x1b\\") + text[at:], "a." * 3000 + "a = 1")
        )
    return text
