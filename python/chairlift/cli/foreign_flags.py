"""Flags of vLLM, Ollama and llama.cpp that Chairlift does not have, and what to do instead."""

from __future__ import annotations

_NOT_NEEDED = "leave it out: "
HINTS = {
    "--trust-remote-code": _NOT_NEEDED + "no code of a checkpoint is ever run",
    "--enable-chunked-prefill": _NOT_NEEDED + "long prompts are always computed in chunks, of --max-num-batched-tokens at most",
    "--disable-log-requests": _NOT_NEEDED + "a request has one line in the log, without its text; --log-level warning leaves it out",
    "--disable-log-stats": _NOT_NEEDED + "use --log-level warning for fewer lines",
    "--guided-decoding-backend": _NOT_NEEDED + "llguidance is the only one",
    "--enable-reasoning": _NOT_NEEDED + "reasoning is recognized by the chat template, or by --reasoning-parser",
    "--pipeline-parallel-size": "not supported: use --tensor-parallel-size, or --replicas",
    "-pp": "not supported: use -tp, or --replicas",
    "--cpu-offload-gb": "not supported: use a smaller checkpoint, or --quantization",
    "--kv-transfer-config": "not supported: use --prefix-cache-dir to keep KV on disk",
    "--api-server-count": _NOT_NEEDED + "one server process is enough for several engines (--replicas)",
    "--limit-mm-per-prompt": "not supported: models read text only",
    "--num-scheduler-steps": _NOT_NEEDED + "steps are planned one by one",
    "--speculative-model": "not supported: tokens are drafted without a model (--speculative-config)",
    "--ctx-size": "use --max-model-len, which is the limit of each request",
    "-c": "use --max-model-len, which is the limit of each request",
    "--parallel": "use --max-num-seqs",
    "-np": "use --max-num-seqs",
    "--n-gpu-layers": "not supported: a model runs on one kind of device, --device",
    "-ngl": "not supported: a model runs on one kind of device, --device",
    "--verbose": "use --log-level debug",
    "-v": "use --log-level debug",
}
"""By flag. A name that differs only in spelling is suggested anyway."""
