"""Training in which a worker is killed every few seconds and replaced, next to the same training undisturbed.

    python benchmarks/kill_often.py [--rounds 50000] [--every 15] [--workers 4] [--methods all-reduce,local-sgd]

Each method trains the model of examples/char_gpt.py twice on as many samples: once while `kill -9` hits a random training
worker every few seconds, and once undisturbed. The loss on held-out text is compared. Nothing is timed, so the runs go on
side by side; in those with deaths, every gradient takes 50 ms of sleep besides its computing, so that they last.

Also checked: every death is replaced; `all-reduce` records no batch twice, and at most as many are missing as records were
lost with dead workers; the launcher's open files do not grow, and its memory at the end is at most 10 % above that of the
undisturbed run. Exit code 1 if a check fails. Prints a table and writes benchmarks/results/kill_often.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.specs.file_loop import FileLoop
from paceline.system.machine import machine, versions

EXAMPLE = Path(__file__).parents[1] / "examples" / "char_gpt.py"
RESULTS = Path(__file__).with_name("results")
BATCH_SIZE, SLEEP_S, BAR = 8, 0.05, 1.02
EPOCHS = 10


@dataclass(frozen=True)
class Sequences(Dataset):
    """Sequences from places all over a text, and the same one character later."""

    text: torch.Tensor
    length: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = number * 7919 % (len(self.text) - self.length - 1)
        return self.text[first : first + self.length], self.text[first + 1 : first + self.length + 1]


@dataclass(frozen=True)
class Train:
    """One worker's loop.

    Args:
        folder: where it writes its process id, and at the end the loss.
        num_samples: of one epoch.
        sleep_s: in each gradient.
    """

    folder: str
    num_samples: int
    sleep_s: float

    def __call__(self) -> None:
        """Trains."""
        example = sys.modules[FileLoop(EXAMPLE, "train").load().__module__]
        torch.manual_seed(0)
        model = example.GPT()
        optimizer = example.make_optimizer(model)
        loader = DataLoader(Sequences(example.train_data, example.LENGTH, self.num_samples), BATCH_SIZE, shuffle=True)
        with pl.attach(model, optimizer) as worker:
            steps = EPOCHS * self.num_samples // (BATCH_SIZE * worker.num_workers)
            rates = LambdaLR(optimizer, lambda step: example.schedule(step, steps))
            rates = worker.follow(rates, samples_per_step=BATCH_SIZE * worker.num_workers)
            note, has_note = Path(self.folder) / str(worker.worker_id), False
            for _ in range(EPOCHS):
                for x, following in worker.batches(loader):
                    optimizer.zero_grad()
                    model(x, following).backward()
                    time.sleep(self.sleep_s)
                    clip_grad_norm_(model.parameters(), example.CLIP)
                    optimizer.step()
                    rates.step()
                    if not has_note:  # the others have let it in
                        written = note.with_suffix(".part")
                        written.write_text(str(os.getpid()))
                        written.replace(note)
                        has_note = True
        (Path(self.folder) / f"{worker.worker_id}.json").write_text(json.dumps(example.validation_loss(model)))


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    method: str
    deaths: int
    replaced: int
    took_s: float
    loss: float
    repeated: int  # batches in two recorded steps
    missing: int  # in none
    records_lost: int
    memory_mb: float  # the launcher's at the end
    open_files: tuple[int, int]  # its own, after a tenth of the deaths and at the end


class Killer(threading.Thread):
    """Kills a random training worker every so often, unless it is the only one."""

    def __init__(self, folder: Path, method: str, every_s: float) -> None:
        super().__init__(daemon=True)
        self._folder, self._method, self._every_s = folder, method, every_s
        self._draws = random.Random(0)
        self.over = threading.Event()
        self.usage: list[tuple[float, int]] = []  # at every death

    def run(self) -> None:
        """Until `over`."""
        while not self.over.wait(self._every_s):
            notes = sorted(one for one in self._folder.iterdir() if one.suffix == "")
            if len(notes) < 2:
                continue
            note = self._draws.choice(notes)
            process = int(note.read_text())
            note.unlink()  # its replacement writes it anew
            with contextlib.suppress(ProcessLookupError):  # its loop has ended
                os.kill(process, signal.SIGKILL)
            self.usage.append(usage())
            if len(self.usage) % 20 == 0:
                print(
                    f"{self._method}: {len(self.usage)} deaths, launcher's memory {self.usage[-1][0]:.0f} MB",
                    flush=True,
                )


def usage() -> tuple[float, int]:
    """Memory of this process in MB, and its open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(list(Path("/proc/self/fd").iterdir()))


def train(method: str, workers: int, num_samples: int, every_s: float | None) -> Outcome:
    """One run; without a time between deaths, undisturbed."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(folder), method, every_s or threading.TIMEOUT_MAX)
        killer.start()
        loop = Train(folder, num_samples // EPOCHS, SLEEP_S if every_s else 0.0)
        try:
            run = pl.launch(loop, workers=workers, algorithm=method, restarts=1_000_000)
        finally:
            killer.over.set()
        losses = [json.loads(one.read_text()) for one in Path(folder).glob("*.json")]
    used, result = [*killer.usage, usage()], run.result
    batches = torch.cat([torch.from_numpy(rows["batch"][rows["samples"] > 0].copy()) for rows in run.records.values()])
    num_different = len(batches.unique())
    return Outcome(
        method=method,
        deaths=len(result["workers_lost"]),
        replaced=result["restarts"],
        took_s=time.monotonic() - began_s,
        loss=max(losses),
        repeated=len(batches) - num_different,
        missing=num_samples // BATCH_SIZE - num_different,
        records_lost=result["records_lost"],
        memory_mb=used[-1][0],
        open_files=(used[len(used) // 10][1], used[-1][1]),
    )


def faults(outcome: Outcome, undisturbed: Outcome) -> list[str]:
    """What is wrong with a run with deaths."""
    memory, own_mb, files = outcome.memory_mb, undisturbed.memory_mb, outcome.open_files
    checks = {
        f"the loss is {outcome.loss / undisturbed.loss:.3f} times the undisturbed": outcome.loss
        > BAR * undisturbed.loss,
        f"{outcome.deaths} deaths, {outcome.replaced} replacements": outcome.deaths != outcome.replaced,
        f"{outcome.repeated} batches repeated, {outcome.missing} missing, {outcome.records_lost} records lost": (
            outcome.method == "all-reduce" and (outcome.repeated > 0 or outcome.missing > outcome.records_lost)
        ),
        f"the launcher ends with {memory:.0f} MB of memory, undisturbed with {own_mb:.0f} MB": memory > 1.1 * own_mb,
        f"the launcher's open files grow from {files[0]} to {files[1]}": files[1] > files[0] + 8,
    }
    return [what for what, is_wrong in checks.items() if is_wrong]


def main() -> None:
    """Runs everything side by side, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=50_000, help="of a batch for each worker; 1,000 take a minute or more"
    )
    parser.add_argument("--every", type=float, default=15.0, metavar="SECONDS", help="between two deaths")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--methods", default="all-reduce,local-sgd", help="separated by commas")
    options = parser.parse_args()
    methods = options.methods.split(",")
    round_samples = BATCH_SIZE * options.workers
    num_samples = options.rounds // EPOCHS * EPOCHS * round_samples
    with ProcessPoolExecutor(2 * len(methods), mp_context=get_context("spawn")) as pool:
        pairs = {
            method: [pool.submit(train, method, options.workers, num_samples, every) for every in (options.every, None)]
            for method in methods
        }
        found = {method: [one.result() for one in pair] for method, pair in pairs.items()}
    rows, wrong = [], []
    for method, (disturbed, undisturbed) in found.items():
        wrong += [f"{method}: {what}" for what in faults(disturbed, undisturbed)]
        losses = f"{disturbed.loss:.4f} | {undisturbed.loss:.4f} | {disturbed.loss / undisturbed.loss:.3f}"
        deaths = f"{disturbed.deaths} | {disturbed.took_s / 60:.0f}"
        rows.append(f"| `{method}` | {deaths} | {losses} | {disturbed.memory_mb:.0f} | {undisturbed.memory_mb:.0f} |")
    about, used = machine(), versions()
    page = [
        "# A worker is killed every few seconds",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores, beside other work. Python {used['python']}, PyTorch"
        f" {used['torch']}. Command: `python benchmarks/kill_often.py --rounds {options.rounds} --every {options.every:g}"
        f" --workers {options.workers} --methods {options.methods}`.",
        "",
        f"The model of `examples/char_gpt.py` under `pl.launch` with {options.workers} workers, {num_samples:,} sequences in"
        f" {EPOCHS} epochs, AdamW, clipping, a warm-up and a cosine by `worker.follow`. Every {options.every:g} s a random"
        " training worker gets `SIGKILL`; every death is replaced. Loss: nats per character of held-out text; at most"
        f" {BAR} times the undisturbed run's on as many samples. Memory: the launcher's at the end, with the records of all"
        " steps.",
        "",
        "| method | deaths | minutes | loss with deaths | undisturbed | ratio | memory with deaths, MB | undisturbed |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        *(wrong or ["All checks hold."]),
    ]
    print("\n".join(page))
    (RESULTS / "kill_often.md").write_text("\n".join(page) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
