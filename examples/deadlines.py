"""Gives a request a deadline. The server ends a request that misses it, or would, and frees its slot."""

from openai import InternalServerError, OpenAI

client = OpenAI()
try:
    answer = client.completions.create(
        model="smollm2-135m-instruct",
        prompt="The history of the world, in great detail:",
        max_tokens=2000,
        extra_body={"deadline_ms": 300, "ignore_eos": True},
    )
    print(f"in time: {answer.usage.completion_tokens} tokens")
except InternalServerError as error:
    print(f"{error.status_code} {error.code}: {error.body['message']}")
