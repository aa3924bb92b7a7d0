"""The texts of tokens that end an answer, whatever a file says about them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),  # Llama 3, Granite
        *("<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),  # ChatML, Qwen
        *("<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),  # Phi, gpt-oss, Solar
        *("<end_of_turn>", "<eos>", "<turn|>", "<|tool_response>"),  # Gemma
        *("</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["),
    )
)
"""As in llama.cpp (src/llama-vocab.cpp): converters often store these tokens with a wrong type, and without a role."""
_END_OF_TURN = re.compile(r"[<\[]\|?(end_?of_?turn(_token)?|turn_?end|assistant_?end|eot|eom)\|?[>\]]", re.IGNORECASE)
"""Other texts that say what they end, such as EXAONE's [|endofturn|] and OpenChat's <|end_of_turn|>: some models name them nowhere but in
their chat template."""


def end_tokens(added: Mapping[str, int]) -> set[int]:
    """Returns the ids of the tokens that end an answer by their text.

    `added` are ids by text of the tokens that are not made by merging: those of any type in a GGUF file, the added ones of a
    tokenizer.json. `<|end|>` ends only a message where gpt-oss's or Solar's tokens end an answer, and `</s>` is plain text in Gemma 4.
    """
    found = {text for text in added if text in _END_TEXTS or _END_OF_TURN.fullmatch(text)}
    if found >= {"<|return|>", "<|call|>"} or ("<|flush|>" in found and found & {"<|call|>", "<|calls|>"}):
        found -= {"<|end|>"}
    if "<|tool_response>" in found:
        found -= {"</s>"}
    return {added[text] for text in found}
