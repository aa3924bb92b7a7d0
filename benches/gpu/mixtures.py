"""Mixtures of experts, for several scripts: their shapes, weights of each kind, and a checkpoint in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import numpy as np

SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}
"""Experts, those that a token uses, hidden size and inner size."""
KINDS = ("bf16", "fp8", "int8", "int4", "mxfp4")
LAYERS = 12
"""Of 48 and 24: dummy weights of all would take a minute."""


def configs() -> dict[str, dict[str, Any]]:
    """The config.json of both shapes, with LAYERS layers."""
    qwen = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128}
    qwen |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    oss = {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4}
    return {
        "Qwen3-30B-A3B": common.llama(2048, 6144, LAYERS, 32, 4, 151_936, **qwen),
        "gpt-oss-20b": gpt_oss(2880, 2880, LAYERS, 64, 8, 201_088, **oss),
    }


def gpt_oss(*shape: int, **more: Any) -> dict[str, Any]:
    """The config.json of a gpt-oss; `shape` and `more` are those of `common.llama`."""
    kinds = ["sliding_attention", "full_attention"] * (shape[2] // 2)
    more |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True}
    return common.llama(*shape, layer_types=kinds, sliding_window=128, **more)


def weights(kind: str, experts: int, outs: int, ins: int, device: str) -> Any:
    """Random matrices of all experts [experts, outs, ins], as `chairlift.layers.experts.Experts` takes them."""
    import torch

    from chairlift.layers.linear import Quantised

    def octets(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (experts, outs, *shape), dtype=torch.uint8, device=device)

    if kind in ("bf16", "fp16"):
        return (torch.randn(experts, outs, ins, device=device) / ins**0.5).to(torch.bfloat16 if kind == "bf16" else torch.float16)
    if kind == "mxfp4":
        return Quantised(octets(0, 256, ins // 2), octets(116, 121, ins // 32), None, 32)
    scale = torch.rand(experts, outs, -(-ins // 128) if kind == "int4" else 1, device=device) / ins**0.5
    if kind == "int4":
        return Quantised(octets(0, 256, ins // 2), (scale / 4).half(), octets(0, 16, scale.shape[-1]), 128)
    numbers = octets(0, 120, ins)
    return Quantised(numbers.view(torch.float8_e4m3fn), scale / 100) if kind == "fp8" else Quantised(numbers.view(torch.int8), scale / 60)


def write_mxfp4(directory: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """Writes a checkpoint of gpt-oss with random weights and experts in MXFP4, and one with the same numbers in bf16."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from chairlift.layers.experts import of_expert

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    whole = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    packed = dict(whole)
    for name in [name for name in whole if name.endswith(("gate_up_proj", "down_proj"))]:
        count, ins, outs = whole[name].shape
        weight = weights("mxfp4", count, outs, ins, "cpu")
        whole[name] = torch.stack([of_expert(weight, expert, torch.bfloat16).T for expert in range(count)]).contiguous()
        del packed[name]
        packed |= {f"{name}_blocks": weight.numbers.view(count, outs, ins // 32, 16), f"{name}_scales": weight.scale}
    paths = []
    for name, tensors, quantization in (("whole", whole, None), ("packed", packed, {"quant_method": "mxfp4"})):
        paths.append(common.write_model(directory / name, config | {"quantization_config": quantization}))
        save_file(tensors, paths[-1] / "model.safetensors", metadata={"format": "pt"})
    return paths[0], paths[1]


def products(run: common.Run) -> None:
    """The first product of experts, of each kind, and torch's; the floor is reading the matrices of those that are used once."""
    import torch

    from chairlift.layers.experts import Rows, grouped_mm

    half = torch.float16 if run.dry else torch.bfloat16
    shapes = {"tiny": (4, 2, 64, 32)} if run.dry else SHAPES
    for name, (experts, used, hidden, inner) in shapes.items():
        for kind in ("fp16", "mxfp4") if run.dry else KINDS:
            weight = weights(kind, experts, 2 * inner, hidden, run.device)
            numbers = weight if isinstance(weight, torch.Tensor) else weight.numbers
            for tokens in (2,) if run.dry else (1, 16, 64, 256, 4096):
                rows = Rows.sort(torch.rand(tokens, experts, device=run.device).topk(used).indices, experts)
                x = torch.randn(tokens, hidden, device=run.device).to(half)
                read = int(rows.experts.unique().numel()) / experts * numbers.numel() * numbers.element_size()
                with run.tried(f"{name}, {kind}, {tokens} tokens", 30):
                    seconds = common.time_calls(run, [lambda x=x, r=rows, w=weight: r.linear(x, w, None, spread=True)], rounds=4, repeats=7)
                    flop = 4 * tokens * used * hidden * inner
                    row = {"model": name, "weight": kind, "tokens": tokens, "us": seconds * 1e6, "GB/s": read / seconds / 1e9}
                    number = run.row("Products of experts", row | {"TFLOP/s": flop / seconds / 1e12})
                    if kind == "bf16" and tokens < 4096:
                        spread = x[rows.order // used]
                        other = common.time_calls(run, [lambda x=spread, r=rows, w=weight: grouped_mm(x, w, r.ends)], rounds=4, repeats=7)
                        run.more(number, {"torch us": other * 1e6, "torch / ours": other / seconds})
            del weight, numbers
            common.free()


def check(run: common.Run, checks: Any, dtype: Any) -> None:
    """Products of experts of each kind beside the same with matrices multiplied out, by `checks` of `correct.py`."""
    import torch

    from chairlift.kernels.expert_linear import expert_linear
    from chairlift.layers.experts import Rows

    kinds = ("fp16", "mxfp4") if run.dry else ("bf16" if dtype == torch.bfloat16 else "fp16", "fp8", "int8", "int4", "mxfp4")
    for tokens, experts, used in ((3, 8, 2), (40, 8, 2), (300, 8, 3))[: 1 if run.dry else None]:
        rows = Rows.sort(torch.rand(tokens, experts, device=run.device).topk(used).indices, experts)
        for kind in kinds:
            weight = weights(kind, experts, 96 if run.dry else 1000, 64 if run.dry else 1504, run.device)
            stored = (weight, None, None, 0) if isinstance(weight, torch.Tensor) else weight.stored
            ins = weight.shape[2] if isinstance(weight, torch.Tensor) else weight.numbers.shape[2] * (2 if kind in ("int4", "mxfp4") else 1)
            bias = torch.randn(experts, stored[0].shape[1], device=run.device).to(dtype)
            for spread in (True, False):
                x = torch.randn(tokens if spread else tokens * used, ins, device=run.device).to(dtype)

                def kernel(x: Any = x, w: Any = stored, b: Any = bias, r: Any = rows, spread: bool = spread, used: int = used) -> Any:
                    return expert_linear(x, w, b, (r.order, r.ends), used, spread=spread)

                def reference(x: Any = x, w: Any = weight, b: Any = bias, r: Any = rows, spread: bool = spread) -> Any:
                    whole = w.float() if isinstance(w, torch.Tensor) else w
                    return r.linear(x.float(), whole, b.float(), spread=spread)

                tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
                name = f"experts, {kind}, {tokens} tokens, {'first' if spread else 'second'}"
                checks.check(name, kernel, reference, tolerance, str(dtype).removeprefix("torch."))


def logprob_gap(mine: list[list[Any]], theirs: list[list[Any]]) -> float:
    """The mean difference of log-probabilities of the same tokens."""
    pairs = [(one.logprob, other.logprob) for a, b in zip(mine, theirs, strict=True) for one, other in zip(a, b, strict=True)]
    return float(np.mean([abs(one - other) for one, other in pairs]))
