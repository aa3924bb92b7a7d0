"""A search over HTTP: paths are forked from one live sequence, ranked by their scores, and only the best is continued."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx


def best_path(http: httpx.Client, prompt: str, paths: int, tokens: int) -> str:
    """The text of the likeliest of `paths` sampled continuations, followed by an answer. The prompt is computed once."""
    root = call(http, "POST", "/sequences", prompt=prompt, lease_seconds=60)["id"]
    forks = [fork["id"] for fork in call(http, "POST", f"/sequences/{root}/fork", n=paths)["data"]]
    try:

        def generate(seed: int) -> dict[str, Any]:
            fields = {"max_tokens": tokens, "temperature": 0.8, "seed": seed, "stop": ["\n"]}
            sequence: dict[str, Any] = call(http, "POST", f"/sequences/{forks[seed]}/generate", **fields)["sequence"]
            return sequence

        with ThreadPoolExecutor(paths) as pool:  # the server runs them in one batch
            ranked = sorted(pool.map(generate, range(paths)), key=lambda path: path["score"] / path["generated_tokens"])
        for worse in ranked[:-1]:
            call(http, "DELETE", f"/sequences/{worse['id']}")  # frees its memory in the next step
        best = ranked[-1]["id"]
        call(http, "POST", f"/sequences/{best}/append", text="\nThe answer is")
        call(http, "POST", f"/sequences/{best}/generate", max_tokens=8, temperature=0)
        text: str = call(http, "GET", f"/sequences/{best}")["text"]
        return text
    finally:
        for sequence in call(http, "GET", "/sequences")["data"]:
            if sequence["id"] in (root, *forks):
                call(http, "DELETE", f"/sequences/{sequence['id']}")


def call(http: httpx.Client, method: str, path: str, **fields: Any) -> Any:
    """The server's answer to a request; raises httpx.HTTPStatusError."""
    response = http.request(method, path, json=fields if fields else None)
    response.raise_for_status()
    return response.json()


if __name__ == "__main__":
    url, key = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), os.environ.get("OPENAI_API_KEY", "none")
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as http:
        print(best_path(http, "Question: Anna has 3 apples and buys 4 more. How many has she?\nThought:", paths=4, tokens=16))
