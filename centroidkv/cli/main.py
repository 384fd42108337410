"""Entry point of the ``centroidkv`` command."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from centroidkv.integrations.process import finish

COMMANDS = {
    "demo": "compress a real model's cache; print what it saved and what it cost",
    "generate": "generate text from your model and prompt with a compressed cache",
}


class Parser(argparse.ArgumentParser):
    """argparse's, which says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Status 2, as argparse has it."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (default: the command line) and run one command; returns the exit status.

    Whatever goes wrong is one line on stderr and a status: 2 after an error, 130 after Ctrl-C, 143 after SIGTERM, 141
    where nobody reads the output any more. ``--traceback`` shows where an error was raised. Called from Python it
    leaves warning filters, progress bars and signal handlers as they were.

    Raises:
        SystemExit: from argparse, after ``--help`` (0) or arguments that it refuses (2).
    """
    status = finish("centroidkv", lambda: _run(arguments))
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process ends: nobody is left to answer an interrupt
    return status


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="centroidkv", description="Shrink the KV cache of large language models.")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(dest="command", required=True)
    try:
        modules = {name: importlib.import_module(f"centroidkv.cli.{name}") for name in COMMANDS}
    except ImportError as error:
        raise ImportError(f"{error}. The command needs more packages: pip install 'centroidkv[demo]'") from error
    for name, help_text in COMMANDS.items():
        modules[name].add_arguments(commands.add_parser(name, help=help_text, description=help_text))
    options = parser.parse_args(arguments)
    with _quiet():
        try:
            return int(modules[options.command].run(options))
        except Exception:
            if options.traceback:
                traceback.print_exc()
            raise


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars but ours, and no warning about what we know, until the end of the block."""
    from transformers.utils import logging

    hub = logging.hf_hub_utils  # which has a switch of its own
    shown, hub_shown = logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    # One progress bar is ours; those of loading weights would break into it.
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # transformers 5.24 renames past_key_values to cache but accepts both until 6.0; the old name works
            # everywhere.
            warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
            yield
    finally:
        if shown:
            logging.enable_progress_bar()  # and the hub's with them
            if not hub_shown:
                hub.disable_progress_bars()


if __name__ == "__main__":
    sys.exit(main())
