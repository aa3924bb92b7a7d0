"""Rust's import arrows point down only: a file imports from the file that defines a name, and that file is in a lower layer."""

import re
from pathlib import Path

import pytest

RUST = Path(__file__).parent.parent / "rust"

LAYERS = {
    "core": [
        {"cache_scope", "tier"},
        {"request", "error", "host", "work"},
        {"policy"},
        {"elsewhere", "energy", "row_times", "turn"},
        {
            "acceptance",
            "arbiter",
            "stake",
            "hash",
            "cost",
            "kv_budget",
            "recent_steps",
            "saturation",
            "share",
            "text_index",
            "timeline",
        },
        {"admission", "background", "block", "config", "corpus", "group", "phase", "place", "queue", "snapshot", "stats"},
        {"batch", "kv", "router", "settings"},
        {"compute", "held", "sequence", "steps", "journal"},
        {"accounts", "awaited", "deadlines", "parsed_journal", "reservation"},
        {"running", "waiting"},
        {"scheduler"},
        {"recorder", "replay"},
        {"drafter"},
    ],
    "sim": [
        {"histogram", "job", "service", "step_time", "utilization"},
        {"live", "machine", "report", "what_if"},
        {"drafts", "recorded"},
        {"replica"},
        {"fleet", "models"},
        {"run"},
    ],
    "cpu": [
        {"half", "pod", "pool"},
        {"block_type", "unsafe_slice"},
        {"simd"},
        {"aligned", "hadamard", "norm", "rope", "sample"},
        {"cache", "tensor"},
        {"ggml", "step"},
        {"gemm"},
        {"quant"},
        {"weights"},
        {"lora"},
        {"linear"},
        {"attention", "blocks"},
        {"pass"},
        {"decoder", "encoder"},
    ],
    "python": [
        {"arbiter", "buffers", "errors", "kv_budget", "reports", "router", "settings", "threads", "work"},
        {"decoder", "scheduler", "simulate"},
        {"encoder", "replay"},
    ],
}
"""Crate → its modules, lower layers first. A module may import from lower layers only; `lib.rs` puts them together."""

CRATES = {"core": set(), "sim": {"core"}, "cpu": set(), "python": {"core", "cpu", "sim"}}
"""Crate → crates that it may import from."""


def code(path: Path) -> str:
    """A file without comments and without its tests."""
    text = re.split(r"#\[cfg\(test\)\]\nmod \w+ \{", path.read_text())[0]
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("//"))


def sources(crate: str) -> list[tuple[str, Path]]:
    """(module, file) of every file of a crate but `lib.rs` and tests; files of a directory belong to its module."""
    root = RUST / crate / "src"
    files = [path for path in sorted(root.rglob("*.rs")) if path.name not in {"lib.rs", "tests.rs"}]
    return [(path.relative_to(root).parts[0].removesuffix(".rs"), path) for path in files]


@pytest.mark.parametrize("crate", LAYERS)
def test_every_module_has_a_layer(crate: str) -> None:
    modules = [module for layer in LAYERS[crate] for module in layer]
    assert len(modules) == len(set(modules))
    assert set(modules) == {module for module, _ in sources(crate)}


@pytest.mark.parametrize("crate", LAYERS)
def test_arrows_point_down_within_a_crate(crate: str) -> None:
    layers = {module: at for at, layer in enumerate(LAYERS[crate]) for module in layer}
    for module, path in sources(crate):
        for name in re.findall(r"\bcrate::(\w+|\{)", code(path)):
            # A name of the crate's root is a re-export, which hides where the arrow leads.
            assert name in layers, f"{path.name} imports {name} from the root of its crate, not from the file that defines it"
            assert name == module or layers[name] < layers[module], f"{path.name} imports from {name}, which is not below it"


@pytest.mark.parametrize("crate", CRATES)
def test_arrows_point_down_between_crates(crate: str) -> None:
    used = {name for _, path in sources(crate) for name in re.findall(r"\bchairlift_(\w+)\b", code(path))}
    assert used <= CRATES[crate] | {crate}


def test_parts_of_a_module_know_their_owner_only() -> None:
    """A part of the scheduler, a sequence or the pool sees its fields, and no other part's functions by path: they meet in its methods."""
    owners = {"block": "BlockPool", "scheduler": "Scheduler", "sequence": "Sequence"}
    for module, path in sources("core"):
        for name in re.findall(r"\bsuper::(\w+)", code(path)):
            assert name == owners.get(module), f"{path.name} imports {name} from its sibling"
