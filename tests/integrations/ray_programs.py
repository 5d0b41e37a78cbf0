"""A loop with `attach` in Ray's TorchTrainer, `python ray_programs.py FOLDER`; with an algorithm, a worker under torchrun."""

import os
import signal
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

WORKERS = 2
NUM_TRAINED = 1440
# Name of a training's folder -> what its loop is told
TRAININGS = {
    "all-reduce": {"algorithm": "all-reduce"},
    "local-sgd": {"algorithm": "local-sgd(period=4)"},
    "ad-psgd": {"algorithm": "ad-psgd"},
    "killed": {"algorithm": "all-reduce", "kills": True},
}


def digits():
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)


def train(told):
    """What a worker of either launcher runs.

    Args:
        told: "folder" for what each worker has come to, "algorithm", and whether one "kills" itself in its third epoch.
    """
    folder = Path(told["folder"])
    first_life = told.get("kills") and not list(folder.glob("checkpoint/*"))
    if told.get("kills"):
        os.environ["PACELINE_CHECKPOINT"] = str(folder / "checkpoint")
    torch.manual_seed(3)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    shuffled = torch.Generator().manual_seed(5)
    loader = DataLoader(
        TensorDataset(x[:NUM_TRAINED], y[:NUM_TRAINED]), batch_size=32, shuffle=True, generator=shuffled
    )
    steps = 0
    with pl.attach(model, optimizer, told["algorithm"]) as worker:
        for epoch in range(3):
            for number, (inputs, labels) in enumerate(worker.batches(loader)):
                if first_life and (epoch, number, worker.worker_id) == (2, 9, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                steps += 1
    with torch.no_grad():
        accuracy = (model(x[NUM_TRAINED:]).argmax(1) == y[NUM_TRAINED:]).float().mean().item()
    found = {"x": nn.utils.parameters_to_vector(model.parameters()).detach(), "accuracy": accuracy, "steps": steps}
    torch.save({**found, "workers": worker.num_workers}, folder / f"{worker.worker_id}.pt")


def in_ray(folder):
    """The loop as Ray's users start it, once for each training."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        for name, told in TRAININGS.items():
            (folder / name).mkdir()
            TorchTrainer(
                train,
                train_loop_config={"folder": str(folder / name), **told},
                scaling_config=ScalingConfig(num_workers=WORKERS),
                torch_config=TorchConfig(backend="gloo"),
                run_config=RunConfig(
                    storage_path=str(folder / "results"),
                    failure_config=FailureConfig(max_failures=int("kills" in told)),
                ),
            ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train({"folder": sys.argv[1], "algorithm": sys.argv[2]})
    else:
        in_ray(Path(sys.argv[1]))
