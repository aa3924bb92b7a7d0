"""What the storage counts is what it stores, whatever calls run beside each other and wherever they are cancelled."""

import asyncio
import contextlib
import errno
import json
import os
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.errors import ApiError
from chairlift.server.storage import batches
from chairlift.server.storage.batches import NO_ROOM, Answer, Batches, BatchRequest, Status, output_line
from chairlift.server.storage.database import _SCHEMA, _VERSION, RESERVE_BYTES, Database
from chairlift.server.storage.files import ANSWERS_SHARE, PIECE_BYTES, Files, StoredFile

LIMIT = 40_000
TENANTS = ("alice", "bob")

CALL = st.tuples(
    st.sampled_from(["upload", "drop", "delete", "expire", "batch", "answer", "cancel", "finish"]),
    st.sampled_from(TENANTS),
    st.one_of(st.integers(0, 20), st.sampled_from([5_000, 9_000, 15_001])),  # a size, or which of the files or batches
    st.one_of(st.none(), st.integers(0, 4)),  # after how many turns of the event loop the call is cancelled
)


class Storage:
    """A data directory whose database the tests may ask."""

    def __init__(self, directory, sharing=()):
        self.directory = Path(directory)
        self.database = Database(self.directory)
        self.files = Files(self.directory / "files", self.database, LIMIT, sharing)
        self.batches = Batches(self.database, self.files)

    @property
    def used(self):
        return LIMIT - self.database.run_now(self.files.free_bytes)

    def rows(self, query):
        return [tuple(row) for row in self.database.run_now(lambda connection: connection.execute(query).fetchall())]

    def check(self):
        """Compares what is counted with what is stored."""
        stored = {path.name: path.stat().st_size for path in (self.directory / "files").iterdir()}
        assert stored == dict(self.rows("SELECT id, bytes FROM files"))
        assert self.rows("SELECT * FROM uploads") == []
        held = sum(512 + 12 * len(custom_id) for [custom_id] in self.rows("SELECT custom_id FROM requests"))
        held += sum(len(text.encode()) + 1 for [text] in self.rows("SELECT text FROM answers"))
        assert self.used == sum(stored.values()) + held <= LIMIT
        for total, answered in self.rows("SELECT total, completed + failed FROM batches WHERE ended_at IS NOT NULL"):
            assert total == answered


async def store(storage, tenant, size, lifetime=None, *, finishes=True):
    """Uploads `size` bytes in pieces."""
    upload = await storage.files.begin(tenant)
    try:
        for start in range(0, size, 1000):
            await upload.write(b"x" * min(1000, size - start))
        if finishes:
            return await upload.finish("f", "batch", lifetime)
    finally:
        await upload.discard()


async def started(storage, tenant, file, lines):
    batch = await storage.batches.create(tenant, file.id, None, None, None)
    await storage.batches.start(batch, [BatchRequest(line, f"request-{line}", 0, 1) for line in range(1, lines + 1)])
    return batch


class Calls:
    """The calls of the server and of its clients."""

    def __init__(self, storage):
        self.storage = storage

    async def one_of(self, tenant, number):
        page, _ = await self.storage.files.page(tenant, None, None, 100, True)
        return page[number % len(page)] if page else None

    async def upload(self, tenant, number):
        await store(self.storage, tenant, number, 0 if number % 2 else None)

    async def drop(self, tenant, number):
        await store(self.storage, tenant, number, finishes=False)

    async def delete(self, tenant, number):
        if (file := await self.one_of(tenant, number)) is not None:
            await asyncio.gather(*(self.storage.files.delete(tenant, file.id) for _ in range(3)), return_exceptions=True)

    async def expire(self, tenant, number):
        await self.storage.files.remove_expired()

    async def batch(self, tenant, number):
        if (file := await self.one_of(tenant, number)) is not None:
            await started(self.storage, tenant, file, number % 7 + 1)

    async def answer(self, tenant, number):
        for batch in await self.storage.batches.open():
            requests = await self.storage.batches.unanswered(batch.id, 0, 2)
            texts = [output_line(one.custom_id, json.dumps("y" * number)) for one in requests]
            await self.storage.batches.add_answers(
                [Answer(batch.id, one.line, number % 3 > 0, text) for one, text in zip(requests, texts, strict=True)]
            )

    async def cancel(self, tenant, number):
        for batch in await self.storage.batches.open():
            if batch.tenant == tenant:
                await self.storage.batches.cancel(tenant, batch.id)

    async def finish(self, tenant, number):
        for batch in await self.storage.batches.open():
            status = Status.CANCELLED if batch.status is Status.CANCELLING else Status.EXPIRED if number % 2 else Status.COMPLETED
            await self.storage.batches.finish(batch, status, json.dumps({"code": "batch_expired", "message": "It expired."}))


def fail(storage, monkeypatch, name, where=lambda: True):
    """Lets transactions that write end with SQLite's error `name`, as long as `where` says so."""
    connection = storage.database._connection  # noqa: SLF001
    before = 0

    class BadDisk:
        def __getattr__(self, name):
            return getattr(connection, name)

        def execute(self, query, *values):
            nonlocal before
            if query == "BEGIN IMMEDIATE":
                before = connection.total_changes
            if query == "COMMIT" and connection.total_changes > before and where():
                error = sqlite3.OperationalError("a failure")
                error.sqlite_errorname = name
                raise error
            return connection.execute(query, *values)

    monkeypatch.setattr(storage.database, "_connection", BadDisk())


def test_on_a_full_disk_batches_can_be_cancelled_and_files_deleted(tmp_path, monkeypatch):
    storage = Storage(tmp_path)
    reserve = tmp_path / "reserve"
    taken = []

    def full():
        if full := reserve.exists():
            taken.append(reserve.stat().st_size)
        return full

    async def work():
        file, other = [await store(storage, "alice", 10) for _ in range(2)]
        batch = await storage.batches.create("alice", file.id, None, None, None)
        fail(storage, monkeypatch, "SQLITE_FULL", full)
        with pytest.raises(ApiError, match="disk is full"):
            await store(storage, "alice", 10)
        with pytest.raises(ApiError, match="disk is full"):
            await storage.batches.start(batch, [BatchRequest(1, "request-1", 0, 1)])
        assert (await storage.batches.get("alice", batch.id)).status is Status.VALIDATING, "it is started when there is space"
        assert (await storage.batches.cancel("alice", batch.id)).status is Status.CANCELLING
        await storage.files.delete("alice", other.id)
        monkeypatch.undo()
        await storage.batches.finish(await storage.batches.get("alice", batch.id), Status.CANCELLED, None)

    asyncio.run(work())
    assert set(taken) == {RESERVE_BYTES}, "it is filled again"
    storage.check()


def test_a_file_whose_deletion_cannot_be_committed_keeps_its_content(tmp_path, monkeypatch):
    storage = Storage(tmp_path)
    file = asyncio.run(store(storage, "alice", 10))
    for name, status, message in (("SQLITE_FULL", 507, "disk is full"), ("SQLITE_IOERR_WRITE", 503, "cannot read or write its data")):
        fail(storage, monkeypatch, name)
        with pytest.raises(ApiError, match=message) as failed:
            asyncio.run(storage.files.delete("alice", file.id))
        assert failed.value.status == status
        monkeypatch.undo()
    storage.check()
    asyncio.run(storage.files.delete("alice", file.id))
    storage.check()
    storage.database.close()
    with pytest.raises(ApiError, match="shutting down"):
        asyncio.run(storage.files.get("alice", file.id))


async def run(storage, calls):
    """Starts a call each turn of the event loop, so that many run at once, and cancels some."""
    made = Calls(storage)

    async def call(kind, tenant, number, cancelled_after):
        task = asyncio.ensure_future(getattr(made, kind)(tenant, number))
        if cancelled_after is not None:
            for _ in range(cancelled_after):
                await asyncio.sleep(0.0003)
            task.cancel()
        with contextlib.suppress(ApiError, asyncio.CancelledError):
            await task

    running = []
    for one in calls:
        running.append(asyncio.ensure_future(call(*one)))
        await asyncio.sleep(0)
    await asyncio.gather(*running)
    await storage.database.run(lambda _: None)  # what cancelled calls have left to do comes before
    storage.check()
    await storage.files.remove_expired()
    assert storage.rows("SELECT id FROM files WHERE expires_at IS NOT NULL AND id NOT IN (SELECT input_file_id FROM batches)") == []


@settings(max_examples=40, deadline=None)
@given(st.lists(CALL, min_size=5, max_size=40))
def test_the_storage_counts_what_it_stores(calls):
    with tempfile.TemporaryDirectory() as directory:
        storage = Storage(directory)
        try:
            asyncio.run(run(storage, calls))
            storage.check()
        finally:
            storage.database.close()


@pytest.fixture
def storage(tmp_path):
    storage = Storage(tmp_path)
    yield storage
    storage.database.close()


def test_of_concurrent_deletes_one_succeeds(storage):
    async def work():
        kept = [await store(storage, "alice", 10) for _ in range(5)]
        file = await store(storage, "alice", 10_000)
        results = await asyncio.gather(*(storage.files.delete("alice", file.id) for _ in range(30)), return_exceptions=True)
        assert [result for result in results if result is None] == [None]
        assert {result.status for result in results if result is not None} == {404}
        assert storage.used == sum(file.bytes for file in kept)

    asyncio.run(work())
    storage.check()


def test_concurrent_uploads_keep_the_limit(storage):
    async def work():
        results = await asyncio.gather(*(store(storage, "alice", 9_000) for _ in range(10)), return_exceptions=True)
        assert sum(isinstance(result, ApiError) for result in results) == 6

    asyncio.run(work())
    storage.check()


def test_a_tenant_takes_no_more_space_than_it_leaves(tmp_path):
    """Uploads get 36,000 bytes. Tenants without a key, who may be invented, and the one without a name count as one."""
    storage = Storage(tmp_path, ("alice", "bob", ""))

    async def stored(tenant):
        count = 0
        with contextlib.suppress(ApiError):
            while True:
                await store(storage, tenant, 1000)
                count += 1
        return count

    async def work():
        counts = [await stored(tenant) for tenant in ("alice", "eve1", "", "eve2", "bob")]
        assert counts == [18, 9, 0, 0, 4]
        for file in (await storage.files.page("alice", None, None, 100, True))[0]:
            await storage.files.delete("alice", file.id)
        assert await stored("bob") == 9  # 13 of its own, of the 27 that eve leaves

    try:
        asyncio.run(work())
        storage.check()
    finally:
        storage.database.close()


def test_the_answers_of_a_tenant_take_no_more_space_than_they_leave(tmp_path):
    storage = Storage(tmp_path, ("alice", "bob"))

    async def answered(tenant):
        batch = await started(storage, tenant, await store(storage, tenant, 100), 8)
        for line in range(1, 9):
            text = output_line(f"request-{line}", json.dumps("y" * 3_000))
            await storage.batches.add_answers([Answer(batch.id, line, True, text)])
        return (await storage.batches.get(tenant, batch.id)).completed

    async def work():
        first = await answered("alice")
        assert storage.used <= LIMIT // 2
        assert first > await answered("bob") > 0
        assert storage.used <= LIMIT * 3 // 4

    try:
        asyncio.run(work())
        storage.check()
    finally:
        storage.database.close()


def test_a_batch_whose_answers_take_all_the_space_fails_its_other_requests(storage):
    async def work():
        batch = await started(storage, "alice", await store(storage, "alice", 1000), 20)
        big = [Answer(batch.id, line, True, output_line(f"request-{line}", json.dumps("y" * 9_000))) for line in range(1, 6)]
        await storage.batches.add_answers(big)
        batch = await storage.batches.get("alice", batch.id)
        assert (batch.completed, batch.failed) == (3, 17)
        assert storage.used <= LIMIT
        await storage.batches.finish(batch, Status.COMPLETED, None)
        batch = await storage.batches.get("alice", batch.id)
        errors = storage.files.path(batch.fields["error_file_id"]).read_text().splitlines()
        assert [json.loads(line)["custom_id"] for line in errors] == [f"request-{number}" for number in range(4, 21)]
        assert {json.loads(line)["error"]["code"] for line in errors} == {"file_quota_exceeded"}

    asyncio.run(work())
    storage.check()


def test_the_tenant_with_the_most_batches_forgets_its_oldest(storage, monkeypatch):
    monkeypatch.setattr(batches, "MAX_BATCHES", 5)
    monkeypatch.setattr(batches, "MAX_ALL_OPEN_BATCHES", 3)

    async def end(batch):
        await storage.batches.fail(batch, [])

    async def work():
        files = {tenant: await store(storage, tenant, 10) for tenant in TENANTS}
        kept = await storage.batches.create("bob", files["bob"].id, None, None, None)
        await end(kept)
        for _ in range(20):
            await end(await storage.batches.create("alice", files["alice"].id, None, None, None))
        assert storage.rows("SELECT tenant, count(*) FROM batches GROUP BY tenant") == [("alice", 4), ("bob", 1)]
        assert [seq for [seq] in storage.rows("SELECT seq FROM batches")] == [1, 18, 19, 20, 21]
        opened = [await storage.batches.create("alice", files["alice"].id, None, None, None) for _ in range(3)]
        with pytest.raises(ApiError, match="the server has 3 batches"):
            await storage.batches.create("bob", files["bob"].id, None, None, None)
        assert {batch.id for batch in opened} <= {id for [id] in storage.rows("SELECT id FROM batches")}
        assert (await storage.batches.get("bob", kept.id)).ended

    asyncio.run(work())
    storage.check()


def test_a_batch_that_is_cancelled_as_it_expires_keeps_its_answers(storage):
    async def work():
        batch = await started(storage, "alice", await store(storage, "alice", 1000), 2)
        await storage.batches.add_answers([Answer(batch.id, 1, True, "{}")])
        seen = await storage.batches.get("alice", batch.id)
        await storage.batches.cancel("alice", batch.id)
        await storage.batches.finish(seen, Status.EXPIRED, "{}")
        batch = await storage.batches.get("alice", batch.id)
        assert batch.status is Status.CANCELLING
        await storage.batches.finish(batch, Status.CANCELLED, "{}")
        batch = await storage.batches.get("alice", batch.id)
        assert (batch.status, batch.completed, batch.failed) == (Status.CANCELLED, 1, 1)
        assert storage.files.path(batch.fields["output_file_id"]).read_text() == "{}\n"

    asyncio.run(work())
    storage.check()


def test_a_batch_without_space_for_its_errors_fails(storage):
    async def work():
        batch = await started(storage, "alice", await store(storage, "alice", 1000), 70)
        batch = await storage.batches.get("alice", batch.id)
        assert batch.status is Status.FAILED
        assert "--max-data-size" in batch.fields["errors"]["data"][0]["message"]
        await store(storage, "alice", LIMIT - LIMIT // ANSWERS_SHARE - storage.used)
        with pytest.raises(ApiError, match="--max-data-size"):
            await started(storage, "alice", (await storage.files.page("alice", None, None, 1, True))[0][0], 1)

    asyncio.run(work())
    storage.check()


@pytest.mark.parametrize("custom_id", ["x", "\U0001f600" * 512, "é" * 100])
@pytest.mark.parametrize("error", [NO_ROOM, {"code": "batch_expired", "message": "m" * 80}])
def test_a_request_holds_the_space_of_its_error_line(custom_id, error):
    assert Answer("b", 1, False, output_line(custom_id, "null", json.dumps(error))).size <= 512 + 12 * len(custom_id)


def test_an_output_that_cannot_be_written_leaves_nothing(storage, monkeypatch):
    fsync, calls = os.fsync, iter([True, True, False])  # the first output and its directory, then the second output

    def sync(number):
        if not next(calls):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(number)

    async def work():
        batch = await started(storage, "alice", await store(storage, "alice", 1000), 2)
        await storage.batches.add_answers([Answer(batch.id, 1, True, "{}"), Answer(batch.id, 2, False, "{}")])
        batch = await storage.batches.get("alice", batch.id)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", sync)
            with pytest.raises(OSError, match="No space"):
                await storage.batches.finish(batch, Status.COMPLETED, None)
        storage.check()
        await storage.batches.finish(await storage.batches.get("alice", batch.id), Status.COMPLETED, None)

    asyncio.run(work())
    storage.check()
    assert storage.rows("SELECT status FROM batches") == [("completed",)]


def test_a_database_of_version_1_is_taken_over(tmp_path):
    with sqlite3.connect(tmp_path / "chairlift.sqlite3") as connection:
        connection.executescript(_SCHEMA.replace(", held_bytes INTEGER NOT NULL DEFAULT 0", "").replace(f"= {_VERSION};", "= 1;"))
        connection.execute("INSERT INTO batches VALUES (1, 'b', 'alice', 'in_progress', 'file-1', 3, 0, 0, NULL, '{}')")
        connection.execute("INSERT INTO requests VALUES ('b', 1, 'é', 0, 1)")
        connection.execute("INSERT INTO answers VALUES ('b', 2, 1, 'é')")
    connection.close()
    for _ in range(2):
        storage = Storage(tmp_path)
        storage.check()
        assert storage.used == 512 + 12 + 3
        storage.database.close()


def test_a_file_is_read_in_small_pieces(tmp_path):
    storage = Storage(tmp_path)
    content = b"12345678" * (PIECE_BYTES // 4) + b"9"
    storage.files.path("file-1").write_bytes(content)

    async def read():
        return [piece async for piece in storage.files.content(StoredFile("file-1", "a", "batch", len(content), 0, None))]

    pieces = asyncio.run(read())
    storage.database.close()
    assert b"".join(pieces) == content
    assert max(map(len, pieces)) <= PIECE_BYTES <= 1 << 16
