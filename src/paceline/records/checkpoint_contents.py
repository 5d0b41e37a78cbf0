"""The contents of a run's checkpoint: the parameters, and the state of each worker and each server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.optim.saved_state import check_state, load_with_own_settings, state_for_checkpoints
from paceline.optim.several_optimizers import members_of
from paceline.records.checkpoint_files import PARAMETERS, describe, load_part, numbers, parts, write_part
from paceline.records.checkpoint_files import end as end_files
from paceline.system import tensor_files
from paceline.system.saved_state import check_fits, fits
from paceline.system.torch_random import cuda_state, torch_state

Checks = dict[str, Callable[[Any], bool]]
_MOST = 2**53  # batches and versions; beyond it, files may lose digits


@dataclass(frozen=True)
class Parameters:
    """The shared part of a checkpoint: the flat vector (P,), its version, the next batch to hand out, the buffers."""

    x: torch.Tensor
    version: int
    next_batch: int
    buffers: dict[str, torch.Tensor]
    division: str = ""  # of a model whose parts' vectors are in a row in `x`; "": it is not divided
    memory_order: str = ""  # of the whole model's `FlatBinding`


# Writing


def save_parameters(folder: Path, number: int, parameters: Parameters) -> None:
    """Writes the shared part."""
    write_part(folder, number, PARAMETERS, vars(parameters))


def save_server(folder: Path, number: int | None, shard_id: int, state: dict[str, Any]) -> None:
    """Writes one server's part: `range`, `x` and `version` of its shard, and the `rule`'s state."""
    write_part(folder, number, f"server-{shard_id}.pt", state)


def save_worker(
    folder: Path,
    number: int | None,
    worker_id: int,
    optimizer: torch.optim.Optimizer,
    taken: int,
    model: tuple[int, int, torch.Tensor] | None = None,
    program: dict[str, Any] | None = None,
    left: tuple[int, list[int], Sequence[list[int]]] | None = None,
    frozen: dict[str, Any] | None = None,
) -> None:
    """Writes one worker's part: its optimizer's state, the batches it has taken, its random state.

    `number` None is the end of the run: `end` gives it a number. `model` is (version, updates, x (P,)) if every worker has
    its own; `program` is the state of the algorithm's program; `left` is for `load_left`, `frozen` of `FrozenParameters`.
    """
    taken = max(0, taken)  # a worker that was stopped before its first batch gave that one back
    state: dict[str, Any] = {"optimizer": state_for_checkpoints(optimizer), "taken": taken, "random": torch_state()}
    if frozen:
        state["frozen"] = frozen
    if torch.cuda.is_initialized():
        state["random on the GPU"] = cuda_state()
    if model is not None:
        state |= dict(zip(("version", "updates", "x"), model, strict=True))
    if program is not None:
        state["program"] = program
    if left is not None:
        state["left"] = [left[0], *left[1]]
        if left[2]:
            state["batch sizes"] = [*left[2]]
    write_part(folder, number, f"worker-{worker_id}.pt", state)


def save_successors(checkpoint: Path, lost: list[int], survivor: int, *, have_programs: bool) -> bool:
    """Writes parts for the successors of lost workers that have left none, from a survivor's; random states are new ones.

    Returns False, and writes nothing, if programs keep state, unless successors `have_programs` that begin with it.
    """
    state = _peek(checkpoint / f"worker-{survivor}.pt")
    if "program" in state and not have_programs:
        return False
    for worker in [one for one in lost if not (checkpoint / f"worker-{one}.pt").exists()]:
        random = torch.Generator().manual_seed(int.from_bytes(f"{checkpoint.name}/{worker}".encode()[-7:]))
        successor = {**state, "random": random.get_state()}
        write_part(checkpoint.parent, int(checkpoint.name), f"worker-{worker}.pt", successor)
    return True


def end(folder: Path, parameters: Parameters, least: int = 0) -> int:
    """Makes a checkpoint of these parameters and the parts saved at the run's end; returns its number, at least `least`."""
    number = max([parameters.next_batch, least, *(taken + 1 for taken in numbers(folder))])
    write_part(folder, None, PARAMETERS, vars(parameters))
    end_files(folder, number)
    return number


# Reading


def load_parameters(checkpoint: Path) -> Parameters:
    """Reads the shared part; if servers hold the vector, takes it and its version from their parts, to match their state."""
    state = load_part(checkpoint, PARAMETERS)
    assert state is not None  # every complete checkpoint has it
    checks: Checks = {
        "x": _is_vector,
        "version": is_count,
        "next_batch": partial(is_count, most=int(checkpoint.name)),
        "buffers": _are_tensors,
        "division": lambda one: isinstance(one, str),
        "memory_order": lambda one: isinstance(one, str),
    }
    if not has_entries(state, checks):
        raise _unsound(checkpoint, PARAMETERS)
    parameters = Parameters(**state)
    states = _server_states(checkpoint)
    if not states:
        return parameters
    x = torch.cat([one["x"] for one in states])
    if not fits(x, parameters.x):
        raise _unsound(checkpoint, "server-0.pt")
    return replace(parameters, x=x, version=states[0]["version"])


def shard_versions(checkpoint: Path) -> list[int]:
    """The versions of the shards that servers saved, in the order of their ranges; empty if there were none."""
    return [state["version"] for state in _server_states(checkpoint)]


def load_fitting(
    checkpoint: Path,
    num_elements: int,
    dtype: torch.dtype,
    buffers: dict[str, torch.Tensor],
    num_workers: int | None,
) -> Parameters:
    """Reads the shared part for a model with this many elements and these buffers, and `num_workers` workers; None: any.

    Raises:
        UsageError: the checkpoint is of another model, or of a run with more or fewer workers.
    """
    saved = load_parameters(checkpoint)
    if saved.x.shape != (num_elements,) or saved.x.dtype != dtype:
        raise UsageError(
            f"The checkpoint in {checkpoint} holds {saved.x.numel()} elements of {saved.x.dtype}, but this model has "
            f"{num_elements} of {dtype}; resume with the task that the run was started with."
        )
    check_fits(saved.buffers, buffers, "the model's buffers")
    if num_workers not in (None, num_before := len(describe(checkpoint)["workers"])):
        raise UsageError(
            f"The checkpoint has the state of {num_before} workers, but this run needs one for each of its {num_workers}: "
            f"give it {num_before} workers, or the algorithm that wrote the checkpoint."
        )
    return saved


def load_rule_state(checkpoint: Path, begin: int, end: int) -> dict[str, torch.Tensor]:
    """The servers' state for elements `begin` to `end` of the flat vector, however it was sharded when saved."""
    states = _server_states(checkpoint)
    found: dict[str, torch.Tensor] = {}
    for name in {name: None for state in states for name in state["rule"]}:
        sizes = [last - first for first, last in (state["range"] for state in states)]
        values = [state["rule"].get(name) for state in states]
        if not _can_be_put_together(name, values, states):
            raise _unsound(checkpoint, "server-0.pt")
        kinds = [one is not None and one.dim() == 1 and len(one) == n for one, n in zip(values, sizes, strict=True)]
        if not any(kinds):
            found[name] = next(one for one in values if one is not None)
            continue
        like = values[kinds.index(True)]
        assert like is not None
        # A shard has one number for all of its elements if they are equal, and nothing if that number is 0.
        parts = [one if kind else like.new_zeros(n) + (0 if one is None else one)
                 for one, kind, n in zip(values, kinds, sizes, strict=True)]  # fmt: skip
        found[name] = torch.cat(parts)[begin:end]
    return found


def _is_of_all(name: str) -> bool:
    return "." not in name and name != "without_state"


def _can_be_put_together(name: str, values: list[torch.Tensor | None], states: list[dict[str, Any]]) -> bool:
    """Whether all shards have numbers for their elements, one number for all of these, or a row of others; of one type."""
    found = [(one, state["x"]) for one, state in zip(values, states, strict=True) if one is not None]
    if _is_of_all(name) and any(any(map(_is_of_all, one["rule"])) and name not in one["rule"] for one in states):
        return False  # a shard has all of these, or has made no update yet
    is_row = [one.dim() == 2 and len(one) == 1 for one, _ in found]
    is_sound = [not one.dim() or one.shape == x.shape for one, x in found]
    return (all(is_row) or all(is_sound)) and len({one.dtype for one, _ in found}) == 1


def _server_states(checkpoint: Path) -> list[dict[str, Any]]:
    """The states of all shards, in the order of their ranges."""
    states, names = [], parts(checkpoint, "server-")
    for name in names:
        state = load_part(checkpoint, name)
        checks: Checks = {"range": _is_range, "x": _is_vector, "version": is_count, "rule": _are_tensors}
        if state is None or not has_entries(state, checks) or state["range"][1] - state["range"][0] != len(state["x"]):
            raise _unsound(checkpoint, name)
        states.append(state)
    states.sort(key=lambda state: state["range"])
    ends = [0, *(state["range"][1] for state in states)]
    if any(state["range"][0] != begin for state, begin in zip(states, ends, strict=False)):
        raise _unsound(checkpoint, names[0])
    return states


def _load_worker(checkpoint: Path, worker_id: int) -> dict[str, Any] | None:
    """One worker's part; None if the worker was absent."""
    name = f"worker-{worker_id}.pt"
    state = load_part(checkpoint, name)
    if state is None:
        return None
    own_model: Checks = {"x": _is_vector, "version": is_count, "updates": is_count}
    optional: Checks = {
        "random on the GPU": lambda one: True,
        "program": lambda one: isinstance(one, dict),
        "frozen": lambda one: isinstance(one, dict),
        "left": _are_counts,
        "batch sizes": lambda one: isinstance(one, list) and all(_are_counts(sizes, least=3) for sizes in one),
    }
    checks: Checks = {"optimizer": _is_optimizer, "taken": is_count, "random": lambda one: fits(one, torch_state())}
    if state.keys() & own_model.keys():
        checks |= own_model
    if not has_entries(state, checks, optional):
        raise _unsound(checkpoint, name)
    return state


def load_worker(
    checkpoint: Path,
    worker_id: int,
    optimizer: torch.optim.Optimizer,
    expect: Callable[[int], None] = lambda _: None,
    *,
    sizes: bool = True,
    makes_same_updates: bool = False,
) -> int:
    """Restores one worker's optimizer and random state; returns the batches it had taken.

    A worker that is new to the run gets the first worker's optimizer state if all make the same updates; else none.
    Learning rate and all other settings stay those of `optimizer`: a resumed run may change them, and a loop with a
    scheduler goes through its schedule again. First calls `expect` with the number of parameters in the saved optimizer's
    first group. `sizes`: whether workers keep state for whole parameters.
    """
    state = _load_worker(checkpoint, worker_id)
    is_new = state is None
    if is_new and makes_same_updates:
        state = _load_worker(checkpoint, min(describe(checkpoint)["workers"]))
    if state is None:
        return 0
    saved = state["optimizer"]["param_groups"]
    num_before = len(optimizer.param_groups[0]["params"])
    expect(len(saved[0]["params"]))
    sizes = sizes and len(optimizer.param_groups[0]["params"]) == num_before  # other groups' sizes are not known yet
    settings = state_for_checkpoints(optimizer)["param_groups"]
    if [len(one["params"]) for one in saved] != [len(one["params"]) for one in settings]:
        raise UsageError(
            f"The optimizer saved in {checkpoint} has different parameter groups than this one; resume with the model and "
            "optimizer that the run was started with."
        )
    check_state(state["optimizer"]["state"], members_of(optimizer), sizes=sizes)
    load_with_own_settings(optimizer, state["optimizer"])
    if is_new:
        return state["taken"]
    try:
        torch.set_rng_state(state["random"])
    except RuntimeError as error:
        raise _unsound(checkpoint, f"worker-{worker_id}.pt") from error
    if "random on the GPU" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random on the GPU"])
    return state["taken"]


def load_workers(checkpoint: Path) -> list[dict[str, Any]]:
    """All workers' parts as they saved them: `optimizer`, `taken`, and `program` where the program kept something."""
    found = (_load_worker(checkpoint, worker) for worker in sorted(describe(checkpoint)["workers"]))
    return [one for one in found if one is not None]


def load_model(checkpoint: Path, worker_id: int) -> tuple[int, int, torch.Tensor] | None:
    """(version, updates, x (P,)) of one worker, if each had its own model; None if the worker was absent."""
    state = _load_worker(checkpoint, worker_id) or {}
    return (state["version"], state["updates"], state["x"]) if "x" in state else None


def load_program(checkpoint: Path, worker_id: int, *, makes_same_updates: bool = False) -> dict[str, Any] | None:
    """The state of one worker's program; None if it kept none, or the worker was absent and does not get the first one's."""
    workers = describe(checkpoint)["workers"]
    known = min(workers) if makes_same_updates and worker_id not in workers else worker_id
    return (_load_worker(checkpoint, known) or {}).get("program")


def load_frozen(checkpoint: Path, worker_id: int) -> dict[str, Any]:
    """What one worker's part, or the first one's, has of frozen parameters."""
    workers = describe(checkpoint)["workers"]
    return (_load_worker(checkpoint, worker_id if worker_id in workers else min(workers)) or {}).get("frozen", {})


def check_programs(checkpoint: Path, *, alike: bool) -> None:
    """Refuses a checkpoint in which only some workers' programs kept state, or, with `alike`, states that do not match.

    Raises:
        UsageError: names the first difference from the first worker's.
    """
    first, *others = sorted(describe(checkpoint)["workers"])
    kept = load_program(checkpoint, first)
    for worker in others:
        program = load_program(checkpoint, worker)
        if alike or kept is None or program is None:
            check_fits(program, kept, f"worker {worker}'s program next to worker {first}'s")


def load_left(checkpoint: Path) -> tuple[int, list[int], list[list[int]]] | None:
    """The batches that a lockstep run has left, as `save_worker` takes them: all workers know the same."""
    state = _load_worker(checkpoint, min(describe(checkpoint)["workers"])) or {}
    left = state.get("left")
    for name in parts(checkpoint, "worker-"):
        if _peek(checkpoint / name).get("left") != left:
            raise _unsound(checkpoint, name)
    return (left[0], left[1:], state.get("batch sizes", [])) if left is not None else None


def load_optimizer_state(checkpoint: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The state that all workers shared, as the first worker saved it: by parameter's index, then by name."""
    state = _load_worker(checkpoint, min(describe(checkpoint)["workers"]))
    assert state is not None  # it has a part of each of them
    return state["optimizer"]["state"]


def versions(checkpoint: Path, workers: list[int]) -> tuple[int, dict[int, int]]:
    """The versions of the shared vector and of each of these workers' own; the checkpoint may be incomplete."""
    server = checkpoint / "server-0.pt"
    own = {worker: _peek(checkpoint / f"worker-{worker}.pt").get("version") for worker in workers}
    shared = _peek(server if server.exists() else checkpoint / PARAMETERS)["version"]
    return shared, {worker: version for worker, version in own.items() if version is not None}


def same_round(checkpoint: Path, workers: list[int]) -> bool:
    """Whether these workers' parts are all there, with equally many batches taken; the checkpoint may be incomplete."""
    paths = [checkpoint / f"worker-{worker}.pt" for worker in workers]
    return all(path.exists() for path in paths) and len({_peek(path)["taken"] for path in paths}) == 1


def _peek(path: Path) -> dict[str, Any]:
    """One part, without reading its tensors' elements from disk."""
    return tensor_files.load(path, "The checkpoint file", mapped=True)


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.is_floating_point()


def is_count(value: Any, most: int = _MOST) -> bool:
    """Whether it is a number of batches, updates and so on."""
    return type(value) is int and 0 <= value <= most


def _are_counts(value: Any, least: int = 1) -> bool:
    return isinstance(value, list) and len(value) >= least and all(map(is_count, value))


def _is_range(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_count, value))


def _is_optimizer(value: Any) -> bool:
    match value:
        case {"state": dict(), "param_groups": list(groups)}:
            return bool(groups) and all(isinstance(one, dict) and isinstance(one.get("params"), list) for one in groups)
    return False


def _are_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, torch.Tensor) for one in value.values())


def has_entries(state: dict[str, Any], checks: Checks, optional: Checks | None = None) -> bool:
    """Whether it has these entries, no others, and each passes its check."""
    known = checks | (optional or {})
    return checks.keys() <= state.keys() <= known.keys() and all(known[name](one) for name, one in state.items())


def _unsound(checkpoint: Path, name: str) -> UsageError:
    return UsageError(
        f"The checkpoint file {checkpoint / name} holds a value that no run writes, such as a number out of range; "
        "start the run again without it."
    )
