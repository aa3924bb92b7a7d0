import numpy as np
import pytest

from chairlift.grammar.grammars import Grammars
from chairlift.grammar.trial import Vocabulary
from chairlift.sampling import SamplingParams
from chairlift.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def takes(byte_model):
    """Whether a structured output allows a text as a whole answer."""
    tokenizer = Tokenizer(byte_model)
    [eos] = tokenizer.eos_token_ids
    grammars = Grammars(Vocabulary(byte_model / "tokenizer.json", 300, (eos,)))

    def taken(structure, text):
        SamplingParams(structured_output=structure)
        matcher = grammars.compile(structure).result(60).matcher(structure.budget)
        for token in [*tokenizer.encode(text), eos]:
            bitmask = np.zeros((1, -(-300 // 32)), dtype=np.int32)
            matcher.mask(bitmask, 0)
            if not int(bitmask[0, token // 32]) >> (token % 32) & 1:
                return False
            matcher = matcher.copy()
            matcher.accept(token)
        return True

    yield taken
    grammars.close()
