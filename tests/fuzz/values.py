"""Values that people, scripts and attackers give: wrong ones of every class, and small ones that are right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, Literal, get_args, get_origin

from paceline.specs.bounds import Bound
from paceline.specs.registry import Registry
from paceline.specs.types import allowed_types

Allowed = Sequence[tuple[Any, Bound | None]]  # types of a field, each with its bound
NUMBERS = (
    "-1", "0", "-0", "1", "2", "3", "0.5", "2.5", "-0.1", "1e-320", "1e308", "-1e308", "1e400", "nan", "inf", "-inf",
    "1e-9", "99999999999999999999", "-99999999999999999999", "9223372036854775807", "9223372036854775808",
    "18446744073709551616", "1" + 23 * "0", "1" + 400 * "0", 5000 * "9", "1_0", "0x10", "1,5", "٣", "½", " 1", "+1",
    "1e", "--1",
)  # fmt: skip
WORDS = (
    "", " ", "x", "none", "null", "true", "False", "NaN", "a b", "ü", "雪", "\u202egnal", "a\x1b[31mb", "\x07", "a\nb",
    "a\tb", "\udcff", "[/red]", "[bold]", "%s", "{0}", "{", "${HOME}", "`id`", "'", '"', "\\", ";", "=", "=1", "a=",
    ",", ",,", ":", "a:b:c", "-", "--", "*", "?", "#", "x" * 300, "x" * 5000, "(" * 3000, "[" * 3000, "a(" * 3000,
    "." * 50, "../" * 50,
)  # fmt: skip
FILES = (
    "file", "folder", "missing", "missing/deep/x", "folder/x", "file/x", "", ".", "..", "/", "/dev/null", "/dev/null/x",
    "/proc/x", "/sys/x", "/dev/full", "~", "x" * 300, "a/" * 2500, "loop", "ü雪", "a\x1b[31mb", "\udcff", "[/red]",
    "x\ny", " ", "-x", "a b",
)  # fmt: skip
DATA = (
    "tiny.py", "broken.py", "data.svm", "cut.svm.gz", "bomb.npz", "junk.npz", "data.npz", "model.npz", "odd-model.npz",
    "ratings.csv", "odd.csv", "ratings-model.npz", "cluster.toml", "deep.toml", "deep.json", "odd.toml", "study.toml",
    "run", "study", "key", "noise",
)  # fmt: skip
TASKS = (
    "tiny.py:make", "tiny.py:empty", "tiny.py:wrong", "tiny.py:fails", "tiny.py:missing", "broken.py:make",
    "folder.py:make", "missing.py:make", "digits-mlp", "mnist-mlp", "digits", "tiny.py:", ":make", "tiny.py:make:make",
    "pipe.py:make", "script.py:go", "script.py", "noise.py:make",
)  # fmt: skip
PAIRS = (
    "0:2", "1:1.5", "0:1e308", "0:-1", "0:nan", "9:2", "-1:2", "99999999999999999999:2", "0", ":", "0:", ":2", "0:2:3",
    "a:b", "0-1:2", "0-0:2", "0-9:2", "0-1", "1-0:inf", "0-1:0", "0:1", "1:0", "0:" + 5000 * "9",
)  # fmt: skip
ADDRESSES = (
    "127.0.0.1:1", "127.0.0.1", "localhost:99999", "127.0.0.1:-1", "127.0.0.1:x", ":1", "[::1]", "x:y:z", "127.0.0.1:0",
    "", "\x1b:1",
)  # fmt: skip
TIMES = (
    "1s", "0s", "-1s", "1e308h", "5m", "1h", "1 s", "s", "1e400", "nan", "1/h", "0/h", "1/0", "1e308/ms", "-1/h", "/h",
    "1e30d",
)  # fmt: skip
OPTIMIZERS = (
    "sgd", "adam", "adamw", "lbfgs", "sparseadam", "adamm", "rmsprop", "asgd", "rprop", "adagrad", "adafactor", "muon",
)  # fmt: skip


def any_of(random: Random, *groups: tuple[str, ...]) -> str:
    """One of a group, whose sizes do not count."""
    return random.choice(random.choice(groups))


def number(random: Random, bound: Bound | None = None) -> str:
    """A number as text: mostly a wrong one; of a bound, often the first beyond."""
    if bound is not None and random.random() < 0.3:
        beyond = (bound.most + 1, bound.least - 1, bound.least)
        return str(random.choice([one for one in beyond if abs(one) < 1e308] or [0]))
    return random.choice(NUMBERS)


def spec(random: Random, registry: Registry, depth: int = 0) -> str:
    """A spec of a registry's names and fields, with values that are mostly wrong."""
    if random.random() < 0.08:
        return any_of(random, WORDS)
    name = random.choice(registry.names())
    fields = allowed_types(registry[name])
    arguments = []
    for key in random.sample(list(fields), k=min(len(fields), random.choice((0, 1, 1, 2)))):
        arguments.append(f"{key}={_value(random, registry, fields[key], depth)}")
    if random.random() < 0.1:
        arguments.append(random.choice(("x=1", "1=x", "=", "a", "x=", *arguments)))
    text = f"{name}({', '.join(arguments)})" if arguments or random.random() < 0.1 else name
    return _broken(random, text) if random.random() < 0.1 else text


def field_names(registry: Registry) -> list[str]:
    """All that its classes have."""
    return sorted({key for name in registry for key in allowed_types(registry[name])})


def toml_value(random: Random, allowed: Allowed = ()) -> str:
    """A value for a file: of the kind that is wanted, or another."""
    if random.random() < 0.6:
        bounds = [one for _, one in allowed if one is not None]
        return number(random, bounds[0] if bounds else None).replace("½", "0.5").replace("٣", "3")
    plain = (
        "true", "false", "[]", "{}", "[1, 2]", "[[1]]", "1979-05-27",
        '["a", 1]', "[0.5, nan]", "[1, 1]", 500 * "[" + 500 * "]",
        "{ from = 1 }", "{ from = 1, to = 2 }", "{ from = 1, to = 4, step = 1 }", "{ from = 1, to = 1e9, step = 1 }",
        "{ from = 1, to = 1e308, factor = 1.0000001 }",
    )  # fmt: skip
    words = [word for member, _ in allowed if get_origin(member) is Literal for word in get_args(member)]
    return random.choice((random.choice(plain), quoted(any_of(random, WORDS, FILES, TASKS, tuple(words) or ("x",)))))


def quoted(text: str) -> str:
    """As TOML and JSON write texts."""
    return json.dumps(text.encode("utf-8", "replace").decode()).replace("\\u007f", "\x7f")


def _value(random: Random, registry: Registry, allowed: Allowed, depth: int) -> str:
    for member, bound in random.sample(allowed, k=len(allowed)):
        nested = registry._nested_registry(member)
        if nested is not None and depth < 3 and random.random() < 0.8:
            return spec(random, nested, depth + 1)
        if get_origin(member) is Literal and random.random() < 0.7:
            return str(random.choice(get_args(member)))
        if member in (int, float) and random.random() < 0.8:
            return number(random, bound)
        if member is bool and random.random() < 0.7:
            return random.choice(("true", "false"))
    return random.choice((any_of(random, WORDS), number(random), "none", "0-1", "0-1_1-2", "0_3_1", "0-99999999999"))


def _broken(random: Random, text: str) -> str:
    at = random.randrange(len(text) + 1)
    return random.choice(
        (text[:at], text + ")", text.replace("(", "((", 1), text[:at] + random.choice("()=,\x1b\n é") + text[at:])
    )
