"""What a structured output lets through, over the vocabulary of the byte model."""

import json

import numpy as np

from chairlift.sampling import StructuredOutput

PATIENCE = 60.0
"""Seconds to wait for a compiled grammar; a guard."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 8}},
}
VOCABULARY = 300


def structure(kind, text=""):
    return StructuredOutput(kind, text if isinstance(text, str) else json.dumps(text))


def allowed(matcher):
    """The tokens that may come next."""
    bitmask = np.zeros((2, -(-VOCABULARY // 32)), dtype=np.int32)
    matcher.mask(bitmask, 1)
    assert not bitmask[0].any()
    return {token for token in range(VOCABULARY) if int(bitmask[1, token // 32]) >> (token % 32) & 1}


def takes(grammars, tokenizer, form, text):
    """Whether the form has `text` as a whole answer."""
    matcher = grammars.compile(form).result(PATIENCE).matcher(form.budget)
    for token in (*tokenizer.encode(text), *tokenizer.eos_token_ids):
        bitmask = np.zeros((1, -(-VOCABULARY // 32)), dtype=np.int32)
        matcher.mask(bitmask, 0)
        if not int(bitmask[0, token // 32]) >> (token % 32) & 1:
            return False
        matcher = matcher.copy()
        matcher.accept(token)
    return True
