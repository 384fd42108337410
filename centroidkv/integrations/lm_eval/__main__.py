"""lm-eval's command line, knowing the model ``centroidkv``: ``python -m centroidkv.integrations.lm_eval ...``."""

from __future__ import annotations

import sys
import warnings

from lm_eval.__main__ import cli_evaluate

import centroidkv.integrations.lm_eval  # noqa: F401 - registers the model
from centroidkv.errors import CentroidKVError
from centroidkv.integrations.process import finish


def main() -> int:
    """Run lm-eval's own command on this process's arguments; returns the exit status.

    After one of our errors, whose message is printed, 2; after Ctrl-C 130, after SIGTERM 143, where nobody reads the
    output 141, all without a traceback. Errors of lm-eval's own are left to it.
    """
    return finish("centroidkv", _run, errors=CentroidKVError)


def _run() -> int:
    with warnings.catch_warnings():
        # transformers 5.24 renames past_key_values to cache but accepts both until 6.0; the old name works everywhere.
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
