"""Parts of a placed model in scripts: under torchrun, and as workers that join a run, on one machine and on two."""

import json
import signal
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import forked
import leftovers
import paceline as pl
from chosen import each_value
from free_ports import free_port
from model_parallel.models import planned
from paceline.model_parallel.graph import joined
from paceline.transport.keys import create_keys
from processes import placed_programs
from processes.join_programs import free_address
from processes.placed_programs import Script, alone, left_weights, made
from processes.scripts import COMMAND, started
from processes.test_join_hosts import HOSTS, networks

PROGRAM = Path(placed_programs.__file__)
__all__ = ["networks"]  # a fixture


def run(scripts, environments):
    """(code, errors) of each worker."""
    told = [
        {**environment, "PACELINE_TEST_PLACED": json.dumps(asdict(script))}
        for script, environment in zip(scripts, environments, strict=True)
    ]
    with forked.running([PROGRAM], told) as workers:
        outputs = [one.communicate(forked.AGAINST_HANGS_S) for one in workers]
        return [(one.returncode, errors) for one, (_, errors) in zip(workers, outputs, strict=True)]


def ranks(number, host="127.0.0.1", **more):
    """What torchrun tells its workers."""
    common = {"MASTER_ADDR": host, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number), **more}
    return [{**common, "RANK": str(rank)} for rank in range(number)]


def invited(number, host="127.0.0.1", **more):
    return [
        {"PACELINE_JOIN": free_address(host), "PACELINE_OF": str(number), "PACELINE_DEADLINE_S": "590", **more}
    ] * number


def check(results, script, workers, *, expected=None):
    assert [code for code, _ in results] == [0] * workers, results
    expected = alone(script.name, script.epochs) if expected is None else expected
    for worker in range(workers):
        state = torch.load(Path(script.folder, f"{worker}.pt"))
        assert all(torch.equal(state[key], value) for key, value in expected.items())


@pytest.mark.parametrize(("start", "of"), each_value([ranks, invited], [("batch norm", 3), ("tied embedding", 2)]))
def test_parts_train_as_the_model_does(start, of, tmp_path):
    name, workers = of
    script = Script(str(tmp_path), name)
    planned(name, workers).save(tmp_path / script.plan)
    check(run([script] * workers, start(workers)), script, workers)


def test_the_agent_starts_parts_and_writes_the_run(tmp_path):
    script = Script(str(tmp_path))
    planned(script.name, 2).save(tmp_path / script.plan)
    words = ["launch", "--workers", 2, "--out", "run", "--", PROGRAM]
    with started(tmp_path, COMMAND, *words, PACELINE_TEST_PLACED=json.dumps(asdict(script))) as agent:
        _, errors = agent.communicate(forked.AGAINST_HANGS_S)
    check([(agent.returncode, errors)], script, 1)
    result = pl.RunData.load(tmp_path / "run").result
    assert (result["outcome"], result["algorithm"], result["steps"]) == ("stopped", "placed", 10)
    state = torch.load(tmp_path / "run" / "model.pt")
    assert all(torch.equal(state[key], value) for key, value in alone(script.name).items())


def test_sigterm_ends_the_agents_parts_and_keeps_what_they_recorded(tmp_path):
    script = Script(str(tmp_path), epochs=100_000)
    planned(script.name, 2).save(tmp_path / script.plan)
    words = ["launch", "--workers", 2, "--out", "run", "--", PROGRAM]
    with started(tmp_path, COMMAND, *words, PACELINE_TEST_PLACED=json.dumps(asdict(script))) as agent:
        leftovers.wait_until(lambda: agent.poll() or len(list(tmp_path.glob("trains-*"))) == 2, "an epoch of both")
        agent.send_signal(signal.SIGTERM)
        _, errors = agent.communicate(forked.AGAINST_HANGS_S)
    assert "Traceback" not in errors
    result = pl.RunData.load(tmp_path / "run").result
    assert (result["outcome"], result["outcome_reason"]) == ("stopped", "Interrupted by SIGTERM.")
    assert result["steps"] >= 5
    assert not (tmp_path / "run" / "model.pt").exists(), "each worker has its own part only"


@pytest.mark.parametrize("start", [ranks, invited])
def test_weights_that_worker_0_leaves_are_the_result(start, tmp_path):
    script = Script(str(tmp_path), leaves=True)
    planned(script.name, 2).save(tmp_path / script.plan)
    left_weights(model := made(script.name))
    check(run([script] * 2, start(2)), script, 2, expected=model.state_dict())


def test_a_worker_takes_the_part_that_it_asks_for(tmp_path):
    scripts = [Script(str(tmp_path), worker=worker) for worker in (1, 0)]
    planned(scripts[0].name, 2).save(tmp_path / "plan.json")
    check(run(scripts, invited(2)), scripts[0], 2)


@pytest.mark.parametrize(
    ("start", "message"),
    [(ranks, "The workers disagree on the plan: "), (invited, "This worker's plan is ")],
)
def test_workers_with_different_plans_are_refused(start, message, tmp_path):
    """Only the times differ, as if each worker had placed the model by itself."""
    plan = planned("batch norm", 2)
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "other.json").write_text(text.replace('"step_s": 0.', '"step_s": 1.', 1))
    scripts = [Script(str(tmp_path)), Script(str(tmp_path), plan="other.json", worker=1 if start is invited else None)]
    environments = start(2) if start is ranks else invited(2, PACELINE_DEADLINE_S="5")
    results = run(scripts, environments)
    refused = [errors for code, errors in results if code == 2]
    assert any(message in errors and "for Normed on 2 workers" in errors for errors in refused), results
    assert all("Traceback" not in errors for _, errors in results), results


@pytest.mark.parametrize("start", [ranks, invited])
def test_a_plan_for_another_number_of_workers_is_refused(start, tmp_path):
    script = Script(str(tmp_path))
    planned(script.name, 3).save(tmp_path / script.plan)
    for code, errors in run([script] * 2, start(2)):
        assert code == 2
        assert "The plan is for 3 workers, and the run has 2: start 3, or make a plan for 2 devices" in errors


@pytest.mark.parametrize("start", [ranks, invited])
def test_the_death_of_a_part_ends_all_with_a_sentence(start, tmp_path):
    planned("batch norm", 3).save(tmp_path / "plan.json")
    scripts = [Script(str(tmp_path), worker=worker, dies_in=0 if worker == 1 else None) for worker in range(3)]
    results = run(scripts, start(3))
    assert [code for code, _ in results] == [1, -signal.SIGKILL, 1]
    for _, errors in results[::2]:
        assert "waited for worker" in errors
        assert "Traceback" not in errors


def test_fewer_workers_go_on_from_the_last_epochs_checkpoint_under_torchrun(tmp_path):
    plan = planned("batch norm", 3)
    plan.save(tmp_path / "plan.json")
    scripts = [Script(str(tmp_path), dies_in=1 if worker == 1 else None) for worker in range(3)]
    folder = str(tmp_path / "checkpoint")
    codes = [code for code, _ in run(scripts, ranks(3, PACELINE_CHECKPOINT=folder))]
    assert codes == [1, -signal.SIGKILL, 1]
    plan.again(devices=[pl.Device()] * 2).save(tmp_path / "plan.json")
    check(run(scripts[:1] * 2, ranks(2, PACELINE_CHECKPOINT=folder)), scripts[0], 2)


def test_a_part_that_there_is_not_is_refused_before_the_run_is_joined(monkeypatch):
    plan = planned("two towers", 2)
    monkeypatch.setenv("PACELINE_JOIN", "127.0.0.1:1")
    monkeypatch.setattr(joined, "JoinedRun", lambda *_: pytest.fail("it has joined"))
    with pytest.raises(pl.UsageError, match="There is no worker 2 in a plan for 2 workers, numbered from 0"):
        plan.part(made("two towers"), 2)
    with pytest.raises(pl.UsageError, match="The plan belongs to another model"):
        plan.part(made("skips"))


def test_a_run_that_has_begun_takes_no_more_parts(monkeypatch):
    """A placed model's workers end together, so that a place is free for a moment only."""
    run = SimpleNamespace(num_workers=2, is_late=True, close=lambda: ended.append(True))
    ended, plan = [], planned("two towers", 2)
    monkeypatch.setattr(joined, "JoinedRun", lambda *_: run)
    monkeypatch.setenv("PACELINE_JOIN", "127.0.0.1:1")
    with pytest.raises(pl.UsageError, match="begin and end together, and this run has begun: start all workers again"):
        plan.part(made("two towers"))
    assert ended


@pytest.mark.parametrize("start", [ranks, invited])
def test_parts_on_two_machines(start, networks, tmp_path):
    names, wires = networks
    create_keys(tmp_path / "run.key")
    planned("two towers", 2).save(tmp_path / "plan.json")
    scripts = [Script(str(tmp_path), "two towers", namespace=name, worker=at) for at, name in enumerate(names)]
    environments = [
        {**environment, "GLOO_SOCKET_IFNAME": wire}
        for environment, wire in zip(start(2, HOSTS[0], PACELINE_KEY=str(tmp_path / "run.key")), wires, strict=True)
    ]
    check(run(scripts, environments), scripts[0], 2)
