"""What the general rules do not find: parts of configurations, and arguments of forward.

`config` are attributes by their path, `*.name` those of every part that has the name; `give`
are arguments, made from the configuration, beside the others or `alone`; `class` is the model where
AutoModel has one that its own configuration does not fit; `reference` is the attention to compare
with, where it is not eager's alone, and `remark` says why; `why` is why it cannot be built.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from inputs import BATCH, LENGTH, boxes, image, tokens


def ones(*shape: int) -> Any:
    return lambda _: torch.ones(BATCH, *shape, dtype=torch.long)


def zeros(*shape: int) -> Any:
    return lambda _: torch.zeros(BATCH, *shape, dtype=torch.long)


def normal(*shape: int) -> Any:
    return lambda _: torch.randn(BATCH, *shape)


def places(height: int, width: int) -> Any:
    """(batch, height * width, 2): where the patches of an image are."""
    where = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    return lambda _: where.expand(BATCH, -1, -1).clone()


LAYERS, ALL_LAYERS = 8, 99
MIXED = ["linear_attention", "full_attention"] * (LAYERS // 2)
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FORECAST = {
    "config": {"prediction_length": 6, "context_length": 12, "num_time_features": 2},
    "give": {
        "past_values": normal(19),
        "past_time_features": normal(19, 2),
        "past_observed_mask": ones(19),
        "future_values": normal(6),
        "future_time_features": normal(6, 2),
    },
}
# Detectors take the best so many places of an image, of which a small one has few.
FEW_QUERIES = {"config": {"num_queries": 10, "decoder_start_token_id": 0}}
# In place of timm's, which is another package.
RESNET = {
    "backbone_config": transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    ),
}
BOOLEAN = {
    "reference": {"": "eager", "text_config": "sdpa"},
    "remark": "text as on sdpa, because eager adds the boolean mask of this model to its scores",
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def session(kind: str) -> Any:
    """A video, with one point on one object in its first frame."""

    def made(config: Any) -> Any:
        folder = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        name = next(name for name in vars(folder) if name.endswith("InferenceSession"))
        found = getattr(folder, name)(
            video=torch.randn(2, 3, 64, 64), video_height=64, video_width=64, dtype=torch.float32
        )
        if hasattr(found, "add_prompt"):  # what to look for, in words
            prompt = found.add_prompt("cat")
            found.prompt_input_ids[prompt] = torch.randint(10, 200, (1, LENGTH))
            found.prompt_attention_masks[prompt] = torch.ones(1, LENGTH, dtype=torch.long)
            return found
        found.obj_id_to_idx(1)
        point = {
            "point_coords": torch.tensor([[[[20.0, 20.0]]]]),
            "point_labels": torch.ones(1, 1, 1, dtype=torch.int32),
        }
        found.add_point_inputs(0, 0, point)
        found.obj_with_new_inputs = [1]
        return found

    return made


HINTS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"config": {"max_length": 128}},
    "autoformer": FORECAST,
    "aya_vision": {"config": {"vision_config.num_attention_heads": 12}},
    "bamba": {"config": {"attn_layer_indices": [1]}},
    "blip-2": {"config": {"image_token_index": 250, "image_token_id": 250}},
    "bros": {"give": {"bbox": lambda config: boxes(config) / 100.0}},
    "chameleon": {"config": {"vocabulary_map": {"<image>": 250}}},
    "clap": {"give": {"input_features": normal(1, 64, 64)}},
    "cohere_compass": {"config": {"text_config.rope_parameters": {"full_attention": PLAIN_ROPE}}},
    "cohere_compass_text": {"config": {"rope_parameters": {"full_attention": PLAIN_ROPE}}},
    "d_fine": FEW_QUERIES,
    "dbrx": {"config": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0}},
    "decision_transformer": {
        "alone": True,
        "give": {
            "states": normal(LENGTH, 17),
            "actions": normal(LENGTH, 4),
            "returns_to_go": normal(LENGTH, 1),
            "timesteps": zeros(LENGTH),
            "attention_mask": ones(LENGTH),
        },
    },
    "deepseek_ocr2": {"config": {"*.mlp_layer_types": ["dense"] * LAYERS}},
    "deepseek_v2": {"config": {"num_experts_per_tok": 2, "moe_intermediate_size": 64}},
    "deimv2": FEW_QUERIES,
    "dia": {"give": {"decoder_input_ids": lambda _: torch.randint(10, 200, (BATCH, 7, 9))}},
    "diffusion_gemma": {
        "config": {
            "text_config.num_experts": 4,
            "text_config.top_k_experts": 2,
            "text_config.moe_intermediate_size": 32,
        }
    },
    "donut-swin": {"config": {"image_size": 224}},
    "dinat": {"why": "needs natten"},
    "dots1": {"config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}},
    "edgetam": {"config": {"vision_config.backbone_channel_list": [1024, 512, 256, 64]}},
    "edgetam_vision_model": {"config": {"backbone_channel_list": [1024, 512, 256, 64]}},
    "emu3": {"config": {"vocabulary_map": {"<image>": 250}}},
    "esm": {"config": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 2}},
    "fastspeech2_conformer_with_hifigan": {
        "give": {"input_ids": lambda _: torch.randint(10, 70, (BATCH, LENGTH))}
    },
    "fun_asr_nano_encoder": {
        "give": {"input_features": normal(64, 560), "input_features_mask": ones(64)},
    },
    "gemma3n": {"config": {"*.num_kv_shared_layers": 2}},
    "gemma3n_text": {"config": {"num_kv_shared_layers": 2}},
    "gemma4_vision": {
        "give": {"pixel_values": normal(36, 768), "pixel_position_ids": places(6, 6)},
    },
    "glm5_next": {"config": {"text_config.index_topk": 16}},
    "glm5_next_text": {"config": {"index_topk": 16}},
    "gpt_neo": {"config": {"attention_types": [[["global", "local"], 1]], "num_layers": 2}},
    "granitemoehybrid": {"config": {"layer_types": MIXED, "num_hidden_layers": LAYERS}},
    "grounding-dino": FEW_QUERIES | BOOLEAN,
    "higgs_audio_v2_tokenizer": {"give": {"input_values": normal(1, 3200)}},
    "hunyuan_v1_dense": {"config": {"head_dim": 8}},
    "hunyuan_v1_moe": {"config": {"head_dim": 8}},
    "idefics": {
        "give": {
            "pixel_values": lambda config: image(config, 1),
            "image_attention_mask": ones(LENGTH, 1),
        }
    },
    "informer": FORECAST,
    "kimi_k25_vision": {"give": {"pixel_values": lambda _: torch.randn(32, 3, 14, 14)}},
    "kyutai_speech_to_text": {
        "give": {"input_ids": lambda _: torch.randint(10, 200, (BATCH, LENGTH, 33))}
    },
    "layoutlmv2": {"why": "needs detectron2"},
    "lfm2_moe": {"config": {"layer_types": ["conv", "full_attention"] * 4, "num_hidden_layers": 8}},
    "lxmert": {"give": {"visual_feats": normal(5, 256), "visual_pos": normal(5, 4)}},
    "mask2former": {"config": {"backbone_config.window_size": 2}},
    "ministral": {"config": {"head_dim": 8}},
    "mm-grounding-dino": FEW_QUERIES | BOOLEAN,
    "molmo2": {"config": {"adapter_config.vision_feature_layer": [6, 4]}},
    "moonshine_streaming": {"config": {"num_key_value_heads": 8, "num_attention_heads": 8}},
    "nemotron": {"config": {"num_key_value_heads": 8}},
    "nemotron3_5_transcribe_word_timestamp": {
        "give": {"inputs_embeds": lambda config: torch.randn(BATCH, LENGTH, config.hidden_size)},
    },
    "oneformer": {"give": {"task_inputs": ones(77)}},
    "patchtsmixer": {"give": {"past_values": normal(32, 1)}},
    "patchtst": {"give": {"past_values": normal(32, 1)}},
    "pe_audio": {"give": {"input_values": normal(1, 3840)}},
    "pe_audio_encoder": {"give": {"input_values": normal(1, 3840)}},
    "perceiver": {"give": {"inputs": normal(LENGTH, 96)}, "attempts": [(8, 8)], "alone": True},
    "qwen3_asr_encoder": {
        "give": {"input_features": normal(128, 200), "input_features_mask": ones(200)}
    },
    "qwen3_omni_moe_thinker": {"config": {"vision_start_token_id": 240}},
    "qwen4_exp": {
        "config": {
            "text_config.indexer_n_heads": 2,
            "text_config.indexer_kv_heads": 1,
            "text_config.indexer_head_dim": 16,
            "text_config.indexer_budget": 4,
            "text_config.indexer_compress_ratio": 2,
        }
    },
    "qwen4_exp_text": {
        "config": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        }
    },
    "rf_detr": FEW_QUERIES,
    "rt_detr": FEW_QUERIES,
    "rt_detr_v2": FEW_QUERIES,
    "pp_doclayout_v3": FEW_QUERIES,
    "pp_doclayout_v4": FEW_QUERIES,
    "pp_ocrv6_small_rec": {"give": {"pixel_values": normal(3, 48, 320)}},
    "siglip2": {
        "give": {
            "pixel_values": normal(16, 768),
            "pixel_attention_mask": ones(16),
            "spatial_shapes": lambda _: torch.tensor([[4, 4]] * BATCH),
        }
    },
    "siglip2_vision_model": {
        "give": {
            "pixel_values": normal(16, 768),
            "pixel_attention_mask": ones(16),
            "spatial_shapes": lambda _: torch.tensor([[4, 4]] * BATCH),
        }
    },
    "speecht5": {
        "give": {
            "input_values": lambda config: torch.randn(BATCH, LENGTH, config.hidden_size),
            "decoder_input_values": lambda config: torch.randn(BATCH, 7, config.hidden_size),
            "attention_mask": ones(LENGTH),
        },
        "alone": True,
    },
    "step3p7": {"config": {"text_config.sliding_window": 4}},
    "swin": {"config": {"image_size": 224}},
    "t5gemma2_encoder": {"config": {"text_config.dropout_rate": 0.0}},
    "time_series_transformer": FORECAST,
    "timm_backbone": {"config": {"backbone": "resnet18"}},
    "timesfm": {
        "give": {
            "past_values": normal(64),
            "past_values_padding": zeros(64),
            "freq": zeros(1),
        }
    },
    "vibevoice_acoustic_tokenizer_encoder": {"give": {"hidden_states": normal(1, 3200)}},
    "vibevoice_acoustic_tokenizer_decoder": {"give": {"hidden_states": normal(64, 4)}},
    "video_llama_3_vision": {"give": {"merge_sizes": lambda _: torch.tensor([2] * BATCH)}},
    "xcodec2": {"give": {"input_values": normal(1, 3200), "input_features": normal(10, 160)}},
    "neucodec": {"give": {"input_values": normal(1, 3200), "input_features": normal(10, 160)}},
    "zamba2": {
        "config": {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "num_hidden_layers": 4,
            "num_mem_blocks": 2,
        },
    },
    "xmod": {"config": {"default_language": "en_XX"}},
    "bark": {"class": "BarkSemanticModel"},
    "blip_2_qformer": {
        "give": {
            "query_embeds": lambda config: torch.randn(BATCH, 6, config.hidden_size),
            "encoder_hidden_states": lambda c: torch.randn(BATCH, 9, c.encoder_hidden_size),
        },
    },
    "blt": {"config": {"encoder_hash_byte_group_vocab": 500, "num_hidden_layers": 8}},
    "conditional_detr": {"config": RESNET},
    "dab-detr": {"config": RESNET},
    "deformable_detr": {"config": RESNET},
    "detr": {"config": RESNET},
    "glm4v_moe": {"config": {"text_config.rope_parameters": MROPE}},
    "glm4v_moe_text": {"config": {"rope_parameters": MROPE}},
    "hunyuan_vl": {
        "config": {
            "text_config.head_dim": 16,
            "text_config.rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 2, 2, 2],
            },
        },
    },
    "hunyuan_vl_text": {
        "config": {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 2, 2, 2],
            },
        },
    },
    "granite_speech5_ctc": {"give": {"input_features": normal(64, 320)}},
    "granite_speech5_encoder": {"give": {"input_features": normal(64, 320)}},
    "inkling2_vision": {
        "give": {
            "pixel_values": lambda _: torch.randn(8, 40, 40, 3),
            "image_grid_thw": lambda _: torch.tensor([[1, 2, 2]] * BATCH),
        },
        "alone": True,
    },
    "kosmos-2": {
        "give": {
            "pixel_values": image,
            "input_ids": lambda config: tokens(config, 70),
            "attention_mask": ones(70),
            "image_embeds_position_mask": lambda _: (
                (torch.arange(70) < 64).long().expand(BATCH, -1)
            ),
        },
        "alone": True,
    },
    "mimi_decoder": {"give": {"latents": lambda c: torch.randn(BATCH, c.hidden_size, LENGTH)}},
    "minicpm_ocr_vision": {
        "give": {
            "pixel_values": lambda c: torch.randn(1, 3, c.patch_size, c.patch_size * 32),
            "target_sizes": lambda _: torch.tensor([[4, 4]] * BATCH),
        }
    },
    "minicpmv4_7_vision": {
        "give": {
            "pixel_values": lambda c: torch.randn(1, 3, c.patch_size, c.patch_size * 32),
            "target_sizes": lambda _: torch.tensor([[4, 4]] * BATCH),
        }
    },
    "muse_glimmer_vision": {"give": {"pixel_values": lambda _: torch.randn(32, 1176)}},
    "muse_spark_vision": {"give": {"pixel_values": lambda _: torch.randn(32, 1176)}},
    "musicgen": {
        "class": "MusicgenForConditionalGeneration",
        "give": {"decoder_input_ids": lambda _: torch.randint(10, 200, (BATCH * 4, 7))},
    },
    "musicgen_melody": {
        "class": "MusicgenMelodyForConditionalGeneration",
        "give": {"decoder_input_ids": lambda _: torch.randint(10, 200, (BATCH * 4, 7))},
    },
    "nemotron3_5_transcribe_audio": {
        "give": {"input_features": normal(128, 128), "input_features_mask": ones(128)},
        "alone": True,
    },
    "pocket_tts_audio_tokenizer_decoder": {
        "give": {"latents": lambda c: torch.randn(BATCH, c.hidden_size, LENGTH)}
    },
    "pp_ocrv5_mobile_rec": {"give": {"pixel_values": normal(3, 96, 320)}},
    "sam2": {
        "attempts": [(1, 99)],
        "config": {"vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    },
    "sam2_video": {
        "attempts": [(1, 99)],
        "config": {"vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
        "give": {"inference_session": session("sam2_video"), "frame_idx": lambda _: 0},
        "alone": True,
    },
    "sam3_tracker": {
        "config": {"vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    },
    "seggpt": {
        "config": {"image_size": [128, 64]},
        "give": {
            "pixel_values": normal(3, 64, 64),
            "prompt_pixel_values": normal(3, 64, 64),
            "prompt_masks": normal(3, 64, 64),
        },
        "alone": True,
    },
    "table-transformer": {"config": RESNET},
    "voxtral_realtime": {
        "give": {
            "input_features": lambda c: torch.randn(BATCH, c.audio_config.num_mel_bins, 8 * LENGTH),
        },
    },
    "instructblip": {"config": {"image_token_index": 250}, "give": {"qformer_input_ids": tokens}},
    "lw_detr": {"config": {"num_queries": 10, "projector_scale_factors": [1.0]}},
    "muse_spark_audio": {"give": {"input_values": normal(3840)}},
    "tvp": {
        "config": {"max_img_size": 64, "visual_prompt_size": 8},
        "give": {
            "input_ids": lambda config: tokens(config)[:1],
            "attention_mask": lambda _: torch.ones(1, LENGTH, dtype=torch.long),
            "pixel_values": lambda config: image(config, 48)[:1],
        },
    },
    "uvdoc": {
        "attempts": [(1, 99)],
        "config": {"backbone_config.out_features": [f"stage{i}" for i in range(1, 7)]},
    },
    "depth_pro": {
        "config": {
            "patch_size": 64,
            "image_model_config.image_size": 64,
            "patch_model_config.image_size": 64,
            "fov_model_config.image_size": 64,
        },
        "give": {"pixel_values": normal(3, 256, 256)},
    },
    "pi0": {
        "give": {
            "action_embeds": lambda c: torch.randn(BATCH, 6, c.dit_config.hidden_size),
            "pixel_values": lambda config: image(config.vlm_config, 1),
            "pixel_attention_mask": lambda _: torch.ones(BATCH, 1, dtype=torch.bool),
            "input_ids": lambda config: torch.cat(
                [torch.full((BATCH, 16), config.vlm_config.image_token_id), tokens(config)], 1
            ),
            "attention_mask": ones(LENGTH + 16),
        },
    },
    "pp_ocrv6_medium_det": {
        "attempts": [(1, 99)],
        "config": {
            "backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"],
            "intraclass_block_config": {
                "reduce_channel": [1, 1, 0],
                "return_channel": [1, 1, 0],
                **{
                    f"{direction}_{ratio}ratio": [3, 1, 1]
                    for direction in (
                        "vertical_long_to_small_conv",
                        "horizontal_small_to_long_conv",
                        "symmetric_conv_long",
                    )
                    for ratio in ("long", "mid", "short")
                },
            },
            "scale_factor_list": [1, 2, 4, 8],
            "kernel_list": [3, 2, 2],
        },
    },
    "pp_ocrv6_small_det": {
        "attempts": [(1, 99)],
        "config": {
            "backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"],
            "layer_list_out_channels": [96, 96, 192, 384],
        },
    },
    "muse_glimmer_assistant": {
        "give": {
            "noise_embeds": lambda c: torch.randn(BATCH, c.block_size, c.hidden_size),
            "context_hidden_states": lambda c: torch.randn(
                BATCH, LENGTH, c.hidden_size * len(c.target_layer_ids)
            ),
            "position_ids": lambda c: torch.arange(LENGTH + c.block_size).expand(BATCH, -1),
            "attention_mask": lambda c: torch.ones(BATCH, LENGTH + c.block_size).long(),
        },
        "alone": True,
    },
    "clvp": {
        "attempts": [(1, 4)],
        "config": {"*.vocab_size": 256},
        "give": {"input_features": normal(80, 64)},
    },
    "edgetam_video": {
        "attempts": [(1, 99)],
        "config": {
            "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "perceiver_resampler_num_latents_2d": 4,
        },
        "give": {"inference_session": session("edgetam_video"), "frame_idx": lambda _: 0},
        "alone": True,
    },
    "granite4_vision": {
        "attempts": [(8, 8)],
        "config": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    },
    "instructblipvideo": {
        "config": {"video_token_index": 250},
        "give": {
            "qformer_input_ids": tokens,
            "pixel_values": lambda config: image(config, 2),
        },
    },
    "qwen2_vl_text": {"attempts": [(8, 8)], "config": {"rope_parameters": MROPE}},
    "qwen2_5_vl_text": {"attempts": [(8, 8)], "config": {"rope_parameters": MROPE}},
    "qwen2_5_omni_thinker": {
        "attempts": [(8, 8)],
        "config": {"vision_start_token_id": 240, "text_config.rope_parameters": MROPE},
    },
    "sam3_tracker_video": {
        "config": {
            "*.image_size": 56,
            "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "memory_attention_rope_feat_sizes": [4, 4],
        },
        "give": {"inference_session": session("sam3_tracker_video"), "frame_idx": lambda _: 0},
        "alone": True,
    },
    "omdet-turbo": {
        "config": RESNET
        | {
            "num_queries": 10,
            "encoder_in_channels": [16, 24, 32],
            "apply_layernorm_after_vision_backbone": False,
        },
        "give": {
            "classes_input_ids": lambda _: torch.randint(10, 200, (4, LENGTH)),
            "classes_attention_mask": lambda _: torch.ones(4, LENGTH, dtype=torch.long),
            "tasks_input_ids": ones(LENGTH),
            "tasks_attention_mask": ones(LENGTH),
            "classes_structure": lambda _: torch.tensor([2, 2]),
        },
    },
    "qwen2_vl": {
        "attempts": [(8, 8)],
        "config": {"text_config.rope_parameters": MROPE, "vision_config.embed_dim": 128},
    },
    "qwen2_5_vl": {
        "attempts": [(8, 8)],
        "config": {"text_config.rope_parameters": MROPE, "vision_config.hidden_size": 128},
    },
    "sam3_video": {
        "config": {
            "*.image_size": 56,
            "detector_config.vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "tracker_config.vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "tracker_config.memory_attention_rope_feat_sizes": [4, 4],
            "low_res_mask_size": 16,
        },
        "give": {"inference_session": session("sam3_video"), "frame_idx": lambda _: 0},
        "alone": True,
    },
}
