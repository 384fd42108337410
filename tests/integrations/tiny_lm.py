"""A random Llama of one token per byte, with a chat template, in a folder; and requests as lm-eval makes them."""

from __future__ import annotations

import torch
import transformers
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last or add_generation_prompt %}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_folder(path):
    """The model and its tokenizer, saved in ``path``; as a string."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=None,
        pad_token_id=fast.pad_token_id, eos_token_id=fast.eos_token_id,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 8  # peaky attention, so that a lost token shows in the text
    model.lm_head.weight.data[256:] = 0  # writes neither end nor padding
    model.save_pretrained(path)
    fast.save_pretrained(path)
    return str(path)


def prose(length, seed=0):
    letters = torch.randint(97, 123, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(map(chr, letters))


def niah(length, seed=0):
    return f"Memorize.\n{prose(length, seed)}\nWhat is the number? The number is"


def request(prompt, task="niah_single_1", doc=None, new=12, **gen):
    kwargs = {"until": [], "max_gen_toks": new, "do_sample": False, **gen}
    return Instance("generate_until", doc or {}, (prompt, kwargs), 0, (task, 0, 1))


def score_request(prompt, answer, task="niah_single_1"):
    return Instance("loglikelihood", {}, (prompt, answer), 0, (task, 0, 1))
