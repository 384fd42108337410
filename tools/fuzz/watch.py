"""What must not grow while cases come and go: memory and threads."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

WARM_UP = 0.3
"""Share of the run in which memory may still settle: compiled kernels, arenas, tables that are filled."""
MARGIN = 48 << 20
"""Bytes that the resident set may move by afterwards: arenas of the allocator, found to move by 5 to 25 MiB."""
NEW_THREADS = 4
"""Threads of PyTorch's pools that may start after the warm-up."""


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def system_threads() -> int:
    """Threads of this process, PyTorch's own included."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


@dataclass
class Watch:
    """Memory and threads over a run of ``seconds``."""

    seconds: float
    start: float = field(default_factory=time.monotonic)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds since the start, bytes, threads)"""

    def look(self) -> None:
        """Note how much there is now, if the last look is a while ago."""
        now = time.monotonic() - self.start
        if self.samples and now - self.samples[-1][0] < min(10.0, self.seconds / 60):
            return
        gc.collect()
        self.samples.append((now, resident(), system_threads()))

    def growth(self) -> str | None:
        """What grew after the warm-up; None if nothing did.

        Memory: the least of the last quarter against the most of the quarter after the warm-up, so that neither one
        large case nor an arena that is given back late counts.
        """
        late = [sample for sample in self.samples if sample[0] >= WARM_UP * self.seconds]
        if len(late) < 8:
            return None
        quarter = len(late) // 4
        first, last = late[:quarter], late[-quarter:]
        grown = min(s[1] for s in last) - max(s[1] for s in first)
        if grown > MARGIN:
            return f"memory grew by {grown >> 20} MiB after the warm-up, over {MARGIN >> 20}: {self.line()}"
        threads = min(s[2] for s in last) - max(s[2] for s in first)
        if threads > NEW_THREADS:
            return f"{threads} threads were added after the warm-up: {self.line()}"
        return None

    def line(self) -> str:
        """Memory and threads over time, in one line."""
        step = max(1, len(self.samples) // 12)
        return ", ".join(f"{at:.0f} s {size >> 20} MiB {threads} threads" for at, size, threads in self.samples[::step])
