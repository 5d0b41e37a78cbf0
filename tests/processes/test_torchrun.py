"""`attach` in workers that another launcher started."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked
import leftovers
import paceline as pl
from free_ports import free_port
from paceline.membership.environment import LaunchedEnvironment, current_environment
from paceline.transport.local_socket import is_heard
from processes import torchrun_programs

PROGRAMS = Path(torchrun_programs.__file__)
no_nccl = pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this PyTorch has NCCL")


def started(program, num_workers, names=("RANK", "WORLD_SIZE"), **environment):
    """Workers, as a launcher would start them."""
    port = str(free_port())
    environments = [
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            names[0]: str(rank),
            names[1]: str(num_workers),
            "RANK": str(rank),  # the programs ask for it, too
            **environment,
        }
        for rank in range(num_workers)
    ]
    if names[0] != "RANK":
        for one in environments:
            one["PACELINE_TEST_RANK"] = one.pop("RANK")
    return forked.running([PROGRAMS, program], environments)


def run(program, num_workers, names=("RANK", "WORLD_SIZE"), wait_for=None, **environment):
    """(code, output, errors) of each worker, or of those in `wait_for`."""
    with started(program, num_workers, names, **environment) as workers:
        return {rank: ended(workers[rank]) for rank in (wait_for if wait_for is not None else range(num_workers))}


def ended(process):
    output, errors = process.communicate(forked.AGAINST_HANGS_S)
    return process.returncode, output, errors


def torchrun(program, num_workers, *options, anew=False, **environment):
    """(code, output, errors) of torchrun; its workers are forked, with PyTorch loaded, or start `anew`, as by default."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    if anew:
        command = [sys.executable, *words, str(PROGRAMS), program]
        limit_s = forked.AGAINST_HANGS_S
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    else:
        done = forked.run([*words, PROGRAMS, program], environment=environment)
    return done.returncode, done.stdout, done.stderr


def reports(output):
    """The workers' lines, by rank."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def check_training(found, num_workers, clips=True):
    assert [one["rank"] for one in found] == list(range(num_workers))
    assert all(one["x"] == found[0]["x"] for one in found)
    assert all(one["same_keys"] for one in found)
    for values, expected in zip(found[0]["x"], torchrun_programs.one_worker_with(num_workers, clips), strict=True):
        torch.testing.assert_close(torch.tensor(values), expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", [None, "all-reduce"])
def test_a_public_style_loop_under_torchrun_is_one_with_bigger_batches(algorithm):
    environment = {} if algorithm is None else {"PACELINE_ALGORITHM": algorithm}
    code, output, errors = torchrun("train", 2, anew=algorithm is None, **environment)
    assert code == 0, errors
    check_training(reports(output), 2)
    assert {one["algorithm"] for one in reports(output)} == {algorithm or "all-reduce"}


def test_workers_with_data_of_their_own_go_on_in_rounds_until_the_last_has_ended():
    """A round's step is one on all its rows together, whichever workers have some; the others see their last rows again."""
    results = run("own_data", 3)
    assert [code for code, *_ in results.values()] == [0, 0, 0], results
    found = [reports(output)[0] for _, output, _ in results.values()]
    assert [one["seen"] for one in found] == [[2, 3, 2, 2] * 2, [1, 2, 2, 2] * 2, [3, 3, 3, 3] * 2]
    model, optimizer = torchrun_programs.make(0)
    own = [torchrun_programs.own_rows(rank) for rank in range(3)]
    for _ in range(2):
        for first in (0, 3, 6):
            x, y = (torch.cat([rows[part][first : first + 3] for rows in own]) for part in range(2))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for one in found:
        for values, expected in zip(one["x"], model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(values), expected.detach().flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loop", ["own_data_left", "own_data_steps_twice_a_batch"])
def test_loops_on_data_of_their_own_may_leave_an_epoch_and_step_twice(loop):
    results = run(loop, 2)
    assert [code for code, *_ in results.values()] == [0, 0], results


def test_a_loop_that_steps_at_the_end_of_its_own_shorter_loader_is_refused():
    for result in run("own_data_accumulated", 2).values():
        assert "skipped step 1 and went on to another batch" in refusal(result)


@pytest.mark.parametrize(
    "algorithm",
    [
        *("d-psgd", "local-sgd(period=2)", "da-sgd(period=2)", "diloco(period=4, delay=1)", "all-reduce"),
        *("parameter-server(mode=sync(backups=0), shards=2)", "parameter-server(mode=sync(backups=0), codec=fp16)"),
    ],
)
def test_a_model_on_a_device_trains_as_one_on_the_cpu(algorithm):
    """Bit for bit, as their rounds are the same; the device is a stand-in whose copies are as late as a GPU's."""
    found = []
    for device in ({}, {"PACELINE_TEST_LAZY_COPIES": "1"}):
        results = run("train_with_buffers", 2, PACELINE_ALGORITHM=algorithm, **device)
        assert [code for code, *_ in results.values()] == [0, 0], results
        found.append([reports(output)[0] for _, output, _ in results.values()])
    on_cpu, on_device = found
    has_servers = algorithm.startswith("parameter-server")  # whose workers take a step's batches in any order
    what = ["x"] if has_servers else ["x", "seen"]
    assert [[one[name] for name in what] for one in on_device] == [[one[name] for name in what] for one in on_cpu]
    # Messages are staged; the collectives take the device's vectors as they are.
    assert all((one["buffers"] > 0) == (has_servers or algorithm == "d-psgd") for one in on_device)


@pytest.mark.parametrize("algorithm", ["all-reduce", "d-psgd", "parameter-server(mode=async)"])
def test_all_begin_with_worker_0s_state_frozen_parameters_and_all_buffers_included(algorithm):
    results = run("begins", 2, PACELINE_ALGORITHM=algorithm)
    assert [code for code, *_ in results.values()] == [0, 0], results
    first, second = (reports(output)[0] for _, output, _ in results.values())
    assert first["own"] != second["own"]
    assert second["begun"] == first["begun"] == first["own"]


def test_optimizer_state_of_worker_0_alone_is_refused_in_lockstep():
    for result in run("loads_its_optimizer_on_worker_0", 2).values():
        assert "optimizer of worker 1 begins with a different state than worker 0's" in refusal(result)


def test_ad_psgd_on_a_device_ends_with_one_model():
    results = run("train_with_buffers", 3, PACELINE_ALGORITHM="ad-psgd", PACELINE_TEST_LAZY_COPIES="1")
    assert [code for code, *_ in results.values()] == [0, 0, 0], results
    found = [reports(output)[0] for _, output, _ in results.values()]
    assert all(one["x"] == found[0]["x"] for one in found)
    assert all(one["buffers"] > 0 for one in found)


@pytest.mark.parametrize("algorithm", ["parameter-server(shards=2)", "parameter-server(mode=async)"])
def test_a_parameter_server_is_hosted_by_worker_0_and_all_end_with_its_model(algorithm):
    results = run("train", 3, PACELINE_ALGORITHM=algorithm)
    assert [code for code, *_ in results.values()] == [0, 0, 0], results
    found = [reports(output)[0] for _, output, _ in results.values()]
    assert all(one["x"] == found[0]["x"] for one in found)
    assert found[0]["x"] != [p.flatten().tolist() for p in torchrun_programs.make(seed=0)[0].parameters()]


@pytest.mark.parametrize("codec", ["qsgd(bits=4)", "power(rank=1, warmup_steps=2)"])
def test_coded_buckets_over_the_network_leave_all_workers_equal_bit_for_bit(codec):
    """Gloo pairs operations by their order: started out of turn, two buckets' would meet each other, or nobody."""
    results = run("train_coded", 3, PACELINE_ALGORITHM=f"all-reduce(bucket_bytes=256, codec={codec})")
    assert [code for code, *_ in results.values()] == [0, 0, 0], results
    found = [reports(output)[0] for _, output, _ in results.values()]
    assert [one["steps"] for one in found] == [30, 30, 30]  # worker 2 has a batch again in the last round of an epoch
    assert all(one["started"] == [0, 1, 2] * 30 for one in found)
    assert all(one["x"] == found[0]["x"] for one in found)


def test_a_sharded_update_over_the_network_is_one_of_a_bigger_batch():
    """Nobody has the whole mean gradient, so a loop that clips is refused."""
    results = run("train_without_clipping", 3, PACELINE_ALGORITHM="all-reduce(sharded=true)")
    assert [code for code, *_ in results.values()] == [0, 0, 0], results
    check_training([reports(output)[0] for _, output, _ in results.values()], 3, clips=False)


def test_three_workers_of_a_launcher_that_sets_slurms_variables():
    """Each is told its number by Slurm's variables alone."""
    results = run("train", 3, names=("SLURM_PROCID", "SLURM_NTASKS"))
    assert [code for code, *_ in results.values()] == [0, 0, 0], results
    check_training([reports(output)[0] for _, output, _ in results.values()], 3)


def failure(result, code=1):
    found, _, errors = result
    assert found == code, errors
    return errors.strip().splitlines()[-1]


def refusal(result):
    """An error that the user can correct is one line, without a traceback."""
    said = failure(result, code=2)
    assert said.startswith("paceline: ")
    assert "Traceback" not in result[2]
    return said


def test_a_killed_or_stopped_worker_is_named():
    """Of two, of four, and one of three that stands still: at the same time, as those that are left wait for seconds."""
    with started("killed", 2) as two, started("killed", 4) as four, started("stopped", 3) as three:
        for workers, there in ((two, "worker 0"), (four, "workers 0, 2 and 3")):
            _, victim, *_ = results = [ended(worker) for worker in workers]
            assert victim[0] == -signal.SIGKILL
            for result in results:
                if result is not victim:
                    assert f"{there} arrived, worker 1 did not" in failure(result)
                    assert "Traceback" not in result[2]
        for rank in (0, 2):
            assert "workers 0 and 2 arrived, worker 1 did not" in failure(ended(three[rank])), "within the deadline"


def test_a_worker_with_an_error_of_its_own_is_named_by_the_others():
    results = run("raises", 3)
    assert "KeyError: 'mine'" in failure(results.pop(1))
    for result in results.values():
        assert "workers 0 and 2 arrived, worker 1 did not; worker 1 had ended its loop" in failure(result)


@pytest.mark.parametrize(
    "algorithm", ["all-reduce", "local-sgd(period=2)", "da-sgd(period=2)", "ad-psgd", "parameter-server(mode=async)"]
)
def test_what_worker_0_restores_at_the_end_is_what_all_end_with(algorithm):
    results = run("restores_its_best", 2, PACELINE_ALGORITHM=algorithm)
    assert [code for code, *_ in results.values()] == [0, 0], results
    found = [reports(output)[0] for _, output, _ in results.values()]
    assert found[0]["after"] == found[1]["after"] == found[0]["left"] != found[1]["left"]


def test_a_worker_that_ends_rounds_early_is_named_though_it_waits_for_the_result():
    results = run("ends_early", 3, PACELINE_ALGORITHM="all-reduce")
    for worker in (0, 2):
        assert "worker 1 did not; worker 1 had ended its loop" in failure(results[worker])


def test_torchrun_reports_a_kill():
    """It ends the others at once, before they can say which is missing, and says so itself."""
    code, _, errors = torchrun("killed", 2)
    assert code == 1
    assert "(local_rank: 1)" in errors
    assert "SIGKILL" in errors


@pytest.mark.parametrize(
    ("algorithm", "device"),
    [
        ("all-reduce", {}),
        ("all-reduce(sharded=true)", {}),
        pytest.param("d-psgd", {}, marks=pytest.mark.soak),
        ("d-psgd", {"PACELINE_TEST_LAZY_COPIES": "1"}),
        ("da-sgd(period=5, delay=5, merge=corrected)", {}),
        ("diloco(period=5, delay=3, local_weight=0.5)", {}),
    ],
    ids=["all-reduce", "sharded", "d-psgd", "d-psgd on a device", "da-sgd in mid-flight", "diloco in mid-flight"],
)
def test_a_run_that_torchrun_restarts_goes_on_from_its_checkpoint(algorithm, device, tmp_path):
    """Bit for bit as if nothing had happened: all-reduce goes on from the last step, others from the last epoch."""
    folders = [{"PACELINE_CHECKPOINT": str(tmp_path / name)} for name in ("undisturbed", "killed")]
    results = run("restarted", 2, PACELINE_ALGORITHM=algorithm, **folders[0], **device)
    assert [code for code, *_ in results.values()] == [0, 0], results
    undisturbed = [reports(output)[0] for _, output, _ in results.values()]
    environment = {"PACELINE_TEST_KILL": "1", "PACELINE_ALGORITHM": algorithm, **folders[1], **device}
    code, output, errors = torchrun("restarted", 2, "--max-restarts=1", **environment)
    assert code == 0, errors
    resumed = reports(output)
    assert [one["steps"] for one in undisturbed] == [36, 36]
    assert [one["steps"] for one in resumed] == [3 if algorithm == "all-reduce" else 12] * 2
    assert [one["bits"] for one in resumed] == [one["bits"] for one in undisturbed]


def test_workers_that_have_a_torchrun_each_outlive_each_other():
    """With PACELINE_JOIN they join a run; the torchrun of the one that dies starts its replacement.

    It held the join point, which the other one then does.
    """
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "--max-restarts=1",
        PROGRAMS,
        "replaced",
    ]
    address = f"127.0.0.1:{free_port()}"
    environment = {"PACELINE_JOIN": address, "PACELINE_OF": "2", "OMP_NUM_THREADS": "1"}
    with forked.running(words, [environment | {"PACELINE_TEST_KILL": "1"}]) as first:
        leftovers.wait_until(lambda: is_heard(f"tcp://{address}"), "the join point")
        with forked.running(words, [environment]) as others:
            results = [ended(one) for one in (*first, *others)]
    assert [code for code, *_ in results] == [0, 0], results
    first, second = (reports(output)[0] for _, output, _ in results)
    assert first["x"] == second["x"]
    assert min(first["steps"], second["steps"]) > 0


def test_checkpoints_of_an_algorithm_without_rounds_are_refused(tmp_path):
    results = run("train", 2, PACELINE_ALGORITHM="ad-psgd", PACELINE_CHECKPOINT=str(tmp_path))
    assert "PACELINE_CHECKPOINT needs an algorithm that trains in rounds" in refusal(results[0])


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("other_model", "The workers disagree on the model: 10 parameters"),
        ("other_algorithm", "disagree on the algorithm: lockstep on worker 0, all-reduce on workers 1 and 2"),
        ("hogwild", "start them with paceline.launch"),
        ("on_other_kinds_of_devices", "disagree on the kind of device: cpu on worker 0, cuda on workers 1 and 2"),
        pytest.param("without_nccl", "which this PyTorch was built without", marks=no_nccl),
    ],
)
def test_what_does_not_fit_is_refused_everywhere(program, says):
    for result in run(program, 3).values():
        assert says in refusal(result)


def test_workers_on_one_gpu_are_told_how_to_have_one_each():
    results = run("on_one_gpu", 3, wait_for=[1, 2])
    for result in results.values():
        assert "Workers 1 and 2 have their models on one GPU" in refusal(result)
        assert "os.environ['LOCAL_RANK']" in refusal(result)


def test_a_worker_that_never_comes_is_named_within_the_deadline():
    results = run("never_attaches", 2, PACELINE_DEADLINE_S="3")
    assert "worker 1 did not call paceline.attach within 3 s" in failure(results[0])


def test_a_port_in_use_is_said_in_a_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        results = run("never_attaches", 2, wait_for=[0], PACELINE_DEADLINE_S="3", MASTER_PORT=port)
    assert f"cannot listen at MASTER_PORT={port}" in refusal(results[0])


def test_a_process_group_of_the_users_is_left_alone():
    found = [reports(output)[0] for _, output, _ in run("twice_beside_a_group_of_the_users", 3).values()]
    assert [one["sum"] for one in found] == [6.0] * 3
    assert all(one["x"] == found[0]["x"] for one in found)


def test_one_workers_overflow_skips_the_step_on_all():
    found = [reports(output)[0] for _, output, _ in run("overflow", 2).values()]
    assert [one["steps"] for one in found] == [[True, True, False, True]] * 2
    assert [one["scale"] for one in found] == [512.0] * 2
    assert found[0]["x"] == found[1]["x"]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_every_operation(num_workers):
    found = [reports(output)[0] for _, output, _ in run("operations", num_workers).values()]
    vectors = [torch.arange(1.0, 7) * 10**worker for worker in range(num_workers)]
    total = sum(vectors)
    weights = [worker + 1 for worker in range(num_workers)]
    mean = sum(weight * vector for weight, vector in zip(weights, vectors, strict=True)) / sum(weights)
    halves = torch.stack([torchrun_programs.large_and_small(worker, num_workers) for worker in range(num_workers)])
    half = halves.double().mean(0).bfloat16()
    for rank, one in enumerate(found):
        assert one["summed"] == total.tolist()
        assert one["part"] == total.chunk(num_workers)[rank].tolist()
        rank = one["rank"]
        assert one["taken"] == [100 * w + 3 * rank + at for w in range(num_workers) for at in range(3)]
        assert one["gathered"] == [float(worker) for worker in range(num_workers) for _ in range(6 // num_workers)]
        assert one["mean"] == pytest.approx(mean.tolist())
        assert one["mean"] == found[0]["mean"]
        assert one["lone"] == vectors[1].tolist()
        assert one["none"] == [0.0] * 6
        assert one["half"] == half.tolist()
        assert one["numbers"] == [
            [num_workers**2 / 2, num_workers * (num_workers - 1) / 2, 0, num_workers],
            [2.0 * num_workers, 0, 0, 0],
        ]
        # The ring's optimum, for the vector of float32, one float64 per worker and the numbers.
        assert one["sent_bytes"] == 2 * (num_workers - 1) * (6 * 4 + num_workers * 8 + 4 * 8) // num_workers
    claimed = sorted(number for one in found for number in one["claimed"])
    assert len(set(claimed)) == 10 * num_workers
    assert claimed[-1] < 12 * num_workers  # whole claims of four


def test_variables_of_launchers(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "5")
    assert current_environment() is None, "no address to meet at"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.warns(UserWarning, match=r"mpirun has started 5 processes, and each trains alone.* set MASTER_ADDR"):
        assert current_environment() is None
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    environment = current_environment()
    assert environment == LaunchedEnvironment(worker_id=2, num_workers=5, deadline_s=600)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(pl.UsageError, match="OMPI_COMM_WORLD_RANK=2 does not exist"):
        current_environment()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "two")
    with pytest.raises(pl.UsageError, match="whole number"):
        current_environment()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert current_environment() is None, "a lone worker needs nobody"


def test_two_names_for_the_algorithm_are_an_error(monkeypatch):
    monkeypatch.setenv("PACELINE_ALGORITHM", "lockstep")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert pl.attach(model, optimizer).algorithm == pl.Lockstep()
    with pytest.raises(pl.UsageError, match="name the algorithm in one place"):
        pl.attach(model, optimizer, algorithm="all-reduce")
