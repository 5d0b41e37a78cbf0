"""One run on slow links: four namespaces, a process in each, and what their diaries say."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from links.course import SNAPSHOT_EVERY, Settings, load_data, make_model
from links.network import WIRE, Network
from paceline.transport.keys import create_keys

BENCHMARKS = Path(__file__).parents[1]
PORT = 29511  # the networks are this run's own
LIMIT_S = 1500.0


def run(settings: Settings, python: str, rate_mbit: float | None) -> dict[str, Any]:
    """Trains once; the record of what happened, which says so where it failed."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="links-") as name, Network(settings.workers, rate_mbit) as network:
        settings = replace(settings, folder=name)
        create_keys(Path(name) / "run.key")
        sent = [network.sent_bytes(host) for host in range(settings.workers)]
        codes, words = _train(settings, network, python)
        moved = [network.sent_bytes(host) - before for host, before in enumerate(sent)]
        found: dict[str, Any] = {"failed": words.strip().rpartition("\n")[2]} if any(codes) else _judge(settings)
        found |= {"sent_bytes": sum(moved) / settings.workers}
    kept = {key: value for key, value in asdict(settings).items() if key != "folder"}
    return {**kept, "rate_mbit": rate_mbit, **found, "took_s": time.monotonic() - started_s}


def _train(settings: Settings, network: Network, python: str) -> tuple[list[int | None], str]:
    """Exit codes of all workers, and the last words of the first that failed."""
    folder = Path(settings.folder)
    running = []
    try:
        for rank in range(settings.workers):
            place = {
                **{"RANK": str(rank), "WORLD_SIZE": str(settings.workers), "LOCAL_RANK": "0"},
                **{"MASTER_ADDR": network.address(0), "MASTER_PORT": str(PORT), "OWN_ADDRESS": network.address(rank)},
                **{"GLOO_SOCKET_IFNAME": WIRE, "PACELINE_KEY": str(folder / "run.key"), "OMP_NUM_THREADS": "1"},
                "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent / "src")]),
            }
            with (folder / f"output-{rank}").open("wb") as output:
                running.append(
                    subprocess.Popen(
                        network.command(rank, [python, "-m", "links.worker"]),
                        env={**os.environ, **place, **settings.variables()},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        until_s = time.monotonic() + LIMIT_S
        codes: list[int | None] = [None] * len(running)
        while None in codes and not any(codes) and time.monotonic() < until_s:
            time.sleep(0.1)
            codes = [process.poll() for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    codes = [process.returncode for process in running]
    failed = next((rank for rank, code in enumerate(codes) if code and code > 0), 0)
    return codes, (folder / f"output-{failed}").read_text(errors="replace")


def _judge(settings: Settings) -> dict[str, Any]:
    """A step's time, and the accuracy on held-out images of the mean of all models after every few steps, with its time."""
    folder, workers = Path(settings.folder), range(settings.workers)
    ended_s = np.stack([np.load(folder / f"ended-{worker}.npy") for worker in workers])
    began_s = ended_s[:, 0].max()
    timed = settings.updates - settings.warm_up
    steps_s = (ended_s[:, -1] - ended_s[:, settings.warm_up]) / timed
    sent = np.stack([np.load(folder / f"sent-{worker}.npy") for worker in workers])
    model, (_, (x, y)) = make_model(settings.seed), load_data()
    curve = []
    for step in range(SNAPSHOT_EVERY, settings.updates + 1, SNAPSHOT_EVERY):
        mean = sum(np.load(folder / f"at-{step}-{worker}.npy") for worker in workers) / settings.workers
        nn.utils.vector_to_parameters(torch.from_numpy(np.asarray(mean, dtype=np.float32)), model.parameters())
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).double().mean().item()
        curve.append((step, float(ended_s[:, step].max() - began_s), accuracy))
    step_bytes = float(np.diff(sent).mean() / timed)
    return {"step_s": statistics.median(steps_s.tolist()), "step_bytes": step_bytes, "curve": curve}


def interpreter(system: str, pythons: dict[str, str]) -> str:
    """A system's Python."""
    return pythons.get(system, sys.executable)
