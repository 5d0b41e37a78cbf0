"""Who takes part in the head to head, and how each is started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
SOURCE = BENCHMARKS.parent / "src"
OURS, DDP, TORCHFT, HIVEMIND = "contest.ours", "contest.ddp", "contest.torchft_peers", "contest.hivemind_peers"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A system's method.

    Args:
        program: module that trains.
        spec: what the program is told.
        mean: whether what the user ends with is the mean of the workers' models; otherwise they are all the same.
        system: whose it is.
        rate: learning rate on MNIST where none has been tuned.
        colour: which of the palette's, in pictures; None: the text's.
        workers: number of workers, if it differs from all other methods'; these workers are never slowed or killed.
        scenes: the scenes in which the method runs.
    """

    program: str
    spec: str
    mean: bool
    system: str
    colour: int | None
    rate: float = 0.4
    workers: int | None = None
    scenes: tuple[str, ...] = ("none", "slow", "killed")


#: The one method of ours that headlines compare, in every scene: the best of several would win by their number.
LEADING = "ad-psgd"
BY_SPEED = "all-reduce, shares by speed"
#: The controls: a single worker, workers whose models are averaged only for the evaluation, and leaving the slow one out.
ALONE, SILENT, WITHOUT = "one worker alone", "no communication", "DDP without the slow worker"
CONTROLS = (SILENT, ALONE, WITHOUT)

METHODS = {
    "all-reduce": Method(program=OURS, spec="all-reduce", mean=False, system="Paceline", colour=0),
    BY_SPEED: Method(program=OURS, spec="all-reduce(shares=auto)", mean=False, system="Paceline", colour=None),
    "local-sgd": Method(
        program=OURS, spec="local-sgd(period=8,warmup_steps=50)", mean=True, system="Paceline", colour=5
    ),
    "ad-psgd": Method(program=OURS, spec="ad-psgd", mean=True, system="Paceline", colour=2),
    "parameter-server, one backup": Method(
        program=OURS, spec="parameter-server(mode=sync(backups=1))", mean=False, system="Paceline", colour=3
    ),
    "parameter-server, asynchronous": Method(
        program=OURS,
        spec="parameter-server(mode=async)",
        mean=False,
        system="Paceline",
        colour=4,
        rate=0.1,
    ),
    ALONE: Method(program=OURS, spec="sequential", mean=False, system="Paceline", colour=None, workers=1),
    SILENT: Method(program=OURS, spec="local-sgd(period=1000000)", mean=True, system="Paceline", colour=None),
    "DistributedDataParallel": Method(program=DDP, spec="ddp", mean=False, system="PyTorch", colour=1),
    WITHOUT: Method(program=DDP, spec="ddp", mean=False, system="PyTorch", colour=None, workers=3, scenes=("slow",)),
    "PostLocalSGD": Method(program=DDP, spec="post-local-sgd", mean=True, system="PyTorch", colour=7),
    "torchft DistributedDataParallel": Method(program=TORCHFT, spec="ddp", mean=False, system="torchft", colour=None),
    "torchft LocalSGD": Method(program=TORCHFT, spec="local-sgd", mean=True, system="torchft", colour=6),
    "hivemind": Method(program=HIVEMIND, spec="local-updates", mean=True, system="hivemind", colour=None),
}


def command(method: Method, workers: int, scene: str, pythons: dict[str, str]) -> list[str]:
    """What starts all workers of a run; torchrun may restart them where one will be killed."""
    python = pythons.get(method.system, sys.executable)
    if method.program != DDP:
        return [python, "-m", method.program]
    restarts = "1" if scene == "killed" else "0"
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    return [*torchrun, f"--max-restarts={restarts}", "--monitor-interval=0.1", "-m", method.program]


def variables() -> dict[str, str]:
    """The environment of a run's processes: one thread each, and where to import from."""
    paths = [str(BENCHMARKS), str(SOURCE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
