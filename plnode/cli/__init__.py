"""The command line: one file a command, thin; what a command does lives in the rooms.

Commands are loaded when they are called, not when the program starts: `plnode status` must answer at once, and torch alone
takes seconds to import.  The table below is therefore all that `plnode --help` looks at.

`main` is the one place where an exception becomes an exit code (`plnode/exits.py`): wrong input is one message without a
traceback, an interrupt is quiet, anything else is our fault and keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

import click

from plnode.exits import BadInput, ExitCode, explain
from wire.identity import KeyFileError

__all__ = ["main", "program"]

_COMMANDS = {
    "run": "Make, sign, plan and show run manifests.",
    "seed": "Run a seed: a node that only introduces peers.",
    "seeds": "Check and sign seed lists.",
    "join": "Join a run and train one stage of it.",
    "status": "Show what the node on this machine is doing.",
    "doctor": "Check whether this machine can take part in a run.",
    "receipts": "Check logs of receipts, and compute points from them.",
    "bench": "Measure the line to another member of a run.",
    "demo": "Train a whole swarm on this machine, end to end.",
    "identity": "Show or make this node's identity.",
    "exits": "Explain exit codes.",
}


class _Program(click.Group):
    """A group whose commands are imported on demand: `plnode/cli/<name>.py` holds `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"plnode.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="plnode", prog_name="plnode")
def program() -> None:
    """Train one large language model together: every node holds one stage and talks to its peers over its own encrypted protocol.

    \b
    Try it on this machine:
      plnode demo
    \b
    Host a run:
      plnode run init --out my-run
      plnode seed --listen 0.0.0.0:4000 --data seed-data
    \b
    Take part in one:
      plnode join --seeds seeds.txt --manifest run.signed --data my-data
    \b
    Exit codes: 0 done, 1 fault of this program, 2 wrong input, 3 a node died, 4 refused by the swarm, 5 no progress, 6 out of
    memory, 7 diverged, 8 cannot take part (doctor), 9 unsound receipts, 130 interrupted, 143 terminated. A restart helps after 1, 3
    and 5. More: plnode exits
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    _end_by_sigterm()
    try:
        result = program.main(args=arguments, prog_name="plnode", standalone_mode=False)
    except click.exceptions.Abort:
        return ExitCode.INTERRUPTED
    except click.ClickException as problem:
        problem.show()
        return problem.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except (BadInput, KeyFileError) as problem:
        return _complain(problem)
    except BrokenPipeError:
        # The reader of our output went away (`plnode run show | head`): not worth a word; Python must not try to flush again.
        sys.stderr.close()
        return 128 + signal.SIGPIPE
    code = int(result) if isinstance(result, int) else ExitCode.OK
    if code not in (ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        click.echo(f"plnode: exit code {explain(code)}", err=True)
    return code


def _end_by_sigterm() -> None:
    """As process 1 of a container a program without a handler does not see SIGTERM at all (pid_namespaces(7)): Docker would wait
    for its ten seconds and kill.  This one serves until `run_until_signal` has something to leave."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def _complain(problem: BaseException) -> int:
    click.echo(f"plnode: {problem}", err=True)
    return ExitCode.BAD_INPUT
