"""Records of runs that never took place: a small event simulation, seeded, of a few ways to agree."""

import heapq

import numpy as np

from paceline.records.run_data import RunData
from paceline.records.step_record import RECORD_DTYPE
from paceline.records.summary import summarize

METHODS = ("lockstep", "locked", "leashed(persistence=0)", "hogwild")


def empty():
    return np.empty(0, RECORD_DTYPE)


def make_run(
    algorithm="leashed(persistence=0)",
    *,
    workers=4,
    steps=400,
    seed=0,
    slow=None,
    factor=8.0,
    diverged_at=None,
    target_loss=0.4,
    batch_samples=64,
):
    """A run of about `steps` gradients per normal worker; `slow` is a straggler's worker_id."""
    random = np.random.default_rng(seed)
    lockstep = algorithm == "lockstep"
    rows = {worker: [] for worker in range(workers)}
    clock = np.zeros(workers)
    version, lock_free_s, batch = 0, 0.0, 0
    initial_loss = 2.3

    def duration(worker):
        return 0.010 * random.lognormal(0, 0.08) * (factor if worker == slow else 1.0)

    def loss_at(version):
        progress = version / workers if not lockstep else version
        if diverged_at is not None and version > diverged_at:
            return float(0.8 * np.exp((version - diverged_at) / 40)) * random.lognormal(0, 0.2)
        return (0.12 + (initial_loss - 0.12) * np.exp(-progress / (steps / 5))) * random.lognormal(0, 0.15)

    def record(worker, **values):
        row = np.zeros((), RECORD_DTYPE)
        row["step"], row["samples"] = len(rows[worker]) + 1, batch_samples
        for name, value in values.items():
            row[name] = value
        rows[worker].append(row)

    if lockstep:
        for _ in range(steps):
            starts = clock.copy()
            takes = np.array([duration(worker) for worker in range(workers)])
            barrier = (starts + 0.0005 + takes).max()
            for worker in range(workers):
                done = starts[worker] + 0.0005 + takes[worker]
                record(
                    worker, batch=batch, read_version=version, gradient_version=version, applied_version=version + 1,
                    started_s=starts[worker], input_s=0.0005, gradient_started_s=starts[worker] + 0.0005,
                    gradient_ended_s=done, wait_s=barrier - done, apply_s=0.001, ended_s=barrier + 0.001,
                    loss=loss_at(version),
                )  # fmt: skip
                batch += 1
            clock[:] = barrier + 0.001
            version += 1
    else:
        stop_s = steps * 0.0118
        queue = [(0.0, worker) for worker in range(workers)]
        pending = []
        read = {}
        while queue or pending:
            if queue and (not pending or queue[0][0] <= pending[0][0]):
                start, worker = heapq.heappop(queue)
                if start >= stop_s:
                    continue
                read[worker] = (start, version)
                heapq.heappush(pending, (start + 0.0005 + duration(worker), worker))
                continue
            done, worker = heapq.heappop(pending)
            start, read_version = read[worker]
            gradient_version, failed, applied = version, 0, -1
            if algorithm.startswith("leashed") and random.random() < 0.06:
                failed, wait = 1, 0.0
            elif algorithm == "locked":
                wait = max(0.0, lock_free_s - done)
                lock_free_s = done + wait + 0.0035
            else:
                wait = 0.0
            apply_s = 0.0035 if algorithm == "locked" else 0.001
            if not failed:
                version += 1
                applied = version
            record(
                worker, batch=batch, read_version=read_version, gradient_version=gradient_version,
                applied_version=applied, failed_publishes=failed, started_s=start, input_s=0.0005,
                gradient_started_s=start + 0.0005, gradient_ended_s=done, wait_s=wait, apply_s=apply_s,
                ended_s=done + wait + apply_s, loss=loss_at(read_version),
            )  # fmt: skip
            batch += 1
            heapq.heappush(queue, (done + wait + apply_s, worker))

    records = {worker: np.array(items, RECORD_DTYPE) for worker, items in rows.items()}
    wall_s = max(float(own["ended_s"].max()) for own in records.values())
    evaluations = []
    for share in np.linspace(0.1, 1, 8):
        loss = loss_at(int(share * version))
        accuracy = 0.1 if diverged_at is not None and share * version > diverged_at else float(np.exp(-loss / 3))
        evaluations.append(
            {
                "elapsed_s": share * wall_s,
                "version": int(share * version),
                "samples": int(share * batch) * batch_samples,
                "train_loss": None,
                "test_loss": loss,
                "test_accuracy": accuracy,
            }
        )
    result = {
        "task": "digits-mlp",
        "algorithm": algorithm,
        "workers": workers,
        "backend": "processes",
        "seed": seed,
        "outcome": "diverged" if diverged_at is not None else "converged",
        "outcome_reason": "the loss became non-finite" if diverged_at is not None else "the target loss was reached",
        "workers_lost": [],
        "versions": {"paceline": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "numpy": "2.4.6"},
        "machine": {"processor": "8 cores", "memory_bytes": 16 * 2**30, "system": "Linux 6.1"},
        "command": f"paceline train digits-mlp --algorithm '{algorithm}' --workers {workers} --seed {seed}",
        "target_loss": target_loss,
        **summarize(
            records,
            num_workers=workers,
            wall_s=wall_s,
            initial_loss=initial_loss,
            target_loss=target_loss,
            evaluations=evaluations,
            lockstep=lockstep,
        ),
    }
    config = {
        "task": "digits-mlp",
        "algorithm": algorithm,
        "workers": workers,
        "seed": seed,
        "learning_rate": 0.05,
        "batch_size": batch_samples,
        "target_loss": target_loss,
        "slow": {} if slow is None else {slow: factor},
    }
    return RunData(config=config, result=result, records=records, evaluations=evaluations)
