"""Code blocks of Markdown pages: what is in them, and running them as a reader would."""

import re
import shlex
import subprocess

import typer.main

from paceline.cli.app import app

from .conftest import ROOT

# Commands that test_examples.py runs.
NOT_RUN = (
    "paceline train --task examples/my_task.py",
    "python -m torch.distributed.run --standalone --nproc-per-node 4 examples/ad_psgd.py 4",
)


def blocks(text, language):
    """The code of every block in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def python_blocks(text):
    """Every Python block, and the output that stands right below it, or an empty text."""
    return re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", text, flags=re.DOTALL | re.MULTILINE
    )  # fmt: skip


def sessions(text):
    """Every command of the console blocks, and what is shown as its output."""
    return [
        session
        for block in blocks(text, "console")
        for session in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)
    ]


def masked(text):
    """Lines without their numbers, units and spacing, which differ from run to run."""
    return [" ".join(re.sub(r"\d[\d,.]*( [mu]?s\b)?", "#", line).split()) for line in text.splitlines() if line.strip()]


def run_session(command, output, shell, *, anew=False):
    """Runs a command and finds the lines that are shown below it; `make` and `pip` are looked at only."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":  # what it would do; the commands themselves are what CI runs
        done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout
    elif words[0] == "pip":
        constraints = words[words.index("--constraint") + 1] if "--constraint" in words else None
        assert (ROOT / constraints).exists() if constraints else "torch" in words[2]
    elif not command.startswith(NOT_RUN):
        printed = shell(command, expect=2 if output.startswith("paceline: ") else 0, anew=anew)
        assert not set(masked(output)) - set(masked(printed)), printed


def run_python(code, shell, output=""):
    """Runs a block, and checks what it prints: against what the page shows, or what such code is for."""
    (shell.folder / "block.py").write_text(code)
    printed = shell("python block.py")
    assert "Warning" not in printed
    if output:
        assert printed == output
    elif "pl.simulate(" in code:
        virtual_s = dict(re.findall(r"^(\S+) ([\d.]+) s of virtual time$", printed, flags=re.MULTILINE))
        assert float(virtual_s["lockstep"]) > 5 * float(virtual_s["ad-psgd"]), printed
    elif "pl.launch(" in code:
        samples_per_s, staleness = map(float, printed.split())
        assert samples_per_s > 0 <= staleness
    elif "pl.train(" in code:
        outcome, accuracy, _ = printed.split()
        assert (outcome, float(accuracy) > 0.5) == ("stopped", True)


def parse_command(line):
    """Whether a command for several machines, or of minutes, has verbs and options that there are; it is not run."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if "paceline" not in words:
        return False
    _parsed(typer.main.get_command(app), words[words.index("paceline") + 1 :], None, "paceline")
    return True


def _parsed(command, words, parent, name):
    if not hasattr(command, "commands"):
        return command.make_context(name, words, parent=parent)
    unnamed = [verb for verb, one in command.commands.items() if one.hidden]  # the verb that nobody writes
    if unnamed and words[0] not in command.commands:
        words = [*unnamed, *words]
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    found, verb, rest = command.resolve_command(context, words)
    return _parsed(verb, rest, context, found)
