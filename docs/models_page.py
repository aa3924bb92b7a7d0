"""Writes docs/models.md, whose table of architectures is made of `chairlift.architectures`: `python docs/models_page.py`."""

from __future__ import annotations

from pathlib import Path

from chairlift.architectures import ARCHITECTURES, Architecture, Code, Windows

PAGE = Path(__file__).with_name("models.md")
START, END = "<!-- made by docs/models_page.py -->\n", "<!-- end -->\n"


def page() -> str:
    """Returns the page with the current table."""
    before, _, rest = PAGE.read_text().partition(START)
    after = rest.partition(END)[2]
    head = "| models | in `config.json` | in GGUF files | differences from Llama | on a GPU |\n|---|---|---|---|---|\n"
    rows = "".join(map(_row, ARCHITECTURES.values()))
    return f"{before}{START}\n{head}{rows}\n{END}{after}"


def _row(known: Architecture) -> str:
    files = ", ".join(f"`{name}`" for name in known.gguf.names) if known.gguf else "not read"
    classes = ", ".join(f"`{name}`" for name in dict.fromkeys((known.name, *known.aliases, *known.wrappers)))
    device = "Chairlift's" if known.code is Code.RUST_AND_TORCH else "transformers' code"
    return f"| {known.models} | {classes} | {files} | {', '.join(_features(known)) or 'none'} | {device} |\n"


def _features(known: Architecture) -> list[str]:
    """Returns the differences from Llama, in words."""
    named = {
        "fused projections": len(known.projections.qkv) == 1 or (len(known.projections.gate_up) == 1 and known.gated),
        "biases": known.qkv_bias is not None or known.biases is not None,
        "norms of queries and keys": known.qk_norm is True and not known.rotated_first,
        "in some models norms of queries and keys": isinstance(known.qk_norm, tuple),
        "norms of queries and keys after their rotation": known.rotated_first,
        "norms after blocks": known.post_norms and known.norms.attention is not None,
        "norms after blocks instead of before": known.norms.attention is None,
        "layer norms": known.centred,
        "attention beside the MLP": known.parallel is True,
        "in some models attention beside the MLP": isinstance(known.parallel, tuple),
        "norms that multiply by 1 + weight": known.norm_offset != 0,
        "GELU": known.activation == "gelu_tanh",
        "GELU instead of gates": known.activation in ("gelu", "gelu_new"),
        "positive numbers instead of gates": known.activation == "relu",
        "squares of positive numbers instead of gates": known.activation == "relu2",
        "sliding windows": known.windows is not Windows.NONE,
        "rotary frequencies by kind of layer": known.local_theta is not None,
        "rotation of a part of each head": known.rotary is not None,
        "rotation of neighbouring numbers": known.adjacent_pairs,
        "layers without rotary positions": known.no_rope_interval is not None or known.window_rotary,
        "models without rotary positions": known.position_type is not None,
        "embeddings of positions": known.positions is not None,
        "queries that grow with their position": known.temperature,
        "softcaps": known.softcaps is not None,
        "scaled embeddings": bool(known.scaled_embeddings),
        "a factor of logits": known.logit_scale is not None,
        "multipliers of embeddings, attention, residuals and logits": known.multipliers,
        "attention sinks": known.sinks,
        "heads by kind of layer, shared keys and values, embeddings for each layer": known.global_head_dim is not None,
        "gated outputs of attention": known.gated_attention,
        "keys and values of a latent vector": known.latent,
        f"layers with {known.recurrence.kind.value}" if known.recurrence else "": known.recurrence is not None,
        "one part a layer": known.single,
        "experts": known.mixture is not None and not known.mixture.switch,
        "groups of experts": known.mixture is not None and known.mixture.best is not None,
        "a shared expert": known.mixture is not None and known.mixture.shared is not None and not known.mixture.switch,
        "in some models experts beside the MLP": known.mixture is not None and known.mixture.switch is not None,
    }
    return [name for name, present in named.items() if present]


if __name__ == "__main__":
    PAGE.write_text(page())
