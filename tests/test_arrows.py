"""The house's import arrows point down only, and heavy packages stay out of light places."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "python" / "chairlift"

LEAVES = {"config", "errors", "sampling", "scheduling", "outputs", "timeline"}
MAY_IMPORT = {
    "": {"engine", "sim", *LEAVES},
    "__main__": {"cli"},
    "cli": {"server", "engine", "checkpoint", "tokenizer", "bench", "sim", *LEAVES, ""},
    "bench": {"errors"},
    "sim": {"engine", "bench", "models", "checkpoint", "_core", *LEAVES},
    "server": {"engine", "grammar", "tokenizer", "checkpoint", *LEAVES, ""},
    "engine": {"runner", "grammar", "tokenizer", "checkpoint", "_core", *LEAVES, ""},
    "runner": {"models", "layers", "kernels", "checkpoint", "_core", *LEAVES},
    "models": {"layers", *LEAVES},
    "layers": {"kernels", "_core"},
    "kernels": set(),
    "grammar": {"errors", "sampling"},
    "tokenizer": {"chat_template", *LEAVES},
    "chat_template": {"errors"},
    "checkpoint": LEAVES,
    "config": {"errors"},
    "errors": set(),
    "checks": {"errors"},
    "sampling": {"checks", "errors"},
    "scheduling": {"checks"},
    "outputs": set(),
    "timeline": set(),
}
"""Room of the house → rooms it may import from; "" is the package's own `__init__`."""

IN_SERVER = {
    "": {"api", "observe", "door", "service", "telemetry"},
    "api": {"door", "service"},
    "observe": {"service", "telemetry"},
    "door": {"service", "telemetry"},
    "service": {"telemetry"},
    "telemetry": set(),
}
"""The same for the rooms within `server`, whose own modules put them together."""

TORCH = {"runner", "models", "layers", "kernels"}
"""The only rooms that may import torch."""


def modules() -> list[tuple[str, Path]]:
    """(room, file) of every module."""
    found = []
    # Whether `rglob` follows the link to the kernels depends on the Python version.
    for path in sorted({*SOURCE.rglob("*.py"), *(SOURCE / "kernels").glob("*.py")}):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found.append(("" if parts == ("__init__",) else parts[0], path))
    return found


def imports(path: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever it does so; those for type checkers alone excepted."""
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
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "chairlift" else {str(node.module)}
    return names


def test_every_room_is_there() -> None:
    assert {room for room, _ in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize(("room", "path"), modules(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_arrows_point_down(room: str, path: Path) -> None:
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("chairlift.")}
    allowed = MAY_IMPORT[room] | {room}
    names = {name for name in rooms if (SOURCE / name).exists() or (SOURCE / f"{name}.py").exists() or name == "_core"}
    assert names <= allowed, f"{path.relative_to(SOURCE)} imports from {sorted(names - allowed)}"


def test_arrows_point_down_within_the_server() -> None:
    seen = set()
    for path in sorted((SOURCE / "server").rglob("*.py")):
        parts = path.relative_to(SOURCE / "server").parts
        room = parts[0] if len(parts) > 1 else ""
        seen.add(room)
        used = {name.split(".")[2] for name in imports(path) if name.startswith("chairlift.server.")}
        rooms = {name for name in used if (SOURCE / "server" / name).is_dir()}
        # Only those who put the rooms together know of each other.
        assert room == "" or rooms == used, f"{path.relative_to(SOURCE)} imports {sorted(used - rooms)}"
        assert rooms <= IN_SERVER[room] | {room}, f"{path.relative_to(SOURCE)} imports from {sorted(rooms - IN_SERVER[room])}"
    assert seen == set(IN_SERVER)


@pytest.mark.parametrize(("room", "path"), modules(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_heavy_packages_stay_where_they_are_used(room: str, path: Path) -> None:
    packages = {name.split(".")[0] for name in imports(path)}
    theirs = room == "models" and path.name.startswith("transformers_")
    assert "transformers" not in packages or theirs, "transformers serves the tests, and the models that there is no code of ours for"
    assert "torch" not in packages or room in TORCH, f"{room or 'the package'} imports torch"
    assert "triton" not in packages or room == "kernels", f"{room} imports triton"
    assert not packages & {"starlette", "uvicorn"} or room in {"server", "cli"}, f"{room} imports the web server"
