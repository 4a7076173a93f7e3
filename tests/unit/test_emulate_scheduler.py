"""How persistent kernels share out tiles (device/fw/tile_scheduler.cuh, tile_queue.cuh), under
emulation."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.own import EmulatedKernel
from tests.unit.emulated import needs_compilers

SOURCE = """
#include <fw/tile_scheduler.cuh>
extern "C" __global__ void walk(int* order, int width, int height, int depth) {
  int turn = 0;
  for (fw::TileScheduler<%s> tile(width, height, depth); tile.more(); tile.next()) {
    int const place = (tile.z() * height + tile.y()) * width + tile.x();
    atomicAdd(order + 2 * place, 1);
    order[2 * place + 1] = gridDim.x * turn++ + blockIdx.x;
  }
}
"""


@functools.cache
def kernel(rounds: str) -> EmulatedKernel:
    return flashwright.emulate.kernel(SOURCE % rounds)


def walked(rounds: str, blocks: int, width: int, height: int, depth: int) -> tuple[int, np.ndarray]:
    """How often each is taken, and in which turn by whom."""
    order = np.zeros((depth, height, width, 2), np.int32)
    done = kernel(rounds)(blocks, 1, order, width, height, depth)
    assert done.ok, done
    return set(order[..., 0].ravel()), order[..., 1]


GRIDS = [(1, 1, 1), (4, 3, 2), (5, 7, 1), (16, 2, 2), (3, 40, 1), (67, 1, 1), (2, 1, 9)]


@needs_compilers
@pytest.mark.parametrize("rounds", ["-1", "0", "2", "6", "2, true"])
@pytest.mark.parametrize("blocks", [1, 4, 13])
def test_every_block_of_the_grid_is_taken_once(rounds: str, blocks: int) -> None:
    for grid in GRIDS:
        often, _ = walked(rounds, blocks, *grid)
        assert often == {1}, grid


@needs_compilers
@pytest.mark.parametrize(("width", "columns"), [(4, 66), (16, 33), (24, 30), (33, 12)])
@pytest.mark.parametrize("rounds", ["2", "2, true"])
def test_all_have_as_much_to_do_where_blocks_grow(rounds: str, width: int, columns: int) -> None:
    blocks = 13
    _, order = walked(rounds, blocks, width, columns, 1)
    load: Counter[int] = Counter()
    for place, who in np.ndenumerate(order[0] % blocks):
        load[who] += width - place[1] if "true" in rounds else place[1] + 1
    assert max(load.values()) / (sum(load.values()) / blocks) < 1.06


@needs_compilers
def test_no_one_gets_the_same_place_of_each_row_where_data_decide() -> None:
    """Every other tile is long, and the rows have an even length."""
    blocks = 12
    _, order = walked("-1", blocks, 16, 24, 1)
    long = Counter((order[0] % blocks)[:, ::2].ravel().tolist())
    assert max(long.values()) <= 16 * 24 // 2 // blocks + 1


@needs_compilers
def test_the_longest_of_a_section_come_first() -> None:
    _, order = walked(2, 4, 8, 4, 1)  # two rounds of four: one column each
    turns = order[0] // 4
    for column in turns:
        assert list(np.argsort(-column, kind="stable")[:1]) == [0]


@needs_compilers
@pytest.mark.parametrize("rounds", ["0", "2, true", "16, true"])
@pytest.mark.parametrize("blocks", [1, 4, 13])
def test_tiles_that_wait_for_earlier_ones_come_to_an_end(rounds: str, blocks: int) -> None:
    """Each waits for the one before it along x, and for the one before it along y and z, as turns
    allow. (Blocks run one after another under emulation, so what would happen is followed here.)"""
    for width, height, depth in GRIDS:
        _, order = walked(rounds, blocks, width, height, depth)
        order = order.reshape(height * depth, width)
        places = sorted(np.ndindex(*order.shape), key=lambda place: order[place])
        left = [[p for p in places if order[p] % blocks == block] for block in range(blocks)]
        done: set[tuple[int, ...]] = set()
        while any(left):
            before = len(done)
            for mine in left:
                while mine and {(mine[0][0] - 1, mine[0][1]), (mine[0][0], mine[0][1] - 1)} <= (
                    done | {(-1, mine[0][1]), (mine[0][0], -1)}
                ):
                    done.add(mine.pop(0))
            assert len(done) > before, (width, height, depth)


SEQUENCES = """
#include <fw/tile_queue.cuh>
struct Params {
  fw::Global<int, 1> starts;
};
extern "C" __global__ void walk(
    int* order, int* starts, int* taken, int widest, int height, int depth) {
  __shared__ __align__(16) unsigned char memory[fw::TileQueue::bytes];
  Params const p{{starts, {1}}};
  fw::TileQueue const queue(memory);
  if (threadIdx.x == 0) queue.init(2);
  fw::rings_ready();
  if (threadIdx.x == 64) {
    fw::TilesToTake tile(
        fw::SequenceTiles<64, fw::Order::%s>(p.starts, height, depth), queue, taken);
    while (tile.more()) tile.next();
    return;
  }
  int turn = 0;
  for (fw::TakenTiles tile(queue); tile.more(); tile.next()) {
    int const place = (tile.z() * height + tile.y()) * widest + tile.x();
    if (threadIdx.x %% 32 == 0) atomicAdd(order + 2 * place, 1);
    if (threadIdx.x == 0) order[2 * place + 1] = gridDim.x * turn + blockIdx.x;
    ++turn;
  }
}
"""


@functools.cache
def packed_kernel(order: str) -> EmulatedKernel:
    return flashwright.emulate.kernel(SEQUENCES % order, arch="sm_90a")


def walked_sequences(order: str, blocks: int, heads: int, lengths: list[int]) -> np.ndarray:
    """For each tile of the sequences, how many warps have seen it, and in which turn of whom."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    found = np.zeros((max(len(lengths), 1), heads, 10, 2), np.int32)
    taken = np.zeros(1, np.int32)
    done = packed_kernel(order)(blocks, 65, found, starts, taken, 10, heads, len(lengths))
    assert done.ok, done
    return found


@needs_compilers
@pytest.mark.parametrize("order", ["even", "rising", "falling"])
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize(
    "lengths", [[1], [0], [64, 65, 0, 0, 200, 1], [0, 0, 640, 0], [300] * 3 + [0], []]
)
def test_only_tiles_of_sequences_are_taken(lengths: list[int], blocks: int, order: str) -> None:
    found = walked_sequences(order, blocks, 3, lengths)
    for sequence, length in enumerate(lengths):
        tiles = -(-length // 64)
        assert (found[sequence, :, :tiles, 0] == 2).all()
        assert not found[sequence, :, tiles:].any()
        if blocks == 1:
            steps = np.diff(found[sequence, :, :tiles, 1], axis=1)
            assert ((steps < 0) if order != "falling" else (steps > 0)).all()  # the longest first
    assert found[..., 0].sum() == 2 * 3 * sum(-(-n // 64) for n in lengths)


@needs_compilers
def test_heads_in_groups_are_all_taken() -> None:
    """A group has 32 heads where these fill 16 waves of thread blocks; the last one has fewer."""
    found = walked_sequences("rising", 1, 70, [640, 100])
    assert (found[0, ..., 0] == 2).all()
    assert found[0, :32, :, 1].max() < found[0, 32:, :, 1].min()


SORTED = """
#include <fw/tile_queue.cuh>
extern "C" __global__ void walk(
    int* order, int* work, int* taken, int width, int height, int depth) {
  __shared__ __align__(16) unsigned char memory[fw::TileQueue::bytes + fw::SortedTiles::bytes];
  fw::TileQueue const queue(memory);
  auto* const sorted = reinterpret_cast<uint32_t*>(memory + fw::TileQueue::bytes);
  if (threadIdx.x == 0) queue.init(2);
  fw::rings_ready();
  fw::SortedTiles::sort<96>(sorted, width, [&](int x) { return work[x]; });
  if (threadIdx.x == 64) {
    fw::TilesToTake tile(fw::SortedTiles(sorted, width, height, depth), queue, taken);
    while (tile.more()) tile.next();
  }
  if (threadIdx.x >= 64) return;
  int turn = 0;
  for (fw::TakenTiles tile(queue); tile.more(); tile.next()) {
    int const place = (tile.z() * height + tile.y()) * width + tile.x();
    if (threadIdx.x % 32 == 0) atomicAdd(order + 2 * place, 1);
    if (threadIdx.x == 0) order[2 * place + 1] = gridDim.x * turn + blockIdx.x;
    ++turn;
  }
}
"""


@functools.cache
def sorting_kernel() -> EmulatedKernel:
    return flashwright.emulate.kernel(SORTED, arch="sm_90a")


def walked_by_work(blocks: int, work: list[int], height: int, depth: int) -> np.ndarray:
    """For each tile, how many warps have seen it, and in which turn of whom."""
    found = np.zeros((depth, height, len(work), 2), np.int32)
    taken, data = np.zeros(1, np.int32), np.array(work, np.int32)
    done = sorting_kernel()(blocks, 96, found, data, taken, len(work), height, depth)
    assert done.ok, done
    return found


@needs_compilers
@pytest.mark.parametrize("work", [[3], [0, 5, 5, 1, 9, 0], [7] * 33, [*range(130)]])
@pytest.mark.parametrize("blocks", [1, 5])
def test_tiles_with_the_most_to_do_come_first(work: list[int], blocks: int) -> None:
    found = walked_by_work(blocks, work, 3, 2)
    assert (found[..., 0] == 2).all()
    if blocks == 1 and len(work) > 4:  # one column is a group: four waves of one thread block
        for column in found[..., 1].reshape(-1, len(work)):
            ordered = [work[x] for x in np.argsort(column)]
            assert ordered == sorted(work, reverse=True)


@needs_compilers
def test_columns_of_a_group_are_taken_together() -> None:
    """Four waves of three thread blocks are four columns of three tiles, then the last two."""
    found = walked_by_work(3, [1, 3, 2], 3, 2)
    assert (found[..., 0] == 2).all()
    turns = found[..., 1].reshape(6, 3)
    assert turns[:4].max() < turns[4:].max()


@needs_compilers
def test_more_tiles_than_can_be_sorted_stay_as_they_lie() -> None:
    found = walked_by_work(1, [*range(513)], 2, 1)
    assert (found[..., 0] == 2).all()
    assert (np.diff(found[..., 1].ravel()) == 1).all()
