"""`kvplan completion`: what makes a shell complete the command's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from kvplan.cli.common import COMPLETE_VARIABLE, PROGRAM, ExitCode

if TYPE_CHECKING:
    from click.shell_completion import ShellComplete


@click.command("completion", epilog='Example: eval "$(kvplan completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> ExitCode:
    r"""Print a script that lets SHELL complete commands, options, plans and transports.

    \b
    bash: eval "$(kvplan completion bash)"        in ~/.bashrc
    zsh:  eval "$(kvplan completion zsh)"         in ~/.zshrc, after compinit
    fish: kvplan completion fish > ~/.config/fish/completions/kvplan.fish
    """
    made: type[ShellComplete] | None = get_completion_class(shell)
    assert made is not None, "click has these three"
    group = context.find_root().command
    # Not its `source()`, which runs the shell to see which version it has.
    script = made(group, {}, PROGRAM, COMPLETE_VARIABLE)
    click.echo(script.source_template % script.source_vars())
    return ExitCode.OK
