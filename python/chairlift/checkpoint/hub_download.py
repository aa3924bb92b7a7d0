"""Downloads a model of the Hugging Face hub into the hub's cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from chairlift.checkpoint.cache import writing_to
from chairlift.checkpoint.download import check_space
from chairlift.checkpoint.gguf_parts import model_files, parts_of
from chairlift.checkpoint.hub import HubClient, RemoteFile, is_whole
from chairlift.checkpoint.hub_cache import Repository
from chairlift.checkpoint.hub_model import all_of, gguf_model, weights_of
from chairlift.checkpoint.model_name import HubName, is_revision
from chairlift.checkpoint.progress import Progress, download_bar, say
from chairlift.errors import ModelNotFound

_VOCABULARIES = ("tokenizer.model", "vocab.txt", "merges.txt")
"""Files of a tokenizer that are not JSON."""
_CONNECTIONS = 4
"""Files that are downloaded at the same time."""


def download_hub_model(name: HubName, cache: Path, progress: Progress) -> Path:
    """Returns the model's GGUF file or directory in the hub's cache, after downloading what is missing or newer on the hub.

    The revision's commit is written down at the end, so an interrupted download leaves the earlier model in place. Raises ModelNotFound,
    or ChairliftError if the disk is full.
    """
    revision = name.revision or "main"
    if not is_revision(revision):
        raise ModelNotFound(f"{revision!r:.100} is no name of a branch, tag or commit")
    client, repository = HubClient(name.repo), Repository(cache, name.repo)
    commit = client.commit(revision)
    files = {file.path: file for file in client.files(commit)}
    model, snapshot = gguf_model(name, files), repository.snapshot(commit)
    source = _Source(client, commit, repository)
    with writing_to(cache):
        repository.blob("").mkdir(parents=True, exist_ok=True)
        if model is None:
            texts = [file for path, file in files.items() if path.suffix in (".json", ".jinja") or path.name in _VOCABULARIES]
            source.fetch(texts, f"the configuration of {name}", False)
            source.fetch(all_of(name, files, weights_of(files, snapshot)), str(name), progress)
        else:
            others = [path for path in model_files(files) if path != model]
            if others and name.tag is None and name.file is None:
                say(f"Taking {model} of {name}, which also holds {', '.join(map(str, others))}", progress)
            beside = model.with_name("tokenizer.json")
            wanted = [*parts_of(model), *([beside] if beside in files else [])]
            source.fetch(all_of(name, files, wanted), f"{name.repo}/{model}", progress)
        repository.set_commit(revision, commit)
    return snapshot if model is None else snapshot / model


class _Stopped(Exception):
    """Another file of the same download failed, or the user ended it."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A commit on the hub, and the repository in the cache that gets its files."""

    client: HubClient
    commit: str
    repository: Repository

    def fetch(self, files: Sequence[RemoteFile], what: str, progress: Progress) -> None:
        """Downloads files side by side, with one progress bar. An exception, such as Ctrl-C, stops all of them."""
        done: dict[PurePosixPath, int] = {}
        stopped = threading.Event()

        def fetch(file: RemoteFile) -> None:
            def on_bytes(num_bytes: int) -> None:
                if stopped.is_set():
                    raise _Stopped
                done[file.path] = num_bytes
                set_done(sum(done.values()))

            self.client.fetch(file, self.commit, self.repository, on_bytes)

        missing = {file.digest: file.num_bytes for file in files if not is_whole(self.repository.blob(file.digest), file)}
        begun = [path.stat().st_size for digest in missing if (path := self.repository.partial(digest)).exists()]
        check_space(self.repository.path, sum(missing.values()) - sum(begun))
        if not missing:
            progress = False
        total = sum(file.num_bytes for file in files)
        with download_bar(what, total, progress) as set_done, ThreadPoolExecutor(_CONNECTIONS) as threads:
            try:
                for _ in threads.map(fetch, files):
                    pass
            except BaseException:
                stopped.set()
                threads.shutdown(cancel_futures=True)
                raise
