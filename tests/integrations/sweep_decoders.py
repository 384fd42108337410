"""What single decoders of the sweep need beside the common sizes, and other settings of some: as data."""

from __future__ import annotations

from typing import Any

from sweep_build import DROP

LATENT = {"num_key_value_heads": 4}  # heads are expanded from latents: as many keys as queries
MAMBA = {"mamba_d_head": 32, "mamba_expand": 2, "mamba_n_groups": 1}
FULL = ["full_attention", "full_attention"]
LINEAR_FIRST = ["linear_attention", "full_attention"]
LINEAR_HEADS = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
NO_WINDOW = {"sliding_window": None, "layer_types": DROP}
TINY_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16, "num_channels": 3,
}  # fmt: skip

BYTES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 260,
    "sliding_window": None,
}
DOTS3_TEXT = {
    **LATENT,
    "num_hidden_layers": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
    "swa_qk_rope_head_dim": 16,
    "shared_experts_intermediate_size": 32,
}
QWEN4_TEXT = {
    **LINEAR_HEADS,
    "layer_types": LINEAR_FIRST,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 1,
    "heads_per_ngram": 2,
}

DECODERS: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": {**LATENT, "layer_types": ["linear_attention", "full_attention"], "layer_group_size": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "blt": {
        "encoder_config": {**BYTES, "hidden_size_global": 64}, "decoder_config": {**BYTES, "hidden_size_global": 64},
        "global_config": {**BYTES, "hidden_size": 64}, "patcher_config": BYTES, "vocab_size": 260,
        "patch_in_forward": False, "patching_mode": "static", "max_patch_length": 4,
        "encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [2, 3], "cross_attn_k": 2,
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        for kind in ("sliding_attention", "full_attention")}},
    "cpmant": {"dim_head": 16, "prompt_length": 4, "prompt_types": 4, "segment_types": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 64},
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention"], "num_key_value_heads": 1,
        "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2, "head_dim": 32,
    },
    "doge": {"sliding_window": None},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3,
             "layer_types": ["full_attention", "full_attention", "full_attention"]},
    "dots3_note": {
        "text_config": DOTS3_TEXT,
        "vision_config": {**TINY_VISION, "adapter_in_dim": 32, "adapter_out_dim": 64, "pyramid_num_routed": [0]},
        "audio_config": {"adapter_out_dim": 64, "adapter_input_size": 64, "num_key_value_heads": 4},
    },
    "dots3_note_text": DOTS3_TEXT,
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **TINY_VISION}, "mm_tokens_per_image": 4},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
                     "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_assistant": {"text_config": {
        "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 2}, "backbone_hidden_size": 64},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}, "backbone_hidden_size": 64},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "got_ocr2": {"text_config": {"model_type": "qwen2", **NO_WINDOW}},
    "inkling2_loop_text": {"unpadded_vocab_size": 128},
    "inkling2_text": {"unpadded_vocab_size": 128, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
                      "swa_head_dim": 16, "sliding_window_size": 32, "rel_extent": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {**LATENT, "layer_types": LINEAR_FIRST, "linear_head_dim": 16, "linear_num_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"]},
    "llama4": {"text_config": {"layer_types": ["chunked_attention", "full_attention"]}},
    "longcat_flash": {**LATENT, "expert_ffn_hidden_size": 32, "zero_expert_num": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "minicpm3": LATENT,
    "minimax": {"layer_types": LINEAR_FIRST},
    "ministral3": NO_WINDOW,
    "mistral": NO_WINDOW,
    "mllama": {"text_config": {"cross_attention_layers": []}},
    "mixtral": NO_WINDOW,
    "phi3": NO_WINDOW,
    "phimoe": NO_WINDOW,
    "starcoder2": NO_WINDOW,
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
                   "n_groups": 1, "ssm_state_size": 8, "expand": 1},
    "olmo_hybrid": {**LINEAR_HEADS, "layer_types": LINEAR_FIRST},
    "qwen2": {"layer_types": FULL},
    "qwen3": {"layer_types": FULL},
    "qwen2_moe": NO_WINDOW,
    **{name: {**LINEAR_HEADS, "layer_types": LINEAR_FIRST} for name in
       ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")},
    **{name: {"text_config": {**LINEAR_HEADS, "layer_types": LINEAR_FIRST}} for name in
       ("qwen3_5", "qwen3_5_moe")},
    "qwen4_exp_text": QWEN4_TEXT,
    "qwen4_exp": {"text_config": QWEN4_TEXT},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 32, "lru_width": 64},
    "reformer": {"axial_pos_embds": False, "feed_forward_size": 96, "attention_head_size": 16,
                 "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16, "attn_layers": ["local", "lsh"],
                 "hash_seed": 1},
    "roc_bert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 50, "pronunciation_embed_dim": 16,
                 "shape_embed_dim": 16},
    "sarvam_mla": LATENT,
    "xmod": {"default_language": "en_XX"},
    "youtu": LATENT,
    "zamba": {"layers_block_type": ["hybrid", "mamba", "hybrid"], "num_hidden_layers": 3, "mamba_dt_rank": 8,
              "n_mamba_heads": 2, "attention_head_dim": 32, "attention_hidden_size": 128, "num_key_value_heads": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 16,
               "num_mem_blocks": 1, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "layer_types": DROP, "router_hidden_size": 32},
    "xlstm": {"qk_dim_factor": 1.0, "num_blocks": 2, "chunk_size": 16},
    "moshi": {"audio_vocab_size": 32, "audio_encoder_config": {"model_type": "mimi"}, "head_dim": 16,
              "num_key_value_heads": 2, "sliding_window": 512},
    "moss_transcribe_diarize": {
        "text_config": {"model_type": "qwen3", "layer_types": FULL},
        "audio_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                         "hidden_size": 32, "num_mel_bins": 8}},
    "musicgen": {"of": "musicgen_decoder", "num_codebooks": 1},
    "musicgen_melody": {"of": "musicgen_melody_decoder", "num_codebooks": 1},
    "phi4_multimodal": {
        "layer_types": DROP, "sliding_window": None,
        "vision_config": {**TINY_VISION, "crop_size": 32, "image_size": 32},
        "audio_config": {"hidden_size": 32, "num_blocks": 1, "num_attention_heads": 2, "intermediate_size": 32,
                         "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32}},

}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "bert/both ways": {"is_decoder": False},
    "doge/window of 32 keys": {"keep_window_size": 32, "sliding_window": None},
    "dory/last loop": {**DECODERS["dory"], "recurrent_kv_cache_mode": "last_loop"},
    "falcon/alibi": {"alibi": True},
    "falcon/grouped": {"new_decoder_architecture": True},
    "gpt_bigcode/many heads": {"multi_query": False},
    "granitemoehybrid/attention only": {**MAMBA, "layer_types": ["attention", "attention"]},
    "lfm2/attention only": {"layer_types": FULL},
    "mistral/windows": {},
    "mllama/cross attention": {"text_config": {"cross_attention_layers": [1], "num_hidden_layers": 3}},
    "qwen2/windows": {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
    "gemma4_text/shared keys": {
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "minimax_m3_vl_text/sparse": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen3_next/attention only": {**LINEAR_HEADS, "layer_types": FULL},
}
"""Other settings of a family that attend in another way, by ``type/what differs``."""

FULL_IDS = ("cpmant", "xlm")
"""Models that want the whole text at every step, and leave out themselves what is cached."""

WANTS_PAIR = ("blt",)
"""Decoders that keep what they read across in a second cache."""

ONE_BY_ONE = ("prophetnet",)
"""Models that read one token at a time as soon as there is a cache."""
