"""What users and the checker rely on: which dtypes run where, and the budgets."""

from __future__ import annotations

import re

import pytest

from flashwright.gpu import A100, GPUS, H100, H200, KIB, L40S, RTX8000, T4, Gpu, UnknownGpu, find


def test_turing_multiplies_fp16_only() -> None:
    for gpu in (T4, RTX8000):
        assert gpu.takes("fp16")
        assert not any(gpu.takes(dtype) for dtype in ("bf16", "e4m3", "e5m2", "fp32"))


def test_fp8_comes_with_ada() -> None:
    assert not A100.takes("e4m3")
    assert all(gpu.takes("e4m3") and gpu.takes("bf16") for gpu in (L40S, H100, H200))


def test_shared_memory_of_a_block() -> None:
    known = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # guide, KB
    assert {gpu.capability for gpu in GPUS.values()} == set(known)
    for gpu in GPUS.values():
        assert gpu.shared_per_block == known[gpu.capability] * KIB, gpu.name


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_facts_agree_with_each_other(gpu: Gpu) -> None:
    assert set(gpu.tensor_flops) == set(gpu.mma)
    # An SM multiplies a power of two of operations a clock; the published peak must show it.
    whole = {75: 1024, 80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 512}[gpu.capability]
    slowed = {"rtx3090": 2, "rtx4090": 2, "h20": 4}  # GeForce, and a card for export
    assert gpu.flops_per_clock("fp16") == pytest.approx(whole / slowed.get(gpu.name, 1), rel=0.02)
    lanes = gpu.fp32_flops / (2 * gpu.sms * gpu.clock_ghz * 1e9)
    assert lanes == pytest.approx(64 if gpu.capability <= 80 else 128, rel=0.1)
    assert gpu.shared_per_block + gpu.shared_reserved == gpu.shared_per_sm
    generations = {75: "Turing", 80: "Ampere", 86: "Ampere", 89: "Ada", 90: "Hopper"}
    assert gpu.generation == generations.get(gpu.capability, "Blackwell")
    assert gpu.wgmma == gpu.tma == (gpu.arch == "sm_90a")
    assert gpu.cp_async == (gpu.capability >= 80)


def test_registers_beside_a_producer_warpgroup() -> None:
    assert [H200.register_limit(warps) for warps in (4, 8, 12)] == [255, 240, 160]


def test_registers_without_a_producer() -> None:
    assert [A100.register_limit(warps) for warps in (4, 8, 12, 16)] == [255, 255, 168, 128]


def test_warps_take_registers_from_their_quarter() -> None:
    # Five blocks of two warps need three warps on some quarter: 16384 / 3 / 32 = 170 each.
    assert A100.blocks_by_registers(168, 2) == 6
    assert A100.blocks_by_registers(176, 2) == 4
    assert A100.blocks_by_registers(255, 4) == 2


def test_a_dealt_out_register_file_is_never_exceeded() -> None:
    for gpu in GPUS.values():
        for warps in range(1, 33):
            limit = gpu.register_limit(warps)
            assert limit == 255 or warps % 4 or gpu.blocks_by_registers(limit, warps) >= 1
            assert limit == 255 or limit % 8 == 0
    with pytest.raises(ValueError, match="at least one warp"):
        T4.register_limit(0)


def test_registers_count_the_tiles_of_each_thread() -> None:
    tile = 128 * 128 * 4  # fp32, over 4 warps: 128 values a thread
    assert A100.registers(tile, 4) - A100.registers(0, 4) == 128
    assert A100.registers(tile, 8) - A100.registers(0, 8) == 64
    assert A100.registers(1, 4) == A100.registers(0, 4) + 1  # part of a register is a register
    assert H200.registers(0, 8) < A100.registers(0, 8)  # wgmma keeps no operand fragments


def test_only_tma_stores_shared_memory_to_global() -> None:
    storing = {gpu.name for gpu in GPUS.values() if ("shared", "global") in gpu.copies}
    assert storing == {gpu.name for gpu in GPUS.values() if gpu.generation == "Hopper"}
    for gpu in GPUS.values():
        assert ("global", "shared") in gpu.copies
        assert ("global", "global") not in gpu.copies


def test_matrix_instructions() -> None:
    assert T4.mma["fp16"] == ((16, 8, 8),)
    assert (16, 8, 16) in A100.mma["bf16"]
    assert (16, 8, 32) in L40S.mma["e4m3"]
    assert (64, 176, 16) in H200.mma["bf16"]
    assert (64, 224, 32) in H200.mma["e4m3"]
    assert not any(shape[0] == 64 for shape in L40S.mma["fp16"])


def test_h200_is_an_h100_with_more_memory() -> None:
    assert (H200.sms, H200.tensor_flops, H200.arch) == (H100.sms, H100.tensor_flops, H100.arch)
    assert H200.bandwidth > H100.bandwidth
    assert H200.memory_bytes > H100.memory_bytes


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h200", "h200"),
        ("H200 SXM", "h200"),
        ("RTX 8000", "rtx8000"),
        ("Quadro RTX-8000", "rtx8000"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("l40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("4090", "rtx4090"),
        ("GeForce RTX 5090", "rtx5090"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA RTX A6000", "a6000"),
        ("H100 PCIe", "h100-pcie"),
        ("h100-pcie", "h100-pcie"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_find(name: str, key: str) -> None:
    assert find(name).name == key


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("A100-40GB", "a100 has the same architecture (sm_80)"),
        ("l40", "l40s has the same architecture (sm_89)"),
        ("RTX 4080 SUPER", "l40s has the same architecture (sm_89)"),
        ("NVIDIA A40", "a6000 has the same architecture (sm_86)"),
        ("H100 NVL", "h100 has the same architecture (sm_90a)"),
        ("A10G", "Did you mean a10?"),
        ("rtx", "Did you mean rtx8000 or rtx3090 or rtx4090 or rtx5090?"),
    ],
)
def test_other_cards_are_refused_with_a_guess(name: str, guess: str) -> None:
    with pytest.raises(UnknownGpu, match=re.escape(guess)) as caught:
        find(name)
    assert all(key in str(caught.value) for key in GPUS)


@pytest.mark.parametrize("name", ["b300", "v100", "a1000", "h300", "p100", "l400", "mi200", ""])
def test_a_card_of_another_architecture_is_no_guess(name: str) -> None:
    with pytest.raises(UnknownGpu) as caught:
        find(name)
    said = str(caught.value).partition(" Known: ")[0]
    assert said == f"No facts about the GPU {name!r}."
