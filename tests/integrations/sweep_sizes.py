"""How large things are in the sweep's tiny models, by the names that configurations give them."""

from __future__ import annotations

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, LAYERS, POSITIONS, WINDOW = 128, 64, 4, 2, 16, 96, 2, 512, 32

SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_vocab", "output_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "d_ff", "d_inner", "n_inner", "ffn_dim", "decoder_ffn_dim"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_hidden_size", "shared_intermediate_size", "dim_ff"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_dim", "kv_channels"), HEAD),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), POSITIONS),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("index_head_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("index_n_heads", "index_topk"), 4),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_dt_rank", "time_step_rank", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_n_groups", "mamba_ngroups"), 4),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("num_mel_bins",), 8),
    **dict.fromkeys(("use_mamba_kernels", "use_mem_eff_path"), False),
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "is_decoder": True,
}
