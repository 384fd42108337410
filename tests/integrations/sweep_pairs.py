"""Encoder-decoder models of the sweep: what single families need beside the common sizes."""

from __future__ import annotations

from typing import Any

SIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 512}  # fmt: skip

PAIRS: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "longt5", "m2m_100", "marian", "mbart",
            "moonshine", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "pop2piano", "prophetnet",
            "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "switch_transformers", "t5", "umt5", "whisper",
        )
    },
    "canary": {"encoder_config": {"model_type": "parakeet_encoder"}},
    "cohere_asr": {"encoder_config": {"model_type": "parakeet_encoder"}},
    "dia": {"encoder_config": SIDE, "decoder_config": {
        **SIDE, "num_channels": 1, "cross_hidden_size": 64, "cross_num_attention_heads": 4, "cross_head_dim": 16,
        "cross_num_key_value_heads": 2}, "delay_pattern": [0]},
    "fsmt": {"src_vocab_size": 128, "tgt_vocab_size": 128},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "speecht5": {"conv_dim": [16], "conv_stride": [2], "conv_kernel": [3], "num_conv_pos_embeddings": 16,
                 "num_conv_pos_embedding_groups": 2, "speech_decoder_prenet_units": 16,
                 "speech_decoder_postnet_units": 16, "speaker_embedding_dim": 16},
    "moonshine/padded heads": {"pad_head_dim_to_multiple_of": 24},
    "t5gemma": {},
    "t5gemma2": {"encoder": {"text_config": {}, "vision_config": {"model_type": "siglip_vision_model",
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 16}}},
}  # fmt: skip
