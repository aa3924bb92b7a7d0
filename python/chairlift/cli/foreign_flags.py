"""Flags of vLLM, Ollama and llama.cpp that Chairlift does not have, and what to do instead."""

from __future__ import annotations

_NOT_NEEDED = "leave it out: "
_LOG = _NOT_NEEDED + "a request has one line in the log, without its text; --log-level warning leaves it out"
_ADAPTERS = _NOT_NEEDED + "only memory limits the number of adapters (--enable-lora)"
_GRAPHS = _NOT_NEEDED + "CUDA graphs are captured by themselves; --enforce-eager turns them off"
_IN_FILES = _NOT_NEEDED + "it is read from the model's files"
_CONTEXT = "use --max-model-len, which is the limit of each request"
_ONE_DEVICE = "not supported: a model runs on one kind of device, --device"
_OTHER_MACHINES = "not supported: engines of other machines join with 'chairlift join' (--engine-listen)"
_OWN_CODE = "not supported: the server loads no other code"
_TEXT_ONLY = _NOT_NEEDED + "models read text only"
HINTS = {
    "--trust-remote-code": _NOT_NEEDED + "no code of a checkpoint is ever run",
    "--enable-chunked-prefill": _NOT_NEEDED + "long prompts are always computed in chunks, of --max-num-batched-tokens at most",
    **dict.fromkeys(("--enable-log-requests", "--disable-log-requests", "--max-log-len", "--disable-uvicorn-access-log"), _LOG),
    "--uvicorn-log-level": "use --log-level",
    "--disable-log-stats": _NOT_NEEDED + "use --log-level warning for fewer lines",
    **dict.fromkeys(("--guided-decoding-backend", "--structured-outputs-config"), _NOT_NEEDED + "llguidance is the only one"),
    "--enable-reasoning": _NOT_NEEDED + "reasoning is recognized by the chat template, or by --reasoning-parser",
    "--pipeline-parallel-size": "not supported: use --tensor-parallel-size, or --replicas",
    "-pp": "not supported: use -tp, or --replicas",
    "--cpu-offload-gb": "not supported: use a smaller checkpoint, or --quantization",
    "--kv-transfer-config": "not supported: use --prefix-cache-dir to keep KV on disk",
    "--api-server-count": _NOT_NEEDED + "one server process is enough for several engines (--replicas)",
    **dict.fromkeys(("--limit-mm-per-prompt", "--mm-processor-kwargs", "--mm-processor-cache-gb", "--language-model-only"), _TEXT_ONLY),
    "--num-scheduler-steps": _NOT_NEEDED + "steps are planned one by one",
    "--speculative-model": "not supported: tokens are drafted without a model (--speculative-config)",
    **dict.fromkeys(("--max-loras", "--max-cpu-loras"), _ADAPTERS),
    **dict.fromkeys(("--compilation-config", "-cc", "-O", "--optimization-level", "--max-cudagraph-capture-size"), _GRAPHS),
    **dict.fromkeys(("--async-scheduling", "--attention-backend", "--distributed-executor-backend"), _NOT_NEEDED + "there is no choice"),
    **dict.fromkeys(("--task", "--convert", "--tokenizer-mode", "--config-format", "--chat-template-content-format"), _IN_FILES),
    **dict.fromkeys(("--tool-parser-plugin", "--reasoning-parser-plugin", "--logits-processors", "--middleware"), _OWN_CODE),
    **dict.fromkeys(("--nnodes", "--node-rank", "--data-parallel-address", "--data-parallel-size-local", "-dpl"), _OTHER_MACHINES),
    "--enable-expert-parallel": "not supported: use --tensor-parallel-size",
    "--enable-prompt-tokens-details": _NOT_NEEDED + "an answer's usage always has them",
    "--default-chat-template-kwargs": "not supported: send chat_template_kwargs in each request",
    "--override-generation-config": "not supported: set sampling in each request, or use --generation-config none",
    "--hf-overrides": "not supported: change the model's config.json",
    "--hf-token": "set the variable HF_TOKEN",
    "--kv-offloading-size": "use --swap-space, or --prefix-cache-dir",
    "--root-path": "not supported: let the proxy remove the prefix",
    **dict.fromkeys(("--ctx-size", "-c"), _CONTEXT),
    **dict.fromkeys(("--parallel", "-np"), "use --max-num-seqs"),
    **dict.fromkeys(("--n-gpu-layers", "-ngl"), _ONE_DEVICE),
    **dict.fromkeys(("--hf-repo", "-hf", "-m"), "name the model without a flag: FILE.gguf, or org/repo:Q4_K_M"),
    **dict.fromkeys(("--alias", "-a"), "use --served-model-name"),
    **dict.fromkeys(("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"), "use --kv-cache-dtype"),
    **dict.fromkeys(("--jinja", "--metrics", "--embeddings", "--flash-attn", "-fa"), _NOT_NEEDED + "it is always on"),
    "-t": "use --threads",
    **dict.fromkeys(("--verbose", "-v"), "use --log-level debug"),
}
"""By flag. A name that differs only in spelling is suggested anyway."""
