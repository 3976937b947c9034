"""Shell completion: click's for verbs, options and choices; names of registries; paths for everything else."""

from __future__ import annotations

import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from torchwright.core.json_file import read_json
from torchwright.core.registry import added

VARIABLE = "_TORCHWRIGHT_COMPLETE"
"""The environment variable by which a shell asks."""


class _OrPaths(ShellComplete):
    """Completes a value that nothing is known of as a path, as `complete -o default` does in Bash."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        found = super().get_completions(args, incomplete)
        if found or not args or incomplete.startswith("-"):
            return found
        return [CompletionItem(incomplete, type="file")]


class _Bash(_OrPaths, BashComplete):
    """Takes `--option=value` as Bash gives it: in three words, since `=` breaks words there."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        return [word for word in args if word != "="], "" if incomplete == "=" else incomplete


class _WholeWord(_OrPaths):
    """Completes `--option=value` for a shell that replaces the whole word: with the option in front."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        found = super().get_completions(args, incomplete)
        name, equals, _ = incomplete.partition("=")
        if not equals or not name.startswith("-"):
            return found
        return [CompletionItem(f"{name}={item.value}", type=item.type, help=item.help) for item in found]


class _Zsh(_WholeWord, ZshComplete):
    pass


class _Fish(_WholeWord, FishComplete):
    pass


def install() -> None:
    """Replace click's completion classes, where a shell asks this process for completions."""
    if VARIABLE in os.environ:
        for each in (_Bash, _Zsh, _Fish):
            add_completion_class(each)


def techniques(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the techniques that begin so; torch is not imported."""
    from torchwright.cli.registries import BUILTINS

    names = [row["name"] for row in read_json(BUILTINS)["techniques"]]
    return [name for name in [*names, *added("torchwright.techniques")] if name.startswith(incomplete)]


def targets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the export targets that begin so; torch is not imported."""
    from torchwright.exporter.base import exports

    return [name for name in exports.names() if name.startswith(incomplete)]
