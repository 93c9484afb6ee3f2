"""`flashrt-ros`: the command line. Each subcommand's module is imported only when it is used.

A subcommand is one line in COMMANDS and one click command elsewhere. Exit codes: 0 done, 1 refused
(the sentence says why), 2 wrong usage.
"""
from __future__ import annotations

import importlib
import importlib.util
import sys

import click

from flashrt_ros.core.errors import Refusal

_NODE = 'flashrt_ros.tools.verbs'
# subcommand -> (module, attribute); a module that this build lacks is not offered
COMMANDS: dict[str, tuple[str, str]] = {
    'serve': ('flashrt_ros.tools.serve', 'serve'),
    **{name: (_NODE, name) for name in (
        'execute', 'save', 'restore', 'rollback', 'drop', 'keep', 'status', 'start', 'stop',
        'pause', 'resume', 'reset')},
    'list': (_NODE, 'list_'),
    'verify': ('flashrt_ros.tools.verify', 'command'),
    'replay': ('flashrt_ros.tools.replay', 'command'),
    'inspect': ('flashrt_ros.tools.inspect_model', 'command'),
    'build': ('flashrt_ros.tools.build', 'command'),
    'report': ('flashrt_ros.tools.report', 'command'),
}


class LazyGroup(click.Group):
    """A group whose commands are imported by name, in the order of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands that this build has."""
        return [name for name, (module, _) in COMMANDS.items()
                if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module, attribute = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]
                        ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, with the nearest name when there is no such command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if near:
                error.message += f' Did you mean {near[0]!r}?'
            raise


@click.group(cls=LazyGroup, context_settings={'help_option_names': ['-h', '--help']})
@click.version_option(package_name='flashrt_ros')
def cli() -> None:
    """Serve a robot policy over ROS 2; save, restore and roll back its whole state."""


def main() -> None:
    """Run the command line; a refusal becomes one sentence and exit code 1."""
    try:
        cli(prog_name='flashrt-ros')
    except Refusal as refusal:
        click.secho(str(refusal), fg='red', err=True)
        sys.exit(1)


if __name__ == '__main__':
    main()
