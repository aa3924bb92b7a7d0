"""The Hugging Face hub's cache: one directory for each repository, which the hub's other programs read and write too.

Its layout is published as "Understand caching" in the documentation of huggingface_hub: `blobs` has the files by digest,
`snapshots/COMMIT` has links to them, and `refs` has the commits of branches and tags.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from chairlift.checkpoint.gguf_parts import parts_of

_FOLDER = re.compile(r"models--(?P<org>.+?)--(?P<model>.+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(text: object) -> bool:
    """Whether `text` is the full name of a commit."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository's directory in a cache, which need not exist."""

    cache: Path
    name: str

    @property
    def path(self) -> Path:
        """The directory."""
        return self.cache / f"models--{self.name.replace('/', '--')}"

    def commit(self, revision: str) -> str | None:
        """Returns the commit of a revision when it was last downloaded; None if it was not."""
        if is_commit(revision):
            return revision
        try:
            commit = (self.path / "refs" / revision).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        return commit if is_commit(commit) else None

    def set_commit(self, revision: str, commit: str) -> None:
        """Remembers the commit of a revision, of which all chosen files are here."""
        import tempfile  # only a download needs it

        path = self.path / "refs" / revision
        if is_commit(revision) or self.commit(revision) == commit:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(commit)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)

    def snapshot(self, commit: str) -> Path:
        """Returns the directory with a commit's files."""
        return self.path / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        """Returns the path of a file's content, which the snapshots link to. A file of that name is complete."""
        return self.path / "blobs" / digest

    def partial(self, digest: str) -> Path:
        """Returns the path of the first bytes of a file that is being downloaded."""
        return self.path / "blobs" / f"{digest}.incomplete"

    def link(self, commit: str, name: str, digest: str) -> None:
        """Makes a blob a file of a snapshot."""
        path = self.snapshot(commit) / name
        target = os.path.relpath(self.blob(digest), path.parent)
        if path.is_symlink() and os.readlink(path) == target:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)

    def files(self, commit: str) -> list[PurePosixPath]:
        """Returns the names of a snapshot's files that are here."""
        snapshot = self.snapshot(commit)
        return sorted(PurePosixPath(path.relative_to(snapshot).as_posix()) for path in snapshot.rglob("*") if path.is_file())

    def snapshots(self) -> list[Path]:
        """Returns the directories of all commits, the newest last."""
        return sorted((self.path / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)

    def delete(self, model: Path) -> None:
        """Deletes the GGUF model of that name from all snapshots, and the blobs that no other file links to.

        The directory is deleted when no weights are left in it.
        """
        name = model.relative_to(self.path / "snapshots").parts[1:]
        links = [part for snapshot in self.snapshots() for part in parts_of(snapshot.joinpath(*name)) if part.is_symlink() or part.exists()]
        blobs = {link.resolve() for link in links}
        for link in links:
            link.unlink()
        left = list((self.path / "snapshots").rglob("*"))
        for blob in blobs - {path.resolve() for path in left}:
            if blob.is_relative_to((self.path / "blobs").resolve()):
                blob.unlink(missing_ok=True)
        if not any(path.suffix.lower() in (".gguf", ".safetensors") for path in left):
            shutil.rmtree(self.path)


def repositories(cache: Path) -> list[Repository]:
    """Returns the repositories of models in a cache."""
    found = [_FOLDER.fullmatch(path.name) for path in cache.glob("models--*") if path.is_dir()]
    return [Repository(cache, f"{match['org']}/{match['model']}") for match in found if match]
