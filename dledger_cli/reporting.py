"""Reports errors as a sentence on standard error and an exit code."""

from __future__ import annotations

import errno

import click
from click.exceptions import NoArgsIsHelpError

from dledger.command_line.contexts import USED
from dledger.errors import ConfigError, DLedgerError
from dledger_cli.terminal import escaped_lines

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNKNOWN_OUTCOME = 3
EXIT_INTERRUPTED = 130
"""After Ctrl-C, as shells have it; a server stops gracefully instead, with 0."""
EXIT_CLOSED_PIPE = 141
"""When nobody reads the output any more (``| head``): as if SIGPIPE had ended the command."""
_CLICKS_OWN = ("Got unexpected ", "Invalid value", "Missing ", "No such ", "Option ")
"""How click's own messages begin, which it writes as sentences."""


class ErrorReportingGroup(click.Group):
    """Turns the project's errors into a sentence on standard error and an exit code; no traceback.

    ``writing`` names the commands after which an unknown outcome matters.
    """

    def __init__(self, *arguments: object, writing: frozenset[str] = frozenset(), **attributes: object) -> None:
        super().__init__(*arguments, **attributes)  # type: ignore[arg-type]  # click's own
        self._writing = writing

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Parse the options before the command."""
        try:
            return super().parse_args(context, arguments)
        except click.UsageError as error:
            _say(error)
            context.exit(error.exit_code)
        except BrokenPipeError:
            context.exit(EXIT_CLOSED_PIPE)

    def invoke(self, context: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(context)
        except click.ClickException as error:
            _say(error)
            context.exit(error.exit_code)
        except ConfigError as error:
            for problem in error.problems:
                _tell(problem)
            _say_context(context)
            context.exit(EXIT_USAGE)
        except DLedgerError as error:
            _tell(str(error))
            _say_context(context)
            unknown = error.outcome == "unknown" and context.invoked_subcommand in self._writing
            if unknown:
                click.echo("The outcome is unknown: it may or may not have happened. Check before you retry.", err=True)
            context.exit(EXIT_UNKNOWN_OUTCOME if unknown else EXIT_FAILED)
        except click.Abort as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # at a question
                click.echo(err=True)
                context.exit(EXIT_INTERRUPTED)
            raise
        except KeyboardInterrupt:
            context.exit(EXIT_INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE and error.filename is None:
                context.exit(EXIT_CLOSED_PIPE)
            if error.filename is None:
                raise
            _tell(f"{error.filename}: {error.strerror}")
            context.exit(EXIT_FAILED)


def _say(error: click.ClickException) -> None:
    """As click does it, but in the style of all other errors."""
    if isinstance(error, NoArgsIsHelpError):  # the help of a group of commands
        error.show()
        return
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n", err=True)
    text = error.format_message()
    if text.startswith(_CLICKS_OWN):
        text = text[0].lower() + text[1:]
    _tell(text)


def _tell(text: str) -> None:
    """Errors quote what others say."""
    click.echo(f"error: {escaped_lines(text)}", err=True)


def _say_context(context: click.Context) -> None:
    if USED in context.meta:
        name = context.meta[USED]
        click.echo(f"Context {name} was used: see `dledger context show {name}`.", err=True)
