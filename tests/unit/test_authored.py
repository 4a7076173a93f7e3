"""Translations that a model wrote: compiled without keys and without end, packed, and judged."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright.build import process, toolchain
from flashwright.build.compile import build
from flashwright.build.toolchain import Toolchain
from flashwright.confine import landlock
from flashwright.confine.start import UNCONFINED
from flashwright.judge.emulated import judge_emulated
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.render import for_model
from flashwright.untrusted.comments import commented
from flashwright.untrusted.contract import Flavour
from flashwright.untrusted.translation import TranslationByModel, translated_by_model
from tests.share import some
from tests.unit.emulated import SPEC, needs_compilers
from tests.unit.fake_nvcc import GOOD, WORKS, FakeNvcc, nvcc
from tests.unit.test_contract import ours, program

__all__ = ["nvcc"]  # a fixture

linux = pytest.mark.skipif(sys.platform != "linux", reason="confined on Linux only")
needs_nvcc = pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")
KERNEL = 'extern "C" __global__ void k(float* x) {{ {} }}\n'


@pytest.fixture(autouse=True)
def compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a system without Landlock the rest is tried nevertheless."""
    if not landlock.available():
        monkeypatch.setenv(UNCONFINED, "1")


def failed(nvcc: FakeNvcc, source: str = "x", seconds: float | None = None) -> Diagnostic:
    with pytest.raises(Failed) as caught:
        build(source, "sm_80", toolchain=nvcc.tools, untrusted=True, time_limit=seconds)
    return caught.value.diagnostics[0]


# --- the process ------------------------------------------------------------------------------


def test_the_compiler_is_told_of_no_keys(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "OTHER"):
        monkeypatch.setenv(name, "hush-hush")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-hush-hush")
    nvcc.set(f"{WORKS} && env > kernel.ptx && pwd > kernel.cubin")
    built = build("x", "sm_80", toolchain=nvcc.tools, untrusted=True)
    told = dict(line.split("=", 1) for line in built.ptx.splitlines())
    assert "hush" not in built.ptx
    assert {*told} <= {"PATH", "HOME", "TMPDIR", "LC_ALL", "LD_LIBRARY_PATH", "NVCC_CCBIN"} | {
        *("PWD", "SHLVL", "_", "OLDPWD")  # the shell's own
    }
    place = built.cubin.decode().strip()
    assert told["HOME"] == told["TMPDIR"] == place
    assert not Path(place).exists()


@linux
def test_time(nvcc: FakeNvcc) -> None:
    nvcc.set("sleep 60 & sleep 60")
    start = time.monotonic()
    found = failed(nvcc, seconds=0.5)
    assert (found.code, time.monotonic() - start < 5) == ("FW825", True)
    assert "0.5 seconds" in found.message


@linux
def test_memory_processes_and_files(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    small = process.CompilerLimits(memory=64 << 20, processes=20, file_bytes=1 << 20, seconds=30)
    monkeypatch.setattr("flashwright.build.compile.CompilerLimits", _Smaller(small))
    nvcc.set("sh -c 'x=y; while :; do x=$x$x; done'")
    assert "GB of memory" in failed(nvcc, "a").message
    nvcc.set("for i in $(seq 40); do sleep 60 & done; sleep 60")
    assert "20 processes" in failed(nvcc, "b").message
    nvcc.set("head -c 9000000 /dev/zero > kernel.ii; exit 1")
    found = failed(nvcc, "c")
    assert (found.code, "1 MB" in found.message) == ("FW825", True)


class _Smaller:
    """Limits that a test can reach."""

    seconds = 30.0

    def __init__(self, small: process.CompilerLimits) -> None:
        self.small = small

    def __call__(self, seconds: float) -> process.CompilerLimits:
        return self.small


@linux
@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="it asks bash for a connection")
def test_no_network_and_none_of_the_users_files(nvcc: FakeNvcc, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush-hush")
    connect = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/9' 2>> kernel.ptx"
    nvcc.set(f"{WORKS}; cat {secret} > kernel.ptx; echo x > {tmp_path}/written; {connect}; exit 0")
    told = build("x", "sm_80", toolchain=nvcc.tools, untrusted=True).ptx
    if platform.machine() in ("x86_64", "aarch64"):
        assert "Operation not permitted" in told
        assert "refused" not in told
    if _has_landlock():
        assert "hush" not in told
        assert not (tmp_path / "written").exists()


def _has_landlock() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if landlock.restrict(["/"], []) else 1)
    return os.waitpid(child, 0)[1] == 0


@linux
def test_a_compiler_that_cannot_be_run_is_not_the_codes_fault(nvcc: FakeNvcc) -> None:
    nvcc.path.chmod(0o644)
    found = failed(nvcc)
    assert (found.code, "cannot be run: Permission denied" in found.message) == ("FW821", True)
    assert process.READS in (found.help or "")


def test_only_the_last_and_first_of_what_it_says_is_kept(nvcc: FakeNvcc) -> None:
    nvcc.set("yes 'kernel.cu(1): error: x' | head -c 9000000; exit 1", says="")
    assert failed(nvcc).message == "nvcc: x"


def test_messages_name_no_folder_of_this_machine(nvcc: FakeNvcc) -> None:
    says = 'kernel.cu(2): error: cannot open "/home/somebody/x/y.h", a/b\n'
    nvcc.set("exit 1", says=says)
    found = failed(nvcc, "int a;\n  int b;\n")
    assert found.message == 'nvcc: cannot open "y.h", a/b'
    assert for_model([found], "int a;\n  int b;\n").startswith("1. error FW822 on line 2: nvcc:")
    nvcc.set("exit 1", says="something /home/somebody/x/y.h\n")
    said = failed(nvcc).message
    assert said.startswith("nvcc failed with 1: ")
    assert said.endswith("something y.h")


def test_a_model_cannot_blame_the_machine(nvcc: FakeNvcc) -> None:
    nvcc.set("exit 1", says="kernel.cu:1:2: error: #error No space left on device\n")
    assert failed(nvcc).code == "FW822"
    nvcc.set("exit 1", says="kernel.cu:1:10: fatal error: cute/x.hpp: No such file or directory\n")
    assert failed(nvcc).code == "FW822"
    nvcc.set("exit 1", says="gcc: No space left on device\n")
    assert failed(nvcc).code == "FW001"


# --- with the real compiler -------------------------------------------------------------------


def taken(
    source: str, gpu: str = "a100", flavour: Flavour = "full", tools: Toolchain | None = None
) -> TranslationByModel:
    return translated_by_model(
        program(gpu), gpus.find(gpu), SPEC, source, flavour=flavour, toolchain=tools
    )


@pytest.mark.slow
@needs_compilers
def test_a_small_kernel_is_packed_and_judged_like_ours(tmp_path: Path) -> None:
    source, plan = ours()
    made = taken(source)
    assert made.translation.plan == plan
    for name, data in made.files.items():
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    digests = json.loads((tmp_path / "build.json").read_text())["artefacts"]
    assert {*digests, "build.json"} == {*made.files}
    assert judge_emulated(tmp_path, SPEC, seed=3, lengths=[(17, 33)], seconds=0.0).ok


@needs_nvcc
def test_findings_are_in_the_lines_of_the_file() -> None:
    source = "// a comment\n" + KERNEL.format("\n  x[0] = y;\n")
    with pytest.raises(Failed) as caught:
        build(source, "sm_80", untrusted=True)
    shown = '1. error FW822 on line 3: nvcc: identifier "y" is undefined\n   line 3: x[0] = y;\n'
    assert for_model(caught.value.diagnostics, source) == shown


PTX = """.visible .entry attention(
\t.param .align {align} .b8 attention_param_0[{size}]
)
.maxntid {threads}
{{
"""
COMPILED = {  # what the PTX says, and what is wrong with it
    "as agreed": ({}, ""),
    "another struct": ({"size": 240}, "takes 240 bytes, and the caller passes 212"),
    "fewer threads": ({"threads": 64}, "compiled for 64 threads a block, and Threads is 128"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_macros_change_shows_in_the_ptx(nvcc: FakeNvcc, name: str) -> None:
    told, says = COMPILED[name]
    text = PTX.format(**{"align": 8, "size": 216, "threads": 128, **told})
    nvcc.set(f"{WORKS}; cat > kernel.ptx <<'END'\n{text}END\n")
    if not says:
        assert taken(ours()[0], tools=nvcc.tools).built.ptx == text
        return
    with pytest.raises(Failed, match="FW827") as caught:
        taken(ours()[0], tools=nvcc.tools)
    assert says in caught.value.diagnostics[0].message


def test_static_and_dynamic_shared_memory_are_one(nvcc: FakeNvcc) -> None:
    says = GOOD.replace("256 bytes smem", "160000 bytes smem")
    text = PTX.format(align=8, size=216, threads=128)
    nvcc.set(f"{WORKS}; cat > kernel.ptx <<'END'\n{text}END\n", says=says)
    with pytest.raises(Failed, match="FW827: 160000 bytes of static and 45056 of dynamic"):
        taken(ours()[0], tools=nvcc.tools)


def test_nothing_is_compiled_that_is_not_screened(nvcc: FakeNvcc) -> None:
    nvcc.set("touch compiled; exit 1")
    for source in (ours()[0] + '#include "/etc/passwd"\n', ours()[0].replace("Params", "P")):
        with pytest.raises(Failed, match=r"FW82[78]"):
            taken(source, tools=nvcc.tools)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["full", "plain"])
def test_hopper(flavour: Flavour) -> None:
    source, plan = ours("h200", flavour)
    made = taken(source, "h200", flavour)
    assert made.translation.plan == plan


BOMBS = {
    "templates": (
        "template <int N, int M> struct A { static constexpr long v = A<N - 1, 2 * M>::v + "
        "A<N - 1, 2 * M + 1>::v; };\n"
        "template <int M> struct A<0, M> { static constexpr long v = M; };\n"
        + KERNEL.format("x[0] = A<28, 0>::v;"),
        "FW825",
    ),
    "recursion": (
        "template <int N> struct A { static constexpr int v = A<N + 1>::v; };\n"
        + KERNEL.format("x[0] = A<0>::v;"),
        "FW822",  # nvcc itself ends it
    ),
    "constexpr": (
        "constexpr int f() { int i = 0; while (true) ++i; return i; }\n"
        + KERNEL.format("constexpr int a = f(); x[0] = a;"),
        "FW822",
    ),
}


@needs_nvcc
@pytest.mark.parametrize("name", some(BOMBS, 3))
def test_no_code_keeps_the_compiler_for_ever(name: str) -> None:
    source, code = BOMBS[name]
    limit = 2.0 if code == "FW825" else 60.0
    start = time.monotonic()
    with pytest.raises(Failed) as caught:
        build(source, "sm_80", untrusted=True, time_limit=limit)
    assert caught.value.diagnostics[0].code == code
    assert time.monotonic() - start < limit + 10


# --- a canary ---------------------------------------------------------------------------------

MARK = "0x7f3a9c51"
CANARY = f'constexpr int canary = {MARK};\n__device__ char const text[] = "canary {MARK}";\n'
READ = "x[0] = canary;"
READERS = {  # none of these would pass the screen: they show that more than the screen holds
    "include": '#include "{path}"\n',
    "behind a true condition": '#if __has_include("{path}")\n#include "{path}"\n#endif\n',
    "by the second stage": '#define EMPTY\nEMPTY # include "{path}"\n',
    "by a header": "#include <cutlass/cutlass.h>\n#undef CUDA_STD_HEADER\n"
    '#define CUDA_STD_HEADER(x) "{path}"\n#include <cutlass/predicate_vector.h>\n',
    "under another name": '#include "{path}"\n#line 1 "kernel.cu"\n',
}


def told_of(source: str) -> str:
    """All that comes out of a build that fails; what does not fail is returned as well."""
    try:
        built = build(source, "sm_80", untrusted=True)
    except Failed as failed:
        return f"failed: {failed} {for_model(failed.diagnostics, source)}"
    return f"built: {built.ptx} {built.cubin!r} {built.record()}"


@linux
@needs_nvcc
@pytest.mark.parametrize("name", some(READERS))
def test_a_file_that_is_no_header_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the process may read it: Landlock is told to let it."""
    monkeypatch.setenv(process.READS, str(tmp_path))
    canary = tmp_path / "canary.h"
    canary.write_text(CANARY)
    told = told_of(READERS[name].format(path=canary) + KERNEL.format(READ))
    assert told.startswith("failed: ")
    assert "FW828" in told
    assert MARK not in told
    assert str(int(MARK, 16)) not in told
    if name != "by the second stage":  # which tells of no files
        assert "`canary.h`" in told


@linux
@needs_nvcc
@pytest.mark.parametrize(
    "text",
    some([f"{MARK} is the key\n", f"#error {MARK}\n", f"#{MARK}\n", f"#include <{MARK}>\n"]),
)
def test_what_the_compiler_quotes_of_a_file_is_not_told(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are no C++ stop the preprocessor, which then lists nothing, or the next stage."""
    monkeypatch.setenv(process.READS, str(tmp_path))
    canary = tmp_path / "canary.txt"
    canary.write_text(text)
    told = told_of(f'#include "{canary}"\n' + KERNEL.format(""))
    assert "FW828" in told
    assert MARK not in told


@linux
@needs_nvcc
@pytest.mark.skipif(not landlock.available(), reason="there is no Landlock here")
def test_the_confined_compiler_cannot_open_a_canary(tmp_path: Path) -> None:
    """In the user's home, in a temporary folder, and below /etc."""
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".canary") as home:
        for folder in (Path(home), tmp_path):
            canary = folder / "canary.h"
            canary.write_text(CANARY)
            for name in ("include", "by the second stage"):
                told = told_of(READERS[name].format(path=canary) + KERNEL.format(READ))
                assert told.startswith("failed: "), (folder, name)
                assert MARK not in told
        first = Path("/etc/passwd").read_text().split("\n")[0]
        told = told_of('#include "/etc/passwd"\n' + KERNEL.format(""))
        assert told.startswith("failed: ")
        assert first not in told
        assert first.split(":")[0] + ":" not in told


@needs_nvcc
def test_headers_of_the_compiler_are_no_other_files() -> None:
    source = "#include <cuda_fp16.h>\n#include <cuda/std/limits>\n#include <cstdint>\n"
    assert told_of(source + KERNEL.format("x[0] = 1;")).startswith("built: ")


def test_a_compiler_that_lists_nothing_is_not_believed(nvcc: FakeNvcc) -> None:
    for gone in ("kernel.d", "kernel.cpp1.ii"):
        nvcc.set(f"{WORKS}; rm {gone}")
        found = failed(nvcc)
        assert (found.code, "which files it has read" in found.message) == ("FW821", True)


def test_names_in_the_list_are_read_as_make_writes_them(nvcc: FakeNvcc) -> None:
    for name in ("/etc/a\\\\ b.txt", "/usr/share/x.h", "../../up.h", "log.txt"):
        nvcc.set(f"{WORKS}; printf 'kernel.o: kernel.cu \\\\\\n {name}\\n' > kernel.d")
        found = failed(nvcc)
        last = name.replace("\\\\", "").rpartition("/")[2]
        assert (found.code, f"`{last}`" in found.message) == ("FW828", True), found.message


def test_code_that_was_trusted_is_not_taken_from_the_cache(nvcc: FakeNvcc) -> None:
    build("x", "sm_80", toolchain=nvcc.tools)
    assert not build("x", "sm_80", toolchain=nvcc.tools, untrusted=True).cached
    assert build("x", "sm_80", toolchain=nvcc.tools, untrusted=True).cached


def test_without_landlock_nothing_is_compiled_unless_told(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "available", lambda: False)
    monkeypatch.delenv(UNCONFINED, raising=False)
    with pytest.raises(Failed, match=r"FW821.*no Landlock") as caught:
        taken(ours()[0], tools=nvcc.tools)
    assert UNCONFINED in (caught.value.diagnostics[0].help or "")
    assert nvcc.runs == []
    monkeypatch.setenv(UNCONFINED, "1")
    nvcc.set(
        f"{WORKS}; cat > kernel.ptx <<'END'\n{PTX.format(align=8, size=216, threads=128)}END\n"
    )
    assert taken(ours()[0], tools=nvcc.tools).built.cubin == b"CUBIN\n"


# --- its own comments as a map ----------------------------------------------------------------


def test_comments_are_read_into_a_map() -> None:
    source = (
        "//   9 | nowhere\nstruct A {\n};\nvoid f() {\n"
        "  //   3 | Copy Q\n  copy();\n\n  for (;;) {\n"
        "    //  4 | Compute\n    go(1,\n       2);\n  }\n  rest();\n"
        '  char a[] = "// 3 | x";\n}\nint after;\n'
    )
    found = commented(source, {3: 3, 4: 5})
    told = {n: found.tl_line(n) for n in range(1, 18)}
    assert {n for n, line in told.items() if line == 3} == {5, 6, 8}
    assert {n for n, line in told.items() if line == 4} == {9, 10, 11}
    assert {n for n, line in told.items() if line is None} == {1, 2, 3, 4, 7, *range(12, 18)}
    assert commented("void f() {}\n", {1: 1}).lines == ()


def test_our_own_comments_give_about_our_own_map() -> None:
    from flashwright.lower.translate import translate
    from flashwright.untrusted.translation import _lines

    made = translate(program("a100"), gpus.find("a100"))
    found = commented(made.source, _lines(program("a100")))
    numbers = range(1, made.source.count("\n") + 1)
    both = [(made.map.tl_line(n), found.tl_line(n)) for n in numbers]
    known = [(a, b) for a, b in both if a is not None and b is not None]
    assert len(known) > 60
    assert sum(a == b for a, b in known) >= 0.95 * len(known)
