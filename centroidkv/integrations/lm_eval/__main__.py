"""lm-eval's command line, knowing the model ``centroidkv``: ``python -m centroidkv.integrations.lm_eval ...``."""

from __future__ import annotations

import sys
import warnings

from lm_eval.__main__ import cli_evaluate

import centroidkv.integrations.lm_eval  # noqa: F401 - registers the model
from centroidkv.errors import CentroidKVError


def main() -> int:
    """Run lm-eval's own command on this process's arguments; 2 after one of our errors, whose message is printed."""
    # transformers 5.24 renames past_key_values to cache but accepts both until 6.0; the old name works everywhere.
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    try:
        cli_evaluate()
    except CentroidKVError as error:
        print(f"centroidkv: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
