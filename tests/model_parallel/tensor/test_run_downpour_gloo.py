"""Downpour with replicas of several workers on real Gloo processes, as torchrun starts them."""

import pytest
import torch

from chosen import soaked
from model_parallel.tensor.run_loops import alone, check_same, found
from model_parallel.tensor.test_run_gloo import ends


def test_one_replica_is_plain_sgd(tmp_path):
    settings = {"optimizer": "momentum", "clip": 1.0}
    codes, said = ends(tmp_path, 2, "tensor(line=2)", "downpour(apply=user)", 1, settings)
    assert codes == [0] * 2, said
    for worker in range(2):
        check_same(found(tmp_path, worker), alone("momentum"))


@pytest.mark.parametrize(("layout", "workers"), [("tensor(line=2)", 4), *soaked(("tensor(q=2)", 8))])
def test_two_replicas_end_with_one_model(layout, workers, tmp_path):
    algorithm, settings = "downpour(push=2, fetch=3, shards=2)", {"batches": 12, "optimizer": "momentum"}
    codes, said = ends(tmp_path, workers, layout, algorithm, 2, settings)
    assert codes == [0] * workers, said
    ends_with = [found(tmp_path, worker) for worker in range(workers)]
    parts = workers // 2
    assert len(ends_with[0]["losses"]) + len(ends_with[parts]["losses"]) == 12
    for worker, one in enumerate(ends_with):
        assert one["losses"] == ends_with[worker // parts * parts]["losses"]
        for name, value in one["model"].items():
            assert torch.equal(value, ends_with[0]["model"][name]) or name.endswith("calls")
