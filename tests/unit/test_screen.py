"""What model-written CUDA may contain: each rule with what it lets pass and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.untrusted.screen import MOST_BYTES, screen

ROOT = Path(__file__).parents[2]


def refusals(source: str | bytes) -> tuple[Diagnostic, ...]:
    try:
        screen(source)
    except Failed as failed:
        return failed.diagnostics
    return ()


REFUSED = {
    "quotes": '#include "kernel.h"',
    "absolute": "#include </etc/passwd>",
    "absolute in quotes": '#include "/etc/passwd"',
    "upwards": "#include <fw/../../secret.h>",
    "hidden": "#include <cuda/.ssh/id>",
    "doubled": "#include <fw//../x>",
    "another library": "#include <fstream>",
    "another folder": "#include <sys/socket.h>",
    "a name that only begins so": "#include <cudax/a.h>",
    "by a macro": "#define WHAT <fw/attention.cuh>\n#include WHAT",
    "next": "#include_next <fw/attention.cuh>",
    "blanks": "  #  include  <unistd.h>",
    "digraph": "%:include <unistd.h>",
    "a comment before": "/* x */ #include <unistd.h>",
    "a comment over lines": "/*\n*/#include <unistd.h>",
    "a comment within": "#/**/include/**/<unistd.h>",
    "spliced": "#inc\\\nlude <unistd.h>",
    "spliced with blanks": "#inc\\  \nlude <unistd.h>",
    "spliced comment": "/\\\n* x *\\\n/ #include <unistd.h>",
    "a comment that ends": "// x \\\\ y\n#include <unistd.h>",
    "behind a string": 'char const* a = "/*";\n#include <unistd.h>\n// */',
    "behind an escaped quote": 'char const* a = "\\"/*";\n#include <unistd.h>\n// */',
    "behind a character": "char a = '\"';\n#include <unistd.h>\n// \"",
    "behind a number": "int a = 1'000'000;\n#include <unistd.h>\n// '",
    "trigraph": "??=include <unistd.h>",
    "spliced by a trigraph": "// x ??/\n#include <unistd.h>",
    "embed": "#embed </etc/passwd>",
    "import": "#import <fw/attention.cuh>",
    "line": '#line 7 "other.cu"',
    "line marker": '# 7 "other.cu"',
    "ident": '#ident "x"',
    "pragma": "#pragma GCC dependency </etc/passwd>",
    "diagnostics off": "#pragma nv_diag_suppress 177",
    "pragma by an operator": '_Pragma("GCC poison x")',
    "pragma in a macro": '#define P _Pragma("GCC poison x")',
    "asks for a file": "#if __has_include(</etc/shadow>)\n#endif",
    "where": "char const* a = __FILE__;",
    "when": "char const* a = __TIME__;",
    "glued": "#define A __FI##LE__",
    "raw string": 'char const* a = R"(x)";',
    "unclosed string": 'char const* a = "x;\n#include <unistd.h>',
    "unclosed comment": "int a; /* x",
    "backslash": "int \\u0061b;",
    "main": "int main() { return 0; }",
    "system": 'void f() { system("ls"); }',
    "environment": 'char* f() { return getenv("HOME"); }',
    "host function": "__host__ void f() {}",
    "constructor": "__attribute__((constructor)) void f() {}",
    "constructor, dressed up": "__attribute__((unused, __constructor__(101))) void f() {}",
    "constructor in brackets": "[[gnu::constructor]] void f() {}",
    "launch": "void f() { k<<<1, 1>>>(); }",
    "managed": "__managed__ int a;",
    "asm of the file": 'asm(".globl x");',
    "asm in a namespace": 'namespace a::b { asm(".globl x"); }',
    "incbin": '__device__ void f() { asm volatile("." "inc" "bin \\"/etc/passwd\\""); }',
    "incbin in a macro": '#define A asm(".incbin \\"x\\"")',
    "control character": "int a; // \x1b[2J",
    "lone carriage return": "// x\r#include <unistd.h>",
    "turned text": "int a; // \u202e x",
    "half a character": "int a; // \ud800",
    "blanks behind a backslash": "// x \\ \t\n#include <unistd.h>",
    "digits of another script": "int a = 1\u0661'; /* ';\n#include <unistd.h>\n// */",
    "digits that open a quote": "\u0661'\n#include <unistd.h>\n//'",
    "letters of another script": "int \u03bb;",
    "a string that is not ASCII": 'char const* a = "\u00e9";',
    "a header that is not ASCII": "#include <cuda_\u0661.h>",
    "a blank that is not ASCII": "#include\u00a0<fw/attention.cuh>",
    "trigraph in a string": 'char const* a = "x??/";',
    "trigraph of a quote": "int a = b ??' c; int d = '0';",
    "form feed": "\f#include <unistd.h>",
    "NUL": "int a;\0",
    "byte order mark": "\ufeffint a;",
    "universal name": "#\\u0069nclude <unistd.h>",
    "preprocessed twice": "#define EMPTY\nEMPTY # include </etc/passwd>",
    "preprocessed twice, digraph": "#define EMPTY\nEMPTY %: include </etc/passwd>",
    "a macro for a directive": "#define HASH #\nHASH include </etc/passwd>",
    "a macro for it, digraph": "#define HASH %:\nHASH include </etc/passwd>",
    "a string of what is no parameter": "#define A(x) #y",
    "a header's own macro": "#define CUDA_STD_HEADER(x) </etc/passwd>",
    "a header's own macro, undone": "#undef CUDA_STD_HEADER",
    "a header's guard": "#define _STDINT_H",
    "a word of the language": "#define volatile",
    "a macro above a header": "#define tuple passwd\n#include <cute/tensor.hpp>",
    "half a bracket": "#define A )",
    "words glued by a library": "char const* a = _CCCL_PP_CAT(__FI, LE__);",
    "a pragma by a library": '_CCCL_PRAGMA(GCC dependency "/etc/passwd")',
    "a pragma by glibc": '__glibc_macro_warning("x")',
    "a sign of assemblers": "int a$b;",
    "a module": "import <vector>;",
    "embed by a digraph": "%:embed </etc/passwd>",
    "asks for data": "#if __has_embed(</etc/shadow>)\n#endif",
    "asm by another name": '#define A asm\n__device__ void f() { A(".incbin"); }',
    "asm of a macro's argument": "#define A(x) asm(x)",
    "asm of a name": "__device__ void f() { asm(text); }",
    "asm of macros": '#define I ".inc"\n__device__ void f() { asm(I "bin x"); }',
    "asm by escapes": '__device__ void f() { asm("\\x2eincbin"); }',
    "asm with a quote": '__device__ void f() { asm(".x \\"/etc/passwd\\""); }',
    "asm with a directive": '__device__ void f() { asm("\\n#include x"); }',
    "asm with a file": '__device__ void f() { asm(".file 7"); }',
    "asm of an array": '__device__ void f() { asm("%0" :: "C"(text)); }',
    "asm of wide text": '__device__ void f() { asm(L"exit;"); }',
    "section": '__attribute__((section(".init_array"))) int a;',
    "attribute by a macro": "#define A constructor\n__attribute__((A)) void f() {}",
    "attributes without an end": "__attribute__((aligned(",
}
TAKEN = {
    "vocabulary": "#include <fw/hopper.cuh>\n#include <cute/tensor.hpp>  // tensors",
    "CUDA": "#include <cuda_fp16.h>\n#include <cuda/std/utility>\n#include <cuda/barrier>",
    "standard": "#include <cstdint>\n#include <cutlass/numeric_types.h>",
    "in a comment": '// #include "/etc/passwd" __FILE__ system(x) asm("x") R"(',
    "in a long comment": '/* #import <x>\n#line 3 "x"\n__host__ void f(); */',
    "in a string": 'char const* a = "#include <x> __FILE__ /* main() .incbin _Pragma";',
    "a string over lines": 'char const* a = "x \\\n#include <unistd.h>";',
    "a comment over lines": "// x \\\n#include <unistd.h>",
    "unroll": "#pragma unroll\n#pragma unroll 4\n#pragma unroll (N * 2)\n#pragma nounroll",
    "once": "#pragma once",
    "conditions": "#if defined(A) && A > 2\n#elif B\n#else\n#endif\n#undef A\n#",
    "macro": "#define MAX(a, b) ((a) > (b) ? (a) : (b))  // 1'000\n#define S(x) #x",
    "asm": '__device__ void f() { asm volatile("bar.sync 1, %0;" : : "r"(1)); }',
    "asm of macros that are strings": '#define A "exit;"\n#define B A "\\n"\n'
    '__device__ void f() { asm volatile("{" B "}" ::: "memory"); }',
    "asm with operands by macros": '#define D(d, i) "+f"(d[i])\n'
    '__device__ void f(float* a) { asm("x %0, %1;" : D(a, 0), "=r"(b) : [n] "n"(3)); }',
    "asm in a namespace's function": 'namespace a { __device__ void f() { asm("exit;"); } }',
    "asm in a member": 'struct A { __device__ void f() { asm("exit;"); } };',
    "names of one's own": "template <int _BM, class _Tp> struct A; float a = __FLT_MAX__;",
    "both sides": "__host__ __device__ int f() { return 1; }\n__device__ __host__ int g();",
    "names that only resemble": "int file_system, mainly, a__FILE__; auto x = system;",
    "attributes": "__attribute__((aligned(16))) int a; [[maybe_unused]] int b; int section = a[b];",
    "question marks": 'int a = b ? c : d; char const* e = "what?"; // why??/ because',
    "numbers": "float a = 1.e+5f + 0x1p-3; int b = 1'000;",
    "line ends of another system": "int a;\r\n#include <fw/attention.cuh>\r\n",
    "other alphabets": "// Größe, 漢字, λ",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED.keys())
def test_refused(source: str) -> None:
    found = refusals(f"int before;\n{source}\nint after;\n")
    assert {d.code for d in found} == {"FW828"}


@pytest.mark.parametrize("source", TAKEN.values(), ids=TAKEN.keys())
def test_taken(source: str) -> None:
    assert not refusals(f"int before;\n{source}\nint after;\n")


def test_the_place_is_that_of_the_file_as_it_is() -> None:
    source = 'int a = \\\n  1;\n/* one\ntwo */\n#include \\\n  "x.h"\n'
    (found,) = refusals(source)
    assert found.span is not None
    assert (found.span.line, found.span.column) == (5, 1)
    assert source[found.span.start : found.span.end] == '#include \\\n  "x.h"'
    assert '#include "x.h"' in found.message.replace("   ", " ")


HONEST = ("tests/golden", "tests/recorded", "docs/results", "flashwright/author/llm/prompts")


@pytest.mark.parametrize("folder", HONEST)
def test_our_own_kernels_and_those_of_models_are_taken(folder: str) -> None:
    paths = [*(ROOT / folder).rglob("*.cu")]
    assert len(paths) >= 6
    for path in paths:
        assert not refusals(path.read_bytes()), path


def test_what_is_no_text_or_too_long() -> None:
    assert "UTF-8" in refusals(b"int a; // \xff")[0].message
    assert not refusals("//" + "x" * (MOST_BYTES - 2))
    assert str(MOST_BYTES) in refusals("//" + "x" * (MOST_BYTES - 1))[0].message


def test_no_text_keeps_it_long() -> None:
    """A pattern that backtracks over the whole text would take hours: then this does not end."""
    for part in ("[[", "{asm(", "namespace a{", 'asm("":', "#define A A\n", "??", "("):
        refusals(part * (MOST_BYTES // 8 // len(part)))
