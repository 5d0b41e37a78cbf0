"""Each launch of a program gives its workers the environment, folder and path that the program has by then."""

import json

from processes.scripts import started

SWEEP = """
    import json
    import os
    import sys
    from pathlib import Path

    import torch

    import paceline as pl

    AT_IMPORT = os.environ.get("RATE")
    os.environ["SET_AT_IMPORT"] = "yes"


    def train():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ["RATE"]))
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(8, 4)] * 4):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        if worker.worker_id == 0:
            import settings

            seen = [AT_IMPORT, os.environ["RATE"], os.environ.get("ONLY_FIRST"), os.environ["SET_AT_IMPORT"]]
            Path(sys.argv[1]).write_text(json.dumps([*seen, Path.cwd().name, settings.NAME, os.getppid()]))


    if __name__ == "__main__":
        second = {"RATE": "0.01", "KMP_INIT_AT_FORK": "0"}
        for number, variables in enumerate([{"RATE": "0.1"}, second, {"OMP_NUM_THREADS": "3"}]):
            folder = Path(__file__).parent / str(number)
            folder.mkdir()
            (folder / "settings.py").write_text(f"NAME = {number}")
            sys.path.insert(0, str(folder))
            os.chdir(folder)
            os.environ.update(variables, SET_AT_IMPORT="no")
            os.environ.pop("ONLY_FIRST", None)
            if number == 0:
                os.environ["ONLY_FIRST"] = "1"
            pl.launch(train, workers=2, algorithm="hogwild")
            print(Path(sys.argv[1]).read_text(), flush=True)
"""


def test_workers_see_what_the_program_has_set_before_each_launch(tmp_path):
    with started(tmp_path, SWEEP, tmp_path / "seen.json") as program:
        output, errors = program.communicate()
    assert program.returncode == 0, errors
    first, second, third = map(json.loads, output.splitlines())
    assert first[:-1] == ["0.1", "0.1", "1", "yes", "0", 0]
    assert second[:-1] == ["0.01", "0.01", None, "yes", "1", 1]
    assert third[1:3] == ["0.01", None]
    assert first[-1] == second[-1] != third[-1]  # libraries read OMP_NUM_THREADS as they load
