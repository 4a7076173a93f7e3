"""The server for coding agents: what its tools answer, how a command ends, and the skill."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mcp.server.mcpserver", reason="the server needs MCP's SDK (the extra mcp)")

import anyio
from mcp.client import Client

from flashwright.agents.server import Tools, server
from flashwright.agents.workspace import SKILL, Workspace
from flashwright.build import toolchain
from flashwright.check.check import check
from flashwright.cli.main import app
from flashwright.generate.replay import replay
from flashwright.gpu import find
from flashwright.lang.codes import CODES
from flashwright.lang.parse import parse
from tests.unit.agent_calls import Call, codes, repeat, session
from tests.unit.test_by_model import Nobody
from tests.unit.test_cli import GOOD

RECORDED = sorted((Path(__file__).parents[1] / "recorded_agents").glob("*.jsonl"))
NO_RESHAPE = "".join(line for line in GOOD.splitlines(True) if not line.strip().startswith("Resh"))
TEXT = (SKILL / "SKILL.md").read_text("utf-8")
SAVED = dict(re.findall(r"<!-- save: (\S+) -->\n\n```\w+\n(.*?)^```", TEXT, re.M | re.S))


def test_an_agent_gets_findings_with_line_and_fix_and_the_fix_mends_the_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the workspace ran')")

    async def work(call: Call) -> None:
        written = await call("write_file", file="ops/a.tl", text=NO_RESHAPE)
        assert (written["text"], written["total_lines"]) == ("ops/a.tl", NO_RESHAPE.count("\n"))
        wrong = await call("check", file="ops/a.tl")
        assert (wrong["ok"], wrong["exit_code"], codes(wrong)) == (False, 1, ["FW501"])
        (found,) = wrong["diagnostics"]
        line = NO_RESHAPE[: NO_RESHAPE.index("Compute GEMM S, V")].count("\n") + 1
        assert (found["file"], found["line"]) == ("ops/a.tl", line)
        assert "Reshape S from" in found["fix"]
        clean = await call("fix", file="ops/a.tl", gpu="a100")
        assert clean["ok"]
        assert "0 errors" in clean["output"]
        assert "mma.sync" in clean["output"]
        told = await call("read_file", file="ops/a.tl", first_line=line, lines=1)
        assert told["text"].strip().startswith("Reshape S from")

    session(tmp_path, work)


def test_every_tool_with_a_path_refuses_one_outside_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*given: object) -> None:
        raise AssertionError("a command was run")

    monkeypatch.setattr("flashwright.agents.server.run_command", never)
    more = {"gpu": "a100", "author": "x", "text": "", "file": "../a.tl", "folder": "../a"}
    given = {**more, "what": "../a"}
    inside = {**given, "file": "a.tl", "folder": ".", "what": "a.tl", "out": "/tmp/elsewhere"}

    async def main() -> None:
        (tmp_path / "a.tl").write_text(GOOD)
        async with Client(server(Workspace(tmp_path), 1)) as client:
            for tool in (await client.list_tools()).tools:
                takes = tool.input_schema.get("properties", {})
                for values in (given, inside):
                    named = {name: value for name, value in values.items() if name in takes}
                    if not {"file", "folder", "what"} & set(takes) or (
                        values is inside and "out" not in takes
                    ):
                        continue
                    answer = (await client.call_tool(tool.name, named)).structured_content
                    assert answer is not None
                    assert codes(answer) == ["FW006"], tool.name

    anyio.run(main)


def test_values_of_options_are_no_options(tmp_path: Path) -> None:
    async def work(call: Call) -> None:
        await call("write_file", file="a.tl", text=GOOD)
        answer = await call("check", file="a.tl", gpu="--fix")
        assert codes(answer) == ["FW705"]

    session(tmp_path, work)


def test_answers_name_the_arguments_of_the_tool(tmp_path: Path) -> None:
    async def work(call: Call) -> None:
        await call("write_file", file="a.tl", text=GOOD)
        answer = await call("submit", file="a.tl", gpu="a100", author="x")
        (found,) = answer["diagnostics"]
        assert found["help"].endswith("or give `spec`")

    session(tmp_path, work)


def test_cases_are_summed_up(tmp_path: Path) -> None:
    async def work(call: Call) -> None:
        await call("write_file", file="a.tl", text=GOOD)
        given = {"file": "a.tl", "spec": "causal, head_dim=64, heads=2", "q_len": 70}
        cases = (await call("run", **given))["result"]["cases"]
        assert (cases["compared"], cases["wrong"]) == (1, [])
        (worst,) = cases["worst"]
        assert (worst["output"], worst["dims"]["q_len"]) == ("O", 70)
        await call("write_file", file="a.tl", text=GOOD.replace("S, Scale", "S, 2 * Scale"))
        cases = (await call("run", **given))["result"]["cases"]
        assert cases["wrong"] == cases["worst"]
        assert not cases["wrong"][0]["ok"]

    session(tmp_path, work)


def children() -> Iterator[str]:
    """The command lines of our processes that this one has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            line = (entry / "cmdline").read_text().replace("\0", " ")
            if parent == os.getpid() and "-m flashwright" in line:
                yield line


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="needs /proc")
def test_a_cancelled_call_ends_its_process_and_reports_progress_before(tmp_path: Path) -> None:
    (tmp_path / "a.tl").write_text(GOOD)
    told: list[str | None] = []

    async def main() -> None:
        async with Client(server(Workspace(tmp_path), 10)) as client:
            with anyio.CancelScope() as scope:

                async def progress(done: float, total: float | None, text: str | None) -> None:
                    told.append(text)
                    assert len([*children()]) == 1
                    scope.cancel()

                size = {"q_len": 16384, "spec": "causal, head_dim=64, heads=2"}
                await client.call_tool("run", {"file": "a.tl", **size}, progress_callback=progress)
            assert scope.cancelled_caught
            while [*children()]:  # the server is told, and ends it
                await anyio.sleep(0.05)

    anyio.run(main)
    assert told


def test_a_command_has_a_time_limit(tmp_path: Path) -> None:
    (tmp_path / "a.tl").write_text(GOOD)

    async def work(call: Call) -> None:
        answer = await call("check", file="a.tl")
        assert (answer["exit_code"], codes(answer)) == (1, ["FW806"])
        assert "was stopped" in answer["diagnostics"][0]["message"]

    session(tmp_path, work, minutes=1e-4)


def test_the_language_is_a_resource_and_a_tool(tmp_path: Path) -> None:
    async def main() -> None:
        async with Client(server(Workspace(tmp_path), 1)) as client:
            whole = (await client.read_resource("flashwright://language")).contents[0]
            skill = (await client.read_resource("flashwright://skill")).contents[0]
            part = await client.call_tool("language", {"section": "Mask"})
            wrong = await client.call_tool("language", {"section": "Loops of joy"})
        assert "### Mask" in whole.text
        assert skill.text.startswith("# Write an attention kernel")
        assert part.structured_content is not None
        assert part.structured_content["text"].strip() in whole.text
        assert wrong.structured_content is not None
        assert "Recipes" in wrong.structured_content["diagnostics"][0]["message"]

    anyio.run(main)


# --- the record -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no nvcc")
def test_an_agent_that_repairs_its_program_leaves_the_record_of_both_attempts(
    tmp_path: Path,
) -> None:
    async def work(call: Call) -> None:
        for name, text in SAVED.items():
            await call("write_file", file=name, text=text)
        right = SAVED["keygate.tl"]
        wrong = right.replace("and get Smax", "and get Ssum", 1)
        await call("write_file", file="keygate.tl", text=wrong)
        given = {"file": "keygate.tl", "gpu": "a100", "author": "a test", "out": "made"}
        answer = await call("submit", **given)
        assert not answer["ok"]
        assert codes(answer)[-1] == "FW912"
        await call("write_file", file="keygate.tl", text=right)
        answer = await call("submit", **given)
        assert answer["ok"], answer
        assert answer["result"]["attempts"] == 2
        shown = answer["result"]
        assert shown["verdict"].startswith("right")
        assert not any("no sketch" in text for text in shown["not_claimed"])
        assert sum("agrees with its reference" in text for text in shown["claimed"]) == 2
        if "`all_problems`" in shown["verdict"]:  # there is no GPU
            assert any("the others are batch" in text for text in shown["notes"])

    told = [*map(str, session(tmp_path, work))]
    assert not any("asking" in text for text in told)
    assert any(text.endswith("reading the program") for text in told)
    result = json.loads((tmp_path / "made" / "result.json").read_text())
    assert result["asked"]["code"]["model"] == "submitted by a test"
    again = replay(tmp_path / "made", tmp_path / "again", Nobody())
    assert (again.same, again.attempts) == (True, 2), again.lines


@pytest.mark.slow
@pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no nvcc")
@pytest.mark.parametrize("transcript", RECORDED, ids=lambda path: path.stem)
def test_what_an_agent_did_comes_out_again(transcript: Path, tmp_path: Path) -> None:
    calls = repeat(transcript, tmp_path, whole=transcript.stem == "relu2")
    submitted = [one["answer"]["result"] for one in calls if one["tool"] == "submit"]
    assert submitted[-1]["ok"]
    result = json.loads((tmp_path / submitted[-1]["folder"] / "result.json").read_text())
    assert result["reached"]
    assert result["asked"]["code"]["model"].startswith("submitted by ")


# --- the skill --------------------------------------------------------------------------------


def test_the_skill_is_one_that_agents_take() -> None:
    head = dict(re.findall(r"^(\w+): (.*)$", TEXT.split("---\n")[1], re.M))
    assert head["name"] == SKILL.name
    assert len(head["description"]) <= 1024
    assert TEXT.count("\n") < 300


def test_the_skill_names_tools_and_codes_that_exist() -> None:
    assert set(re.findall(r"`(\w+)\(\w+=", TEXT)) <= set(dir(Tools))
    for tool in ("check", "fix", "run", "translate", "emulate", "submit", "verify", "explain"):
        assert f"`{tool}(" in TEXT, tool
        assert hasattr(Tools, tool)
    assert set(re.findall(r"\bFW\d{3}\b", TEXT)) <= set(CODES)


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_the_program_of_the_skill_is_clean(gpu: str) -> None:
    assert not check(parse(SAVED["keygate.tl"]), find(gpu)).diagnostics


def test_the_statements_of_the_skill_are_tl() -> None:
    found = [
        " ".join(text.split())
        for text in re.findall(r"`((?:Copy|Compute|Allocate|Reshape) [^`]+)`", TEXT)
        if "..." not in text and " where condition" not in text
    ]
    assert len(found) > 8
    for statement in found:
        parse(f"{statement}\n")


def test_the_command_prints_where_the_skill_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["mcp", "--skill"])
    assert ended.value.code == 0
    assert (Path(capsys.readouterr().out.strip()) / "SKILL.md").is_file()
