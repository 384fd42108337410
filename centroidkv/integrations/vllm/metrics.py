"""What a worker has clustered so far, in its log and for ``/metrics``.

A worker is another process than the server that answers ``/metrics``. Prometheus joins processes through files in the
folder that ``PROMETHEUS_MULTIPROC_DIR`` names; where a server is started with it, these counters appear beside vLLM's
own. (vLLM's hook for statistics in the server's process would need no folder, but it switches statistics on in every
server on the machine by being installed.)
"""

from __future__ import annotations

import time

from prometheus_client import REGISTRY, Counter

from centroidkv.paged.plan import Event

SECONDS_BETWEEN_LINES = 10.0
PREFIX = "centroidkv:"
COUNTERS = {
    "clustered_requests": "Requests whose cache was clustered at least once.",
    "clusterings": "Compressions of a request's cache.",
    "returned_blocks": "Blocks that clustering made free, whether or not another request shared them.",
    "clustering_seconds": "Seconds spent compressing.",
}


class ClusteringStats:
    """Counts events of one worker; the first rank counts for all, whose events are the same.

    Args:
        model: name for the label ``model_name``, as in vLLM's own metrics.
    """

    def __init__(self, model: str) -> None:
        self.requests = self.events = self.blocks = 0
        self.seconds = 0.0
        self._clustered: set[str] = set()
        self._told = 0.0
        self._counters = {name: _counter(name, text).labels(model_name=model) for name, text in COUNTERS.items()}

    def note(self, request_id: str, event: Event, seconds: float) -> None:
        """One compression of a request."""
        first = request_id not in self._clustered
        self._clustered.add(request_id)
        returned = event.source_blocks - event.target_blocks
        self.requests, self.events = self.requests + first, self.events + 1
        self.blocks, self.seconds = self.blocks + returned, self.seconds + seconds
        for name, more in zip(COUNTERS, (first, 1, returned, seconds), strict=True):
            self._counters[name].inc(more)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._clustered.discard(request_id)

    def line(self) -> str | None:
        """A line for the log, if something happened and the last one is a while ago."""
        now = time.monotonic()
        if not self.events or now - self._told < SECONDS_BETWEEN_LINES:
            return None
        self._told = now
        return (
            f"Clustered {self.requests} requests {self.events} times so far, returned {self.blocks} blocks, "
            f"spent {self.seconds:.1f} s"
        )


def _counter(name: str, text: str) -> Counter:
    """The counter of this name; a second engine in one process shares the first one's."""
    known = getattr(REGISTRY, "_names_to_collectors", {}).get(PREFIX + name)
    return known if isinstance(known, Counter) else Counter(PREFIX + name, text, ["model_name"])
