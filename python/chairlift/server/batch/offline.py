"""Batches that are made of a local file, for `chairlift run-batch`."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from chairlift.server.storage.batches import Status
from chairlift.server.storage.storage import Storage


async def import_input(storage: Storage, path: Path, model: str) -> str:
    """Makes a batch of the file at `path` and returns its id.

    If the storage has a batch of the same content for the same model that was interrupted or is complete, returns that one.
    """
    with path.open("rb") as stream:
        digest = (await asyncio.to_thread(hashlib.file_digest, stream, "sha256")).hexdigest()
        metadata = {"sha256": digest, "model": model}
        page, _ = await storage.batches.page("", None, 100)
        for batch in page:
            if batch.fields["metadata"] == metadata and batch.status not in (Status.FAILED, Status.CANCELLED, Status.EXPIRED):
                return batch.id
        stream.seek(0)
        upload = storage.files.begin("")
        try:
            while data := await asyncio.to_thread(stream.read, 1 << 20):
                await upload.write(data)
            file = await upload.finish(path.name, "batch", None)
        finally:
            await upload.discard()
    return (await storage.batches.create("", file.id, None, metadata, None, window=None)).id
