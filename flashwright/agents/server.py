"""The MCP server: a tool for each command that an agent needs, and the language as a resource.

A tool checks its paths, runs the command in a process, and returns what the command reports.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resources import FunctionResource
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field

from flashwright.agents.job import Ended, run_command
from flashwright.agents.workspace import SKILL, Workspace
from flashwright.author.llm import language
from flashwright.lang import render
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.version import __version__

JOBS = 2
"""The commands that run at a time; others wait."""
SIZES = ("q_len", "kv_len", "batch", "heads", "kv_heads")
INSTRUCTIONS = """Write attention kernels in TL, a small tile language. First read the resource flashwright://skill.
Then: write_file a program and its spec (a .toml file of the same name), check, run, translate,
emulate, and submit, which judges the kernel and makes the package. Paths are relative to the
workspace.
"""
BULKY = ("spec", "picture")
"""The parts of a command's report that an agent does not get."""
LONGEST = 30_000
"""Characters of a text that a tool returns."""

Program = Annotated[str, Field(description="TL code: a path in the workspace")]
Folder = Annotated[str, Field(description="A kernel package: a folder in the workspace")]
Gpu = Annotated[str, Field(description="The GPU, such as a100, h100, h200, rtx4090 or b200")]
Spec = Annotated[
    str | None,
    Field(
        description="What it should compute: a TOML file, or settings such as 'causal, "
        "head_dim=64'. Default: the TOML file of the program's own name, else spec.toml beside it"
    ),
]
Length = Annotated[int | None, Field(ge=1, le=1 << 14)]
Seed = Annotated[int, Field(ge=0)]


class Finding(BaseModel):
    """A diagnostic: what is wrong, where, and how to mend it."""

    code: str
    severity: str
    message: str
    file: str = ""
    line: int | None = None
    column: int | None = None
    label: str = ""
    """What the place shows."""
    related: list[str] = []
    """Further places: `line 12: ...`."""
    help: str | None = None
    fix: str | None = None
    """An edit that the tool `fix` makes."""


class Answer(BaseModel):
    """What a command reported."""

    ok: bool
    """Whether it succeeded: the program is right, the file was made."""
    exit_code: int
    """0: fine. 1: the program or the kernel is wrong. 2: the input cannot be used."""
    diagnostics: list[Finding] = []
    result: dict[str, Any] | None = None
    """The command's report as data, if it has one."""
    output: str = ""
    """What it printed."""


class Text(BaseModel):
    """A text, or why there is none."""

    ok: bool
    text: str = ""
    total_lines: int = 0
    diagnostics: list[Finding] = []


class Tools:
    """The tools, for one workspace."""

    def __init__(self, workspace: Workspace, minutes: float) -> None:
        self.workspace, self.seconds = workspace, minutes * 60
        self._jobs = anyio.Semaphore(JOBS)

    async def check(
        self,
        ctx: Context,
        file: Program,
        gpu: Annotated[str | None, Field(description="Also against this GPU's budgets")] = None,
    ) -> Answer:
        """Check a TL program: what is wrong, on which line, and the fix. Takes a second. With a GPU
        also how it will be translated."""
        return await self._run(ctx, "check", lambda w: [w.program(file)], {"gpu": gpu})

    async def fix(self, ctx: Context, file: Program, gpu: str | None = None) -> Answer:
        """Apply the fixes of `check` to the file, and check again."""
        options = {"gpu": gpu, "fix": True}
        return await self._run(ctx, "check", lambda w: [w.program(file)], options)

    async def run(
        self,
        ctx: Context,
        file: Program,
        spec: Spec = None,
        q_len: Length = None,
        kv_len: Length = None,
        batch: Length = None,
        heads: Length = None,
        kv_heads: Length = None,
        seed: Seed = 0,
    ) -> Answer:
        """Run a TL program on the CPU and compare its outputs with fp64: is it the operator?
        Without sizes it tries the problems that the judge derives from the program. Seconds."""
        sizes = dict(zip(SIZES, (q_len, kv_len, batch, heads, kv_heads), strict=True))
        options = {"spec": spec, **sizes, "seed": seed, "format": "json"}
        return await self._run(ctx, "run", lambda w: [w.program(file, spec)], options)

    async def translate(
        self,
        ctx: Context,
        file: Program,
        gpu: Gpu,
        out: Annotated[str | None, Field(description="Default: out/NAME-GPU/kernel.cu")] = None,
    ) -> Answer:
        """Translate a TL program to CuTe C++, and say which instructions and schedule it uses.
        `read_file` shows the CUDA."""
        target = out or f"{_out(file, gpu)}/kernel.cu"

        def arguments(workspace: Workspace) -> list[str]:
            folder = workspace.tree(str(PurePosixPath(target).parent))
            (workspace.root / folder).mkdir(parents=True, exist_ok=True)
            return [workspace.program(file)]

        return await self._run(ctx, "translate", arguments, {"gpu": gpu, "out": target})

    async def build(
        self,
        ctx: Context,
        file: Program,
        gpu: Gpu,
        out: Annotated[str | None, Field(description="Default: out/NAME-GPU")] = None,
    ) -> Answer:
        """Compile a TL program to a kernel package: registers, spills, shared memory. Takes up to
        minutes. Needs nvcc."""
        options = {"gpu": gpu, "out": out or _out(file, gpu)}
        return await self._run(ctx, "build", lambda w: [w.program(file)], options)

    async def emulate(
        self,
        ctx: Context,
        what: Annotated[str, Field(description="TL code, or a kernel package's folder")],
        gpu: Annotated[str | None, Field(description="For TL code: its GPU")] = None,
        spec: Spec = None,
        q_len: Length = None,
        kv_len: Length = None,
        batch: Length = None,
        heads: Length = None,
        kv_heads: Length = None,
        schedule: Annotated[str, Field(pattern="^(eager|lazy|all|random:[0-9]+)$")] = "eager",
        profile: bool = False,
        seed: Seed = 0,
    ) -> Answer:
        """Execute the compiled kernel's PTX on the CPU by the GPU's rules: outputs, races, accesses
        out of bounds, barriers. One problem; the default is small. Needs nvcc, no GPU."""
        sizes = dict(zip(SIZES, (q_len, kv_len, batch, heads, kv_heads), strict=True))
        options: dict[str, object] = {"gpu": gpu, "spec": spec, **sizes, "schedule": schedule}
        options |= {"profile": profile, "seed": seed, "json": True}

        def arguments(workspace: Workspace) -> list[str]:
            name = workspace.program(what, spec)
            if PurePosixPath(name).suffix != ".tl" and not (workspace.root / name).is_dir():
                text = f"{what} is neither TL code nor a folder: the tool takes no other kernels"
                raise Failed(Diagnostic("FW857", text))
            return [name]

        return await self._run(ctx, "emulate", arguments, options)

    async def submit(
        self,
        ctx: Context,
        file: Program,
        gpu: Gpu,
        author: Annotated[str, Field(description="You: model or agent, for the record")],
        spec: Spec = None,
        out: Annotated[str | None, Field(description="Default: out/NAME-GPU")] = None,
        all_problems: Annotated[
            bool, Field(description="Under emulation: all problems, not the first few")
        ] = False,
    ) -> Answer:
        """Hand in a finished program. It is checked, run, translated, compiled and judged, on a GPU
        or under emulation, and the package gets its record. A wrong one comes back with findings;
        the next submission goes on with the same record."""
        folder = out or _out(file, gpu)
        options: dict[str, object] = {"gpu": gpu, "spec": spec, "author": author, "out": folder}
        options |= {"all_problems": all_problems, "json": True}
        return await self._run(ctx, "submit", lambda w: [w.program(file, spec)], options)

    async def verify(
        self,
        ctx: Context,
        folder: Folder,
        spec: Spec = None,
        on: Annotated[
            str, Field(pattern="^(gpu|cpu)$", description="cpu: under emulation")
        ] = "cpu",
        seed: Annotated[int | None, Field(ge=0, description="Default: random")] = None,
    ) -> Answer:
        """Judge a kernel package on all problems: random shapes against fp64, and its side effects.
        Takes seconds on a GPU, minutes under emulation."""
        options = {"spec": spec, "on": on, "seed": seed, "json": True}
        return await self._run(ctx, "verify", lambda w: [w.program(folder, spec)], options)

    async def bench(
        self,
        ctx: Context,
        folder: Folder,
        peers: Annotated[
            str | None, Field(description="Only these libraries: flash,cudnn,flex; or none")
        ] = None,
        out: Annotated[str | None, Field(description="Default: out/bench")] = None,
    ) -> Answer:
        """Measure a kernel package beside the libraries on this machine's GPU."""
        options = {"peers": peers, "out": out or "out/bench"}
        return await self._run(
            ctx, "bench", lambda w: [f"--package={w.program(folder)}"], options, positional=False
        )

    async def explain(
        self,
        ctx: Context,
        code: Annotated[str, Field(pattern="^(FW)?[0-9]{3}$", description="Such as FW501")],
    ) -> Answer:
        """Explain a diagnostic's code, with a wrong and a right example."""
        return await self._run(ctx, "explain", lambda w: [code], {})

    def language(
        self,
        section: Annotated[
            str | None, Field(description="A heading; default: a list of them")
        ] = None,
    ) -> Text:
        """The reference of TL: the headings, or a section. The resource flashwright://language has
        all of it."""
        every = language.sections()
        if section is None:
            return _whole("\n".join(every))
        found = [name for name in every if section.strip("`# ").lower() in name.lower()]
        if not found:
            text = f"there is no section {section[:80]!r}: there are {', '.join(every)}"
            return Text(ok=False, diagnostics=[_finding(Diagnostic("FW001", text))])
        return _whole(language.chosen(*found))

    def write_file(self, file: str, text: str) -> Text:
        """Write a text file of the workspace: a program (.tl), its spec (.toml) or its reference in
        Python (.py)."""
        told = _reported(lambda: self.workspace.write(file, text))
        return told.model_copy(update={"total_lines": len(_lines(text))}) if told.ok else told

    def read_file(
        self,
        file: str,
        first_line: Annotated[int, Field(ge=1)] = 1,
        lines: Annotated[int, Field(ge=1, le=2000)] = 400,
    ) -> Text:
        """Read a part of a text file of the workspace, with numbered lines."""
        return _reported(lambda: self.workspace.read(file), first_line, lines)

    def list_files(self) -> Text:
        """The files of the workspace."""
        return _reported(lambda: "\n".join(self.workspace.listing()))

    async def _run(
        self,
        ctx: Context,
        command: str,
        arguments: Callable[[Workspace], list[str]],
        options: Mapping[str, object],
        positional: bool = True,
    ) -> Answer:
        """Run a command of ours; the paths are looked at first."""
        try:
            given = arguments(self.workspace)
            if options.get("out") is not None:
                self.workspace.tree(str(options["out"]))
        except Failed as failed:
            return Answer(ok=False, exit_code=2, diagnostics=[*map(_finding, failed.diagnostics)])
        words = [command, *_flags(options), *(["--"] if positional else []), *given]
        count = 0

        async def progress(text: str) -> None:
            nonlocal count
            count += 1
            await ctx.report_progress(count, message=text)

        async with self._jobs:
            ended = await run_command(words, self.workspace.root, self.seconds, progress)
        return self._answer(command, _in_words_of_tool(ended, options))

    def _answer(self, command: str, ended: Ended) -> Answer:
        output, result = ended.output, _object(ended.output)
        findings = [*ended.diagnostics]
        if result is not None:
            findings += result.pop("diagnostics", [])
            result = {name: value for name, value in result.items() if name not in BULKY}
            if "cases" in result:
                result["cases"] = _summary(result["cases"])
            output = ""
        code = ended.code
        if code is None:
            text = f"`{command}` was stopped after {self.seconds:g} seconds"
            found = Diagnostic("FW806", text, help="try a smaller problem first")
            findings += json.loads(render.as_json([found], ""))
        return Answer(
            ok=code == 0,
            exit_code=1 if code is None else code,
            diagnostics=[_finding_of(one) for one in findings],
            result=result,
            output=_short("\n".join(t for t in (output.strip(), ended.errors.strip()) if t)),
        )


def server(workspace: Workspace, minutes: float) -> MCPServer[Any]:
    """The server of a workspace. `minutes` is the limit of one command."""
    tools = Tools(workspace, minutes)
    made: MCPServer[Any] = MCPServer(
        "flashwright",
        title="Flashwright",
        version=__version__,
        instructions=INSTRUCTIONS,
    )
    reads = ToolAnnotations(read_only_hint=True)
    writes = ToolAnnotations(read_only_hint=False, destructive_hint=False)
    looking: list[Callable[..., Any]] = [tools.check, tools.run, tools.emulate, tools.verify]
    looking += [tools.explain, tools.language, tools.read_file, tools.list_files]
    making: list[Callable[..., Any]] = [tools.write_file, tools.fix, tools.translate, tools.build]
    making += [tools.submit, tools.bench]
    for tool in looking:
        made.add_tool(tool, annotations=reads)
    for tool in making:
        made.add_tool(tool, annotations=writes)
    for uri, title, text in (
        ("flashwright://language", "The reference of TL", language.chosen),
        ("flashwright://skill", "How to write an attention kernel", _skill),
    ):
        made.add_resource(
            FunctionResource(uri=uri, name=title, title=title, mime_type="text/markdown", fn=text)
        )
    return made


def _skill() -> str:
    """The skill, without its head."""
    return (SKILL / "SKILL.md").read_text("utf-8").split("---\n", 2)[2].strip() + "\n"


def _out(file: str, gpu: str) -> str:
    return f"out/{PurePosixPath(file).stem}-{gpu}"


def _flags(options: Mapping[str, object]) -> list[str]:
    """The options of a command line. A value is in the same word, so that none passes for one."""
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    flags = [name for name, value in given.items() if value is True]
    return flags + [
        f"{name}={value}"
        for name, value in given.items()
        if value is not None and not isinstance(value, bool)
    ]


def _in_words_of_tool(ended: Ended, options: Mapping[str, object]) -> Ended:
    """With the tool's arguments in the place of the command's options, in all that is said."""

    def argument(found: re.Match[str]) -> str:
        name = found[2].replace("-", "_")
        if name not in options:
            return found[0]
        return f"`{name}" if found[1] else f"`{name}`"

    def said(text: str) -> str:
        return re.sub(r"(`?)--([a-z]+(?:-[a-z]+)*)", argument, text)

    diagnostics = json.loads(said(json.dumps(ended.diagnostics)))
    output, errors = said(ended.output), said(ended.errors)
    return replace(ended, output=output, errors=errors, diagnostics=diagnostics)


def _summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many outputs of problems were compared, the wrong ones, and of each output the worst."""

    def error(case: Mapping[str, Any]) -> float:
        size = float(case["relative_rms"])
        return math.inf if math.isnan(size) else size

    names = dict.fromkeys(case["output"] for case in cases)
    return {
        "compared": len(cases),
        "wrong": [dict(case) for case in cases if not case["ok"]],
        "worst": [max((c for c in cases if c["output"] == name), key=error) for name in names],
    }


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a command printed; None for other output."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _finding(found: Diagnostic) -> Finding:
    return _finding_of(json.loads(render.as_json([found], ""))[0])


def _finding_of(record: Mapping[str, Any]) -> Finding:
    related = [f"line {place['line']}: {place['text']}" for place in record["secondary"]]
    fix = record["fix"]["title"] if record["fix"] else None
    same = {name: record[name] for name in Finding.model_fields if name in record}
    return Finding(**{**same, "fix": fix}, related=related)


def _reported(work: Callable[[], str], first: int = 1, most: int = LONGEST) -> Text:
    try:
        return _whole(work(), first, most)
    except Failed as failed:
        return Text(ok=False, diagnostics=[*map(_finding, failed.diagnostics)])


def _whole(text: str, first: int = 1, most: int = LONGEST) -> Text:
    lines = _lines(text)
    part = "\n".join(lines[first - 1 : first - 1 + most])
    return Text(ok=True, text=_short(part), total_lines=len(lines))


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n... (the rest is left out)"
