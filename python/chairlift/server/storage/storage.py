"""The data directory as a whole."""

from __future__ import annotations

from collections.abc import Collection

from chairlift.directories import private_directory
from chairlift.errors import InvalidSetting
from chairlift.server.storage.batches import Batches
from chairlift.server.storage.database import Database
from chairlift.server.storage.files import Files


class Storage:
    """Files and batches in a directory that one process uses at a time."""

    def __init__(self, directory: str, max_bytes: int, sharing: Collection[str] = ()) -> None:
        """Creates the directory for this user alone; raises InvalidSetting. `max_bytes` limits the files; `sharing` is that of `Files`."""
        path = private_directory("--data-dir", directory)
        try:
            self._database = Database(path)
            self.files = Files(path / "files", self._database, max_bytes, sharing)
        except OSError as error:
            raise InvalidSetting(f"--data-dir {directory}: {error.strerror}") from None
        self.batches = Batches(self._database, self.files)

    def close(self) -> None:
        """Closes the database. What was acknowledged is on the disk already."""
        self._database.close()
