"""The build cache: what is in it is right, whatever happened to the disk or to other processes."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from flashwright.build import cache as caches
from flashwright.build.cache import Cache, CacheEntry, digest

ENTRY = CacheEntry({"registers": 168, "seconds": 1.5}, b"\x7fELF\n\x00cubin", b".version 9.0\n")
KEYS = [f"{n:02x}" * 32 for n in range(1, 9)]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def files(cache: Cache) -> list[Path]:
    return [path for path in cache.root.rglob("*") if path.is_file()]


def test_what_is_put_is_got(cache: Cache) -> None:
    assert cache.get(KEYS[0]) is None
    cache.put(KEYS[0], ENTRY)
    assert cache.get(KEYS[0]) == ENTRY
    assert cache.get(KEYS[1]) is None
    assert Cache(cache.root).get(KEYS[0]) == ENTRY
    assert cache.trouble is None


@pytest.mark.parametrize("cut", [0, 1, 64, 65, 80, -1])
def test_a_cut_entry_is_thrown_away(cache: Cache, cut: int) -> None:
    cache.put(KEYS[0], ENTRY)
    (file,) = files(cache)
    file.write_bytes(file.read_bytes()[:cut])
    assert cache.get(KEYS[0]) is None
    assert not file.exists()
    cache.put(KEYS[0], ENTRY)
    assert cache.get(KEYS[0]) == ENTRY


def test_every_damaged_byte_is_seen(cache: Cache) -> None:
    cache.put(KEYS[0], ENTRY)
    (file,) = files(cache)
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cache.get(KEYS[0]) is None, place


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    big = CacheEntry({}, b"x" * 1000, b"")
    cache = Cache(tmp_path, most=3500)
    for age, key in enumerate(KEYS[:3]):
        cache.put(key, big)
        os.utime(cache._path(key), (1000 + age, 1000 + age))
    assert cache.get(KEYS[0])  # used now, so the second is the oldest
    cache.put(KEYS[3], big)
    assert [bool(cache.get(key)) for key in KEYS[:4]] == [True, False, True, True]
    assert sum(file.stat().st_size for file in files(cache)) <= 3500


def test_an_entry_larger_than_the_cache_is_kept_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path, most=10)
    cache.put(KEYS[0], ENTRY)
    cache.put(KEYS[1], ENTRY)
    assert cache.get(KEYS[0]) is None
    assert cache.get(KEYS[1]) == ENTRY


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHWRIGHT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert caches.folder() == tmp_path / "flashwright"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert caches.folder() == Path("/home/somebody/.cache/flashwright")
    monkeypatch.setenv("FLASHWRIGHT_CACHE", "/elsewhere")
    assert caches.folder() == Path("/elsewhere")


def test_how_large_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHWRIGHT_CACHE_MB", "7")
    assert caches.limit() == 7 << 20
    monkeypatch.setenv("FLASHWRIGHT_CACHE_MB", "much")
    assert caches.limit() == caches.LIMIT


def test_the_name_depends_on_everything(tmp_path: Path) -> None:
    tree = tmp_path / "include"
    (tree / "fw").mkdir(parents=True)
    (tree / "fw" / "a.cuh").write_text("one")
    names = [digest(["source", "flags"], [tree])]
    names += [digest(parts, [tree]) for parts in (["sourceflags"], ["source", "flags", ""], ["s"])]
    (tree / "fw" / "a.cuh").write_text("two")
    names.append(digest(["source", "flags"], [tree]))
    (tree / "fw" / "a.cuh").rename(tree / "fw" / "b.cuh")
    names.append(digest(["source", "flags"], [tree]))
    (tree / "fw" / "c.cuh").touch()
    names.append(digest(["source", "flags"], [tree]))
    assert len(set(names)) == len(names)
    assert names[-1] == digest(["source", "flags"], [tree])


def test_a_cache_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache")
    assert cache.get(KEYS[0]) is None
    with cache.locked(KEYS[0], 1), cache.workplace() as place:
        (place / "kernel.cu").write_text("x")
    assert not place.exists()
    cache.put(KEYS[0], ENTRY)
    assert "Not a directory" in (cache.trouble or "")


def test_a_full_disk_leaves_no_half_an_entry(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(old: str, new: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    cache.put(KEYS[0], ENTRY)
    assert "No space left" in (cache.trouble or "")
    assert files(cache) == []


def test_what_a_killed_build_left_goes_after_an_hour(cache: Cache) -> None:
    with cache.workplace() as alive:
        dead = alive.with_name("dead")
        dead.mkdir()
        (dead / "kernel.cu").touch()
        hour_ago = time.time() - caches.LEFT_OVER - 1
        os.utime(dead, (hour_ago, hour_ago))
        with cache.workplace() as other:
            assert alive.exists()
            assert other.exists()
            assert not dead.exists()
    assert not alive.exists()


def test_turns(cache: Cache) -> None:
    """Two never have the same turn; one who waited too long goes on without."""
    order: list[str] = []
    started = threading.Event()

    def first() -> None:
        with cache.locked(KEYS[0], 10):
            started.set()
            time.sleep(0.3)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    started.wait()
    with cache.locked(KEYS[0], 0.05):
        order.append("impatient")
    with cache.locked(KEYS[1], 10):
        order.append("another")
    with cache.locked(KEYS[0], 10):
        order.append("second")
    thread.join()
    assert order == ["impatient", "another", "first", "second"]
