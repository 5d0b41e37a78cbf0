"""The command `paceline`: its verbs, and how errors are printed.

Importing this module must stay fast: nothing here imports torch, and the verbs import what they need when they run.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from typing import Annotated, Any

import typer
import typer.core

import paceline
from paceline.cli.advise import advise
from paceline.cli.algorithms import algorithms, cite
from paceline.cli.backups import plan
from paceline.cli.blame import blame
from paceline.cli.calibrate import calibrate
from paceline.cli.compare import compare
from paceline.cli.console import complain, page_about
from paceline.cli.doctor import doctor
from paceline.cli.key import key
from paceline.cli.launch import LaunchCommand, launch
from paceline.cli.place import place
from paceline.cli.replay import replay
from paceline.cli.simulate import simulate
from paceline.cli.sparse import sparse
from paceline.cli.study import study_app
from paceline.cli.train import train
from paceline.errors import PacelineError, UsageError, printable
from paceline.system import interrupts

# Typer 0.16 and later vendor Click, earlier ones import it; this is the base of its errors in both.
_WrongWords: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_NO_SUCH_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)  # for names that no file can have


def _sentence(text: str) -> str:
    """Joins the lines of a message and ends it with a full stop if necessary."""
    text = printable(text.rstrip())
    return text if text.endswith((".", "?", "!")) else f"{text}."


class _VerbsThatExplain(typer.core.TyperGroup):
    """Prints errors that users can act on as one sentence, with an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            complain(_sentence(str(error)))
            raise typer.Exit(2) from error
        except PacelineError as error:
            complain(str(error))
            raise typer.Exit(1) from error
        except OSError as error:  # of reading a file, or of the machine; errors of writing are handled elsewhere
            if isinstance(error, BrokenPipeError):
                raise  # the output's reader has closed the pipe
            about = "" if error.filename is None else f"{error.filename}: "
            complain(_sentence(f"{about}{error.strerror or error}; choose another place."))
            raise typer.Exit(2 if error.errno in _NO_SUCH_NAMES else 1) from error
        except KeyboardInterrupt as error:
            complain("Stopped.")
            raise typer.Exit(interrupts.exit_code(error)) from error


app = typer.Typer(
    cls=_VerbsThatExplain,
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=page_about("command_line"))(train)
app.command(epilog=page_about("command_line"))(compare)
app.command(cls=LaunchCommand, context_settings={"allow_interspersed_args": False}, epilog=page_about("launchers"))(
    launch
)
app.command(epilog=page_about("simulate"))(simulate)
app.command(epilog=page_about("simulate"))(calibrate)
app.command(epilog=page_about("replay"))(replay)
app.command(epilog=page_about("replay"))(blame)
app.command(epilog=page_about("security"))(key)
app.command(epilog=page_about("which_algorithm"))(algorithms)
app.command(epilog=page_about("start"))(doctor)
app.command(epilog=page_about("method_cards"))(cite)
app.command(epilog=page_about("placement"))(place)
app.add_typer(advise, name="advise")
app.add_typer(plan, name="plan", epilog=page_about("advise"))
app.add_typer(sparse, name="sparse", epilog=page_about("sparse"))
app.add_typer(study_app, name="study", epilog=page_about("studies"))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback(epilog=page_about("index"))
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Parallel and asynchronous SGD for PyTorch: choose how the workers agree, from figures.

    Start with: paceline train
    """


def main() -> None:
    """Runs the command line; wrong options, too, give one sentence and exit code 2."""
    interrupts.install()
    try:
        os.getcwd()  # noqa: PTH109
    except OSError as error:
        complain(f"The working folder cannot be found ({error.strerror}): cd into an existing folder.")
        sys.exit(2)
    try:
        code = app(standalone_mode=False)
    except _WrongWords as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "paceline")
        if message := error.format_message().rstrip(
            "."
        ):  # empty if a group of verbs was called without one: prints help
            end = "" if message.endswith("?") else "."
            complain(_sentence(f"{message}{end} See {command} --help."))
        code = error.exit_code
    except (typer.Abort, KeyboardInterrupt) as error:  # before a verb began; Typer turns the second into the first
        complain("Stopped.")
        code = interrupts.exit_code(error.__context__ or error)
    interrupts.uninstall()
    gc.freeze()  # saves half a second: the interpreter's last collections would walk through all of PyTorch
    sys.exit(code if isinstance(code, int) else 0)
