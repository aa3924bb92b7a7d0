"""Checks that each entry of a config.json is used, changes nothing, or is reported."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.models.fields import NoNativeModel
from chairlift.models.shape import ModelShape

log = logging.getLogger("chairlift")

_DESCRIPTIVE = re.compile(
    # What the file is, and how it was made.
    r"_\w+|architectures|model_type|auto_map|transformers[\w.]*|unsloth_\w+|(torch_)?dtype|tokenizer_class|quantization\w*|is_llama_config"
    r"|finetuning_task|task_specific_params|prefix|sentence_transformers|sbert_\w+|problem_type|num_labels|id2label|label2id"
    # Training.
    r"|\w*(dropout|pdrop|layerdrop)\w*|\w*initializer_\w+|\w*_init(_\w+)?|init_\w+|\w*(aux|z)_loss\w*|seq_aux|\w*jitter\w*|rescale_prenorm_residual"
    r"|gradient_checkpointing|neftune_\w+|\w*fused?_\w+|time_step_\w+|sparse_pred\w*"
    # How it is computed, with the same result.
    r"|use_cache|cache_implementation|\w*_dtype|output_\w+|return_dict|torchscript|use_bfloat16|\w*logits_to_keep|pretraining_tp|ep_size"
    r"|\w*chunk_size\w*|residual_in_fp32|attn_implementation|\w*flash_attn\w*|use_memory_efficient_attention|use_\w+_kernels?|unpad_inputs"
    r"|pack_qkv|moe_shared_expert_overlap|reference_compile|repad_\w+|use_xentropy|pad_vocab_size_multiple"
    # Tokens, and how they are chosen, which generation_config.json says.
    r"|\w*_token_(id|index)(s|_list)?|temperature|top_[kp]|typical_p"
    r"|do_sample|(max|min)_length|num_beam\w*|diversity_penalty|length_penalty"
    r"|repetition_penalty|\w*ngram_size|num_return_sequences|early_stopping"
    # Parts that are not used: images, sounds, and tokens beyond the next one.
    r"|perceiver_config|pixel_\w+|vlm|is_composition|use_base_siglip|freeze_\w+"
    r"|((use|tune)_)?(vision|visual|image|video|audio|mm|mtp|num_mtp)_\w+|\w*projector_\w+|spatial_\w+|temporal_\w+|\w*fullatt_\w+"
    # What follows from other entries, or is read with others alone.
    r"|(qk_|attention_)?head_dim|num_key_value_heads|\w*max_(seq|sequence)?_?len(gth)?|seq_length|initial_context_length|experts_per_token"
    r"|max_window_layers|use_sliding_window|(sliding_)?window_size|full_attention_interval|sliding_window_pattern|global_attn_every_n_layers|full_attn_idxs|intermediate_size|n_positions"
    r"|moe_(norm_min|capacity|gate|use_aux_free)"
    r"|n_shared_experts|num_(local_)?experts|topk_method|(block_)?norm_eps|block_dim"
    r"|conv_(dim\w*|L_cache|bias)|num_heads|theta|expand|hidden_act|mamba_\w+"
    r"|classifier_\w+|summary_\w+|pooler_\w+|embedding_size|vocab_size_per_layer_input|tie_word_embeddings|decoder_bias|dense_seq_output"
    r"|use_bidirectional_attention|is_causal"
    r"|n_ctx|matryoshka_dimensions|cla_share_factor|layer_switch"
    r"|order_of_interleaved_layers|use_(parallel_\w+|gated_activation|embedding_sharing)"
    r"|rotary_scaling_factor"  # of texts that are longer than those that Nomic's models were made for
)
"""Entries that change no answer of the architectures that there is code for, or that are read with others alone."""
_USUAL = {
    "mamba_hidden_act": ("silu",),
    "normalization_function": ("rmsnorm",),
    "layer_norm_type": ("layer_norm",),
    "scoring_func": ("softmax", "sigmoid"),
    "score_func": ("sigmoid",),  # Trinity's
    "position_embedding_type": ("absolute", "rope", "rotary", "rope_gptj"),
    "attn_output_gate": (True,),  # whose matrices have other sizes without it
    "qk_norm": (True,),  # as all models have it whose code does not read this
    "use_qk_norm": (True,),
    "norm_type": ("rms",),
    "directionality": ("bidi",),
    "block_use_swiglu": (True,),
    "use_pos_enc": (True,),
    "rotary": (True,),  # GPT-J's
    "scale_attn_weights": (True,),
    "activation": ("swiglu",),  # beside the usual hidden_act, as in Falcon 3
    "activation_function": ("silu",),
}
"""Values of entries that change nothing, beside the neutral ones."""
_CHANGES = re.compile(
    r"\w*(scale|scaling|scalar|scaling_factor|multiplier|softcap\w*|cap|clip\w*|clamp\w*|alibi\w*|temperature\w*|interleaved?|parallel_block|_act|activation\w*)"
    r"|\w*per_layer\w*|block_configs|\w*layers?_(pattern|config\w*|freq\w*|types?)"
    r"|norm_topk_prob|swiglu_\w+|sliding_windows|attention_sinks?\w*|\w*lm_head_bias|pruned_heads|use_bias|attention_out_bias"
)
"""Entries that change answers, unless their value is neutral."""
_IMAGES = re.compile(r"\w*(image|tile|tiling|pixel|patch|thumbnail)\w*|(scale|downsample)_\w+|ignore_index|use_reentrant\w*|text_config")
"""Entries beside the configuration of a model of text, about the images that it can be given."""
_EXPERTS = re.compile(r"\w*(expert|topk|top_k|moe|routed)\w*|\w*_group|first_k_dense_replace")


def check_entries(unread: Mapping[str, Any], *, experts: bool, flags: bool = True) -> tuple[str, ...]:
    """Returns the entries that nothing here knows. Raises NoNativeModel for one that would change answers.

    `unread` are the entries of a config.json that the configuration was not made of. Those about experts change nothing without `experts`.
    Without `flags` only numbers, lists and tables can raise the error.
    """
    found = {name: value for name, value in unread.items() if value and not _is_known(name, value, experts)}
    grave = (name for name, value in found.items() if _CHANGES.fullmatch(name) and (flags or not isinstance(value, bool | str)))
    if changes := next(grave, None):
        raise NoNativeModel(f"{changes} {found[changes]!r:.100} has no code of ours")
    return tuple(found)


def check_beside(raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the entries of a config.json that differ from those of its model of text, or that this model lacks, and that are not known.

    As in transformers, those of the model of text prevail. Raises NoNativeModel for one that would change answers and that it lacks.
    """
    beside = {name: value for name, value in raw.items() if value != text.get(name) and not _IMAGES.fullmatch(name)}
    lacking = check_entries({name: value for name, value in beside.items() if name not in text}, experts=True)
    differing = [name for name, value in beside.items() if name in text and value and not _is_known(name, value, experts=True)]
    return tuple(f"{name} beside text_config" for name in (*lacking, *differing))


def _is_known(name: str, value: Any, experts: bool) -> bool:
    """Whether an entry is known to change nothing."""
    if name in _USUAL:
        return value in _USUAL[name]
    return (
        _DESCRIPTIVE.fullmatch(name) is not None
        or (value == 1 and value is not True)
        or (not experts and _EXPERTS.fullmatch(name) is not None)
    )


def report_entries(directory: Path, model: ModelShape) -> None:
    """Logs which entries of a config.json nothing here knows."""
    if model.unread:
        log.warning("%s has entries that are not known here and not used: %s", directory / "config.json", ", ".join(model.unread))
