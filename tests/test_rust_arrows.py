"""Rust's import arrows point down only: a file imports from the file that defines a name, and that file is in a lower layer."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

RUST = Path(__file__).parent.parent / "rust"

LAYERS = {
    "core": [
        {"error", "latest", "request"},
        {"memory", "policy", "step_time"},
        {"config", "step"},
        {"ledger", "sessions"},
        {"sequence"},
        {"batch", "queue"},
        {"scheduler"},
        {"journal"},
        {"drafts", "machine"},
    ],
    "sim": [
        {"goes_on", "histogram", "job", "random", "service", "step_time", "storage", "utilization"},
        {"live", "machine", "report", "session", "what_if"},
        {"drafts", "recorded"},
        {"replica"},
        {"fleet", "models", "shadow"},
        {"run", "sessions"},
    ],
    "cpu": [
        {"grids", "half", "pod", "time_slice", "zeroed"},
        {"block_type", "pool", "unsafe_slice"},
        {"simd"},
        {"aligned", "hadamard", "norm", "rope", "sample"},
        {"cache", "tensor"},
        {"ggml", "step"},
        {"gemm", "state"},
        {"quant"},
        {"weights"},
        {"lora"},
        {"linear", "router"},
        {"attention", "mlp"},
        {"experts", "latent", "layer_input", "recurrent"},
        {"blocks"},
        {"pass"},
        {"decoder", "encoder"},
    ],
    "gpu": [],
    "python": [
        {"errors"},
        {"copied"},
        {"buffers", "policy", "reports", "request", "threads", "work"},
        {"arbiter", "kv_budget", "once", "router"},
        {"settings"},
        {"caches", "grammar", "linear", "scheduler", "simulate"},
        {"decoder", "encoder", "replay", "shadow", "simulate_sessions"},
    ],
}
"""Crate → its modules (the core's are rooms), lower layers first. A module imports from lower layers only; `lib.rs` puts them together."""

CRATES = {"core": set(), "sim": {"core"}, "cpu": set(), "gpu": set(), "python": {"core", "cpu", "gpu", "sim"}}
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
            assert name in layers, f"{path.name} imports {name} from the root of its crate, not from the module that defines it"
            assert name == module or layers[name] < layers[module], f"{path.name} imports from {name}, which is not below it"


@pytest.mark.parametrize("crate", CRATES)
def test_arrows_point_down_between_crates(crate: str) -> None:
    used = {name for _, path in sources(crate) for name in re.findall(r"\bchairlift_(\w+)\b", code(path))}
    assert used <= CRATES[crate] | {crate}


def test_parts_of_a_type_know_their_owner_only() -> None:
    """A part of the scheduler, a sequence or the pool sees its fields, and no other part's functions by path: they meet in its methods."""
    owners = {"block": "BlockPool", "scheduler": "Scheduler", "sequence": "Sequence"}
    for _, path in sources("core"):
        for name in re.findall(r"\bsuper::([A-Z]\w*)", code(path)):
            assert name == owners.get(path.parent.name), f"{path.name} imports {name}, which it is not a part of"


def test_arrows_have_no_circle_within_a_room() -> None:
    rooms: dict[Path, dict[str, set[str]]] = {}
    for _, path in sources("core"):
        rooms.setdefault(path.parent, {})[path.stem] = set(re.findall(r"\bsuper::([a-z]\w*)", code(path)))
    assert any(imports for files in rooms.values() for imports in files.values()), "no file imports from its room: the pattern is wrong"
    for files in rooms.values():
        TopologicalSorter(files).prepare()  # raises CycleError
