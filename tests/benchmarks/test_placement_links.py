"""When two placed workers stop making steps: both after the same one, when other programs hardly computed."""

import importlib
import threading
from pathlib import Path

import pytest
import torch

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    placement_links = importlib.import_module("placement_links")

STEPS = 2


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        ([0.05, 0.0], [0.05]),
        ([1.5, 0.3, 0.0, 0.0], [1.5, 0.3, 0.0]),
        ([1.5, 1.0, 0.5, 0.2], [1.5, 1.0, 0.5]),
    ],
)
def test_blocks_of_steps_end_with_the_first_quiet_one_or_the_third(others, kept, monkeypatch, tmp_path):
    for name, size, dtype in (("counts", 2, torch.int64), ("shared", 3, torch.float64)):
        torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=dtype).zero_()
    now_s, computed_s = iter(range(10)), iter([sum(others[:at]) for at in range(len(others) + 1)])
    monkeypatch.setattr(placement_links.time, "perf_counter", lambda: float(next(now_s)))  # a second in each block
    monkeypatch.setattr(placement_links.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(placement_links, "computed_s", lambda: next(computed_s))
    blocks = [placement_links.Blocks(tmp_path, worker, STEPS, most=3) for worker in range(2)]
    made = [0, 0]

    def work(worker):
        while not blocks[worker].is_over(made[worker]):
            made[worker] += 1

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert made == [placement_links.WARM_UP + STEPS * len(kept)] * 2
    assert blocks[0].others == pytest.approx(kept)
