"""What the workers of test_step_checkpoints.py run: `python step_checkpoints.py`, as PACELINE_TEST_LOOP describes it as JSON.

Each worker notes the samples of each step, by the version of the parameters that the step makes, before it computes.
"""

import json
import math
import multiprocessing
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import exact_codec
import paceline as pl
from lazy_copies import LazyCopies
from leftovers import wait_until
from paceline.membership import launched
from paceline.records import checkpoint_files
from paceline.transport.collectives import DistributedCollectives
from paceline.worker.memberships import memory
from processes.survivors import EPOCHS, OPTIMIZERS, OneAhead, Survivors, loader, model, own_samples

RANK = int(os.environ.get("RANK", "0"))
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(os.environ.get("PACELINE_TEST_LIFE", "0"))


@dataclass
class Loop:
    """A loop in whose first life something happens to a worker.

    Args:
        folder: of the notes, and of the checkpoints.
        event: what happens: `kill`, `kill after` the step, `kill at end` of the loop, `raise`; or `terminate` and `terminate
            at end`, where every worker says by a file that it is there, and waits for SIGTERM.
        at: the batch of the victim's at which it happens, counted from 0 over all epochs.
        victim: the worker that it happens to.
        saver: the only worker that may write the last checkpoint; the others wait for it; None: the first to come.
        behind: a worker that fails in the step before the victim's death, as if it had not got the mean.
        on_device: whether the model counts as one on a device whose copies take their time.
        dies_writing: whether the worker that writes the last checkpoint is killed as it does.
    """

    folder: str
    event: str = ""
    at: int = 6
    victim: int = 1
    algorithm: str = "all-reduce"
    optimizer: str = "sgd"
    data: str = "plain"
    per_step: int = 1
    ahead: bool = False
    own: bool = False
    sums: bool = False
    saver: int | None = None
    behind: int | None = None
    on_device: bool = False
    dies_writing: bool = False
    num_batches: int = 10
    epochs: int = EPOCHS

    def run(self):
        exact_codec.learn()
        torch.set_num_threads(1)
        multiprocessing.set_start_method("fork", force=True)  # as in programs that no fork server has started
        net, data = model(), loader(self.data, self.num_batches)
        optimizer = OPTIMIZERS[self.optimizer](net.parameters())
        if self.on_device:
            copies = LazyCopies()
            memory.device_copies = lambda device: copies
        if not LIFE:
            self._arrange()
        number, step = 0, []
        with pl.attach(net, optimizer, algorithm=self.algorithm) as worker:
            self._worker, shared = worker, worker._membership.ports.shared
            self._note({"begun": shared.version})
            batches = OneAhead(worker, data) if self.ahead else worker.batches(data, own=self.own)
            for _ in range(self.epochs):
                for indices, x, y in batches:
                    self._happens(number, "kill", "raise", "terminate")
                    if not step:
                        optimizer.zero_grad()
                    step.append([indices.tolist(), worker._replica.batches_of_step[-1] >= 0])
                    if len(step) == self.per_step:
                        self._note({"version": shared.version + 1, "batches": step})
                        nn.functional.mse_loss(net(x), y).backward()
                        optimizer.step()
                        self._happens(number, "kill after")
                        step = []
                    else:
                        with worker.accumulate():
                            nn.functional.mse_loss(net(x), y).backward()
                    number += 1
                if self.sums:
                    worker.sum(1)
            self._happens(number, "kill at end", "terminate at end")
        torch.save(net.state_dict(), Path(self.folder, f"model-{RANK}.pt"))
        os.write(1, f"worker {RANK} has ended\n".encode())

    def _note(self, what):
        with Path(self.folder, f"notes-{LIFE}-{RANK}.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")

    def _happens(self, number, *events):
        if LIFE or self.event not in events or number != self.at:
            return
        if self.event.startswith("terminate"):  # all workers are, as soon as all are here
            Path(self.folder, f"here-{RANK}").touch()
            wait_until(lambda: self._worker._membership.is_terminated, "SIGTERM")
        elif self.victim == RANK and self.event == "raise":
            raise KeyError("label 17")
        elif self.victim == RANK:
            os.kill(os.getpid(), signal.SIGKILL)

    def _arrange(self):
        """Makes what is rare certain."""
        claim, complete = checkpoint_files.claim_end, checkpoint_files.complete

        def claim_in_turn(folder, run):
            if self.saver not in (None, RANK):
                wait_until(lambda: not list(folder.glob("running-*")), "the one that saves")
            return claim(folder, run)

        def complete_or_die(folder, number, workers, about, **options):
            if self.dies_writing and len(workers) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return complete(folder, number, workers, about, **options)

        checkpoint_files.claim_end, checkpoint_files.complete = claim_in_turn, complete_or_die
        if self.event.startswith("kill"):
            await_keys, farewell = launched.missing_keys, f"left/{self.victim}"

            def await_the_living(store, keys, *limits):  # worker 0 would wait 5 s for the farewell of the dead
                return await_keys(store, [key for key in keys if key != farewell], *limits)

            launched.missing_keys = await_the_living
        if self.behind == RANK:
            wait_for = DistributedCollectives.wait_for

            def fail(collectives, work, label, **options):
                wait_for(collectives, work, label, **options)
                worker = getattr(self, "_worker", None)  # which joins first
                if worker is not None and worker._membership.ports.shared.version == self.at:
                    raise collectives._lost(label, "as if the connection had broken")

            DistributedCollectives.wait_for = fail


def notes(folder):
    """By life, then by worker: the version at which it began, and each version's batches."""
    found = {}
    for path in sorted(Path(folder).glob("notes-*.jsonl")):
        _, life, rank = path.stem.split("-")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if lines:  # else it was killed before it began
            versions = {line["version"]: line["batches"] for line in lines[1:]}
            found.setdefault(int(life), {})[int(rank)] = lines[0]["begun"], versions
    return found


def check(loop, num_workers, begins):
    """The last life's workers are equal, and as one process would have trained; each sample counts once an epoch.

    `begins` are the versions at which the lives have begun.
    """
    lives = notes(loop.folder)
    assert [{begun for begun, _ in one.values()} for one in lives.values()] == [{one} for one in begins]
    counted, rate = {}, OPTIMIZERS[loop.optimizer](model().parameters()).param_groups[0]["lr"]
    for life, end in zip(lives.values(), [*begins[1:], math.inf], strict=True):
        for _, versions in life.values():
            for version in filter(lambda one: one <= end, versions):
                counted.setdefault(version, []).append((rate, versions[version]))
    counted = dict(sorted(counted.items()))
    assert list(counted) == list(range(1, len(counted) + 1))
    times = Counter(n for parts in counted.values() for _, part in parts for n in own_samples(part))
    assert times == dict.fromkeys(range(4 * loop.num_batches - 1), loop.epochs)
    reference = Survivors(
        Path(loop.folder), optimizer=loop.optimizer, per_step=loop.per_step, marks=True, num_batches=loop.num_batches
    ).replayed(counted)
    models = [torch.load(Path(loop.folder, f"model-{rank}.pt")) for rank in range(num_workers)]
    for one in models:
        assert all(torch.equal(one[name], models[0][name]) for name in one)
        for name, value in reference.items():
            torch.testing.assert_close(one[name], value, rtol=1e-9, atol=1e-12)


if __name__ == "__main__":
    Loop(**json.loads(os.environ["PACELINE_TEST_LOOP"])).run()
