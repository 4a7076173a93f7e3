"""Two thousand texts that try to bring a file into the program: none that is let through does.

Each text takes a way to read a file (an include, `#embed`, a macro of a header, asm, ...), hides it
(in what only some lexers take for a comment or a string) and changes a few characters (splices,
trigraphs, digraphs, digits and letters of other scripts, odd blanks). What passes the screen is
preprocessed under several dialects, and once more, as nvcc's second stage does. The preprocessor is
not confined here: only the screen stands before the canary.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashwright.build import process, toolchain
from flashwright.build.compile import build
from flashwright.lang.diagnostic import Failed
from flashwright.lang.render import for_model
from flashwright.untrusted.screen import screen

MARK = "canary_7f3a9c_was_read"
GCC = shutil.which("gcc")
needs_gcc = pytest.mark.skipif(GCC is None, reason="there is no gcc here")
needs_nvcc = pytest.mark.skipif(
    GCC is None or not toolchain.has_nvcc(), reason="there is no CUDA compiler here"
)
SEED = 20
QUICK, ALL = 200, 2000

WAYS = (
    '#include "{path}"',
    "#include <{path}>",
    "#include <fw/../{name}>",
    '#include_next "{path}"',
    '#import "{path}"',
    '#embed "{path}"',
    "#embed <{path}> limit(8)",
    '#define WHAT "{path}"\n#include WHAT',
    '#define WHAT(x) "{path}"\n#include WHAT(1)',
    '#define CUDA_STD_HEADER(x) "{path}"\n#include <cute/tensor.hpp>',
    '#undef CUDA_STD_HEADER\n#define CUDA_STD_HEADER(x) "{path}"\n#include <cute/tensor.hpp>',
    "#define tuple ../{name}\n#include <cute/tensor.hpp>",
    '#define EMPTY\nEMPTY # include "{path}"',
    '#define EMPTY\nEMPTY %: include "{path}"',
    '#define HASH #\nHASH include "{path}"',
    '#define HASH() %:\nHASH() include "{path}"',
    '#define LINE(x) x include "{path}"\nLINE(#)',
    '#pragma GCC dependency "{path}"',
    '#pragma include_alias(<fw/attention.cuh>, "{path}")\n#include <fw/attention.cuh>',
    '_Pragma("GCC dependency \\"{path}\\"")',
    '#line 1 "{path}"',
    '#if __has_include("{path}")\n#include "{path}"\n#endif',
    '#if __has_embed("{path}")\nint found;\n#endif',
    'asm(".incbin \\"{path}\\"");',
    '__device__ void g() {{ asm volatile(".inc" "bin \\"{path}\\""); }}',
    '__device__ void g() {{ asm volatile("\\n#include \\"{path}\\"\\n"); }}',
    '#define T(x) #x\n__device__ void g() {{ asm volatile(T(.include "{path}")); }}',
    "import <{path}>;",
)
HIDDEN = (
    "{way}",
    "{way}",
    "// {way}",
    "/* {way} */",
    "/* x *\\\n/ {way}\n//*/",
    "// x ??/\n{way}",
    "// x \\ \n{way}",
    "// x \\\n\n{way}",
    "int a = 1{digit}'0; /*';\n{way}\n// */",
    "int a = {digit}'/*';\n{way}\n// */",
    "int a = 1{letter}'; /*';\n{way}\n// */",
    'char const* a = "??/"; /*";\n{way}\n// */',
    'char const* a = "\\\\"; /*";*/\n{way}\n//"',
    'char const* a = R"x(/*)x";\n{way}\n// */',
    'char const* a = u8R"(")";\n{way}\n//"',
    'char const* a{letter}R"(/*)";\n{way}\n// */',
    "int a$R = '/*';\n{way}\n// */",
    "#if 0\n'\n#endif\n{way}\n//'",
    "#if 1 /* x\n*/ // y\n{way}\n#endif",
    "#ifdef __CUDACC__\n#else\n{way}\n#endif",
    "#define LONG a \\\n b\n{way}",
    "/* \f */ {way}",
    "/\\\n/ x\n{way}",
    "/\\\n* x *\\\n/{way}",
    "a /* */ ??' /*';\n{way}\n// */",
)
DIGITS = "\u0661\u06f3\u0967\u0be8\uff11\u00b2\u2460"
LETTERS = "\u00e9\u03bb\u0430\u0131\u017f\uff49\u2118"
BLANKS = ("\t", "\f", "\v", "\0", "\u00a0", "\u2003", "\u2028", "\u0085", "\ufeff", "/**/", "\r")
KERNEL = """#include <fw/attention.cuh>
{top}
struct Params {{ float* x; }};
{middle}
extern "C" __global__ void attention(Params p) {{
{inside}
  p.x[0] = 1.0f;
}}
"""


@dataclass(frozen=True)
class World:
    """The canary, and folders of headers that behave as those of CUTLASS do."""

    folder: Path
    canary: Path

    def preprocessed(self, text: bytes, *options: str) -> bytes:
        """What the preprocessor makes of a text; whether it complains is all the same."""
        assert GCC is not None
        command = [GCC, "-E", "-x", "c++", "-w", *options, "-nostdinc", "-I", str(self.folder), "-"]
        told = subprocess.run(command, input=text, capture_output=True, timeout=60, cwd=self.folder)
        return told.stdout

    def leaks(self, source: str) -> bool:
        """Whether the canary's bytes come in, in any dialect, at the first or the second stage."""
        text = source.encode("utf-8", errors="surrogatepass")
        for options in (
            ("-std=c++17",),
            ("-std=gnu++17", "-trigraphs", "-fdollars-in-identifiers"),
        ):
            once = self.preprocessed(text, *options)
            if MARK.encode() in once or MARK.encode() in self.preprocessed(once, *options):
                return True
        return False


@pytest.fixture
def world(tmp_path: Path) -> World:
    canary = tmp_path / "canary.txt"
    canary.write_text(f"int {MARK} = 1;\n")
    headers = tmp_path / "include"
    for name in ("fw", "cute", "cuda/std"):
        (headers / name).mkdir(parents=True)
    (headers / "canary.txt").write_text(canary.read_text())
    (headers / "fw" / "attention.cuh").write_text("struct Attention;\n")
    (headers / "cuda" / "std" / "tuple").write_text("struct Tuple;\n")
    (headers / "cute" / "tensor.hpp").write_text(
        "#if !defined(CUDA_STD_HEADER)\n#define CUDA_STD_HEADER(x) <cuda/std/x>\n#endif\n"
        "#include CUDA_STD_HEADER(tuple)\n"
    )
    return World(headers, canary)


def sources(canary: Path, count: int, seed: int = SEED) -> list[str]:
    """Texts of a seed, the same on every machine but for the canary's name."""
    draw = random.Random(seed)
    return [_source(canary, draw) for _ in range(count)]


def _source(canary: Path, draw: random.Random) -> str:
    way = draw.choice(WAYS).format(path=canary, name=canary.name)
    hidden = draw.choice(HIDDEN)
    digit, letter = draw.choice(DIGITS), draw.choice(LETTERS)
    if draw.random() < 0.5:
        way = _changed(way, draw)
    text = hidden.format(way=way, digit=digit, letter=letter)
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
        text = _changed(text, draw)
    parts = dict.fromkeys(("top", "middle", "inside"), "")
    parts[draw.choice([*parts])] = text
    whole = KERNEL.format(**parts)
    return whole.replace("\n", "\r\n") if draw.random() < 0.05 else whole


def _changed(text: str, draw: random.Random) -> str:
    """A text with one place written in another way."""
    place = draw.randrange(len(text) + 1)
    before, here, after = text[:place], text[place : place + 1], text[place + 1 :]
    kind = draw.randrange(12)
    if kind == 0:
        return before + draw.choice(("\\\n", "\\ \n", "\\\r\n", "??/\n", "\\\t\n")) + here + after
    if kind == 1:
        return text.replace("#", draw.choice(("??=", "%:", "\\\n#", "/**/#", "# \\\n")), 1)
    if kind == 2 and here.isalpha():
        return before + draw.choice((f"\\u{ord(here):04x}", f"\\U{ord(here):08x}")) + after
    if kind == 3:
        return before + draw.choice(BLANKS) + here + after
    if kind == 4:
        return text.replace(" ", draw.choice((*BLANKS, "/*\n*/", " \\\n ")), 1)
    if kind == 5:
        return before + draw.choice(DIGITS + LETTERS) + here + after
    if kind == 6:
        return draw.choice(("\ufeff", "\n", ";", "/**/", "\\\n", "??=\n", "'", '"')) + text
    if kind == 7:
        return before + draw.choice("'\"/*\\?<>#%:()") + here + after
    if kind == 8:
        return before + after
    if kind == 9:
        return text + draw.choice(("\\", "/*", '"', "'", "//", "*/", "\\\n", "??/"))
    if kind == 10:
        return text.replace('"', draw.choice(('L"', "'", '""', 'R"', '\\"')), 1)
    return f"#define ONE {draw.choice('#1(a')}\n{text}"


def passes(source: str) -> bool:
    try:
        screen(source)
    except Failed:
        return False
    return True


def _leaking(world: World, texts: Sequence[str]) -> list[str]:
    return [text for text in texts if world.leaks(text)]


@needs_gcc
def test_texts_that_try_to_read_a_file(world: World) -> None:
    texts = sources(world.canary, QUICK)
    taken = [text for text in texts if passes(text)]
    assert len(taken) >= QUICK // 50  # harmless ones: in comments, or behind a false condition
    assert not _leaking(world, taken)
    refused = [text for text in texts if text not in set(taken)]
    assert len(_leaking(world, refused[:60])) >= 3  # there is something to refuse


@pytest.mark.slow
@needs_gcc
def test_two_thousand_texts_that_try_to_read_a_file(world: World) -> None:
    texts = sources(world.canary, ALL)
    taken = [text for text in texts if passes(text)]
    assert len(taken) >= ALL // 50
    assert not _leaking(world, taken)
    refused = [text for text in texts if text not in set(taken)]
    assert len(_leaking(world, refused[:300])) >= 15


@needs_gcc
@pytest.mark.parametrize("way", [w for w in WAYS if "{path}" in w or "{name}" in w])
def test_each_way_by_itself_is_refused(way: str, world: World) -> None:
    text = way.format(path=world.canary, name=world.canary.name)
    assert not passes(KERNEL.format(top=text, middle="", inside=""))


def _compiled(texts: Sequence[str]) -> int:
    """How many go through the confined compiler; Failed or not, nothing of the canary comes out."""
    made = 0
    for text in texts:
        try:
            built = build(text, "sm_80", untrusted=True)
        except Failed as failed:
            told = f"{failed} {for_model(failed.diagnostics, '')}"
        else:
            told = f"{built.ptx} {built.cubin!r}"
            made += 1
        assert MARK not in told.replace(text, "")
    return made


def _for_the_compiler(world: World, count: int) -> list[str]:
    """Texts that pass the screen, and as many that would bring the canary in if it were not."""
    texts = sources(world.canary, 10 * count + 50)
    taken = [text for text in texts if passes(text)][:count]
    return [*taken, *_leaking(world, [t for t in texts if not passes(t)][: 10 * count])[:count]]


@pytest.mark.slow
@needs_nvcc
def test_one_of_each_kind_meets_the_confined_compiler(world: World) -> None:
    texts = _for_the_compiler(world, 1)
    assert len(texts) == 2
    assert _compiled(texts) >= 1


@pytest.mark.slow
@needs_nvcc
def test_more_meet_the_confined_compiler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process may open the canary: its bytes still do not come out."""
    monkeypatch.setenv(process.READS, str(world.canary.parent))
    assert _compiled(_for_the_compiler(world, 3)) >= 2
