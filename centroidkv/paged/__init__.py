"""Clustered caches in pages, without any engine: what a server needs to know and do, in plain tensors.

A server keeps the keys and values of all requests in one pool of blocks. :class:`ServingPlan` says when a request is
clustered and which of its blocks then hold centroids; :class:`Pages` reads and writes them; :func:`lay_out` cuts one
step's tokens where events fall between them; :func:`attend` attends; :func:`cluster` carries an event out. An engine's
adapter (:mod:`centroidkv.integrations.vllm`) translates its own records into these, and nothing else.
"""

from centroidkv.paged.attend import attend, causal_attention
from centroidkv.paged.batch import Batch, lay_out
from centroidkv.paged.cluster import cluster
from centroidkv.paged.pages import PageDatum, Pages, lasting_data, slot_bytes
from centroidkv.paged.plan import Event, Region, ServingPlan

__all__ = [
    "Batch", "Event", "PageDatum", "Pages", "Region", "ServingPlan",
    "attend", "causal_attention", "cluster", "lasting_data", "lay_out", "slot_bytes",
]  # fmt: skip
