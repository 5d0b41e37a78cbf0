"""What real workers print, and figures that they bring together."""

import os

import forked
from processes import printing


def test_lines_of_launched_workers_are_whole_and_tagged():
    done = forked.run([printing.__file__, "prints"], errors=None)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 9
    for worker in range(3):
        own = [line.removeprefix(f"[{worker}] ") for line in lines if line.startswith(f"[{worker}] ")]
        assert own == [f"out of worker {worker}", "step made", "the end"]
        assert f"[{worker}] errors of worker {worker}" in done.stderr.splitlines()


def test_a_killed_worker_is_not_waited_for():
    done = forked.run([printing.__file__, "launched"], errors=None)
    assert sorted(done.stdout.splitlines()) == ["111.0 [2.0]"] * 2, done.stderr


def test_workers_of_torchrun_bring_figures_together():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", printing.__file__, "adds"]
    done = forked.run(words, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stdout.splitlines() == ["111.0 [2.0]"] * 3, done.stderr
