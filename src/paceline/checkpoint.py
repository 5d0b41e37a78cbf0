"""Checkpoints of a run: `checkpoint/<n>/` with the parameters, one file per worker, and `complete.json` once all are there.

Every file is written under another name and renamed, so that a kill at any instant leaves the last complete checkpoint as it
was. Numbers n grow; a new complete checkpoint replaces the older ones.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError

__all__ = [
    "Parameters",
    "all_there",
    "clear",
    "complete",
    "describe",
    "end",
    "load_model",
    "load_optimizer_state",
    "load_parameters",
    "load_program",
    "load_rule_state",
    "load_worker",
    "newest",
    "newest_or_none",
    "same_round",
    "save_parameters",
    "save_server",
    "save_worker",
]

_PARAMETERS = "parameters.pt"
_COMPLETE = "complete.json"
_ENDING = "ending"


@dataclass(frozen=True)
class Parameters:
    """The shared part of a checkpoint: the flat vector (P,), its version, the next batch to hand out, the buffers."""

    x: torch.Tensor
    version: int
    next_batch: int
    buffers: dict[str, torch.Tensor]


def save_parameters(folder: Path, number: int, parameters: Parameters) -> None:
    """Writes the shared part."""
    _save(_inside(folder, number) / _PARAMETERS, vars(parameters))


def save_server(folder: Path, number: int | None, shard_id: int, state: dict[str, Any]) -> None:
    """Writes one server's part: `range`, `x` and `version` of its shard, and the `rule`'s state."""
    _save(_inside(folder, number) / f"server-{shard_id}.pt", state)


def load_rule_state(checkpoint: Path, begin: int, end: int) -> dict[str, torch.Tensor]:
    """The servers' state for elements `begin` to `end` of the flat vector, whatever the shards were that saved it."""
    states = _server_states(checkpoint)
    found: dict[str, torch.Tensor] = {}
    for name in {name: None for state in states for name in state["rule"]}:
        sizes = [last - first for first, last in (state["range"] for state in states)]
        values = [state["rule"].get(name) for state in states]
        kinds = [one is not None and one.dim() == 1 and len(one) == n for one, n in zip(values, sizes, strict=True)]
        if not any(kinds):
            found[name] = next(one for one in values if one is not None)
            continue
        like = values[kinds.index(True)]
        assert like is not None
        # A shard has one number for all of its elements where they are alike, and nothing where that is 0.
        parts = [one if kind else like.new_zeros(n) + (0 if one is None else one)
                 for one, kind, n in zip(values, kinds, sizes, strict=True)]  # fmt: skip
        found[name] = torch.cat(parts)[begin:end]
    return found


def _server_states(checkpoint: Path) -> list[dict[str, Any]]:
    return sorted(map(_load, checkpoint.glob("server-*.pt")), key=lambda state: state["range"])


def save_worker(
    folder: Path,
    number: int | None,
    worker_id: int,
    optimizer: torch.optim.Optimizer,
    taken: int,
    model: tuple[int, torch.Tensor] | None = None,
    program: dict[str, Any] | None = None,
) -> None:
    """Writes one worker's part: its optimizer's state, the batches it has taken, its random state.

    `number` None is the end of the run: `end` gives it a number. `model` is (version, x (P,)) where every worker has its own;
    `program` is what the algorithm's program keeps of its own.
    """
    state: dict[str, Any] = {"optimizer": optimizer.state_dict(), "taken": taken, "random": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["random on the GPU"] = torch.cuda.get_rng_state()
    if model is not None:
        state |= {"version": model[0], "x": model[1]}
    if program is not None:
        state["program"] = program
    _save(_inside(folder, number) / f"worker-{worker_id}.pt", state)


def complete(
    folder: Path,
    number: int,
    workers: list[int],
    about: dict[str, Any],
    *,
    keep: Path | None = None,
    num_servers: int = 0,
) -> bool:
    """Marks a checkpoint as complete if every part is there, and removes older ones; returns whether it is.

    Args:
        folder: the run's `checkpoint` folder.
        number: which checkpoint.
        workers: ids of the workers whose parts it needs.
        about: what a resumed run must know besides, as JSON: samples trained on, time trained, ...
        keep: an older one that stays.
        num_servers: whose parts it needs.
    """
    if not all_there(folder, number, workers, num_servers):
        return False
    inside = folder / str(number)
    content = json.dumps({"number": number, "workers": workers, **about})
    temporary = inside / f".{_COMPLETE}"
    temporary.write_text(content)
    temporary.rename(inside / _COMPLETE)
    for older in folder.iterdir():
        if older.name.isdigit() and int(older.name) < number and older != keep:
            shutil.rmtree(older)
    return True


def all_there(folder: Path, number: int, workers: list[int], num_servers: int = 0) -> bool:
    """Whether the parameters and these workers' and servers' parts of a checkpoint are written."""
    names = [_PARAMETERS, *(f"worker-{one}.pt" for one in workers), *(f"server-{one}.pt" for one in range(num_servers))]
    return all((folder / str(number) / name).exists() for name in names)


def newest(folder: Path) -> Path:
    """The newest complete checkpoint in a run's `checkpoint` folder.

    Raises:
        UsageError: there is none.
    """
    found = newest_or_none(folder)
    if found is None:
        raise UsageError(f"There is no complete checkpoint in {folder}; start the run again without --resume.")
    return found


def newest_or_none(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, if it holds one."""
    found = [path.parent for path in folder.glob(f"*/{_COMPLETE}")]
    return max(found, key=lambda path: int(path.name)) if found else None


def describe(checkpoint: Path) -> dict[str, Any]:
    """What `complete` wrote about a checkpoint."""
    return json.loads((checkpoint / _COMPLETE).read_text())


def load_parameters(checkpoint: Path) -> Parameters:
    """Reads the shared part; where servers hold the vector, theirs counts, which has its version and their state with it."""
    parameters = Parameters(**_load(checkpoint / _PARAMETERS))
    states = _server_states(checkpoint)
    if not states:
        return parameters
    x = torch.cat([state["x"] for state in states])
    return replace(parameters, x=x, version=states[0]["version"])


def load_worker(
    checkpoint: Path,
    worker_id: int,
    optimizer: torch.optim.Optimizer,
    expect: Callable[[int], None] = lambda _: None,
) -> int:
    """Restores one worker's optimizer and random state; returns the batches it had taken (0 for a worker new to the run).

    Learning rate and all other settings stay those of `optimizer`: a resumed run may change them, and a loop with a scheduler
    comes to the right one by itself, since it goes through its schedule again. Before, `expect` is called with the number of
    parameters that the saved optimizer's first group has.
    """
    path = checkpoint / f"worker-{worker_id}.pt"
    if not path.exists():
        return 0
    state = _load(path)
    saved = state["optimizer"]["param_groups"]
    expect(len(saved[0]["params"]))
    settings = optimizer.state_dict()["param_groups"]
    if [len(one["params"]) for one in saved] != [len(one["params"]) for one in settings]:
        raise UsageError(
            f"The optimizer saved in {checkpoint} has other groups of parameters than this one; resume with the model and"
            " optimizer that the run was started with."
        )
    optimizer.load_state_dict({**state["optimizer"], "param_groups": settings})
    torch.set_rng_state(state["random"])
    if "random on the GPU" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random on the GPU"])
    return state["taken"]


def load_model(checkpoint: Path, worker_id: int) -> tuple[int, torch.Tensor] | None:
    """(version, x (P,)) of one worker, where each had a model of its own; None for one that was not there."""
    path = checkpoint / f"worker-{worker_id}.pt"
    state = _load(path) if path.exists() else {}
    return (state["version"], state["x"]) if "x" in state else None


def load_program(checkpoint: Path, worker_id: int) -> dict[str, Any] | None:
    """What one worker's program kept of its own; None where it kept nothing, or was not there."""
    path = checkpoint / f"worker-{worker_id}.pt"
    return _load(path).get("program") if path.exists() else None


def load_optimizer_state(checkpoint: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The state that all workers shared, as the first of them saved it: by parameter's index, then by name."""
    path = checkpoint / f"worker-{min(describe(checkpoint)['workers'])}.pt"
    return _load(path)["optimizer"]["state"]


def same_round(checkpoint: Path, workers: list[int]) -> bool:
    """Whether these workers' parts are all there and have taken equally many batches."""
    paths = [checkpoint / f"worker-{worker}.pt" for worker in workers]
    return all(path.exists() for path in paths) and len({_load(path)["taken"] for path in paths}) == 1


def end(folder: Path, parameters: Parameters) -> int:
    """Turns what the workers saved at the end of the run into a checkpoint with the given parameters; returns its number."""
    numbers = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    number = max([parameters.next_batch, *(taken + 1 for taken in numbers)])
    ending = _inside(folder, None)
    _save(ending / _PARAMETERS, vars(parameters))
    ending.rename(folder / str(number))
    return number


def clear(folder: Path, keep: Path | None) -> None:
    """Removes what a killed run left unfinished, and every checkpoint but the one that this run starts from.

    A newer one that was all but complete would be taken for this run's.
    """
    for path in folder.glob("*"):
        if (path.name.isdigit() and path != keep) or path.name == _ENDING:
            shutil.rmtree(path)


def _inside(folder: Path, number: int | None) -> Path:
    inside = folder / (_ENDING if number is None else str(number))
    inside.mkdir(parents=True, exist_ok=True)
    return inside


def _save(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(content, temporary)
    temporary.rename(path)


def _load(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise UsageError(f"The checkpoint file {path} cannot be read: {why}; resume from another run.") from error
