"""`paceline advise`: predictions of models for training that has not happened yet; without a verb, what to train with."""

from __future__ import annotations

from typing import Any

import typer
import typer.core

from paceline.cli.advise_layers import layers
from paceline.cli.advise_training import training
from paceline.cli.backups import backups
from paceline.cli.console import page_about, verbs

_WITHOUT_VERB = "training"


class _Unnamed(typer.core.TyperCommand):
    """The default verb, which help and errors do not mention."""

    class context_class(typer.core.TyperCommand.context_class):  # noqa: N801
        @property
        def command_path(self) -> str:
            return super().command_path.rstrip()


class _VerbsOrProgram(typer.core.TyperGroup):
    """Treats an unknown verb as a program to advise on, so that `paceline advise train.py:train` works."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [_WITHOUT_VERB, *(args or ["--help"])]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == _WITHOUT_VERB else name, command, rest


advise = verbs("Which algorithm, how many workers; which layers to divide; how many backups.", cls=_VerbsOrProgram)
advise.command(_WITHOUT_VERB, cls=_Unnamed, hidden=True, epilog=page_about("advise"))(training)
advise.command(epilog=page_about("hybrid"))(layers)
advise.command(epilog=page_about("advise"))(backups)


@advise.callback()
def _about() -> None:
    """Choose from models of how training will go."""
