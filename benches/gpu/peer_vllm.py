"""vLLM on the workloads of `serve.py`, in a process of its own, whose Python may be another one.

    python peer_vllm.py < ORDER

An order is JSON: the checkpoint's directory, vLLM's settings, and the cases: their names, prompts' token ids, and tokens of an answer.
Prints a line when vLLM has loaded, with its version, and one for each case, with its seconds: JSON behind MARK.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "chairlift: "
"""Begins our lines: vLLM logs to the same stream."""


def has_vllm(python: str) -> bool:
    """Whether a Python has vLLM, which is not imported."""
    code = "import sys; from importlib.util import find_spec; sys.exit(find_spec('vllm') is None)"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def replies(python: str, order: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
    """Runs an order in a Python that has vLLM. Raises RuntimeError behind the last reply if it fails or takes longer than `seconds`."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # vLLM has processes of its own, which must end with it: so a group of processes.
    with subprocess.Popen([python, str(Path(__file__).resolve())], text=True, start_new_session=True, **pipes) as child:
        try:
            out, errors = child.communicate(json.dumps(order), timeout=seconds)
            status = f"it ended with {child.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, errors = child.communicate()
            errors, status = "", f"it took more than {seconds:.0f} s"
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    yield from (json.loads(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK))
    if child.returncode:
        raise RuntimeError(errors.strip().splitlines()[-1] if errors.strip() else status)


def main() -> None:
    """Reads the order, loads vLLM with random weights, and times the cases, each after a few tokens to warm up."""
    from importlib.metadata import version

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    order = json.load(sys.stdin)
    llm = LLM(model=order["model"], load_format="dummy", enable_prefix_caching=False, skip_tokenizer_init=True, **order["settings"])
    print(MARK + json.dumps({"vllm": version("vllm")}), flush=True)
    for case in order["cases"]:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in case["prompts"]]
        seconds = 0.0
        for answer in (min(2, case["answer"]), case["answer"]):
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
        print(MARK + json.dumps({"case": case["name"], "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
