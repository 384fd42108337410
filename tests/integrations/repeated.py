"""The plain model over a cache in which every centroid stands as often as its degree says: what ln N amounts to."""

from __future__ import annotations

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from centroidkv.integrations.transformers.layer import CentroidLayer


def repeated(cache, config, weigh=None):
    """A function ``(model, ids, tail, position_ids) -> logits`` of the plain model on a copy of ``cache`` as it is.

    ``weigh [T]``: what is added to the logits of each slot, hence of all its copies. ``tail [1, 1, L, L]``: the
    additive mask among the new tokens.
    """
    plain, biases = DynamicCache(config=config), []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, CentroidLayer):
            raise NotImplementedError("for models of full attention")
        state, total = layer.growing.state, layer.growing.logical
        counts = state.degree.round().long()

        def copies(x, counts=counts, total=total):
            rows = [
                [head.repeat_interleave(n, 0) for head, n in zip(row, of_row, strict=True)]
                for row, of_row in zip(x, counts, strict=True)
            ]
            # Rows of fewer tokens are filled up in front, where the mask below hides it.
            filled = [torch.stack([_filled(head, total) for head in row]) for row in rows]
            return torch.stack(filled)

        new = DynamicLayer()
        new.update(copies(state.keys), copies(state.values))
        plain.layers[index] = new
        slots = torch.zeros(state.slots) if weigh is None else weigh
        biases.append(copies(slots.expand(state.degree.shape)[..., None])[..., 0])

    def run(model, ids, tail, position_ids):
        groups = config.num_attention_heads // config.num_key_value_heads
        hooks = []
        for index, layer in enumerate(model.model.layers):
            bias = biases[index].repeat_interleave(groups, 1)[:, :, None].expand(-1, -1, ids.shape[1], -1)
            mask = torch.cat((bias, tail.expand(*bias.shape[:3], -1)), -1)

            def put(module, args, kwargs, mask=mask):
                return args, {**kwargs, "attention_mask": mask}

            hooks.append(layer.self_attn.register_forward_pre_hook(put, with_kwargs=True))
        try:
            return model(ids, past_key_values=plain, position_ids=position_ids).logits
        finally:
            for hook in hooks:
                hook.remove()

    return run


def _filled(head, total):
    return torch.cat((head.new_zeros(total - len(head), *head.shape[1:]), head))
