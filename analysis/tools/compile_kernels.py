"""What the Triton kernels cost on GPUs that are not here: registers, spills, shared memory, instructions.

python -m analysis compile_kernels [--targets sm_90 gfx942] [--only "d128 bf16"] [--json FILE]

Every configuration that a call uses on its own (``cases()`` of each ``triton.py``) is compiled ahead of time, for
aligned pointers and strides that are multiples of 16. NVIDIA: counted by cuobjdump of the Triton package. AMD: read off
the assembly. Spilled bytes are stack and local memory (AMD: scratch), where registers go that did not fit.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from analysis.tools.store import environment, write_json
from centroidkv.errors import BackendError
from centroidkv.kernels import INTERPRET, KernelCase

MODULES = (
    "centroidkv.matching.triton",
    "centroidkv.aggregate.triton",
    "centroidkv.rounds.triton",
    "centroidkv.attention.triton",
    "centroidkv.attention.paged.triton",
)
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes: registers per thread, bytes, and instructions in its code."""

    kernel: str
    target: str
    default: bool
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: int
    seconds: float


def all_cases() -> list[KernelCase]:
    """The cases of all kernels.

    Raises:
        BackendError: Triton interprets kernels in this process, so there is nothing to compile; or it is not installed.
    """
    if os.environ.get(INTERPRET) == "1":
        raise BackendError(
            f"kernels were to be compiled, but {INTERPRET}=1 makes Triton define them as NumPy code; unset it "
            f"(env -u {INTERPRET} python -m analysis compile_kernels)"
        )
    if importlib.util.find_spec("triton") is None:
        raise BackendError("kernels were to be compiled, but the package triton is not installed; pip install triton")
    return [case for name in MODULES for case in importlib.import_module(name).cases()]


def compile_case(case: KernelCase, target: str) -> Resources:
    """Compile one case for one target and count."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel: Any = case.kernel
    names = kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.signature[name] for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name] == "i64" or signature[name].startswith("*")
    }
    start = time.perf_counter()
    compiled = triton.compile(
        ASTSource(kernel, signature, dict(case.constants), aligned),
        target=GPUTarget(*TARGETS[target]),
        options={"num_warps": case.warps, "num_stages": case.stages},
    )
    seconds = time.perf_counter() - start
    counts = _count_amd(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _count_nvidia(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    return Resources(case.name, target, case.default, case.warps, *counts[:2], shared, counts[2], round(seconds, 2))


def _count_nvidia(cubin: bytes) -> tuple[int, int, int]:
    """Registers, spilled bytes and instructions of a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    return found["REG"], found["STACK"] + found["LOCAL"], sum(line != "NOP" for line in lines)


def _count_amd(assembly: str) -> tuple[int, int, int]:
    """Vector registers (accumulation registers included), scratch bytes and instructions of AMD assembly."""
    registers, scratch = (
        int(re.search(rf"\.{name}:\s*(\d+)", assembly).group(1))  # type: ignore[union-attr]
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    lines = re.findall(r"^\s+((?:s|v|ds|global|buffer|flat|scratch)_\w+)", assembly, re.MULTILINE)
    return registers, scratch, sum(line != "s_nop" for line in lines)


def compile_all(cases: list[KernelCase], targets: list[str]) -> Iterator[Resources]:
    """Every case for every target."""
    from tqdm import tqdm

    pairs = [(case, target) for target in targets for case in cases]
    for case, target in tqdm(pairs, file=sys.stderr, leave=False, disable=None):
        yield compile_case(case, target)


def main() -> None:
    """Compile, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=list(TARGETS))
    parser.add_argument("--only", default="", help="only kernels whose name matches this regular expression")
    parser.add_argument("--json", type=Path, help="write the table there")
    options = parser.parse_args()
    try:
        cases = [case for case in all_cases() if re.search(options.only, case.name)]
    except BackendError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        found = list(compile_all(cases, options.targets))
    print(json.dumps({**environment(), "triton": version("triton")}) + "\n")
    spilling = [f"{one.kernel} on {one.target}" for one in found if one.default and one.spilled_bytes]
    print(f"default configurations that spill: {', '.join(spilling) or 'none'}\n")
    from centroidkv.cli.demo import format_table  # which imports transformers: not before a refusal

    columns = ("kernel", "target", "warps", "registers", "spilled_bytes", "shared_bytes", "instructions", "seconds")
    rows = [[str(getattr(one, column)) for column in columns] for one in found]
    print(format_table([column.replace("_", " ") for column in columns], rows))
    if options.json:
        versions = {**environment(), "triton": version("triton")}
        write_json(options.json, {"environment": versions, "kernels": [asdict(one) for one in found]})


if __name__ == "__main__":
    main()
