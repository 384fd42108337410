"""One rank of the tensor-parallel test, run by torchrun; and the run of one process that it is compared with.

    torchrun --nproc-per-node 2 tests/integrations/tensor_parallel.py MODEL_FOLDER RESULT_FOLDER

Every rank writes ``rank<n>.pt``: per case the generated tokens, the logits of every step and every layer's state.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from centroidkv import Compressor, presets
from centroidkv.integrations.transformers import CentroidCache
from centroidkv.matching import Evict
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.schedule import FewestRounds
from centroidkv.similarity import Cosine

NEW = 24


def cases():
    """Compressors by name: those that decide per head, then those that look at all heads together."""
    return {
        "centroidkv": presets.centroidkv(0.25),
        "distinctive": presets.distinctive(0.25),
        "knorm": presets.knorm(0.25),
        "mean of heads": Compressor.builder()
        .preserve(Sinks(4), Recent(16))
        .similarity(Cosine(heads="mean"))
        .budget(0.25)
        .build(),
        "passages": Compressor.builder()
        .preserve(Sinks(4), Recent(16), Distinctive("passages", share=1.0))
        .matching(Evict())
        .schedule(FewestRounds())
        .budget(0.25)
        .build(),
        "balanced": presets.balanced(0.25),
    }


def save_model(folder):
    """A random Llama of 4 KV heads and 8 query heads, with peaky attention."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 8
    model.save_pretrained(folder)


@torch.no_grad()
def run(model, compressor):
    """Tokens ``[NEW]``, logits ``[NEW, V]`` and the positions of every layer's slots; or the error's name and text."""
    ids = torch.randint(3, 101, (1, 400), generator=torch.Generator().manual_seed(7))
    cache = CentroidCache(compressor, interval=8)
    try:
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids),
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    except ValueError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    states = [layer.growing.state for layer in cache.layers]
    return {
        "tokens": out.sequences[0, 400:],
        "logits": torch.cat(out.logits),
        "positions": [state.positions for state in states],
        "degrees": [state.degree for state in states],
    }


def main(folder, results):
    import transformers
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    plan = DistributedConfig(tp_plan="auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=plan)
    model.eval()
    attention = model.model.layers[0].self_attn
    weight = attention.k_proj.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    found = {name: run(model, compressor) for name, compressor in cases().items()}
    found["local key rows"] = local.shape[0]
    torch.save(found, Path(results) / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
