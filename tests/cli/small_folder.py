"""A random Llama of one token per byte, with a chat template, in a folder: a model that loads in no time."""

from __future__ import annotations

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def small_folder(path):
    """Save the model and its tokenizer in ``path``, and return that."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=65536, bos_token_id=None,
        pad_token_id=fast.pad_token_id, eos_token_id=fast.eos_token_id,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.lm_head.weight.data[94:] = 0  # writes visible ASCII: no end, and no half of a character
    model.save_pretrained(path)
    fast.save_pretrained(path)
    return path
