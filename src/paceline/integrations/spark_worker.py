"""A Spark task under `pl.spark.launch`: keeps its rows in a file, and runs the user's loop in a process beside it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.errors import PacelineError, UsageError
from paceline.integrations.spark_failures import Kind, first_told, make_good, said, tell
from paceline.integrations.spark_job import meet_driver
from paceline.integrations.spark_loop import FAILURE, Loop
from paceline.integrations.spark_rows import spark_folder, spilled
from paceline.membership.environment import Invitation, LaunchedEnvironment, WorkerEnvironment
from paceline.membership.join_point import JoinPoint, JoinPointLostError
from paceline.system import files
from paceline.system.exit_codes import how_ended
from paceline.transport.keys import Keys

_CAUSE_S = 30.0  # time for the worker that failed first to report why; waited in full only if it never does
_BETWEEN_LOOKS_S = 0.1
_dist: Any = dist  # its type stubs do not name the stores


@dataclass(frozen=True)
class WorkerTask:
    """A task, as data that Spark sends to its executors; the only message that contains the key."""

    address: str
    keys: Keys
    function: bytes
    algorithm: str
    workers: int
    in_barrier: bool  # all tasks are in a barrier stage and meet as torchrun's workers do; else they come and go
    seed: int
    reach_s: float  # how long to look for the driver
    deadline_s: float  # how long workers wait for each other

    def run(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        """Runs the loop on this partition; returns its worker's records, or nothing if it came too late."""
        from pyspark import BarrierTaskContext, TaskContext  # pyright: ignore[reportMissingImports]

        context: Any = BarrierTaskContext.get() if self.in_barrier else TaskContext.get()
        partition, attempt = context.partitionId(), context.attemptNumber()
        with (
            spilled(batches) as rows,
            contextlib.closing(meet_driver("launch", self.address, self.keys, self.reach_s, partition)) as join_point,
        ):
            if attempt and self._is_over(join_point):
                return []
            with tempfile.TemporaryDirectory(prefix="paceline-", dir=spark_folder()) as name:
                folder = Path(name)
                try:
                    self._train(context, join_point, rows.fileno(), folder)
                    written = _written(folder, attempt)
                except _LoopError as error:
                    is_refused = attempt > 0 and error.is_ours  # such as when there is no place: the others go on
                    if is_refused and self._is_over(join_point):
                        return []
                    kind: Kind = "follows" if is_refused else error.kind
                    raise self._failure(join_point, partition, str(error), kind) from None
                except PacelineError as error:
                    raise self._failure(join_point, partition, said(partition, error), "raised") from None
                make_good(join_point, partition)
                return written

    def _is_over(self, join_point: JoinPoint) -> bool:
        """Whether the others are about to end, so that the run accepts no more workers."""
        return not self.in_barrier and join_point.check(["ending"])

    def _train(self, context: Any, join_point: JoinPoint, rows: int, folder: Path) -> None:
        partition = context.partitionId()
        if not os.fstat(rows).st_size:
            raise UsageError(
                f"it has no rows, but each of the {self.workers} workers needs some: use "
                f"data.repartition({self.workers}), or fewer workers."
            )
        about: dict[str, Any] = {"algorithm": self.algorithm, "deadline_s": self.deadline_s, "out": folder}
        variables: dict[str, str] = {}
        store: Any = None
        if self.in_barrier:
            if partition == 0:
                store = _open_store(join_point)
            places = context.allGather(f"{store.host} {store.port}" if store is not None else "")
            variables["MASTER_ADDR"], variables["MASTER_PORT"] = places[0].split()
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            environment: WorkerEnvironment = LaunchedEnvironment(
                worker_id=partition, num_workers=self.workers, own_data=True, **about
            )
        else:
            environment = Invitation(
                num_workers=self.workers, address=self.address, key=self.keys, of=self.workers, own_data=True, **about
            )
        loop = Loop(
            self.function,
            environment,
            rows,
            partition,
            self.seed * self.workers + partition,
            max(1, context.cpus()),
            folder,
            variables,
        )
        code = _run(loop)
        if code:
            told: dict[str, Any] = files.read_json(folder / FAILURE, {})
            if not told:
                ended = f"partition {partition}: the worker's process {how_ended(code)}, and said nothing"
                raise _LoopError(ended, "died", is_ours=False)
            raise _LoopError(told["said"], "follows" if told["follows"] else "raised", is_ours=told["is_ours"])

    def _failure(self, join_point: JoinPoint, partition: int, sentence: str, kind: Kind) -> Exception:
        tell(join_point, partition, sentence, kind)
        until_s = time.monotonic() + _CAUSE_S
        ends_job = self.in_barrier and kind == "follows"  # with a task whose end is not the cause
        with contextlib.suppress(JoinPointLostError):
            while ends_job and time.monotonic() < until_s:
                if first_told(join_point, self.workers, "raised", "died"):
                    break
                time.sleep(_BETWEEN_LOOKS_S)
        return PacelineError(sentence)


class _LoopError(Exception):
    def __init__(self, sentence: str, kind: Kind, *, is_ours: bool) -> None:
        super().__init__(sentence)
        self.kind: Kind = kind
        self.is_ours = is_ours


def _open_store(join_point: JoinPoint) -> Any:
    """A store that listens at one address; PyTorch's own listener accepts connections at all addresses of the machine."""
    listener = join_point.listen()
    host, port = listener.getsockname()[:2]
    return _dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _run(loop: Loop) -> int:
    """Runs the loop in its own process; returns the exit code, negative for a signal."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-m", "paceline.integrations.spark_loop"],
        stdin=subprocess.PIPE,
        stdout=2,  # goes to the executor's log
        env=environment,
        pass_fds=[loop.rows],
    ) as child:
        assert child.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(pickle.dumps(loop))
                child.stdin.flush()
            return child.wait()
        finally:
            child.kill()


def _written(folder: Path, attempt: int) -> list[dict[str, Any]]:
    """The worker's records: one row, or none if the loop never attached; raises PacelineError if its events are missing."""
    rows = []
    for path in folder.glob("worker-*.json"):
        about: dict[str, Any] = files.read_json(path, {})
        if about["state"] == "ended":
            model, events = folder / "model.pt", folder / f"events-{about['worker']}.jsonl"
            if not events.is_file():
                raise PacelineError(
                    f"the worker's {events.name} is gone: make sure that nothing deletes files in {folder.parent}"
                )
            rows.append(
                {
                    "about": json.dumps({**about, "attempt": attempt}),
                    "events": events.read_bytes(),
                    "model": model.read_bytes() if model.is_file() else b"",
                }
            )
    return rows
