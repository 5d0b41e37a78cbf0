"""What tests of the strategy for Lightning train: digits, in processes of their own, and what each worker has seen."""

import json
import logging
import os
import signal
import warnings
from functools import cache, partial
from pathlib import Path

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.integrations.lightning import PacelineStrategy
from paceline.membership.environment import current_environment
from paceline.tasks.load import load_task

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@cache
def digits():
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    return TensorDataset(*data[:1440]), TensorDataset(*data[1440:])


@cache
def mnist():
    return load_task("mnist-mlp").load()


class Classifier(lightning.LightningModule):
    """Two layers.

    Args:
        num_inputs: pixels of an image.
        num_hidden: units of the layer between.
        optimizer: of torch.optim, by name.
        settings: its own.
        by_step: steps a schedule after every step of the optimizer.
    """

    def __init__(self, optimizer="SGD", by_step=False, num_inputs=64, num_hidden=32, **settings):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, num_hidden), nn.Tanh(), nn.Linear(num_hidden, 10))
        self.optimizer, self.by_step, self.settings = optimizer, by_step, settings

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), **self.settings)
        if not self.by_step:
            return optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=90)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(strategy, make=None, *, epochs=2, batch_size=32, checkpoint=None, data=digits, **settings):
    """A module, made once the generators are seeded, that is trained; and its trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.seed_everything(3, verbose=False)
        module = make() if make is not None else Classifier(lr=0.3, momentum=0.5)
        trainer = lightning.Trainer(max_epochs=epochs, strategy=strategy, **{**QUIET, **settings})
        train, held_out = data()
        trainer.fit(
            module,
            DataLoader(train, batch_size=batch_size, shuffle=True),
            DataLoader(held_out, batch_size=len(held_out)),
            ckpt_path=checkpoint,
            weights_only=False,
        )
    return module, trainer


def vector(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().numpy()


def own_id():
    return current_environment().worker_id


def tell(folder, trainer, module):
    """Writes down what this worker has come to."""
    seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
    seen |= {"epochs": trainer.current_epoch, "rate": module.optimizers().param_groups[0]["lr"]}
    np.save(Path(folder) / f"{own_id()}.npy", vector(module))
    (Path(folder) / f"{own_id()}.json").write_text(json.dumps(seen))


def learn(folder, by_step):
    module, trainer = fit(PacelineStrategy(), lambda: Classifier(lr=0.3, momentum=0.5, by_step=by_step), epochs=4)
    tell(folder, trainer, module)


def mnist_classifier(**settings):
    return Classifier(num_inputs=784, num_hidden=64, **settings)


def learn_mnist(folder, rate):
    """A plain loop comes to 0.967 with batches of 64 and a rate of 0.2, and to 0.963 with 256 and 0.6.

    With 32 hidden units and a rate of 0.1 it came to 0.945, and could not show what workers lose.
    """
    module, trainer = fit(
        PacelineStrategy(), lambda: mnist_classifier(lr=rate, momentum=0.5), epochs=3, batch_size=64, data=mnist
    )
    tell(folder, trainer, module)


def stop_early(folder):
    """Worker 1 alone finds that it gets worse."""

    class Worse(Classifier):
        def validation_step(self, batch, index):
            self.log("own", float(own_id() == 1 and self.current_epoch))

    stopping = EarlyStopping("own", patience=1, mode="min")
    module, trainer = fit(PacelineStrategy(), lambda: Worse(lr=0.1), epochs=9, callbacks=[stopping])
    tell(folder, trainer, module)


def save(folder):
    callback = ModelCheckpoint(folder, filename="best", monitor="accuracy", mode="max")
    module, trainer = fit(PacelineStrategy(), callbacks=[callback], enable_checkpointing=True)
    tell(folder, trainer, module)


def die(folder):
    """Worker 1 is killed in its second epoch."""

    class Killed(Classifier):
        def training_step(self, batch, index):
            if own_id() == 1 and self.current_epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch, index)

    module, trainer = fit(PacelineStrategy(), lambda: Killed(lr=0.3, momentum=0.5), epochs=4)
    tell(folder, trainer, module)


class Forgets(Classifier):
    """`configure_optimizers` leaves out a parameter."""

    def __init__(self):
        super().__init__(lr=0.3)
        self.forgotten = torch.nn.Parameter(torch.zeros(3))

    def configure_optimizers(self):
        kept = [p for p in self.parameters() if p is not self.forgotten]
        return torch.optim.SGD(kept, lr=0.3)


class Unfreezes(Classifier):
    """A part is unfrozen during training."""

    def __init__(self):
        super().__init__(lr=0.3)
        self.part = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    def on_train_epoch_start(self):
        self.part.requires_grad_(self.current_epoch == 1)


def refused(kind, algorithm=None):
    fit(PacelineStrategy(algorithm), kind)


def launched(program, folder, *arguments, workers, algorithm):
    """What each worker that came to its end has told."""
    run = pl.launch(partial(program, str(folder), *arguments), workers=workers, algorithm=algorithm)
    told = {int(path.stem): json.loads(path.read_text()) for path in Path(folder).glob("?.json")}
    vectors = {int(path.stem): np.load(path) for path in Path(folder).glob("?.npy")}
    return run, told, vectors
