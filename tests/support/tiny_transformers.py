"""Tiny random models of many of transformers' types, with weights that make logits far from flat, and steps over a paged cache."""

from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from chairlift.layers.attention import plan_attention
from chairlift.models.forward_batch import ForwardBatch
from chairlift.models.transformers_config import ATTENTION, TransformersConfig
from chairlift.models.transformers_model import TransformersModel
from chairlift.runner.memory.kv_cache import KvCache

VOCABULARY = 128
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 9,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of these a type gets what its config knows."""
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}
LATENT |= {"num_key_value_heads": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}

DENSE = (
    "apertus arcee bitnet cohere ernie4_5 gemma glm glm4 gpt2 gpt_bigcode gpt_neox granite helium hunyuan_v1_dense hyperclovax jais2 "
    "llama ministral3 mistral modernbert-decoder nanochat olmo olmo2 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 starcoder2"
)
SLIDING = "cohere2 cwm exaone4 gemma2 gemma3_text granite_swa ministral olmo3 vaultgemma"
MIXTURES = "ernie4_5_moe flex_olmo glm4_moe granitemoe minimax_m2 mixtral olmoe qwen2_moe qwen3_moe solar_open"
TYPES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in DENSE.split()}
TYPES |= {name: (name, MIXED) for name in SLIDING.split()}
TYPES |= {name: (name, EXPERTS) for name in MIXTURES.split()}
TYPES |= {name: (name, EXPERTS | MIXED) for name in ("afmoe", "beam", "gpt_oss", "mimo_v2_flash")}
TYPES |= {name: (name, EXPERTS | LATENT) for name in ("deepseek_v2", "deepseek_v3")}
TYPES |= {
    "gemma3": ("gemma3", {"text_config": MIXED, "vision_config": VISION}),
    "gemma3n_text": ("gemma3n_text", MIXED | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8}),
    "gemma4_text": ("gemma4_text", MIXED | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8}),
    "lfm2": ("lfm2", {"layer_types": ["full_attention"] * 2}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "phimoe": ("phimoe", EXPERTS | {"sliding_window": None}),
    "minicpm3": ("minicpm3", LATENT),
}


def configure(name: str, **changes: Any) -> Any:
    """A config of transformers: the type's own, as small as can be."""
    kind, settings = TYPES.get(name, (name, {}))
    default = CONFIG_MAPPING[kind]()
    text = default.get_text_config(decoder=True)
    known = set(text.to_dict()) | set(type(text).attribute_map)
    nested = settings.get("text_config")
    small = {key: value for key, value in SHAPE.items() if key in known} | (nested or settings) | changes
    small.setdefault("layer_types", None) if "layer_types" in known else None
    return CONFIG_MAPPING[kind](**(settings | {"text_config": small} if nested is not None else small))


def build(config: Any) -> torch.nn.Module:
    """The model in fp32, with random weights and transformers' own attention."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start at zero and norms at one: a mistake with them would go unseen.
            noise = 0.2 * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model


def adopted(model: Any, longest: int = 128) -> TransformersModel:
    """The same model with our attention."""
    shape = TransformersConfig.of(model.config, "a test")
    model.set_attn_implementation(ATTENTION)
    return TransformersModel(model, shape, longest)


def logits_of(model: TransformersModel, prompts: list[list[int]], steps: list[list[int]], block_size: int = 4) -> list[torch.Tensor]:
    """The logits of all tokens of each sequence; each step computes so many more tokens of each, 0 of those that wait."""
    each = -(-max(map(len, prompts)) // block_size)
    tables = np.random.default_rng(0).permutation(np.arange(1, 1 + len(prompts) * each, dtype=np.int32)).reshape(len(prompts), each)
    cache = KvCache(model.specs, tables.size + 1, block_size, torch.float32, torch.device("cpu"))
    cache.tensor.fill_(float("nan"))
    windows = frozenset(spec.window for spec in model.specs)
    done, found = [0] * len(prompts), [[] for _ in prompts]
    for step in steps:
        chunks = [(i, np.arange(done[i], done[i] + count)) for i, count in enumerate(step) if count]
        for i, at in chunks:
            done[i] += len(at)
        slots = [tables[i][at // block_size] * block_size + at % block_size for i, at in chunks]
        counts = [len(at) for _, at in chunks]
        rows = [i for i, _ in chunks]
        plan = plan_attention(
            np.concatenate(slots).astype(np.int32),
            np.cumsum([0, *counts], dtype=np.int32),
            np.array([done[i] for i in rows], dtype=np.int32),
            tables[rows],
            windows=windows,
            block_size=block_size,
            device=torch.device("cpu"),
        )
        ids = np.concatenate([np.array(prompts[i], dtype=np.int32)[at] for i, at in chunks])
        positions = np.concatenate([at for _, at in chunks]).astype(np.int32)
        hidden = model.forward(ForwardBatch(torch.from_numpy(ids), torch.from_numpy(positions), plan), cache.layers)
        # The head is asked twice, in another order than the tokens were computed in.
        last = torch.arange(len(ids)).flip(0)
        half = len(ids) // 2
        logits = torch.cat((model.logits(hidden, last[:half]), model.logits(hidden, last[half:]))).flip(0)
        for i, piece in zip(rows, logits.split(counts), strict=True):
            found[i].append(piece)
    return [torch.cat(parts) for parts in found]
