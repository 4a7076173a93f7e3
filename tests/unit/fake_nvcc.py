"""A compiler that does nothing, fast: a shell script that behaves as each test says."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashwright.build.toolchain import Toolchain

PTXAS = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 256 bytes smem, 364 bytes cmem[0]
"""
GOOD = PTXAS.format(stack=0, stores=0, loads=0, registers=168)
LISTS = "echo '# 1 \"kernel.cu\"' > kernel.cpp1.ii && echo 'kernel.o: kernel.cu' > kernel.d"
WORKS = (
    "cat > /dev/null < kernel.cu && echo CUBIN > kernel.cubin && echo PTX > kernel.ptx && " + LISTS
)


class FakeNvcc:
    """The script, and the folder in which it counts how often it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "nvcc"
        self.set()

    def set(self, body: str = WORKS, says: str = GOOD, version: str = "13.0.88") -> None:
        """Behave like this from now on."""
        release = version.rpartition(".")[0]
        (self.folder / "says").write_text(says)
        self.path.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then echo "release {release}, V{version}"; exit 0; fi\n'
            f'echo "$@" >> {self.folder}/runs\n'
            f"cat {self.folder}/says >&2\n"
            f"{body}\n"
        )
        self.path.chmod(0o755)

    @property
    def runs(self) -> list[str]:
        """The command line of each run so far."""
        path = self.folder / "runs"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def tools(self) -> Toolchain:
        """A toolchain with this compiler and next to no headers."""
        for name in ("device", "cutlass"):
            (self.folder / name).mkdir(exist_ok=True)
        return Toolchain(self.path, "13.0.88", self.folder / "cutlass", self.folder / "device")


@pytest.fixture
def nvcc(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """A fake compiler that `find` finds, and a cache of the test's own."""
    folder = tmp_path_factory.mktemp("nvcc")
    fake = FakeNvcc(folder)
    monkeypatch.setenv("FLASHWRIGHT_NVCC", str(fake.path))
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(folder / "cache"))
    return fake
