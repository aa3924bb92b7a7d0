from functools import partial

import grammar_forms
import pytest

from chairlift.grammar.grammars import Grammars
from chairlift.grammar.trial import Vocabulary
from chairlift.sampling import SamplingParams
from chairlift.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(byte_model):
    return Tokenizer(byte_model)


@pytest.fixture(scope="module")
def vocabulary(byte_model, tokenizer):
    [eos] = tokenizer.eos_token_ids
    return Vocabulary(byte_model / "tokenizer.json", grammar_forms.VOCABULARY, (eos,))


@pytest.fixture(scope="module")
def grammars(vocabulary):
    made = Grammars(vocabulary)
    yield made
    made.close()


@pytest.fixture(scope="module")
def takes(grammars, tokenizer):
    """Whether a structured output has a text as a whole answer."""
    return partial(grammar_forms.takes, grammars, tokenizer)


@pytest.fixture(scope="module")
def answers(takes):
    """Whether a structured output, which a request may have, has a text as a whole answer."""

    def checked(structure, text):
        SamplingParams(structured_output=structure)
        return takes(structure, text)

    return checked
