"""The files of the prefix cache: the limit of their sizes, several writers, and files that are damaged or no blocks."""

import os
import threading
import time

import pytest

from chairlift.engine import prefix_store
from chairlift.engine.prefix_store import TEMPORARY_SECONDS, PrefixStore
from chairlift.errors import InvalidSetting

PRINT = "ab" * 16
ROOT = bytes(16)


def files(tmp_path):
    return sorted((tmp_path / "kv").glob("*/*"))


def test_a_directory_that_others_can_write_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(InvalidSetting, match="writable by nobody else"):
        PrefixStore(str(tmp_path / "kv"), 1 << 20, PRINT)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSetting, match="this is a file, name a directory"):
        PrefixStore(str(tmp_path / "file"), 1 << 20, PRINT)
    os.umask(before := os.umask(0o002))
    try:
        os.umask(0o002)
        PrefixStore(str(tmp_path / "a" / "b"), 1 << 20, PRINT)  # it makes its own directory private
    finally:
        os.umask(before)


def chain(store, count, kv):
    """Writes blocks that follow each other; returns their names."""
    names = [ROOT]
    for index in range(count):
        tokens = bytes([index] * 8)
        names.append(store.name(names[-1], tokens))
        assert store.write(names[-1], names[-2], tokens, kv)
    return names[1:]


def test_the_limit_holds_for_two_writers_and_the_starts_of_prefixes_stay_longest(tmp_path):
    limit = 100_000
    stores = [PrefixStore(str(tmp_path / "kv"), limit, print_) for print_ in (PRINT, "cd" * 16)]
    for round_ in range(30):
        for store in stores:
            chain(store, 4, bytes([round_]) * 1000)
    names = chain(stores[0], 60, b"x" * 1000)
    chain(stores[1], 60, b"y" * 1000)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= limit * (1 + 2 / 20)
    assert sum(store.blocks_evicted for store in stores) > 0
    again = PrefixStore(str(tmp_path / "kv"), limit, PRINT)
    assert again.contents == f"{tmp_path / 'kv'} has {len(files(tmp_path))} blocks, 0 of 0 MB"
    kept = [stores[0].has(name) for name in names]
    assert 10 < sum(kept) < 60
    assert kept == sorted(kept, reverse=True)


def test_several_threads_write_the_same_block(tmp_path):
    store = PrefixStore(str(tmp_path / "kv"), 1 << 20, PRINT)
    failed = []

    def write():
        for index in range(100):
            tokens = index.to_bytes(8)
            if not store.write(store.name(ROOT, tokens), ROOT, tokens, b"k" * 1000):
                failed.append(index)

    threads = [threading.Thread(target=write) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed
    assert len(files(tmp_path)) == 100
    tokens = (5).to_bytes(8)
    assert bytes(store.read(store.name(ROOT, tokens), ROOT, tokens)) == b"k" * 1000
    assert store.read(store.name(ROOT, tokens), ROOT, bytes(8)) is None


def test_files_that_are_no_blocks_stop_neither_the_start_nor_a_writer(tmp_path):
    directory = str(tmp_path / "kv")
    folder = tmp_path / "kv" / PRINT
    names = chain(PrefixStore(directory, 1 << 20, PRINT), 8, b"x" * 1000)
    (folder / "empty").touch()
    (folder / ("0" * 32)).write_bytes(b"chairlift-kv-1")
    (folder / "lost+found").mkdir()
    store = PrefixStore(directory, 4000, PRINT)
    assert [store.has(name) for name in names] == [True] * 3 + [False] * 5
    chain(store, 20, b"y" * 1000)
    assert sum(path.stat().st_size for path in files(tmp_path) if path.is_file()) <= 4000


def test_files_of_others_are_neither_counted_nor_deleted(tmp_path):
    chain(PrefixStore(str(tmp_path / "kv"), 1 << 20, PRINT), 2, b"x" * 1000)
    others = [tmp_path / "kv" / name for name in ("photos/1.jpg", "photos/notes", f"{PRINT}/notes", f"photos/{PRINT}")]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"p" * 9000)
        os.utime(path, (0, 0))
    assert PrefixStore(str(tmp_path / "kv"), 4000, PRINT).blocks_evicted == 0
    assert PrefixStore(str(tmp_path / "kv"), 1000, PRINT).blocks_evicted == 2
    assert files(tmp_path) == sorted(others)


def test_a_block_that_another_process_deletes_meanwhile_stops_nobody(tmp_path, monkeypatch):
    names = chain(PrefixStore(str(tmp_path / "kv"), 1 << 20, PRINT), 8, b"x" * 1000)
    parent = prefix_store._parent  # noqa: SLF001

    def deleted(path):
        path.unlink()
        return parent(path)

    monkeypatch.setattr(prefix_store, "_parent", deleted)
    store = PrefixStore(str(tmp_path / "kv"), 4000, PRINT)
    assert not any(map(store.has, names))


def test_files_that_are_being_written_are_left_alone_for_an_hour(tmp_path):
    folder = tmp_path / "kv" / PRINT
    names = chain(PrefixStore(str(tmp_path / "kv"), 1 << 20, PRINT), 4, b"x" * 1000)
    long_ago = time.time() - TEMPORARY_SECONDS - 60
    temporary = [folder / f"{'1' * 32}.{pid}-5" for pid in (1, 2)]
    for path in temporary:
        path.write_bytes(b"k" * 1000)
    for path in [*(folder / name.hex() for name in names), temporary[1]]:
        os.utime(path, (long_ago, long_ago))
    store = PrefixStore(str(tmp_path / "kv"), 1000, PRINT)
    assert files(tmp_path) == temporary[:1]
    assert store.blocks_evicted == 5


@pytest.mark.parametrize("copies", [{0: 0}, {0: 1}, {0: 2}])
def test_blocks_that_name_each_other_as_their_parents_do_not_hold_up_the_start(tmp_path, copies):
    store = PrefixStore(str(tmp_path / "kv"), 1 << 20, PRINT)
    names = chain(store, 3, b"x" * 1000)
    paths = [tmp_path / "kv" / PRINT / name.hex() for name in names]
    for at, other in copies.items():
        head, parent = 32, 16  # of the file, before the parent's name
        content = paths[other].read_bytes()
        paths[at].write_bytes(content[:head] + names[other] + content[head + parent :])
    assert PrefixStore(str(tmp_path / "kv"), 2000, PRINT).blocks_evicted == 2
