"""The head to head with PyTorch: what its figures mean, on diaries made up here, and a very small run of real processes."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import forked

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from contest import course, judge, picture, results, runs, tables
from contest.course import STEP, Settings
from contest.stolen import Stolen

sys.path.pop()

ROOT = Path(__file__).parents[2]
DDP = "DistributedDataParallel"


def settings(folder, **changed):
    fields = {"method": "ad-psgd", "spec": "ad-psgd", "scene": "none", "learning_rate": 0.1, "task": "digits-mlp"}
    data = folder.parent / "digits-mlp.pt"
    course.save_data("digits-mlp", data)
    folder.mkdir(exist_ok=True)
    return Settings(**{**fields, "folder": str(folder), "data": str(data), "workers": 2, "batch_size": 16, **changed})


def write_steps(folder, worker_id, pid, times_s, samples=16):
    rows = [STEP.pack(times_s[0], 0), *(STEP.pack(at_s, samples) for at_s in times_s[1:])]
    (folder / f"steps-{worker_id}-{pid}").write_bytes(b"".join(rows))


def write_snapshot(folder, worker_id, at_s, model):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    (folder / f"at-{at_s:.4f}-{worker_id}").write_bytes(vector.numpy().tobytes())


def test_the_clock_starts_when_all_stand_ready_and_what_is_done_again_counts_once(tmp_path):
    one = settings(tmp_path / "run", epochs=1, scene="killed")
    folder = Path(one.folder)
    rounds = one.rounds_per_epoch
    steps = [10.0 + 0.1 * step for step in range(1, rounds + 1)]
    for worker_id in range(2):
        write_steps(folder, worker_id, 1, [9.0 + worker_id, *steps])
        write_steps(folder, worker_id, 2, [20.0, *(10.0 + at_s for at_s in steps)])
    (folder / "killed").write_text("14.0")
    write_snapshot(folder, 0, 10.5, course.make_model(one))
    found = judge.judge(one, mean=False, target=2.0, finished=True)
    assert found["wall_s"] == pytest.approx(10 + 0.1 * rounds)
    assert found["useful_samples"] == one.planned_samples == rounds * 32
    assert found["goodput"] == pytest.approx(found["useful_samples"] / found["wall_s"])
    assert found["time_to_target_s"] is None
    assert found["after_kill"] == "all started again from a checkpoint"
    assert found["curve"][0][0] == 0.5
    (folder / "said.json").write_text(json.dumps({"dropped_gradients": 3}))
    assert judge.judge(one, mean=False, target=2.0, finished=True)["useful_samples"] == one.planned_samples - 48
    assert judge.judge(one, mean=False, target=2.0, finished=False)["after_kill"] == "everything lost"
    ended = judge.judge(one, mean=False, target=2.0, finished=False, in_time=False)
    assert ended["after_kill"] == "not done in time", "we ended it, so nobody knows what would have become of it"
    (folder / "steps-0-2").unlink()  # then only the dead worker came again
    assert judge.judge(one, mean=False, target=2.0, finished=True)["after_kill"] == "nothing"


def test_the_model_is_the_mean_of_the_newest_of_all_that_live(tmp_path):
    one = settings(tmp_path / "run")
    folder = Path(one.folder)
    model = course.make_model(one)
    for worker_id, at_s, value in ((0, 1.0, 0.0), (1, 1.5, 4.0), (0, 2.0, 2.0), (0, 3.0, 8.0)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        write_snapshot(folder, worker_id, at_s, model)
    found = judge.snapshots(folder)

    def means(**how):
        return [sum(part.parameters()[0] for part in parts) / len(parts) for _, parts in judge.models(found, **how)]

    assert means(mean=True, died=None) == [0, 3, 6]
    assert means(mean=True, died=(1, 2.5)) == [0, 3, 8]
    assert means(mean=False, died=None) == [0, 2, 8]


def record(method, scene, wall_s, time_s, *, finished=True, seed=1):
    return {
        "method": method, "scene": scene, "wall_s": wall_s, "time_to_target_s": time_s, "finished": finished, "seed": seed,
        "target": 0.96, "goodput": 1000 / wall_s, "final_accuracy": 0.96, "slow_factor": 10.0,
        "curve": [(0.5, 0.85), (wall_s, 0.96)],
    }  # fmt: skip


def test_tables_compare_every_system_with_its_own_undisturbed_runs():
    records = [
        *(record(DDP, "none", wall_s, wall_s / 2) for wall_s in (9.0, 10.0, 12.0)),
        *(record(DDP, "slow", wall_s, wall_s / 2) for wall_s in (90.0, 100.0, 110.0)),
        *(record("ad-psgd", "none", 10.0, 5.0) for _ in range(3)),
        *(record("ad-psgd", "slow", wall_s, None) for wall_s in (12.5, 12.5, 20.0)),
    ]
    undisturbed = tables.of(records, scene="none", method=DDP)
    assert tables.time_ratios(tables.of(records, scene="slow", method=DDP), undisturbed) == [9, 10, 11]
    rows = tables.table(records, "slow", 0.9)
    assert rows[2].startswith(
        f"| {DDP} | PyTorch | 50.0 (45.0 to 55.0) | 96.0 (96.0 to 96.0) | 10.00 (9.00 to 11.00) | 10 "
    )
    assert (
        rows[3] == "| ad-psgd | Paceline | did not arrive | 96.0 (96.0 to 96.0) | 1.25 (1.25 to 2.00) | 80 (50 to 80) |"
    )
    assert tables.lead(records, "slow") == (math.inf, DDP, 50.0)
    lost = record(DDP, "killed", 3.0, None, finished=False)
    assert tables.goodputs([lost], undisturbed) == [0]
    assert "everything lost" in tables.table([*records, lost], "killed", 0.9)[2]
    for dark in (False, True):
        text = picture.picture(records, ["slow"], [DDP, "ad-psgd"], 0.9, dark=dark)
        assert text.count("<polyline") == 2
        assert text.count("<circle") == 1, "ad-psgd never reached the target"


def test_a_headline_is_of_one_method_of_ours_in_all_scenes_not_of_our_best():
    records = [
        record("ad-psgd", scene, 20.0, time_s, seed=seed)
        for scene, times_s in (("slow", (12.0, 14.0, 13.0)), ("killed", (11.0, 12.0)))
        for seed, time_s in enumerate(times_s)
    ]
    records += [record("parameter-server, one backup", scene, 20.0, 1.0) for scene in ("slow", "killed")]
    records += [
        record(DDP, "slow", 90.0, 50.0),
        record("PostLocalSGD", "slow", 90.0, 60.0),
        record(DDP, "killed", 90.0, 20.0),
    ]
    assert tables.lead(records, "slow") == (13.0, DDP, 50.0)
    assert tables.lead(records, "killed") == (11.5, DDP, 20.0)
    assert tables.lead(records, "none") is None, "nobody has run there"
    said = results.summary(records)
    assert "backup" not in said
    assert "seconds to 96 %: `ad-psgd` 13.0 (12.0 to 14.0)" in said
    assert "DistributedDataParallel, the first of the 2 others measured so far, of 5, 50.0 (1, 3 runs)" in said
    assert "The controls (no communication, one worker alone, DDP without the slow worker) were not run" in said
    records += [record("no communication", "slow", 20.0, time_s) for time_s in (9.0, 8.0, 7.0)]
    said = results.summary(records)
    assert "50.0; no communication 8.0 (7.0 to 9.0) (1, 3 runs)" in said
    assert "The controls (one worker alone, DDP without the slow worker) were not run" in said


class Launched:
    """A process that ends at a time of a clock which moves whenever it is waited for."""

    def __init__(self, ends_s):
        self.now_s, self.ends_s = 0.0, ends_s

    def wait(self, timeout):
        self.now_s += timeout
        if self.now_s < self.ends_s:
            raise subprocess.TimeoutExpired("run", timeout)
        return 0


def test_a_slow_run_is_not_ended_and_one_that_stands_still_is():
    third = Launched(10_000.0)  # however long it takes, as long as it makes steps
    assert runs.outcome(third, lambda: int(third.now_s) // 200, 300.0, lambda: third.now_s) == 0
    hung = Launched(10_000.0)
    assert runs.outcome(hung, lambda: min(int(hung.now_s), 50), 300.0, lambda: hung.now_s) is None
    assert hung.now_s == pytest.approx(351, abs=2)


def test_a_run_whose_launcher_fails_after_the_last_step_is_finished(tmp_path):
    one = settings(tmp_path / "run", epochs=1)
    folder = Path(one.folder)
    for worker_id in range(2):
        write_steps(folder, worker_id, 1, [1.0 + step for step in range(one.rounds_per_epoch + 1)])
    write_snapshot(folder, 0, 2.0, course.make_model(one))
    assert judge.judge(one, mean=False, target=2.0, finished=False)["finished"]
    write_steps(folder, 1, 1, [1.0 + step for step in range(one.rounds_per_epoch)])
    assert not judge.judge(one, mean=False, target=2.0, finished=False)["finished"], "a step is missing"


def test_what_the_host_gives_to_others_is_a_share_of_all_cores_time(tmp_path):
    file = tmp_path / "stat"
    file.write_text("cpu  100 0 100 1000 0 0 0 50 7 0\ncpu0 100 0 100 1000 0 0 0 50 7 0\n")
    stolen = Stolen(file)
    assert stolen.share() == 0
    file.write_text("cpu  130 0 110 1050 0 0 0 60 9 0\n")
    assert stolen.share() == 0.1
    assert Stolen(tmp_path / "none").share() == 0


def test_runs_of_other_settings_are_not_mixed_with_those_asked_for(tmp_path):
    path = tmp_path / "runs.jsonl"
    kept = {
        "method": "ad-psgd",
        "protocol": 1,
        "task": "mnist-mlp",
        "batch_size": 16,
        "epochs": 12,
        "step_s": 0.003,
        "snapshot_every_s": 0.05,
        "workers": 4,
    }
    path.write_text(line := json.dumps({**kept, "scene": "none", "target": 0.93}) + "\n")
    asked = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "head_to_head.py"), "--small", "--runs", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert asked.returncode == 2
    assert "task mnist-mlp and not digits-mlp. Name another file" in asked.stderr
    assert "Traceback" not in asked.stderr
    assert path.read_text() == line


@pytest.mark.soak  # eight programs that import PyTorch, one after the other
def test_a_slow_worker_holds_up_ddp_and_not_ad_psgd(tmp_path):
    workers, epochs = 2, 2
    path = tmp_path / "runs.jsonl"
    words = f"--small --scenes slow --workers {workers} --epochs {epochs} --runs {path}".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "head_to_head.py"), *words, "--methods", f"ad-psgd;{DDP}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = process.communicate(timeout=forked.AGAINST_HANGS_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
    assert process.returncode == 0, printed
    found = {one["method"]: one for one in map(json.loads, path.read_text().splitlines())}
    ddp, ad_psgd = found[DDP], found["ad-psgd"]
    assert ddp["finished"], ddp
    assert ad_psgd["finished"], ad_psgd
    rounds = epochs * (1437 // (ddp["batch_size"] * workers))
    assert ddp["useful_samples"] == ad_psgd["useful_samples"] == rounds * workers * ddp["batch_size"]
    alike = {"finished": True, "wall_s": rounds * ddp["step_s"]}  # if computing took no time
    ((ddp_ratio,), (ad_psgd_ratio,)) = (tables.time_ratios([one], [alike]) for one in (ddp, ad_psgd))
    assert ddp_ratio > 0.95 * ddp["slow_factor"], "every round takes as long as the slow worker's sleep"
    assert ddp_ratio > 2 * ad_psgd_ratio
    assert "One worker 10 times as slow" in printed
    assert not list(tmp_path.glob("head-to-head-*")), "nothing is left of the runs"
