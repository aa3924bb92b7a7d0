import math

import pytest
from scripted_engine import WordTokenizer

from chairlift.outputs import TokenLogprobs
from chairlift.server.schema.logprobs import CompletionLogprobs, prompt_logprobs_json, text_offsets


class Vocabulary(WordTokenizer):
    """Tokens are places in a list of pieces, as a SentencePiece model might have them."""

    strips_first_space = True
    pieces = (b"<s>", b" Hello", b" wor", b"ld", b"\xf0\x9f", b"\x98\x80", b" ", b"<end>")

    def piece(self, token):
        return self.pieces[token]


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        ([0, 1, 2, 3], "Hello world", [0, 0, 5, 9]),  # the first one was put there, and is not shown
        ([0, 1], "<s> Hello", [0, 3]),
        ([1, 4, 5, 3], "Hello\N{GRINNING FACE}ld", [0, 5, 5, 6]),
        ([6, 1], " Hello", [0, 0]),
        ([1, 7, 3], "Hellold", [0, 5, 5]),
        ([2, 4], "wor\N{REPLACEMENT CHARACTER}", [0, 3]),
    ],
)
def test_where_tokens_begin_in_their_text(tokens, text, offsets):
    assert text_offsets(Vocabulary(), tokens, text) == offsets


def test_what_json_cannot_say_is_very_unlikely():
    never = TokenLogprobs(97, -math.inf, 256, ((98, -0.5), (99, -math.inf)))
    columns = CompletionLogprobs(WordTokenizer(), 2, False).json([97], [never], [0])
    assert columns["token_logprobs"] == [-9999.0]
    assert columns["top_logprobs"] == [{"b": -0.5, "c": -9999.0, "a": -9999.0}]
    reported = list(prompt_logprobs_json(WordTokenizer(), [None, never], 1))
    assert reported == [
        None,
        {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}, "97": {"logprob": -9999.0, "rank": 256, "decoded_token": "a"}},
    ]
