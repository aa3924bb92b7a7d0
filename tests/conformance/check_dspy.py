"""dspy: a plain call, and a signature with a typed field."""

from typing import Literal

import dspy
import pytest

FORM = r"\[\[ ## city ## \]\]\n(Paris|Rome)\n\n\[\[ ## completed ## \]\]"
"""What dspy's chat adapter reads. The default model is too small to follow its instructions."""


@pytest.fixture
def lm(real, key, model):
    settings = {"temperature": 0.0, "max_tokens": 100, "cache": False, "num_retries": 0}
    return lambda **fields: dspy.LM(f"hosted_vllm/{model}", api_base=f"{real}/v1", api_key=key, **settings, **fields)


def test_a_plain_call(lm):
    assert lm()("Say hello.")[0]


def test_a_signature_with_a_typed_field(lm):
    class Capital(dspy.Signature):
        """Names the capital of a country."""

        country: str = dspy.InputField()
        city: Literal["Paris", "Rome"] = dspy.OutputField()

    with dspy.context(lm=lm(extra_body={"guided_regex": FORM}), adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        assert dspy.Predict(Capital)(country="France").city in ("Paris", "Rome")
