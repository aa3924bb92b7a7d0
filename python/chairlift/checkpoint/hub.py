"""Talks to the Hugging Face hub: which files a repository has at a commit, and their content.

It uses the routes `/api/models/REPO/refs`, `/revision/REVISION` and `/tree/COMMIT` of the hub's API, and `/REPO/resolve/COMMIT/FILE`. The
package huggingface_hub is not used, because it neither resumes downloads of an earlier process nor checks the digests of files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from chairlift.checkpoint.download import Refused, download, empty, partial_file, read_page, sha256_of
from chairlift.checkpoint.hub_cache import Repository, is_commit
from chairlift.checkpoint.hub_settings import endpoint, hub_token
from chairlift.errors import ModelNotFound

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="?next"?')
_PAGE_BYTES = 64 << 20
_PAGES = 1000


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. Its digest is the SHA-256 of large files, and git's SHA-1 of others."""

    path: PurePosixPath
    num_bytes: int
    digest: str

    def differs(self, path: Path) -> bool:
        """Whether a local file has another content."""
        if len(self.digest) == 64:
            return sha256_of(path) != self.digest
        git = hashlib.sha1(b"blob %d\0" % self.num_bytes, usedforsecurity=False)
        git.update(path.read_bytes())
        return git.hexdigest() != self.digest


class HubClient:
    """Requests for one repository. Raises ModelNotFound with what the user can do."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self._endpoint = endpoint()
        self._token = hub_token()

    def commit(self, revision: str) -> str:
        """Returns the commit of a branch, a tag or an abbreviated commit."""
        if is_commit(revision):
            return revision
        refs, _ = self._json(f"{self._endpoint}/api/models/{self.repo}/refs", optional=True)
        listed = [refs.get(kind) for kind in ("branches", "tags")] if isinstance(refs, dict) else []
        known = [ref for kind in listed if isinstance(kind, list) for ref in kind]
        commit: Any = next((ref.get("targetCommit") for ref in known if isinstance(ref, dict) and ref.get("name") == revision), None)
        if commit is None:
            info, _ = self._json(f"{self._endpoint}/api/models/{self.repo}/revision/{urllib.parse.quote(revision, safe='')}", revision)
            commit = info.get("sha") if isinstance(info, dict) else None
        if not is_commit(commit):
            raise self._not_a_hub(f"its commit of {revision} is {commit!r:.60}")
        return str(commit)

    def files(self, commit: str) -> list[RemoteFile]:
        """Returns all files of a commit, in order of their paths. Raises ModelNotFound for a path that leaves the model's folder."""
        found: list[RemoteFile] = []
        page: str | None = f"{self._endpoint}/api/models/{self.repo}/tree/{commit}?recursive=true"
        for _ in range(_PAGES):
            if page is None:
                return sorted(found, key=lambda file: file.path)
            entries, page = self._json(page, commit)
            if not isinstance(entries, list):
                raise self._not_a_hub("it lists no files")
            found += [self._file(entry) for entry in entries if not (isinstance(entry, dict) and entry.get("type") == "directory")]
        raise self._not_a_hub("its list of files does not end")

    def fetch(self, file: RemoteFile, commit: str, repository: Repository, on_bytes: Callable[[int], None]) -> None:
        """Downloads a file into the hub's cache, or goes on with a download; a file that is there stays.

        Another process that downloads the same file is waited for. A file is there under its name only when its size and its digest are
        right.
        """
        blob = repository.blob(file.digest)
        if not is_whole(blob, file):
            with partial_file(repository.partial(file.digest)) as part:
                if not is_whole(blob, file):  # which another process may have downloaded meanwhile
                    url = f"{self._endpoint}/{self.repo}/resolve/{commit}/{urllib.parse.quote(str(file.path))}"
                    if not self._download(file, url, part, on_bytes):
                        raise ModelNotFound(
                            f"{file.path} of {self.repo} as downloaded is not the file that the hub lists (its digest differs)"
                        )
                    os.fsync(part.fileno())
                    os.replace(part.name, blob)
        on_bytes(file.num_bytes)
        repository.link(commit, str(file.path), file.digest)

    def _download(self, file: RemoteFile, url: str, part: IO[bytes], on_bytes: Callable[[int], None]) -> bool:
        """Downloads the rest of a file. Returns False, and removes it, if its digest is another.

        A file that an earlier process began is then downloaded once more.
        """
        resumed = part.tell() > 0
        try:
            linked_etag = (download(url, part, file.num_bytes, on_bytes, self._token) or "").strip('"')
        except ConnectionError as error:
            raise self._explained(error, is_listed=True) from None
        other = _SHA256.fullmatch(linked_etag) is not None and linked_etag != file.digest
        if not other and not file.differs(Path(part.name)):
            return True
        empty(part)
        return resumed and not other and self._download(file, url, part, on_bytes)

    def _file(self, entry: Any) -> RemoteFile:
        try:
            path, large = entry["path"], entry.get("lfs") or {}
            size, digest = large.get("size") or entry["size"], large.get("oid") or large.get("sha256") or entry["oid"]
            digest = digest.removeprefix("sha256:")
            sound = type(size) is int and size >= 0 and (_SHA256 if large else _SHA1).fullmatch(digest) is not None
        except (KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise self._not_a_hub(f"its list of files has {entry!r:.100}")
        if not _stays_inside(path):
            raise ModelNotFound(f"{self.repo} lists the file {path!r:.100}, which is outside of the model's folder: it is not downloaded")
        return RemoteFile(PurePosixPath(path), size, digest)

    def _json(self, url: str, revision: str | None = None, *, optional: bool = False) -> tuple[Any, str | None]:
        """Returns a page of the API, and the address of the next one. Mirrors of the hub may lack an `optional` page, which is None."""
        try:
            data, answer = read_page(url, _PAGE_BYTES, self._token_for(url))
        except ConnectionError as error:
            if optional and isinstance(error, Refused) and error.status == 404 and not error.code:
                return None, None
            raise self._explained(error, revision) from None
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            raise self._not_a_hub("it answers with something else than JSON") from None
        following = _NEXT.search(answer.headers.get("Link", ""))
        if following is None:
            return document, None
        try:
            page = urllib.parse.urljoin(answer.url, following[1])
            is_safe = urllib.parse.urlsplit(page).scheme in ("https", urllib.parse.urlsplit(answer.url).scheme)
        except ValueError:
            is_safe = False
        if not is_safe:
            raise self._not_a_hub(f"its list of files goes on at {following[1]!r:.100}, which is no encrypted address")
        return document, page

    def _token_for(self, url: str) -> str | None:
        """Returns the token if the address is the hub's own, which the next page need not be."""
        return self._token if urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(self._endpoint)[:2] else None

    def _not_a_hub(self, reason: str) -> ModelNotFound:
        return ModelNotFound(f"{self._endpoint} does not answer as the Hugging Face hub does: {reason}")

    def _explained(self, error: ConnectionError, revision: str | None = None, *, is_listed: bool = False) -> ModelNotFound:
        """Returns the exception that says what the user can do. The files of a gated model are listed for everybody."""
        page, has_token = f"{self._endpoint}/{self.repo}", self._token is not None
        if not isinstance(error, Refused):
            return ModelNotFound(
                f"the Hugging Face hub cannot be reached for {self.repo} ({error}): check the network, or name a local file or directory"
            )
        if error.status == 429 or error.status >= 500:
            later = f"in {error.pause:.0f} s" if error.pause is not None else "later"
            what = "allows no more requests now" if error.status == 429 else f"is out of order (status {error.status})"
            return ModelNotFound(f"the Hugging Face hub {what}: try again {later}" + ("" if has_token else ", or set HF_TOKEN"))
        refused = error.status == 403 or (error.status == 401 and is_listed and not has_token)
        if error.code == "GatedRepo" or (refused and not error.code):
            remedy = "" if has_token else f", and set HF_TOKEN to a token of {self._endpoint}/settings/tokens"
            return ModelNotFound(f"{self.repo} is gated: accept its terms at {page} with your account{remedy}")
        if error.status == 401 and has_token and error.code != "RepoNotFound":
            return ModelNotFound(f"the Hugging Face hub refuses the token: set HF_TOKEN to a valid one of {self._endpoint}/settings/tokens")
        if error.code == "RevisionNotFound" or (error.status == 404 and revision not in (None, "main") and not error.code):
            return ModelNotFound(f"{self.repo} has no revision {revision!r:.100} on the Hugging Face hub")
        if error.status in (401, 404) and error.code != "EntryNotFound":
            remedy = "your token may not read it" if has_token else "set HF_TOKEN"
            return ModelNotFound(f"the Hugging Face hub has no model {self.repo}; if it is private, {remedy}")
        return ModelNotFound(f"{self.repo} cannot be downloaded: {error}" + (f" ({error.reason:.200})" if error.reason else ""))


def is_whole(blob: Path, file: RemoteFile) -> bool:
    """Whether a file is in the cache."""
    return blob.is_file() and blob.stat().st_size == file.num_bytes


def _stays_inside(path: object) -> bool:
    """Whether a path of a list of files is that of a file below the model's folder."""
    return isinstance(path, str) and path.isprintable() and not {"", ".", ".."} & set(re.split(r"[/\\]", path)) and ":" not in path[:2]
