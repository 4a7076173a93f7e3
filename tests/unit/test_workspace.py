"""The workspace of an agent's tools: which paths are taken, and which are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashwright.agents.workspace import Workspace
from flashwright.confine import landlock
from flashwright.lang.diagnostic import Failed
from tests.unit.test_cli import GOOD


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "inside").mkdir()
    (tmp_path / "secret.toml").write_text('variant = "mha"\n')
    (tmp_path / "secret.py").write_text("")
    folder = tmp_path / "inside"
    (folder / "a.tl").write_text(GOOD)
    (folder / "link").symlink_to(tmp_path)
    (folder / "link.tl").symlink_to(tmp_path / "secret.toml")
    (folder / "circle").symlink_to(folder / "circle")
    return Workspace(folder)


OUTSIDE = ["/etc/passwd", "../secret.toml", "x/../../secret.toml", "link/secret.toml", "link.tl"]
NO_PATHS = ["", "~/x.tl", "--help", "x/-o", "a\0b", "circle"]


@pytest.mark.parametrize("path", [*OUTSIDE, *NO_PATHS])
def test_a_path_that_leads_out_is_refused_by_name(workspace: Workspace, path: str) -> None:
    for use in (workspace.path, workspace.program, workspace.read):
        with pytest.raises(Failed) as caught:
            use(path)
        (found,) = caught.value.diagnostics
        assert found.code == "FW006"
        assert path in found.message
    with pytest.raises(Failed):
        workspace.write(path, "text")
    assert (workspace.root.parent / "secret.toml").read_text() == 'variant = "mha"\n'


@pytest.mark.parametrize(
    "spec",
    [
        "../secret.toml",
        "/etc/hostname",
        "reference=../secret.py",
        "reference=link/secret.py:f",
        "head_dim=64, reference=/etc/x.py",
    ],
)
def test_a_spec_names_no_file_outside(workspace: Workspace, spec: str) -> None:
    with pytest.raises(Failed, match=r"FW006|workspace|absolute|`\.\.`"):
        workspace.program("a.tl", spec)


def test_a_spec_beside_the_program_names_no_file_outside(workspace: Workspace) -> None:
    (workspace.root / "a.toml").write_text('variant = "x"\nreference = "../secret.py"\n')
    with pytest.raises(Failed, match=r"secret\.py leads out of the workspace"):
        workspace.program("a.tl")


def test_a_package_has_no_link_that_leads_out(workspace: Workspace) -> None:
    package = workspace.root / "out" / "mine"
    package.mkdir(parents=True)
    assert workspace.program("out/mine") == "out/mine"
    (package / "kernel.cu").symlink_to(workspace.root.parent / "secret.py")
    with pytest.raises(Failed, match=r"out/mine/kernel\.cu leads out"):
        workspace.program("out/mine")


def test_what_an_agent_writes_it_can_read(workspace: Workspace) -> None:
    assert workspace.write("ops/new.toml", "causal = true\n") == "ops/new.toml"
    assert workspace.read("ops/new.toml") == "causal = true\n"
    assert workspace.listing() == ["a.tl", "circle", "link.tl", "ops/new.toml"]
    with pytest.raises(Failed, match=r"\.tl, \.toml, \.py"):
        workspace.write("ops/result.json", "{}")
    with pytest.raises(Failed, match="more than"):
        workspace.write("big.tl", "/" * (1 << 21))


@pytest.mark.skipif(not landlock.available(), reason="the system has no Landlock")
def test_a_confined_server_writes_in_the_workspace_only(
    workspace: Workspace, tmp_path: Path
) -> None:
    code = (
        "import sys, pathlib, tempfile\n"
        "from flashwright.agents.workspace import Workspace\n"
        f"tempfile.tempdir = {str(tmp_path / 'temporary')!r}\n"
        f"print(Workspace(pathlib.Path({str(workspace.root)!r})).confine())\n"
        f"for folder in ({str(workspace.root)!r}, {str(tmp_path)!r}):\n"
        "    try: pathlib.Path(folder, 'new').write_text('x'); print('written')\n"
        "    except PermissionError: print('refused')\n"
    )
    env = {**os.environ, "FLASHWRIGHT_CACHE": str(tmp_path / "cache")}
    env.pop("FLASHWRIGHT_UNCONFINED", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split() == ["True", "written", "refused"]
