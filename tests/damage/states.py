"""Runs of every family of algorithms with state, and states that none of them writes, with checksums that are right."""

import copy
import random
import shutil
from dataclasses import dataclass

import torch

import paceline as pl
from damage.small_task import SMALL
from paceline.records import checkpoint_files
from rewritten import replace, write_checked

CONFIG = {"task": SMALL, "workers": 2, "backend": "threads", "batch_size": 32, "steps": 6}
FAMILIES = {
    "shared vector": {"algorithm": "leashed", "momentum": 0.9},
    "shared optimizer state": {"algorithm": "locked", "optimizer": "adam", "optimizer_state": "shared"},
    "mean gradient": {"algorithm": "all-reduce", "optimizer": "adamw"},
    "coded mean gradient": {"algorithm": "all-reduce(codec=sign)"},
    "factors": {"algorithm": "all-reduce(codec=power(rank=2, warmup_steps=2))"},
    "chosen bits": {"algorithm": "all-reduce(codec=dq(target_bits=4))"},
    "sharded": {"algorithm": "all-reduce(sharded=true)", "momentum": 0.9},
    "coded averages": {"algorithm": "local-sgd(period=2, codec=sign)", "momentum": 0.9},
    "late averages": {"algorithm": "da-sgd(period=4, delay=3)"},
    "outer optimizer": {"algorithm": "diloco(period=4, delay=3, codec=sign)"},
    "gossip": {"algorithm": "ad-psgd", "momentum": 0.9},
    "gossip in rounds": {"algorithm": "d-psgd", "optimizer": "rmsprop"},
    "server": {"algorithm": "parameter-server(shards=2)", "optimizer": "adam"},
    "server with a rule": {"algorithm": "parameter-server(apply=adam, average=0.9)"},
    "server with a codec": {"algorithm": "parameter-server(mode=async, codec=top-k(fraction=0.1))"},
    "server with delays": {
        "algorithm": "parameter-server(apply=delayed(delay=constant(updates_late=4), rule=momentum))"
    },
    "server that gathers": {"algorithm": "parameter-server(mode=rennala(gradients=5))"},
    "server with a table": {"algorithm": "parameter-server(mode=ringleader)"},
    "server that measures": {"algorithm": "parameter-server(mode=ringmaster(threshold=auto))"},
    "revisions": {"algorithm": "adaptive-revision"},
    "downpour": {"algorithm": "downpour"},
    "lone worker with a rule": {"algorithm": "adaptive-revision", "workers": 1},
}
KINDS = ("shape", "type of elements", "type", "missing", "added")
FOREIGN = ("config.json", "checkpoint", "events-0.jsonl")
UNUSED = ("param_groups", "events")  # a resumed run has settings of its own; what is not counted is not checked


def made(family, folder):
    """A run of this family."""
    pl.train(pl.TrainConfig(**CONFIG | FAMILIES[family]), out=folder)
    return folder


def parts_of(folder):
    """The files with state of a run's newest checkpoint."""
    newest = checkpoint_files.newest(folder / "checkpoint")
    return [*sorted(checkpoint_files.describe(newest)["sha256"]), "complete.json"]


@dataclass(frozen=True)
class Unfit:
    """What is changed in one part of a checkpoint; `str` of it repeats it.

    Args:
        part: the file.
        kind: one of `KINDS`.
        seed: of where and with what.
    """

    part: str
    kind: str
    seed: int

    def apply(self, folder):
        """Does it; returns where, or None where the part has nothing of that kind."""
        newest = checkpoint_files.newest(folder / "checkpoint")
        if self.part == "complete.json":
            content = checkpoint_files.describe(newest)
        else:
            content = torch.load(newest / self.part, weights_only=True)
        where = changed(content, self.kind, random.Random(self.seed))
        if where is not None and self.part == "complete.json":
            write_checked(newest / self.part, content)
        elif where is not None:
            replace(newest, self.part, content)
        return where


def places(value, path=()):
    """All containers in nested ones with each of their keys, and the way there."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in inside:
        if key not in UNUSED:
            yield value, key, (*path, key)
            yield from places(one, (*path, key))


def changed(content, kind, draws):
    """Changes nested containers in one place."""
    tensors = [torch.zeros(3)] * any(isinstance(inside[key], torch.Tensor) for inside, key, _ in places(content))
    found = [one for one in places(content) if not isinstance(one[0], tuple)]
    if kind in ("shape", "type of elements"):
        found = [one for one in found if isinstance(one[0][one[1]], torch.Tensor)]
    elif kind == "added":  # optimizers of users' own may save more than `state` and `param_groups`
        found = [one for one in found if isinstance(one[0], dict) and one[2][:-1] != ("optimizer",)]
    elif kind == "missing":  # counts as none yet: of a parameter without a gradient so far, or of a program
        found = [one for one in found if one[2] != ("program",) and one[2][:-1] != ("optimizer", "state")]
    if not found:
        return None
    inside, key, path = draws.choice(found)
    match kind:
        case "shape":
            inside[key] = draws.choice(SHAPES)(inside[key])
        case "type of elements":
            types = [one for one in TYPES if one != inside[key].dtype]
            inside[key] = inside[key].to(draws.choice(types))
        case "type":
            inside[key] = copy.deepcopy(
                draws.choice([one for one in (*VALUES, *tensors) if type(one) is not type(inside[key])])
            )
        case "missing":
            del inside[key]
        case "added":
            path = (*path[:-1], "more")
            inside["more"] = copy.deepcopy(inside[key])
    return path


SHAPES = (
    lambda x: torch.cat([x.reshape(-1), x.reshape(-1)[:1]]),
    lambda x: x.reshape(-1)[: x.numel() // 2],
    lambda x: x.reshape(-1)[:0],
    lambda x: x.unsqueeze(0).expand(2, *x.shape).clone(),
)
TYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8)
VALUES = (None, "text", 3.5, 7, True, [1.0], {"one": 1})


def put(folder, name, other):
    """Puts a file, or the checkpoints, of another run into a run's folder."""
    path = folder / name
    if path.is_dir():
        shutil.rmtree(path)
        shutil.copytree(other / name, path)
    else:
        shutil.copy(other / name, path)
