"""The extension for VS Code: its files belong together, and its grammar colours all of TL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from flashwright.lang.build import tokens
from flashwright.lang.gbnf_rules import FILE
from flashwright.program.vocabulary import (
    CONSTANTS,
    DTYPES,
    PAGE,
    POSITIONS,
    PREDEFINED_DIMS,
    RESERVED_PARAMS,
    VERBS,
)
from flashwright.version import __version__
from tests.unit.test_editor import DECODE, ROOT

FOLDER = ROOT / "editors" / "vscode"
PACKAGE: dict[str, Any] = json.loads((FOLDER / "package.json").read_text("utf-8"))
GRAMMAR: dict[str, Any] = json.loads(
    (FOLDER / "syntaxes" / "tl.tmLanguage.json").read_text("utf-8")
)
RULES = [(re.compile(rule["match"]), rule["name"]) for rule in GRAMMAR["patterns"]]
KEYWORDS = re.findall(r"^[A-Z_.0-9]+: /([a-z?:()|]+)\\b(?:\|[a-z]+\\b)*/i$", FILE.read_text(), re.M)


def scopes(line: str) -> Iterator[tuple[str, str]]:
    """The words of a line with their scopes: the rule that matches first in the line wins, of two
    at one place the first, as TextMate's grammars are read. No rule here spans lines."""
    at = 0
    while at < len(line):
        found = [
            (m.start(), n, m) for n, (rule, _) in enumerate(RULES) if (m := rule.search(line, at))
        ]
        if not found:
            return
        _, number, match = min(found, key=lambda f: f[:2])
        yield match[0], RULES[number][1].split(".tl")[0]
        at = max(match.end(), at + 1)


def of(line: str) -> dict[str, str]:
    return dict(scopes(line))


def test_the_package_names_files_that_are_there() -> None:
    contributes = PACKAGE["contributes"]
    (language,), (grammar,) = contributes["languages"], contributes["grammars"]
    for file in (PACKAGE["main"], language["configuration"], grammar["path"]):
        assert (FOLDER / file).is_file()
    assert language["extensions"] == [".tl"]
    assert grammar["language"] == language["id"] == "tl"
    assert grammar["scopeName"] == GRAMMAR["scopeName"]
    assert PACKAGE["version"] == __version__
    json.loads((FOLDER / language["configuration"]).read_text("utf-8"))


def test_every_keyword_of_the_grammar_is_coloured() -> None:
    words = {w for entry in KEYWORDS for w in re.sub(r"\(\?:.*?\)\??|s\?", "", entry).split("|")}
    assert {"param", "copy", "strided", "register", "coord", "where"} <= words
    assert len(words) >= 35
    for word in words:
        assert of(f" {word} ")[word].startswith(("keyword", "storage")), word
        assert of(f" {word.upper()} ")[word.upper()].startswith(("keyword", "storage")), word


def test_every_word_of_the_vocabulary_is_coloured() -> None:
    for words, scope in (
        (DTYPES, "support.type"),
        (VERBS, "support.function"),
        ((*PREDEFINED_DIMS, *POSITIONS, PAGE, *CONSTANTS, *RESERVED_PARAMS), "variable.language"),
    ):
        for word in words:
            assert of(f"x = {word}(")[word].startswith(scope), word


def test_a_line_has_its_scopes() -> None:
    line = "  Compute GEMM Q_shared, K.T where a >= 1e30 and get new S  // and get S"
    assert of(line) == {
        "Compute": "keyword.other.statement",
        "GEMM": "support.function.verb",
        "Q_shared": "variable.other",
        "K": "variable.other",
        ".T": "keyword.operator.transpose",
        "where": "keyword.other.clause",
        "a": "variable.other",
        ">=": "keyword.operator.comparison",
        "1e30": "constant.numeric",
        "and get": "keyword.other.clause",
        "new": "keyword.other.clause",
        "S": "variable.other",
        "// and get S": "comment.line.double-slash",
    }
    assert of("if a and not b")["and"] == "keyword.operator.logical"
    assert of("Compute where(S > 0, S, 0)")["where"] == "support.function"


def test_comments_end_where_the_parser_says() -> None:
    wanted = [t.text for t in tokens(DECODE) if t.type == "COMMENT"]
    found = [
        w for line in DECODE.split("\n") for w, scope in scopes(line) if scope.startswith("comment")
    ]
    assert found == wanted


STARTED = """
const Module = require("module");
const load = Module._load;
const settings = JSON.parse(process.argv[2]);
Module._load = (name, ...rest) => {
  if (name === "vscode") return {
    workspace: {
      getConfiguration: () => ({ get: (key) => settings[key] }),
      onDidChangeConfiguration: () => ({}),
    },
    commands: { registerCommand: () => ({}) },
    window: { showErrorMessage: (text) => console.log(JSON.stringify(text)) },
  };
  if (name === "vscode-languageclient/node") return { LanguageClient: class {
    constructor(id, title, server, client) { this.given = { server, client }; }
    async start() {
      if (settings.fails) throw new Error("spawn ENOENT");
      console.log(JSON.stringify(this.given));
    }
    isRunning() { return true; }
    async stop() { console.log(JSON.stringify("stopped")); }
  } };
  return load(name, ...rest);
};
const extension = require(process.argv[1]);
extension.activate({ subscriptions: [] }).then(extension.deactivate);
"""


def started(**settings: object) -> list[Any]:
    """What the extension does in a VS Code with these settings."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the extension is not run")
    command = [node, "-e", STARTED, str(FOLDER / "extension.js"), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_extension_starts_the_server_and_stops_it() -> None:
    given, stopped = started(command="/opt/venv/bin/flashwright", gpu="h200")
    assert given["server"] == {"command": "/opt/venv/bin/flashwright", "args": ["lsp"]}
    assert given["client"]["documentSelector"] == [{"language": "tl"}]
    assert given["client"]["initializationOptions"] == {"gpu": "h200"}
    assert stopped == "stopped"


def test_the_extension_says_how_to_get_the_server() -> None:
    (told, _) = started(fails=True)
    assert "flashwright lsp does not start (spawn ENOENT)" in told
    assert "pip install 'flashwright[lsp]'" in told
