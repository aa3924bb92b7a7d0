"""Maps a user's model name or path to a directory in Hugging Face's layout."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from chairlift.checkpoint.cache import FULL, LINK, cache_dir, hub_dir, writing_to
from chairlift.checkpoint.downloads import check_remote, is_hub_name
from chairlift.checkpoint.gguf_parts import is_gguf, model_files, parts_of, stem_of
from chairlift.checkpoint.pull import MEMBER, SAMPLING, default_file, pull_default
from chairlift.config import DEFAULT_MODEL
from chairlift.errors import ModelNotFound

__all__ = ["cache_dir", "locate", "public_name"]

_LAYOUT = 3
"""Part of the name of a converted model. It is incremented when the output of `convert` changes."""

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_HUB_TIMEOUT = 10


def locate(model: str, revision: str | None = None, directory: str | None = None, progress: bool = True, *, download: bool = True) -> Path:
    """Returns the local directory of a model. Downloads it (with `download`) or converts it first if necessary.

    `model` is DEFAULT_MODEL, a directory with config.json and safetensors files or with GGUF files, a GGUF file, or a name
    `organisation/model` on the Hugging Face hub, with `revision` as branch, tag or commit. Models are stored in `directory`, or as
    `cache_dir` says; hub models by default in the hub's own cache. `progress` reports slow operations on stderr. Raises ModelNotFound with
    remedies, UnsupportedModel, or ChairliftError if the disk is full.
    """
    cache = cache_dir(directory)
    path = Path(os.path.expanduser(model))
    if model == DEFAULT_MODEL and not path.is_dir():
        return _converted(lambda: _default(cache, progress, download), cache, f"default-{Path(MEMBER).stem}-{_LAYOUT}", progress, SAMPLING)
    if path.is_dir():
        return _directory(path, cache, progress)
    if path.is_file():
        if not is_gguf(path):
            raise ModelNotFound(f"{path} is a file but not a GGUF one; name a GGUF file, or the directory that holds config.json")
        return _gguf(path, cache, progress)
    if is_hub_name(model):
        return _directory(_from_hub(model, revision, hub_dir(directory), download), cache, progress)
    raise ModelNotFound(
        f"there is no model {model!r} here; name a directory with config.json and *.safetensors, a .gguf file, "
        f"a model of the Hugging Face hub (organisation/model), or {DEFAULT_MODEL}"
    )


def pull_model(model: str, directory: str | None = None) -> Path:
    """Downloads DEFAULT_MODEL or a model of the hub, as `locate` does; raises ModelNotFound for any other name."""
    check_remote(model)
    return locate(model, directory=directory, progress=False)


def public_name(model: str) -> str:
    """Returns the name under which clients see a model: the last part of a local path, without .gguf and a part's number, or `model`."""
    path = Path(os.path.abspath(os.path.expanduser(model)))
    if not path.exists():
        return model
    if path.parent.name == "snapshots" and (hub := path.parent.parent.name).startswith("models--"):
        return hub.removeprefix("models--").replace("--", "/")  # a directory of the Hugging Face hub's cache
    return stem_of(path) or model


def _default(cache: Path, progress: bool, download: bool) -> Path:
    """Returns the default model's file."""
    if not download and not default_file(cache).is_file():
        raise ModelNotFound(f"{DEFAULT_MODEL} is not in {cache}: 'chairlift pull' downloads it")
    return pull_default(cache, progress)


def _directory(path: Path, cache: Path, progress: bool) -> Path:
    """Returns a directory in Hugging Face's layout as it is, else the converted directory of one of its GGUF files."""
    has_config = (path / "config.json").is_file()
    if has_config and ((path / LINK).is_symlink() or any(path.glob("*.safetensors"))):
        return path.absolute()
    found = model_files(path)
    if found:
        if len(found) > 1 and progress:
            others = ", ".join(file.name for file in found[1:])
            _say(f"Taking {found[0].name} of {path}, which also holds {others}")
        return _gguf(found[0], cache, progress)
    if has_config:
        return path.absolute()
    raise ModelNotFound(
        f"{path} has no config.json and no GGUF file; a model's directory holds config.json, tokenizer.json and *.safetensors"
    )


def _gguf(path: Path, cache: Path, progress: bool) -> Path:
    """Returns the converted directory of a file, or of the model of which it is a part.

    Converts again if the file or a tokenizer.json beside it has changed. A link stays one: in the hub's cache, tokenizer.json and other
    parts are beside the link, and not beside the file. The previous directory is then removed. Directories of other layout versions stay,
    because a server of another version may be using them.
    """
    path = parts_of(path.absolute())[0]
    identity = hashlib.sha256()
    for file in (path, path.parent / "tokenizer.json"):
        if file.is_file():
            facts = file.stat()
            identity.update(f"\0{file}\0{facts.st_size}\0{facts.st_mtime_ns}".encode(errors="surrogateescape"))
    place = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    name = f"{stem_of(path)}-{place}-{_LAYOUT}"
    out = _converted(lambda: path, cache, f"{name}-{identity.hexdigest()[:8]}", progress)
    for other in out.parent.glob(f"{glob.escape(name)}-*"):
        if other != out:
            shutil.rmtree(other, ignore_errors=True)
    return out


def _converted(source: Callable[[], Path], cache: Path, name: str, progress: bool, sampling: Mapping[str, float] | None = None) -> Path:
    """Returns the converted directory `name` of the file `source`, created if it is missing. Then removes old copies of weights."""
    out = cache / "gguf" / name
    if not (out / LINK).exists():
        from chairlift.checkpoint.gguf import convert  # imports numpy, which a server's process does not need otherwise

        path = source()
        if out.is_dir() and not (out / LINK).exists():
            shutil.rmtree(out)  # the GGUF file that it links to was moved
        with _announced(f"Reading the tokenizer of {path.name}", progress):
            convert(path, out, sampling)
        _remove_old_copies(cache / "models")
    return out


def _remove_old_copies(directory: Path) -> None:
    """Removes copies of weights that earlier versions wrote, which contain a `model.blocks`. Other directories belong to the user."""
    for blocks in directory.glob("*/model.blocks"):
        shutil.rmtree(blocks.parent, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.rmdir()  # only if it is empty


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _announced(text: str, progress: bool) -> Iterator[None]:
    """Shows `text` on stderr while the block runs: as a spinner on a terminal, as one line elsewhere."""
    if not progress:
        yield
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        _say(text)
    with console.status(text):
        yield


def _from_hub(name: str, revision: str | None, directory: Path | None, download: bool) -> Path:
    """Returns the hub's snapshot of a model in `directory` or the hub's own cache. Respects $HF_HUB_OFFLINE and $HF_TOKEN."""
    ways_out = "name a local directory or .gguf file instead, or fetch it where the hub can be reached and copy it here"
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError:
        raise ModelNotFound(f"fetching {name} needs the package huggingface_hub; {ways_out}") from None
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=directory,
                allow_patterns=list(_HUB_FILES),
                etag_timeout=_HUB_TIMEOUT,
                local_files_only=not download,
            )
        )
    except errors.GatedRepoError:
        raise ModelNotFound(f"{name} is gated: accept its terms on huggingface.co and set HF_TOKEN, or {ways_out}") from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(f"{name} has no revision {revision!r} on the Hugging Face hub") from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(f"the Hugging Face hub has no model {name} (or it is private: set HF_TOKEN); {ways_out}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        if not download:
            raise ModelNotFound(f"{name} is not downloaded: 'chairlift pull {name}' downloads it") from None
        raise ModelNotFound(f"{name} is not in the local cache and the Hugging Face hub cannot be reached; {ways_out}") from None
    except Exception as error:  # the exceptions of the hub's HTTP stack differ between versions
        if isinstance(error, OSError) and error.errno in FULL:
            with writing_to(directory or Path(constants.HF_HUB_CACHE)):
                raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(f"could not fetch {name} from the Hugging Face hub ({reason}); {ways_out}") from None
