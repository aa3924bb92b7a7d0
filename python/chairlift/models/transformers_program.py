"""A program for any Python with torch and transformers: answers questions about a model, one JSON object a line.

`python transformers_program.py MODEL [FILE.gguf]` computes in float32 on the CPU. A question has `ask`, and the answer `answer` or
`error`. The first line that it writes has the versions. It imports nothing of Chairlift.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

POOLED = {"mean": lambda states: states.mean(0), "first": lambda states: states[0], "last": lambda states: states[-1]}
ACTIVATIONS = {"identity": lambda x: x, "tanh": torch.tanh, "gelu": torch.nn.functional.gelu}


class Model:
    """A model and its tokenizer, each loaded when a question needs it."""

    def __init__(self, directory: str, file: str | None) -> None:
        self.directory, self.source = directory, {"gguf_file": file} if file else {}
        self._loaded: dict[str, Any] = {}

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return list(self._tokenizer()(text)["input_ids"])

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Returns the tokens of a pair of texts."""
        return list(self._tokenizer()(first, second)["input_ids"])

    def chat(self, messages: list[dict[str, str]]) -> list[int] | None:
        """Returns the tokens of a conversation; None if there is no chat template."""
        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            return None
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])

    def follow(self, prompt: list[int], answer: list[int], top: int) -> list[list[tuple[int, float]]]:
        """Returns the most likely tokens, with their log-probabilities, at each position of an answer."""
        model = self.load("AutoModelForCausalLM", "AutoModelForImageTextToText")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].float()
        best = logits.log_softmax(-1).topk(min(top, logits.shape[-1]))
        return [list(zip(ids, values, strict=True)) for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def embed(self, ids: list[int], pooling: str, dense: list[dict[str, Any]]) -> list[float]:
        """Returns the embedding of a text, of length 1. `dense` are the layers of sentence-transformers after the pooling."""
        from safetensors.torch import load_file

        model = self.load("AutoModel")
        with torch.no_grad():
            state = POOLED[pooling](model(input_ids=torch.tensor([ids])).last_hidden_state[0].float())
            for layer in dense:
                weights = load_file(Path(self.directory) / layer["path"] / "model.safetensors")
                state = torch.nn.functional.linear(state, weights["linear.weight"].float(), weights.get("linear.bias"))
                state = ACTIVATIONS[layer["activation"]](state)
        numbers: list[float] = (state / state.norm()).tolist()
        return numbers

    def score(self, first: str, second: str) -> float:
        """Returns a classifier's number for a pair of texts."""
        model = self.load("AutoModelForSequenceClassification")
        with torch.no_grad():
            return float(model(**self._tokenizer()(first, second, return_tensors="pt")).logits[0, 0])

    def _tokenizer(self) -> Any:
        if "tokenizer" not in self._loaded:
            self._loaded["tokenizer"] = transformers.AutoTokenizer.from_pretrained(self.directory, **self.source)
        return self._loaded["tokenizer"]

    def load(self, *names: str) -> Any:
        """Loads the model by the first of these classes that knows it."""
        for name in names:
            if name in self._loaded:
                return self._loaded[name]
        for name in names:
            try:
                model = getattr(transformers, name).from_pretrained(self.directory, dtype=torch.float32, **self.source)
            except ValueError:
                if name == names[-1]:
                    raise
            else:
                self._loaded[name] = model.eval()
                return model


def main() -> None:
    """Answers the questions of standard input until it ends."""
    # Libraries may print to standard output.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    model = Model(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)

    def write(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    write({"answer": f"transformers {transformers.__version__}, torch {torch.__version__}"})
    for line in sys.stdin:
        question = json.loads(line)
        try:
            write({"answer": getattr(model, question.pop("ask"))(**question)})
        except Exception as error:  # the asker decides what a failure means
            write({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
