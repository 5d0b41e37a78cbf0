import io
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.observe.progress import LiveTable, Progress, WorkerProgress
from paceline.observe.tables import comparison_table, result_table

from .synthetic import METHODS, make_run

WORKERS = (WorkerProgress(0, True, 1300, 108.0, 2.7, 0.03), WorkerProgress(1, False, 20, 0.0, None, None))
PROGRESS = Progress(12.3, 0.41, 17.2, 5210, 333_440, 27_100.0, 0.432, 0.912, 3, WORKERS)


def console(*, terminal=False, width=100):
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, _environ={"TERM": "xterm"}, highlight=False
    )


def written(where):
    return where.file.getvalue()


def test_elsewhere_than_on_a_terminal_there_is_a_line_about_every_two_seconds():
    where, now = console(width=40), [0.0]
    with LiveTable("hogwild on digits", console=where, now_s=lambda: now[0]) as table:
        for tick in range(50):
            now[0] = tick / 10
            table.update(replace(PROGRESS, elapsed_s=now[0]))
    lines = written(where).splitlines()
    assert lines[0] == "hogwild on digits"
    assert [line.split()[0] for line in lines[1:]] == ["0.0", "2.0", "4.0", "4.9"]  # and the last state
    assert [part.strip() for part in lines[1].split("  ")[-9:]] == [
        "41 %", "epoch 3", "5,210 updates", "27,100 samples/s", "loss 0.432", "accuracy 91.2 %", "staleness 2.7",
        "lost: worker 1", "17.2 s left",
    ]  # fmt: skip


def test_a_message_and_a_new_epoch_are_told_at_once():
    where = console()
    with LiveTable(console=where, now_s=lambda: 0.0) as table:
        for progress in (
            PROGRESS, PROGRESS, replace(PROGRESS, message="worker 1 was lost [killed]"), replace(PROGRESS, epoch=4)
        ):  # fmt: skip
            table.update(progress)
    lines = written(where).splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("worker 1 was lost [killed]")
    assert "epoch 4" in lines[2]


def test_on_a_terminal_there_is_a_table():
    where = console(terminal=True)
    with LiveTable("hogwild on digits", console=where) as table:
        table.update(replace(PROGRESS, message="a checkpoint was written"))
        table.update(Progress(13.0))
        table.update(replace(PROGRESS, elapsed_s=14.0))
    text = written(where)
    for part in ("hogwild on digits", "running", "lost", "27,100", "staleness (updates)", "91.2 %", "a checkpoint"):
        assert part in text


def test_standard_output_stays_free(capsys):
    with LiveTable("title") as table:
        table.update(PROGRESS)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "title" in captured.err


def test_an_exception_leaves_the_block_as_it_is():
    def interrupted():
        with LiveTable(console=console(terminal=True)) as table:
            table.update(PROGRESS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def shown(table, width):
    where = console(width=width)
    where.print(table)
    return written(where)


@pytest.mark.parametrize("width", [80, 120])
def test_the_comparison_fits_a_terminal_and_cuts_no_figure(width):
    results = [make_run(method, slow=2).result for method in METHODS]
    results.append(make_run("hogwild(step_size=0.5)", diverged_at=300).result)
    text = shown(comparison_table(results), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for part in ("converged", "diverged", "14.8", "64.4", " 86", "the loss became non-finite", "4 workers each."):
        assert part in text


def test_only_what_is_clearly_better_is_marked():
    results = [{"algorithm": "a", "time_to_target_s": 1.0}, {"algorithm": "b", "time_to_target_s": 1.03}]
    assert "Bold" not in shown(comparison_table(results), 80)
    results[1]["time_to_target_s"] = 2.0
    assert "Bold" in shown(comparison_table(results), 80)
    results[0]["outcome"] = "crashed"
    assert "Bold" not in shown(comparison_table(results), 80)


def test_the_result_of_one_run():
    text = shown(result_table(make_run(slow=1).result), 80)
    assert "converged: the target loss was reached" in text
    assert "samples/s" in text
    assert "95 % at most" in text
    assert "not reached (loss of 0.4)" in shown(result_table(make_run(diverged_at=10).result), 80)
    assert "unknown" in shown(result_table({}), 80)


def test_a_run_says_what_auto_has_chosen_and_how_late_averages_are():
    run = make_run().result
    for name in ("late averages", "chosen by auto"):
        assert name not in shown(result_table(run | {"delay": 0, "progress_factor": 1.0}), 80)
    text = shown(result_table(run | {"delay": 3, "progress_factor": 0.4375}), 80)
    assert "by 3 steps, which leaves 0.44 of the progress" in text
    text = shown(result_table(run | {"chosen_gradients": {"last": 24, "fewest": 4, "most": 31}}), 80)
    assert "24 gradients at the end, 4 to 31 in all" in text
    text = shown(result_table(run | {"chosen_gradients": {"last": 1, "fewest": 1, "most": 1}}), 80)
    assert "1 gradient at the end" in text
    assert "in all" not in text


def test_a_run_says_what_it_has_noted_once():
    """Such as which number `backups=auto` goes by: it is to be read in the terminal, too."""
    run = make_run(slow=1).result | {"notes": ["One node.", "Worker 1 was late."], "records_lost": 2}
    text = shown(result_table(run), 80)
    assert "One node." in text
    assert "Worker 1 was late." in text
    assert "records lost" in text
    crashed = run | {"outcome": "crashed", "outcome_reason": "Worker 1 was late. It has died."}
    assert shown(result_table(crashed), 80).count("Worker 1 was late.") == 1
    assert shown(comparison_table([{}, {}]), 80)
