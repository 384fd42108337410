"""Entry point of the ``centroidkv`` command."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence

COMMANDS = {
    "demo": "compress a real model's cache; print what it saved and what it cost",
    "generate": "generate text from your model and prompt with a compressed cache",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (default: the command line) and run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="centroidkv", description="Shrink the KV cache of large language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    try:
        modules = {name: importlib.import_module(f"centroidkv.cli.{name}") for name in COMMANDS}
    except ImportError as error:
        print(f"centroidkv: {error}. The command needs more packages: pip install 'centroidkv[demo]'", file=sys.stderr)
        return 2
    for name, help_text in COMMANDS.items():
        modules[name].add_arguments(commands.add_parser(name, help=help_text, description=help_text))
    options = parser.parse_args(arguments)
    # One progress bar is ours; those of loading weights would break into it.
    sys.modules["transformers"].utils.logging.disable_progress_bar()
    # transformers 5.24 renames past_key_values to cache but accepts both until 6.0; the old name works everywhere.
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    try:
        return int(modules[options.command].run(options))
    except (OSError, ValueError) as error:
        print(f"centroidkv: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
