"""The machine, the methods and the runs of `thesis.py`: what is assumed, and how a run becomes a few figures.

No number here was fitted to what is published about the methods. The machine is the papers', two sockets with 36 cores in all,
with the defaults of `Sockets`, which come from public measurements of such machines. How long a gradient takes was measured
with one thread on one core of a Zen 4, for two programs; a core of 2016 is taken to be half as fast.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.simulator import Cluster, Normal, Sockets

MLP_PARAMETERS, SMALL_PARAMETERS = 134_794, 8_970  # mnist-mlp, which is the papers'; digits-mlp
MACHINE = Cluster.load(Path(__file__).parent / "two_sockets.toml")
CORE_BYTES_PER_S, SOCKET_BYTES_PER_S = MACHINE.core_bytes_per_s, MACHINE.bus_bytes_per_s
SAMPLE_NUMBERS = 2 * 784 + 4 * 394  # the input, read twice; activations written and read, and so their gradients
JITTER = 0.05  # standard deviation of a gradient's time


@dataclass(frozen=True)
class Code:
    """A program that computes the MLP's gradients on a core of the machine.

    Args:
        name: for tables.
        step_s: of every gradient.
        sample_s: for each sample more.
        number_bytes: of a parameter.
    """

    name: str
    step_s: float
    sample_s: float
    number_bytes: int

    @property
    def vector_bytes(self) -> int:
        """Of the parameters."""
        return self.number_bytes * MLP_PARAMETERS

    def gradient_s(self, batch_size: int) -> float:
        """T_c: forward and backward of a batch, alone on a core."""
        return self.step_s + self.sample_s * batch_size


CPP = Code("the papers' C++, double", 0.0, 135e-6, 8)  # as they ship it: 14,800 samples/s at batch 512
TORCH = Code("PyTorch, float32", 0.4e-3, 17e-6, 4)  # 4.65 ms at batch 512, 0.78 ms at 64
STREAMING_S = 0.01  # of a gradient that does nothing but read memory

METHODS = {
    "mutex": "locked(kind=mutex)",
    "rwlock": "locked(kind=rwlock)",
    "Hogwild!": "hogwild(reads=copy)",
    "leashed, T_p = inf": "leashed",
    "leashed, T_p = 1": "leashed(persistence=1)",
    "leashed, T_p = 0": "leashed(persistence=0)",
}
LOCKS, LEASHED = ("mutex", "rwlock"), ("leashed, T_p = inf", "leashed, T_p = 1", "leashed, T_p = 0")
UMA, FIRST_TOUCH, INTERLEAVED = "one socket", "two, first touch", "two, interleaved"
TARGET, INITIAL_LOSS = 0.05, math.log(10)  # epsilon of the initial loss, at which training ends
PLACEMENTS = {UMA: (1, "bind(node=0)"), FIRST_TOUCH: (2, "first-touch"), INTERLEAVED: (2, "interleave")}


def machine(workers: int, batch_size: int | None, *, code: Code = CPP, used: int = 2) -> Cluster:
    """The two-socket machine computing gradients of the MLP with this batch; None: a gradient that only reads memory."""
    if batch_size is None:
        compute_s = STREAMING_S
        gradient_bytes = compute_s * CORE_BYTES_PER_S - code.vector_bytes  # the parameters are read as well
    else:
        compute_s = code.gradient_s(batch_size)
        gradient_bytes = (
            code.number_bytes * SAMPLE_NUMBERS * batch_size + code.vector_bytes
        )  # and the gradient, written
    assert MACHINE.sockets is not None
    return replace(
        MACHINE,
        workers=workers,
        compute_s=Normal(average_s=compute_s, deviation_s=JITTER * compute_s),
        sockets=replace(MACHINE.sockets, used=used, gradient_bytes=gradient_bytes),
    )


def law(workers: int, gradient_s: float, code: Code) -> float:
    """n* = m / (T_c / T_u + 1), with T_u alone on the machine, interleaved: one pass of three vectors, three atomics."""
    sockets = Sockets()
    far = (1 + sockets.remote_factor) / 2
    update_s = code.vector_bytes * (2 * far + 1) / CORE_BYTES_PER_S + 3 * sockets.far_atomic_s
    return workers / (gradient_s / update_s + 1)


def scaled(cluster: Cluster, code: Code) -> Cluster:
    """The same machine for the small model: a vector of it takes as long as one of the MLP, so all times are the MLP's."""
    factor = 4 * SMALL_PARAMETERS / code.vector_bytes
    assert cluster.sockets is not None
    return replace(
        cluster,
        core_bytes_per_s=cluster.core_bytes_per_s * factor,
        bus_bytes_per_s=cluster.bus_bytes_per_s * factor,
        sockets=replace(cluster.sockets, gradient_bytes=cluster.sockets.gradient_bytes * factor),
    )


class Runs:
    """Makes runs and keeps their figures in a folder, so that what was interrupted goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def timed(
        self,
        algorithm: str,
        workers: int,
        batch_size: int | None,
        *,
        code: Code = CPP,
        placement: str = INTERLEAVED,
        steps: int = 40,
        bandwidth: float = 1.0,
    ) -> dict[str, Any]:
        """Times only, with the MLP's size; so many steps per worker; with so many times the memories' bandwidth."""
        used, where = PLACEMENTS[placement]
        cluster = machine(workers, batch_size, code=code, used=used)
        cluster = replace(cluster, bus_bytes_per_s=bandwidth * cluster.bus_bytes_per_s)
        config = pl.TrainConfig(
            task="mnist-mlp", algorithm=algorithm, workers=workers, batch_size=512, steps=steps, placement=where
        )  # the batch's size is in the cluster's times
        return self._figures(config, cluster, timing_only=True, num_parameters=code.vector_bytes // 4)

    def trained(
        self,
        algorithm: str,
        workers: int,
        batch_size: int,
        learning_rate: float,
        *,
        gradients: int,
        seed: int = 1,
        placement: str = INTERLEAVED,
    ) -> dict[str, Any]:
        """Real gradients of digits-mlp, at most so many in total, until 5 % of the initial loss; in the MLP's times."""
        used, where = PLACEMENTS[placement]
        config = pl.TrainConfig(
            task="digits-mlp",
            algorithm=algorithm,
            workers=workers,
            batch_size=batch_size,
            learning_rate=learning_rate,
            steps=math.ceil(gradients / workers),
            seed=seed,
            placement=where,
            target_loss=TARGET * INITIAL_LOSS,
        )
        return self._figures(config, scaled(machine(workers, batch_size, used=used), CPP))

    def _figures(self, config: pl.TrainConfig, cluster: Cluster, **timing: Any) -> dict[str, Any]:
        about = json.dumps([repr(config), cluster.as_table()], sort_keys=True)
        path = self._folder / f"{hashlib.sha256(about.encode()).hexdigest()[:20]}.json"
        if not path.exists():
            figures = _figures(pl.simulate_task(config, cluster=cluster, **timing))
            draft = path.with_suffix(".part")
            draft.write_text(json.dumps(figures), encoding="utf-8")
            draft.replace(path)
        return json.loads(path.read_text(encoding="utf-8"))


def _figures(run: pl.RunData) -> dict[str, Any]:
    """Rates are sums over workers of what each did in its own time, for they do not end at the same instant."""
    names = ("outcome", "wall_s", "steps", "failed_publishes", "dropped_updates", "computed_gradients", "waiting_share")
    figures = {name: run.result[name] for name in (*names, "time_to_fraction_s", "train_loss", "initial_loss")}
    staleness = run.result["staleness"]
    figures |= {f"staleness_{key}": staleness[key] for key in ("mean", "p50", "p95", "max", "mean_after_gradient")}
    rows = [one for one in run.records.values() if len(one)]
    spans = [float(one["ended_s"][-1]) for one in rows]
    publishing = [float((one["ended_s"] - one["gradient_ended_s"]).sum()) for one in rows]
    figures["publishing"] = math.fsum(part / span for part, span in zip(publishing, spans, strict=True))
    figures["updates_per_s"] = math.fsum(
        float((one["applied_version"] >= 1).sum()) / span for one, span in zip(rows, spans, strict=True)
    )
    computing = [float((one["gradient_ended_s"] - one["gradient_started_s"]).sum()) for one in rows]
    figures["gradient_s"] = math.fsum(computing) / max(1, figures["computed_gradients"])
    return figures
