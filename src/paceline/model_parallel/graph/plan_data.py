"""A plan as data that is written as JSON, and is the same on every worker."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from paceline.errors import UsageError
from paceline.model_parallel.graph.partition import Transfer, transfers_of
from paceline.model_parallel.graph.place import Placement, best_of, candidates, check_placer
from paceline.model_parallel.graph.problem import Bounds, Device, Group, Link, Problem, TensorInfo, bounds
from paceline.model_parallel.graph.schedule import Schedule, simulate
from paceline.system.files import write_text
from paceline.system.plain_files import read_table

_FORMAT = 1


@dataclass(frozen=True)
class PlanData:
    """The fields of a `Plan`, and what follows from them."""

    model: str
    digest: str
    arguments: tuple[str, ...]
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    random: tuple[str, ...]
    any_mode: bool
    problem: Problem
    placement: Placement
    others: tuple[tuple[str, float], ...]
    bounds: Bounds
    objective: str = "latency"
    step_s: float = 0.0
    sum_s: float = 0.0
    wire: str = ""
    seed: int = 0
    cut: tuple[bool, ...] = ()
    is_verified: bool = False

    @property
    def workers(self) -> int:
        return len(self.problem.devices)

    @property
    def title(self) -> str:
        """A short text that differs between plans."""
        digest = hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:8]
        return f"{digest}, for {self.model} on {self.workers} workers"

    @property
    def device_of(self) -> dict[str, int]:
        """By operation, the device that runs it."""
        pairs = zip(self.problem.groups, self.placement.device_of, strict=True)
        return {name: device for group, device in pairs for name in group.nodes}

    def check_worker(self, worker: int) -> None:
        """Refuses a worker that has no part."""
        if not 0 <= worker < self.workers:
            raise UsageError(f"There is no worker {worker} in a plan for {self.workers} workers, numbered from 0.")

    def check_workers(self, number: int) -> None:
        """Refuses a run with more or fewer workers."""
        if number != self.workers:
            raise UsageError(
                f"The plan is for {self.workers} workers, and the run has {number}: start {self.workers}, or make a plan "
                f"for {number} devices, as plan.again(devices=...) does."
            )

    @property
    def makespan_s(self) -> float:
        """Simulated duration of one step's forward and backward passes."""
        return self.placement.makespan_s

    @property
    def error(self) -> float:
        """Difference between the measured blocks' sum and the measured whole, relative to the whole."""
        return abs(self.sum_s - self.step_s) / self.step_s if self.step_s else 0.0

    @property
    def one_device_s(self) -> float:
        """The same step on the fastest device alone, from the same measurements and without transfers."""
        fastest = min(one.slowness for one in self.problem.devices)
        return sum(one.step_s for one in self.problem.groups) * fastest * self.problem.microbatches

    def transfers(self) -> list[Transfer]:
        """The transfers of one forward pass."""
        return transfers_of(self.problem, self.placement.device_of)

    def schedule(self) -> Schedule:
        """The simulated step, with all its events."""
        return simulate(self.problem, self.placement.device_of, self.placement.order, records=True)

    def elsewhere_s(self, group: int) -> float | None:
        """The extra time of a step if a group, with the groups that must stay with it, runs on the best other device.

        None: no other device may run it.
        """
        problem, device_of = self.problem, list(self.placement.device_of)
        found = []
        for device in problem.choices[group]:
            if device != device_of[group]:
                moved = [
                    device if problem.class_of[one] == problem.class_of[group] else d for one, d in enumerate(device_of)
                ]
                if problem.fits(moved):
                    found.append(best_of(problem, moved)[0].makespan_s - self.makespan_s)
        return min(found, default=None)

    def again(
        self,
        *,
        # Replace this plan's devices; pins are dropped. If their number differs, all links are the usual one.
        devices: int | Sequence[Device] | None = None,
        placer: str | None = None,  # the placer to use; None: the best
        device_of: Mapping[str, int] | None = None,  # an explicit placement instead: by group, its device
    ) -> Self:
        """Places the model again in milliseconds, from the same measurements: for other devices, or as the caller chooses.

        Raises:
            UsageError: no such placement exists.
        """
        check_placer(placer)
        problem = self.problem
        if devices is not None:
            devices = (Device(),) * devices if isinstance(devices, int) else tuple(devices)
            if not devices:
                raise UsageError("A plan needs at least one device.")
            link_factors = problem.link_factors if len(devices) == self.workers else ()
            problem = dataclasses.replace(problem, devices=devices, allowed=(), link_factors=link_factors)
        if device_of is None:
            found, below = candidates(problem)
            chosen = next((one for one in found if placer in (None, one.placer)), None)
            if chosen is None:
                raise UsageError(
                    f"{placer} finds no placement of these {len(problem.groups)} groups: choose another placer."
                )
            others = tuple((one.placer, one.makespan_s) for one in found if one is not chosen)
            changes = {"problem": problem, "placement": chosen, "bounds": below, "others": others}
            return dataclasses.replace(self, **changes, is_verified=False)
        names = {one.name for one in problem.groups}
        if wrong := [one for one in (*device_of, *names) if (one in names) != (one in device_of)]:
            raise UsageError(f"device_of must name all groups of the plan, and no others: see {wrong[0]}.")
        asked = tuple(device_of[one.name] for one in problem.groups)
        if any(not 0 <= one < len(problem.devices) for one in asked) or not problem.fits(asked):
            raise UsageError(
                "This placement separates operations that must share a device, or does not fit the devices' memory."
            )
        run, order = best_of(problem, asked)
        placement = Placement("as asked", asked, order, run.makespan_s)
        changes = {"problem": problem, "placement": placement, "bounds": bounds(problem), "others": ()}
        return dataclasses.replace(self, **changes, is_verified=False)

    # As a file

    def as_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads."""
        values = dataclasses.asdict(self)
        values["constants"] = [[name, _encoded(value)] for name, value in self.constants]
        return {"paceline_plan": _FORMAT, **values}

    def save(self, path: Path | str) -> None:
        write_text(Path(path), json.dumps(self.as_json(), indent=1))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Reads a file that `save` wrote.

        Raises:
            UsageError: the file holds no plan.
        """
        try:
            return cls.from_json(read_table(Path(path), "The plan"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{path} holds no plan of paceline place: place the model again.") from error

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        values = dict(values)
        if values.pop("paceline_plan") != _FORMAT:
            raise ValueError("another format")
        problem, placement = dict(values["problem"]), dict(values["placement"])
        problem["groups"] = tuple(Group(**_tuples(one)) for one in problem["groups"])
        problem["tensors"] = tuple(TensorInfo(**_tuples(one)) for one in problem["tensors"])
        problem["devices"] = tuple(Device(**one) for one in problem["devices"])
        problem["link"] = Link(**problem["link"])
        values |= {
            "problem": Problem(**_tuples(problem)),
            "placement": Placement(**_tuples(placement)),
            "bounds": Bounds(**values["bounds"]),
            "constants": tuple((name, _decoded(value)) for name, value in values["constants"]),
        }
        rest = {k: v for k, v in values.items() if k != "constants"}
        return cls(**_tuples(rest), constants=values["constants"])


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _as_tuple(value) for key, value in values.items()}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    return {"tuple": [_encoded(one) for one in value]} if isinstance(value, list | tuple) else value


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(map(_decoded, content))
    return torch.device(content) if kind == "device" else getattr(torch, content)
