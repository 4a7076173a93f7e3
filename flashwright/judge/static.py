"""Static checks: libraries in the source or in the links, and the types of the MMAs.

For a candidate that may not call libraries, they read the names that its Python function can reach,
or the libraries that its shared library links to. Only this finds a fallback in an `except` that no
trial reaches. Code that the function does not reach, such as a test, may call any library.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashwright.build.reading import CUBIN, PTX
from flashwright.files import content
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.process import Launched
from flashwright.spec import AttentionSpec

# Modules and functions that compute attention.
MODULES = frozenset(
    (
        *("flash_attn", "flash_attn_interface", "flash_attn_3", "flashinfer", "xformers", "cudnn"),
        *("transformer_engine", "vllm", "sageattention", "bitsandbytes", "deepspeed"),
    )
)
NAMES = frozenset(
    (
        *("scaled_dot_product_attention", "flex_attention", "multi_head_attention_forward"),
        *("MultiheadAttention", "_flash_attention_forward", "_efficient_attention_forward"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_efficient_attention", "dot_product_attention", "sdpa_kernel"),
        *("memory_efficient_attention", "flash_attn_func", "_scaled_dot_product_attention_math"),
    )
)
LINKED = re.compile(r"lib(cudnn|cublas|torch|c10|nvjitlink_attention|flash_attn|cutlass_attention)")
# Library kernels that do attention's work: fused attention, matrix products, softmax. Copies,
# casts, fills and sums are allowed. This applies to kernels that come from a library only.
KERNELS = re.compile(
    r"flash|fmha|attention|attn|cudnn|cublas|xmma|nvjet|gem[mv]|cutlass|splitk|triton_tem_|soft_?max"
    r"|dot_kernel",
    re.IGNORECASE,
)
_MMA = re.compile(r"\b(?:mma\.sync\S*|wgmma\.mma_async\S*)")
_PTX_NAMES = {"fp16": "f16", "bf16": "bf16", "fp8": "e4m3"}


def libraries(candidate: Candidate) -> list[str]:
    """The libraries that a candidate's source names or that it links to."""
    if candidate.kind == "python":
        path = _source(candidate.where)
        return sorted(set(_libraries_in_source(path, candidate.function))) if path else []
    if candidate.kind == "library":
        return sorted(set(_linked_libraries(Path(candidate.where))))
    return []


def _source(where: str) -> Path | None:
    """The file of a module, found without importing it."""
    if where.endswith(".py"):
        return Path(where)
    inner = Path(*where.split("."))
    for folder in sys.path:
        for path in (Path(folder, inner).with_suffix(".py"), Path(folder, inner, "__init__.py")):
            if path.is_file():
                return path
    return None


def _libraries_in_source(path: Path, function: str) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return  # it will not load either, and that message says more
    for node in _reachable_nodes(tree, function.partition(".")[0]):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.partition(".")[0] in MODULES:
                yield node.module
            yield from (a.name for a in node.names if a.name in NAMES)
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node.attr
        elif _names_library(node):
            yield str(getattr(node, "value", ""))


def _reachable_nodes(tree: ast.Module, function: str) -> Iterator[ast.AST]:
    """The nodes that run on import, the function, and everything they name, transitively."""
    defined: dict[str, list[ast.AST]] = {}
    waiting: list[ast.AST] = []
    for stmt in tree.body:
        if isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.setdefault(stmt.name, []).append(stmt)
            waiting += stmt.decorator_list
        elif isinstance(stmt, ast.Import | ast.ImportFrom):
            for alias in stmt.names:  # an unused import is not called
                name = alias.asname or alias.name.partition(".")[0]
                defined.setdefault(name, []).append(type(stmt)(**{**vars(stmt), "names": [alias]}))
        elif not _is_main(stmt):
            waiting.append(stmt)
    waiting += defined.pop(function, [])
    while waiting:
        for node in ast.walk(waiting.pop()):
            yield node
            for field in ("id", "attr", "value"):  # a string too: globals()["helper"]
                found = getattr(node, field, None)
                waiting += defined.pop(found, []) if isinstance(found, str) else []


def _is_main(node: ast.AST) -> bool:
    """Whether a node is `if __name__ == "__main__":`, which does not run on import."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.left, ast.Name)
        and node.test.left.id == "__name__"
        and not node.orelse
    )


def _names_library(node: ast.AST) -> bool:
    """Whether a string names a library, as in import_module("cudnn")."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return node.value in NAMES or node.value.partition(".")[0] in MODULES


def _linked_libraries(path: Path) -> Iterator[str]:
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            dynamic: Any = ELFFile(file).get_section_by_name(".dynamic")
            needed = [t.needed for t in dynamic.iter_tags("DT_NEEDED")] if dynamic else []
    except (ELFError, OSError):
        return
    yield from (name for name in needed if LINKED.match(name))


def of_libraries(launches: Sequence[Launched]) -> Launched | None:
    """The library kernel that did attention's work most often; None if there is none."""
    theirs = [one for one in launches if not one.own and KERNELS.search(one.name)]
    return max(theirs, key=lambda one: one.times, default=None)


def instructions(folder: Path, spec: AttentionSpec) -> tuple[str, int]:
    """Why a package's matrix instructions are less exact than asked, and how many were read.

    The reason is empty if operands have the spec's type and sums are in fp32.
    """
    found = _MMA.findall((content(folder / PTX) or b"").decode(errors="replace"))
    for one in found:
        types = re.findall(r"\.(f16|bf16|f32|s32|tf32|e4m3|e5m2|s8|u8|s4|u4)\b", one)
        wrong = _why_weaker(types, spec)
        if wrong:
            return f"{one} {wrong}", len(found)
    return _check_sass(folder, spec, len(found))


def _why_weaker(types: Sequence[str], spec: AttentionSpec) -> str:
    """Why an MMA with these PTX types (D, A, B, C) is less exact than asked; empty if it is not."""
    if len(types) < 3:
        return ""
    if types[0] != "f32":
        return f"sums in {types[0]}"
    narrow = {"e4m3", "e5m2", "s8", "u8", "s4", "u4"}
    if spec.dtype != "fp8" and narrow & set(types[1:3]):
        return f"multiplies {types[1]}, and {_PTX_NAMES[spec.dtype]} is asked for"
    return ""


def _check_sass(folder: Path, spec: AttentionSpec, seen: int) -> tuple[str, int]:
    """The same check of the cubin's instructions, as the cubin is what runs; needs nvdisasm."""
    tool, cubin = shutil.which("cuobjdump"), folder / CUBIN
    if tool is None or not cubin.is_file():
        return "", seen
    try:
        done = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "", seen
    found = re.findall(r"\b(?:HMMA|HGMMA|QMMA|QGMMA|IMMA|IGMMA)\.\S+", done.stdout)
    for one in found:
        if re.match(r"HG?MMA\.[\dx]+\.F16", one):
            return f"{one} sums in f16", len(found)
        if spec.dtype != "fp8" and not one.startswith("H"):
            return f"{one} multiplies 8 bits, and {spec.dtype} is asked for", len(found)
    return "", seen + len(found)
