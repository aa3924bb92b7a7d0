"""Imports point down only, and heavy packages stay out of light modules."""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "python" / "chairlift"

LEAVES = {
    "config",
    "errors",
    "machine",
    "sampling",
    "scheduling",
    "settings",
    "outputs",
    "process_log",
    "svg",
    "timeline",
    "timeline_plot",
    "trim",
}
MAY_IMPORT = {
    "": {"engine", "sim", "tokenizer", "_core", *LEAVES},
    "__main__": {"cli"},
    "cli": {
        *("server", "gate", "engine", "runner", "checkpoint", "chat_template", "directories", "tokenizer", "bench", "sim", "verification"),
        *LEAVES,
        "",
    },
    "verification": {"engine", "models", "checkpoint", "_core", *LEAVES},
    "bench": {"errors", "scheduling", "svg"},
    "sim": {"engine", "bench", "models", "checkpoint", "_core", *LEAVES},
    "gate": {"server", "engine", "tokenizer", *LEAVES},
    "server": {"engine", "chat", "grammar", "tokenizer", "template_process", "child_process", "checkpoint", "directories", *LEAVES, ""},
    "fleet": {"engine", *LEAVES},
    "engine": {"runner", "chat", "grammar", "tokenizer", "checkpoint", "checks", "child_process", "directories", "_core", *LEAVES, ""},
    "runner": {"child_process", "models", "layers", "kernels", "checkpoint", "architectures", "_core", *LEAVES},
    "models": {"layers", "architectures", *LEAVES},
    "layers": {"kernels", "_core"},
    "kernels": set(),
    "chat": {"grammar", "errors", "outputs", "sampling"},
    "grammar": {"_core", "checkpoint", "child_process", "errors", "sampling", "trim"},
    "tokenizer": {"chat_template", "checkpoint", "text_parts", "token_cache", *LEAVES},
    "text_parts": {"alternatives"},
    "token_cache": set(),
    "alternatives": set(),
    "chat_template": {"template_process", "errors"},
    "template_process": {"child_process", "template_renderer", "errors"},
    "child_process": set(),
    "template_renderer": {"alternatives", "errors"},
    "checkpoint": {"alternatives", "architectures", *LEAVES},
    "architectures": set(),
    "config": {"scheduling", "settings", "_core"},
    "settings": {"scheduling"},
    "errors": set(),
    "machine": set(),
    "process_log": set(),
    "directories": {"errors"},
    "checks": {"errors"},
    "sampling": {"checks", "errors"},
    "scheduling": {"checks"},
    "outputs": {"timeline_plot"},
    "timeline_plot": {"svg", "timeline"},
    "svg": {"errors"},
    "timeline": set(),
    "trim": set(),
}
"""Module or package → those it may import; "" is the package's own `__init__`."""

LABORATORY = {"sim", "bench"}
"""What measures and simulates engines. The product works without it; the command line and the package's public names join the two."""
COMPATIBILITY = {"fleet", "routes.ollama"}
"""What adapts the product to other software's interfaces. Nothing else depends on it."""

IN_SERVER = {
    "supervisor": {
        *("admin", "app", "batch", "config", "garbage", "http", "keys", "lifecycle", "load_policy", "model", "observability", "service"),
        *("storage", "tiers", "tokenizing", "work"),
    },
    "admin": {"errors", "http", "model", "routes", "service"},
    "app": {"config", "errors", "http", "keys", "middleware", "observability", "routes", "service", "session_wait"},
    "middleware": {"errors", "http", "keys", "observability", "service", "session_name", "work"},
    "routes": {
        "batch",
        "chat",
        "embedding",
        "errors",
        "generation",
        "http",
        "keys",
        "lifecycle",
        "model",
        "observability",
        "registry",
        "schema",
        "sequences",
        "service",
        "session_name",
        "streaming",
        "tokenizing",
    },
    "batch": {"admission", "errors", "http", "keys", "lifecycle", "observability", "registry", "service", "storage", "work"},
    "embedding": {"errors", "generation", "model", "schema", "service"},
    "chat": {"cache_miss", "errors", "generation", "http", "keys", "model", "schema", "service", "turns", "usage"},
    "streaming": {"errors", "http"},
    "generation": {"errors", "keys", "model", "observability", "registry", "schema", "service", "session_wait", "submission", "usage"},
    "submission": {"lifecycle", "model", "observability", "session_name", "session_wait"},
    "http": {"errors", "observability", "schema", "service", "work"},
    "schema": {"errors", "session_name"},
    "service": {
        *("admission", "errors", "keys", "lifecycle", "load_policy", "model", "model_loader", "observability", "pacing", "registry"),
        *("sequences", "tiers", "turns"),
    },
    "sequences": {"errors"},
    "admission": {"errors", "keys"},
    "pacing": {"errors", "work"},
    "model_loader": {"engine_keeper", "errors", "lifecycle", "load_policy", "model"},
    "engine_keeper": {"model"},
    "engine_listener": set(),
    "ray_engines": set(),
    "load_policy": set(),
    "garbage": set(),
    "model": {"lifecycle", "observability", "tokenizing"},
    "tokenizing": {"work"},
    "model_specs": {"config", "toml_file"},
    "lifecycle": {"errors"},
    "storage": {"errors", "work"},
    "errors": {"registry", "usage"},
    "registry": {"keys", "observability"},
    "turns": {"cache_miss", "keys"},
    "observability": {"cache_miss", "keys", "session_name", "tiers", "work"},
    "cache_miss": set(),
    "session_name": set(),
    "session_wait": set(),
    "tiers": {"keys", "toml_file"},
    "keys": {"toml_file"},
    "config": set(),
    "toml_file": set(),
    "usage": set(),
    "work": set(),
}
"""Module or package of `server` → those it may import. A request's path goes down this list."""

TORCH = {"runner", "models", "layers", "kernels"}
"""The only folders that may import torch."""


@cache
def modules() -> list[tuple[str, Path]]:
    """The folder and the file of every module."""
    found = []
    # Whether `rglob` follows the link to the kernels depends on the Python version.
    for path in sorted({*SOURCE.rglob("*.py"), *(SOURCE / "kernels").glob("*.py")}):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found.append(("" if parts == ("__init__",) else parts[0], path))
    return found


@cache
def imports(path: Path, *, members: bool = False) -> set[str]:
    """The full names of all modules that a file imports, wherever it does so; those for type checkers alone excepted.

    With `members` also the names that it takes from them, which may be modules.
    """
    tree = ast.parse(path.read_text())
    checked_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in checked_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            taken = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= taken if node.module == "chairlift" else {str(node.module), *taken} if members else {str(node.module)}
    return names


def within(folder: str) -> list[Path]:
    """The files of a module or package."""
    found = [path for name, path in modules() if name == folder]
    assert found, folder
    return found


def test_every_room_is_there() -> None:
    assert {folder for folder, _ in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_arrows_point_down(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder}
    for path in within(folder):
        folders = {name.split(".")[1] for name in imports(path) if name.startswith("chairlift.")}
        names = {name for name in folders if (SOURCE / name).exists() or (SOURCE / f"{name}.py").exists() or name == "_core"}
        assert names <= allowed, f"{path.relative_to(SOURCE)} imports from {sorted(names - allowed)}"


def test_arrows_point_down_within_the_server() -> None:
    above: set[str] = set()
    for unit, below in IN_SERVER.items():
        assert not below & above, f"{unit} may import what is above it: {sorted(below & above)}"
        above.add(unit)
    seen = {""}
    for path in sorted((SOURCE / "server").rglob("*.py")):
        unit = path.relative_to(SOURCE / "server").with_suffix("").parts[0].replace("__init__", "")
        seen.add(unit)
        used = {name.split(".")[2] for name in imports(path) if name.startswith("chairlift.server.")}
        allowed = IN_SERVER.get(unit, set()) | {unit}
        assert used <= allowed, f"{path.relative_to(SOURCE)} imports {sorted(used - allowed)}"
    assert seen - {""} == set(IN_SERVER)


def test_the_product_needs_neither_the_laboratory_nor_the_compatibility() -> None:
    joints = {"cli", ""}
    for folder, below in MAY_IMPORT.items():
        assert folder in joints | LABORATORY or not below & LABORATORY, f"{folder} may import the laboratory"
        assert folder in joints or not below & COMPATIBILITY, f"{folder} may import what adapts others' interfaces"
    server = SOURCE / "server"
    registers = {"admin.py", "openapi.py"}  # the operator's routes, and all others
    for path in server.rglob("*.py"):
        if "ollama" not in path.parts and path.name not in registers:
            assert not [name for name in imports(path) if ".routes.ollama" in name], f"{path.relative_to(server)} imports Ollama's API"


def test_no_import_circles_between_files() -> None:
    paths = {path for _, path in modules()}
    known = {_module(path) for path in paths}
    graph = {_module(path): imports(path, members=True) & known for path in paths}
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for name in sorted(graph[module]):
            if name != module:
                visit(name, [*trail, module])
        done.add(module)

    for module in graph:
        visit(module, [])


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("chairlift", *parts)).removesuffix(".__init__")


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_heavy_packages_stay_where_they_are_used(folder: str) -> None:
    for path in within(folder):
        packages, name = {name.split(".")[0] for name in imports(path)}, path.relative_to(SOURCE)
        theirs = folder == "models" and path.name.startswith("transformers_")
        assert "transformers" not in packages or theirs, f"{name}: transformers serves the tests, and models without code of ours"
        assert "torch" not in packages or folder in TORCH, f"{name} imports torch"
        assert "triton" not in packages or folder == "kernels", f"{name} imports triton"
        assert not packages & {"starlette", "uvicorn"} or folder in {"server", "gate", "cli"}, f"{name} imports the web server"
