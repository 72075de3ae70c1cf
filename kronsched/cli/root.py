"""The top-level command and the one place where an exception becomes a line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence

import click

import kronsched
from kronsched.cli.ablate import ablate
from kronsched.cli.bench import bench
from kronsched.cli.compare import compare
from kronsched.cli.doctor import doctor
from kronsched.cli.emit import emit
from kronsched.cli.plugins import import_plugin
from kronsched.cli.records import replay, report, show, thin
from kronsched.cli.select import select
from kronsched.cli.simulate import simulate
from kronsched.cli.space import space
from kronsched.cli.strategies import strategies
from kronsched.cli.train import train
from kronsched.cli.tune import tune
from kronsched.cli.versus import versus
from kronsched.cli.worker import worker
from kronsched.errors import KronschedError, UserError

DONE, FAILED, BAD_ARGUMENTS, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(kronsched.__version__, prog_name="kronsched")
@click.option("--plugin", "plugins", multiple=True, metavar="MODULE", help="Import a module (or .py file) that registers parts.")
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
def cli(plugins: tuple[str, ...], debug: bool) -> None:
    """Search, measure and ship fast kernels for structured matmul programs."""
    for plugin in plugins:
        import_plugin(plugin)


for _command in (tune, replay, show, space, emit, bench, report, compare, thin, simulate, strategies, train, worker, doctor):
    cli.add_command(_command)
cli.add_command(select)
cli.add_command(versus)
cli.add_command(ablate)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 bad arguments, 130 interrupted, 143 terminated."""
    args = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(args))


def _terminate(*_: object) -> None:
    """End as after an exception, so that worker processes and temporary folders go as well. A second signal kills at once."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(TERMINATED)


def run(args: list[str]) -> int:
    """Run the command line and return the exit code. A user's mistake is one line on stderr, never a traceback."""
    debug = "--debug" in args
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = cli.main(args, prog_name="kronsched", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except click.exceptions.NoArgsIsHelpError as e:
        e.show()
        return BAD_ARGUMENTS
    except click.UsageError as e:
        help_command = f" (see {e.ctx.command_path} --help)" if e.ctx else ""
        return _fail(e.format_message() + help_command, BAD_ARGUMENTS)
    except click.ClickException as e:
        return _fail(e.format_message(), BAD_ARGUMENTS)
    except UserError as e:
        return _fail(str(e), BAD_ARGUMENTS)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing to say, and nobody to say it to.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KronschedError as e:
        return _fail(str(e), FAILED)
    except Exception as e:
        if debug:
            traceback.print_exc()
            return FAILED
        return _fail(f"unexpected {type(e).__name__}: {e} (run `kronsched --debug …` for the traceback)", FAILED)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"kronsched: warning: {message}", err=True)


def _fail(message: str, code: int) -> int:
    click.echo("kronsched: " + " ".join(message.split()), err=True)
    return code
