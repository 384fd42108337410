"""How far one merge can move attention: a bound from key and value distances and degrees.

Let a cluster's members have keys k_i, values v_i, degrees n_i (N = sum n_i), centroid k and mean value v, and let a
query q with scale s give the rest of the cache the mean output r and the cluster the merged weight

    p = N exp(s q.k) / (Z_rest + N exp(s q.k)).

Write d_i = s q.(k_i - k). Then sum n_i d_i = 0 and |d_i| <= e with e = s |q| max_i |k_i - k|. Exact attention replaces
N by W = sum n_i exp(d_i), and v by v* = sum n_i exp(d_i) v_i / W. With rho = W / N:

- Jensen gives rho >= 1, and as exp lies below its chord on [-e, e] and the d_i average to 0, rho <= cosh e.
- The exact weight is p* = rho p / (1 - p + rho p) <= min(1, p cosh e), and p* - p <= p (1 - p) (cosh e - 1).
- v* - v = sum (n_i / N) (exp(d_i) / rho - 1) (v_i - v), and |exp(d_i) / rho - 1| <= exp(e) - 1.

The exact output is (1 - p*) r + p* v*, the merged one (1 - p) r + p v, so their distance is at most

    p (1 - p) (cosh e - 1) |v - r|  +  min(1, p cosh e) (exp(e) - 1) sum (n_i / N) |v_i - v|.

Assumptions: exact arithmetic; one merge (the errors of several, one after the other, add up at most); k and v are the
degree-weighted means. Equal keys give e = 0 and no error, whatever the values; for small e the first term is of second
order in e.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_error_bound(spread: Tensor, weight: Tensor, value_to_rest: Tensor, value_spread: Tensor) -> Tensor:
    """Largest distance between the attention outputs with and without one merge (see the module's text).

    Args:
        spread: e >= |d_i|, the largest shift of a member's logit: s |q| max_i |k_i - k| holds for every query of that
            length; max_i |s q.(k_i - k)|, where the query is known, is much smaller.
        weight: p, the cluster's share of the attention after the merge, in [0, 1].
        value_to_rest: |v - r|, from the cluster's mean value to the output of everything else.
        value_spread: sum (n_i / N) |v_i - v|, the mean distance of the members' values from their mean.

    All arguments broadcast; float64 recommended. Never NaN: what does not count (a weight or a distance of 0) adds
    nothing, and where exp(spread) leaves the type there is no bound on what does, so the result is infinite.

    >>> merge_error_bound(*torch.tensor([0.0, 0.5, 1.0, 3.0]))
    tensor(0.)
    """
    growth = spread.cosh()
    moved = _times(
        weight * (1 - weight) * value_to_rest, growth - 1, weight * (1 - weight) * (growth - 1) * value_to_rest
    )
    share = torch.where(weight > 0, weight * growth, weight).clamp(max=1)
    turned = _times(share * value_spread, torch.expm1(spread), share * torch.expm1(spread) * value_spread)
    return moved + turned


def _times(factor: Tensor, growth: Tensor, product: Tensor) -> Tensor:
    """``product`` of the first two, and 0 where a factor of 0 meets a growth without bound."""
    return torch.where((factor == 0) & growth.isinf(), torch.zeros_like(product), product)
