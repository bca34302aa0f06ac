"""Entry point: the commands, and the one place that turns errors into one line and an exit code."""

from __future__ import annotations

import sys

import typer

from pdserve import __version__
from pdserve.cli.adapters import app as adapters
from pdserve.cli.certificates import certificates
from pdserve.cli.conformance import conformance
from pdserve.cli.console import fail
from pdserve.cli.demo import demo
from pdserve.cli.doctor import doctor
from pdserve.cli.drain import drain
from pdserve.cli.generate import generate
from pdserve.cli.health import health
from pdserve.cli.ledger import ledger_command
from pdserve.cli.pools import down, up
from pdserve.cli.scale import scale, update
from pdserve.cli.status import status
from pdserve.cli.template import config
from pdserve.cli.top import top
from pdserve.cli.verify import verify
from pdserve.errors import ConfigError, PdserveError

HELP = """Disaggregated prefill/decode serving for language models.

\b
Start two worker pools and a router on this machine, ask, look, stop:
    pdserve up &
    pdserve generate --chat "What is the capital of France?"
    pdserve status
    pdserve down

Without any server: pdserve generate --local "Once upon a time"
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(up)
app.command()(generate)
app.command()(status)
app.command()(top)
app.command()(down)
app.command()(scale)
app.command()(update)
app.command()(demo)
app.command()(config)
app.command()(certificates)
app.command()(verify)
app.command()(conformance)
app.command()(health)
app.command()(doctor)
app.command()(drain)
app.command("ledger")(ledger_command)
app.add_typer(adapters, name="adapters")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Runs a command. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted."""
    try:
        app()
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is not an error.
        sys.stderr.close()
    except PdserveError as error:
        fail(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
