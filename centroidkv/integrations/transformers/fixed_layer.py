"""A compressed layer of constant size, and how a compiled decoding step hands its degrees to the attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from centroidkv.cache import FixedState
from centroidkv.errors import BackendError
from centroidkv.integrations.transformers.attention import FIXED_DEGREE, takes_tags
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.integrations.transformers.release import STOCK_TAKES_BIAS, query_groups, query_length


class FixedLayer(CentroidLayer):
    """A FixedState behind transformers' cache-layer interface, which says that it may be compiled."""

    is_compileable = True
    growing: FixedState

    def __init__(self, growing: FixedState) -> None:
        super().__init__(growing)

    def ready_for(self, keys: Tensor) -> bool:
        """Whether this is a decoding step: one token, and there are buffers to write it to."""
        return keys.shape[2] == 1 and self.growing.slots is not None

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """(C, 0) for decoding steps, whatever the number of tokens; as in a growing layer for longer pieces.

        Offset 0 makes a causal mask hide the empty slots as long as slots are tokens, and nothing afterwards: from then
        on degrees alone decide.
        """
        if query_length(query) == 1 and self.growing.slots is not None:
            return self.growing.capacity, 0
        return super().get_mask_sizes(query)

    def get_seq_length(self) -> Any:
        """Tokens seen: a tensor once there are buffers (as in transformers' static layers), so that it is no constant
        of a compiled step. A copy, because the next step counts on in place.
        """
        return self.growing.logical if self.growing.slots is None else self.growing.slots.tokens.clone()


def check_route(config: Any, shared: dict[str, Any] | None, padded: bool) -> dict[str, Any]:
    """``shared``, if the model can be handed the degrees of a fixed-capacity cache through it in a compiled step.

    Raises:
        BackendError: says what would work.
    """
    name = config._attn_implementation
    if shared is None:
        raise BackendError(
            "capacity='fixed' hands the degrees over in the keyword arguments of the attention module, which this "
            "transformers release (before 5.24) or model does not pass to the cache; use capacity='growing'"
        )
    if takes_tags(config):
        return shared
    use_ours = "call enable(model) from centroidkv.integrations.transformers around generate"
    if name != "sdpa" or not STOCK_TAKES_BIAS:
        raise BackendError(f"capacity='fixed' with attention {name!r}: {use_ours} (for 'sdpa' and 'eager')")
    if padded:
        raise BackendError(
            "the batch is padded, and stock attention would apply the padding mask, whose columns are tokens, to the "
            f"slots of the cache; {use_ours}, which masks by slot"
        )
    return shared


def hand_over(degree: Tensor, shared: dict[str, Any], config: Any, dtype: Any) -> None:
    """Put ``degree [B, H, C]`` where the attention of this step finds it. Traceable."""
    if takes_tags(config):
        shared[FIXED_DEGREE] = degree
        return
    groups = query_groups(config)
    bias = degree.log().to(dtype).repeat_interleave(groups, dim=1)[:, :, None, :]
    own = shared.get("position_bias")
    shared["position_bias"] = bias if own is None else bias + own
