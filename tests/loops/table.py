"""The table: habits of loops x families of algorithms. Each cell works, works with a warning, or is refused in a sentence."""

import importlib
import pkgutil
from typing import NamedTuple

from loops import habits
from loops.families import ALL, KINDS, OWN_LOCKSTEP, SERVED, SHARED_LOCKSTEP

HABITS = [one.name for one in pkgutil.iter_modules(habits.__path__)]
ALONE = "alone"

SHARDED = ["all-reduce(sharded=true)"]
SERVED_BY_OPTIMIZER = [name for name in ALL if name.startswith("parameter-server")]
TAKE_ONE = [*SHARDED, "d-psgd", "ad-psgd"]
HAVE_ONE_RATE = [name for name in SERVED if name not in SERVED_BY_OPTIMIZER]


class Cell(NamedTuple):
    """What is not simply so: refused, or warned of."""

    habits: list[str]
    algorithms: list[str]
    says: str
    is_warning: bool = False


OTHER = [
    Cell(["clipping", "grad_scaler", "penalty_after_backward"], SHARDED, "own part of the mean gradient only"),
    Cell(
        ["clipping", "penalty_after_backward"],
        ["lockstep", "parameter-server"],
        "acts on each worker's own gradient, before their mean",
        True,
    ),
    Cell(["penalty_after_backward"], ["all-reduce"], "parameters differ, and this method keeps them equal"),
    Cell(["own_plateau"], [*SHARED_LOCKSTEP, *OWN_LOCKSTEP], "the workers' learning rates differ"),
    Cell(["two_optimizers", "in_turn", "sparse_table"], TAKE_ONE, "takes one optimizer, but attach was given 2"),
    Cell(["two_optimizers", "sparse_table"], HAVE_ONE_RATE, "The servers' rule has one learning rate"),
    Cell(["skipped_step"], [*SHARED_LOCKSTEP, *OWN_LOCKSTEP], "Worker 1 skipped"),
    Cell(["clamped", "lookahead"], [*SERVED, "leashed"], "would be lost: load weights before attach"),
    Cell(["unfrozen"], ALL, "attach after unfreezing or adding it"),
    Cell(["head_only"], ALL, "No optimizer that attach was given has the parameter"),
    Cell(["own_checkpoint"], SHARDED, "has only the state of this worker's own part", True),
    Cell(["own_checkpoint"], SERVED_BY_OPTIMIZER, "lacks its current values, such as momentum", True),
    Cell(
        ["lbfgs"],
        [name for name in ALL if name not in ("lockstep", "all-reduce")],
        "LBFGS chooses its steps by the loss",
    ),
    Cell(["two_phases"], SHARDED, "parameters differ, and this method keeps them equal"),
    Cell(["two_phases"], ["hogwild", "leashed"], "moves its parameters while a step is under way", True),
    Cell(["sharpness"], SHARDED, "evaluates its closure several times in a step"),
    Cell(["sharpness"], SERVED, "A server cannot apply SharpnessAware"),
]


def module_of(habit):
    return importlib.import_module(f"loops.habits.{habit}")


def cells():
    return [(habit, algorithm) for habit in HABITS for algorithm in ALL]


def on_processes():
    """The cells that `make test` runs on real processes, so that each habit meets one of the families, in turn.

    Loaders have processes there only, and meet each kind.
    """
    return [
        (habit, algorithm)
        for row, habit in enumerate(HABITS)
        for column, algorithm in enumerate(ALL)
        if (row + column) % len(ALL) == 0 or (habit == "loader_processes" and algorithm in KINDS)
    ]


def expected(habit, algorithm):
    """The cell, where it is not simply so."""
    return next((one for one in OTHER if habit in one.habits and algorithm in one.algorithms), None)
