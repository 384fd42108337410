"""All laws that a matcher has to keep: those of every matcher, and those of its kind."""

from __future__ import annotations

from typing import Any

from centroidkv.testing.bipartite_laws import BIPARTITE_LAWS, GREEDY_LAWS, chunks_decide_alone
from centroidkv.testing.law import check_all
from centroidkv.testing.matching_laws import laws_of
from centroidkv.testing.prepare_laws import laws_of_preparing
from centroidkv.traits import MatcherTraits


def check_matcher(matcher: Any, examples: int | None = None, *, greedy: bool | None = None) -> None:
    """Check a matcher against every law of its family.

    Args:
        matcher: the stage; its declared capabilities (``needs_partition``, ``capacity``, ``exact``, ``evicts``,
            ``mass``, ``weigh``, ``prepare``, ``pools_heads``, ``needs_queries``) choose the laws.
        examples: tries per law.
        greedy: whether it promises to carry out the most similar edges of a head, ties to the earliest. Default: yes
            if it needs a partition and does not declare another ``rank`` than "sequence".

    >>> from centroidkv.matching import BipartiteSoftMatching
    >>> check_matcher(BipartiteSoftMatching(), examples=10)
    """
    said = MatcherTraits.of(matcher)
    bipartite = said.needs_partition
    if greedy is None:
        greedy = bipartite and said.rank == "sequence"
    more = (BIPARTITE_LAWS if bipartite else ()) + (GREEDY_LAWS if greedy else ())
    chunks = (chunks_decide_alone,) if bipartite and said.rank == "chunk" else ()
    check_all(laws_of(matcher) + laws_of_preparing(matcher) + more + chunks, matcher, examples)
