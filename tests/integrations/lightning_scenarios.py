"""What Lightning's own tests look at, one small fit each; `python lightning_scenarios.py FOLDER NAME...` is a worker."""

import copy
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from integrations.lightning_programs import QUIET, vector
from paceline.integrations.lightning import PacelineStrategy


class Line(lightning.LightningModule):
    """Least squares.

    Args:
        schedule: makes a scheduler's configuration for the optimizer.
        rate: of the optimizer.
    """

    def __init__(self, schedule=None, rate=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.schedule, self.learning_rate, self.rates = schedule, rate, []

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("most", batch[0].max(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.log("least", batch[0].min(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="min")
        return loss

    def on_train_batch_end(self, *of_hook):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch, index):
        self.log("val", self.net(batch[0]).square().mean(), sync_dist=True)

    def test_step(self, batch, index):
        self.log("test", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(self.trainer, optimizer)}


class TwoOptimizers(Line):
    """Both step after one backward pass."""

    def __init__(self):
        super().__init__()
        self.other, self.automatic_optimization = nn.Linear(3, 1), False

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=rate) for net, rate in ((self.net, 0.1), (self.other, 0.05))]

    def training_step(self, batch, index):
        both = self.optimizers()
        for one in both:
            one.zero_grad()
        self.manual_backward((self.net(batch[0]) + self.other(batch[0])).square().mean())
        for one in both:
            one.step()


class SeveralEvaluations(Line):
    """LBFGS evaluates its closure, and with it `training_step`, up to four times in a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class Adversarial(TwoOptimizers):
    """Each has a loss of its own, as those of a GAN have."""

    def training_step(self, batch, index):
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward((self.net(batch[0]) + self.other(batch[0]) - 1).square().mean())
        first.step()
        second.zero_grad()
        self.manual_backward((self.net(batch[0]).detach() - self.other(batch[0])).square().mean())
        second.step()


class Rotating(torch.utils.data.Sampler):
    """An order that depends on the epoch that it was told."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(index + 8 * self.epoch) % self.length for index in range(self.length)])

    def __len__(self):
        return self.length


class WithoutLength:
    """A loader that tells no length."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def points(num_samples=72):
    return TensorDataset(torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(num_samples)))


def one_cycle(trainer, optimizer):
    steps = trainer.estimated_stepping_batches
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}


def every_second_step(trainer, optimizer):
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return {"scheduler": halving, "interval": "step", "frequency": 2}


def cosine(trainer, optimizer):
    return {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36), "interval": "step"}


def trained(strategy, folder, batch_size, make=Line, *, loader=None, callback=None, **settings):
    """A module after two epochs of 72 samples, its trainer, and its validation loader."""
    if callback is not None:
        settings |= {"callbacks": [callback], "default_root_dir": folder}
    settings = {"max_epochs": 2, **QUIET, "enable_checkpointing": isinstance(callback, ModelCheckpoint), **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, trainer = make(), lightning.Trainer(strategy=strategy, **settings)
        trainer.fit(module, loader or DataLoader(points(), batch_size=batch_size), DataLoader(points(16), batch_size=8))
    return module, trainer


def seen(module, trainer):
    """What is compared between the plain Trainer and workers of the strategy."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"x": vector(module).tolist(), "steps": trainer.global_step, "rate": module.rates[-1], **metrics}


def simple(strategy, folder, batch_size, **settings):
    return seen(*trained(strategy, folder, batch_size, **settings))


def set_epoch(strategy, folder, batch_size):
    loader = DataLoader(points(), batch_size=batch_size, sampler=Rotating(72))
    module, trainer = trained(strategy, folder, batch_size, loader=loader, limit_train_batches=4)
    return seen(module, trainer) | {"told": loader.sampler.epoch, "samples": len(trainer.train_dataloader.dataset)}


def without_length(strategy, folder, batch_size, **settings):
    loader = WithoutLength(DataLoader(points(), batch_size=batch_size))
    return simple(strategy, folder, batch_size, loader=loader, **settings)


def averaged(strategy, folder, batch_size):
    """Averaging takes over from a schedule per step."""
    average = StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=1)
    make = partial(Line, cosine)
    return simple(strategy, folder, batch_size, make=make, callback=average, max_epochs=4)


def estimated(strategy, folder, batch_size):
    made, trainer = trained(strategy, folder, batch_size, partial(Line, one_cycle))
    return {**seen(made, trainer), "total": trainer.lr_scheduler_configs[0].scheduler.total_steps}


def every_n_steps(strategy, folder, batch_size):
    callback = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    found = simple(strategy, folder, batch_size, callback=callback)
    return found | {"file": Path(callback.best_model_path).name}


def best(strategy, folder, batch_size):
    callback = ModelCheckpoint(folder, monitor="val", filename="{epoch}")
    module, trainer = trained(strategy, folder, batch_size, callback=callback)
    trainer.test(module, DataLoader(points(16), batch_size=8), ckpt_path="best", verbose=False, weights_only=False)
    return seen(module, trainer) | {"file": Path(callback.best_model_path).name}


def find_rate(strategy, folder, batch_size):
    finder = LearningRateFinder(num_training_steps=15, update_attr=True)
    module, trainer = trained(strategy, folder, batch_size, callback=finder)
    return seen(module, trainer) | {"found": module.learning_rate, "left": len(list(Path(folder).glob(".lr_find*")))}


def copied(strategy, folder, batch_size):
    """The trainer is pickled and copied once `fit` has returned, and its loader's processes have ended."""
    loader = DataLoader(points(), batch_size=batch_size, num_workers=1)
    module, trainer = trained(strategy, folder, batch_size, loader=loader)
    torch.save(trainer, Path(folder) / f"{os.getpid()}.trainer")
    copy.deepcopy(trainer)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = [Path(f"/proc/{one}/cmdline").read_text() for one in children]
    loaders = [one for one in names if "resource_tracker" not in one and "forkserver" not in one]
    return seen(module, trainer) | {"loaders": len(loaders), "has its own": trainer.train_dataloader is loader}


def collectives(strategy, folder, batch_size):
    """What each worker brings is its number, within the last step and when `fit` is over."""

    class JoinPoint(Line):
        def __init__(self):
            super().__init__()
            self.mean, self.found = torchmetrics.MeanMetric(), {}

        def prepare_data(self):
            with (Path(folder) / "prepared").open("a") as file:
                file.write("once ")

        def on_train_batch_end(self, *of_hook):
            super().on_train_batch_end(*of_hook)
            strategy, rank = self.trainer.strategy, self.global_rank
            strategy.barrier()
            reduced = [
                strategy.reduce(torch.tensor(float(rank)), reduce_op=one) for one in ("mean", "sum", "max", "min")
            ]
            self.found["reduced"] = torch.stack(reduced).tolist()
            self.found["told"] = strategy.broadcast({"by": [rank, "all"]}, src=self.trainer.world_size - 1)

        def on_train_epoch_end(self):
            self.mean.update(float(self.global_rank))
            self.found["metric"] = self.mean.compute().item()

        def on_fit_end(self):
            self.found["gathered"] = self.all_gather(torch.tensor([float(self.global_rank)])).flatten().tolist()

    module, trainer = trained(strategy, folder, batch_size, JoinPoint)
    return seen(module, trainer) | module.found | {"prepared": (Path(folder) / "prepared").read_text()}


SCENARIOS = {
    "limit_train_batches": partial(simple, limit_train_batches=4),
    "a part of the batches": partial(simple, limit_train_batches=0.8),
    "val_check_interval": partial(simple, val_check_interval=2),
    "max_steps": partial(simple, max_steps=9, max_epochs=-1),
    "accumulation": partial(simple, accumulate_grad_batches=2),
    "every_n_train_steps": every_n_steps,
    "frequency": partial(simple, make=partial(Line, every_second_step, 1.0), max_epochs=1),
    "averaging": averaged,
    "set_epoch": set_epoch,
    "mixed precision and clipping": partial(simple, precision="bf16-mixed", gradient_clip_val=0.1),
    "without a length": without_length,
    "LBFGS": partial(simple, make=SeveralEvaluations),
    "LBFGS without a length": partial(without_length, make=SeveralEvaluations),
    "best": best,
    "rate finder": find_rate,
    "estimated steps": estimated,
    "two optimizers": partial(simple, make=TwoOptimizers),
    "adversarial": partial(simple, make=Adversarial),
    "copies": copied,
    "collectives": collectives,
}


def run_scenario(name, strategy, folder, batch_size=8):
    own = Path(folder) / name
    own.mkdir(exist_ok=True)
    return SCENARIOS[name](strategy, str(own), batch_size)


def tell_scenario(folder, name):
    """One worker's part in a scenario; the strategy says which it is, as the environment may not outlive a run."""
    strategy = PacelineStrategy()
    found = run_scenario(name, strategy, folder)
    (Path(folder) / f"{name} {strategy.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":  # FOLDER NAME...: what each of a launcher's workers runs
    torch.set_num_threads(1)
    for each in sys.argv[2:]:
        tell_scenario(sys.argv[1], each)
