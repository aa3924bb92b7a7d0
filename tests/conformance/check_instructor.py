"""instructor: typed results by tools and by schema, whole and streamed."""

from typing import Literal

import instructor
import openai
import pytest
from pydantic import BaseModel

ASK = [{"role": "user", "content": "What is the capital of France?"}]


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]
    sure: bool


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_a_typed_result(real, key, model, mode):
    with openai.OpenAI(base_url=f"{real}/v1", api_key=key, max_retries=0, timeout=300) as client:
        patched = instructor.from_openai(client, mode=mode)
        fields = {"model": model, "messages": ASK, "response_model": Capital, "max_tokens": 64, "temperature": 0, "max_retries": 0}
        assert isinstance(patched.chat.completions.create(**fields), Capital)


def test_a_partial_stream(real, key, model):
    with openai.OpenAI(base_url=f"{real}/v1", api_key=key, max_retries=0, timeout=300) as client:
        patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        parts = list(
            patched.chat.completions.create_partial(model=model, messages=ASK, response_model=Capital, max_tokens=64, temperature=0)
        )
        assert parts[-1].city in ("Paris", "Rome")
