"""Run through all model families, and print or write what became of each: the page docs/families.md.

python tests/integrations/sweep.py [family ...] [--write docs/families.md]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from sweep_families import Family, families
from sweep_run import COMPRESSORS, Outcome, cell
from sweep_table import CELLS, page


def swept(family: Family) -> dict[tuple[Family, str, bool], list[Outcome]]:
    """The outcomes of a family's four cells, one per compressor."""
    return {
        (family, attention, enabled): [cell(family, attention, enabled, name) for name in COMPRESSORS]
        for attention, enabled in CELLS
    }


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="family", help="model types or rows; default: all")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    options = parser.parse_args()
    wanted = [row for row in families() if not options.only or {row.name, row.model_type} & set(options.only)]
    if not wanted:
        parser.error(f"no family is called {' or '.join(options.only)}")
    if options.write and options.only:
        parser.error("--write takes all families; leave out the names")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    outcomes, failures, begun = {}, 0, time.monotonic()
    for family in wanted:
        outcomes |= (new := swept(family))
        for (_, attention, enabled), told in new.items():
            for name, outcome in zip(COMPRESSORS, told, strict=True):
                failures += not outcome.fine
                if options.only or not outcome.fine:
                    where = (
                        f"{family.name} ({family.how}), {attention}, {'enable' if enabled else 'cache alone'}, {name}"
                    )
                    print(
                        f"{where}: {outcome.kind}, {outcome.distance:.1e} {outcome.stage} {outcome.reason}", flush=True
                    )
    print(f"{len(wanted)} families in {time.monotonic() - begun:.0f} s, {failures} failures")
    if options.write:
        options.write.write_text(page(outcomes, transformers.__version__))
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
