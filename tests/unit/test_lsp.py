"""The language server, asked over stdin and stdout as an editor asks it."""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashwright.editor.analysis import analyse
from flashwright.gpu import find
from flashwright.lang.diagnostic import Diagnostic
from flashwright.lang.fix import apply
from tests.unit.test_cli import Outcome
from tests.unit.test_editor import DECODE, ROOT, SOFTMAX
from tests.unit.test_element_places import gated
from tests.unit.test_explain import WRONG

pytest.importorskip("pygls", reason="pygls is not installed: pip install 'flashwright[lsp]'")

from lsprotocol import types
from pygls.lsp.client import LanguageClient

from flashwright.editor.server import make

H200 = "h200"
DOCUMENTS = (ROOT / "examples" / "documents.tl").read_text("utf-8")
HANGS = 120
"""Seconds after which a test gives up."""


class Editor:
    """A client of `flashwright lsp`, with a folder for its files."""

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        self.folder = folder
        self.numbers = itertools.count(1)
        self.published: queue.Queue[types.PublishDiagnosticsParams] = queue.Queue()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.client = LanguageClient("test", "1")
        self.client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(
            lambda p: self.published.put(p)
        )
        self.logged: list[str] = []
        self.client.feature(types.WINDOW_LOG_MESSAGE)(lambda p: self.logged.append(p.message))
        self.client.feature(types.WINDOW_SHOW_MESSAGE)(lambda p: self.logged.append(p.message))
        self.wait(self.client.start_io(sys.executable, "-m", "flashwright", "lsp"))
        about = types.InitializeParams(types.ClientCapabilities(), initialization_options=options)
        self.capabilities = self.wait(self.client.initialize_async(about)).capabilities
        self.call(lambda: self.client.initialized(types.InitializedParams()))

    def wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(HANGS)

    def call(self, work: Any) -> None:
        async def done() -> None:
            work()

        self.wait(done())

    def open(self, text: str) -> str:
        uri = (self.folder / f"program{next(self.numbers)}.tl").as_uri()
        item = types.TextDocumentItem(uri, "tl", 1, text)
        params = types.DidOpenTextDocumentParams(item)
        self.call(lambda: self.client.text_document_did_open(params))
        return uri

    def type(self, uri: str, version: int, text: str) -> None:
        document = types.VersionedTextDocumentIdentifier(version, uri)
        change = types.TextDocumentContentChangeWholeDocument(text)
        params = types.DidChangeTextDocumentParams(document, [change])
        self.call(lambda: self.client.text_document_did_change(params))

    def diagnostics(self, uri: str, version: int = 1) -> list[types.Diagnostic]:
        """What the server publishes on a version of a file."""
        while True:
            found = self.published.get(timeout=HANGS)
            if (found.uri, found.version) == (uri, version):
                return [*found.diagnostics]

    def actions(self, uri: str, kind: str) -> list[types.CodeAction]:
        where = types.Range(types.Position(0, 0), types.Position(10_000, 0))
        context = types.CodeActionContext([], only=[types.CodeActionKind(kind)])
        params = types.CodeActionParams(types.TextDocumentIdentifier(uri), where, context)
        return [*self.wait(self.client.text_document_code_action_async(params))]

    def close(self) -> None:
        self.wait(self.client.shutdown_async(None))
        self.call(lambda: self.client.exit(None))
        self.wait(self.client.stop())


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    made = Editor(tmp_path_factory.mktemp("lsp"), {"gpu": H200})
    yield made
    made.close()
    assert made.logged == []


def offset(text: str, place: types.Position) -> int:
    """The offset of a position, whose column counts UTF-16 units."""
    rows = text.split("\n")
    row = rows[place.line] if place.line < len(rows) else ""
    units = row.encode("utf-16-le")[: 2 * place.character]
    return sum(len(r) + 1 for r in rows[: place.line]) + len(units.decode("utf-16-le"))


def edited(text: str, action: types.CodeAction, uri: str) -> str:
    """The text after the edits of an action."""
    assert action.edit is not None
    assert action.edit.changes is not None
    places = [
        (offset(text, e.range.start), offset(text, e.range.end), e.new_text)
        for e in action.edit.changes[uri]
    ]
    for start, end, new in sorted(places, key=lambda p: p[:2], reverse=True):
        text = text[:start] + new + text[end:]
    return text


def findings(text: str) -> tuple[Diagnostic, ...]:
    card = find(H200)
    return analyse(text, card).with_notes(card).diagnostics


BROKEN = {
    **{
        param.values[0]: param.values[1].text  # type: ignore[attr-defined]
        for param in WRONG
        if param.values[1].gpu in (None, H200)  # type: ignore[attr-defined]
    },
    "FW101": SOFTMAX.replace("from global to shared", "form global to shraed", 1),
    "FW102": SOFTMAX.replace("Compute Multiply", "Comptue Multiply"),
    "FW204": SOFTMAX.replace("Compute Multiply", "Compute Multipy"),
    "FW404": DOCUMENTS.replace("Copy Start (", "Copy Stort ("),
    "FW603": gated(""),
    "FW814": f"param Overlap = 0\n{SOFTMAX}",
}
FIXABLE = sorted(
    code for code, text in BROKEN.items() if any(d.fix and d.code == code for d in findings(text))
)


def test_there_is_a_program_for_every_fix() -> None:
    """All codes whose findings can carry a fix. That of a note restores the fast path."""
    assert set(FIXABLE) == {
        *("FW101", "FW102", "FW103", "FW201", "FW204", "FW207", "FW208", "FW210", "FW301"),
        *("FW306", "FW404", "FW501", "FW503", "FW603", "FW607"),
        *("FW812", "FW814", "FW815", "FW816", "FW817"),
    }


@pytest.mark.parametrize("code", FIXABLE)
def test_every_fix_is_an_edit_of_the_editor(editor: Editor, code: str) -> None:
    text = BROKEN[code]
    uri = editor.open(text)
    shown = editor.diagnostics(uri)
    wanted = [d for d in findings(text) if d.fix]
    if code.startswith("FW8"):
        shown = editor.diagnostics(uri)  # the translator's notes follow
    assert {d.code for d in wanted} <= {d.code for d in shown}
    offered = editor.actions(uri, "quickfix")
    assert [a.title for a in offered] == [d.fix.title for d in wanted if d.fix]
    for action, finding in zip(offered, wanted, strict=True):
        assert edited(text, action, uri) == apply(text, [finding])[0]


@pytest.mark.parametrize("code", ["FW102", "FW301", "FW503"])
def test_fix_all_is_what_the_command_does(editor: Editor, code: str, tmp_path: Path) -> None:
    file = tmp_path / "program.tl"
    file.write_text(BROKEN[code])
    Outcome("check", str(file), "--fix", "--gpu", H200)
    uri = editor.open(BROKEN[code])
    (action,) = editor.actions(uri, "source.fixAll")
    assert edited(BROKEN[code], action, uri) == file.read_text()


def test_findings_have_codes_places_and_pages(editor: Editor) -> None:
    text = SOFTMAX.replace("K_shared.T", "K_shared")
    (found,) = editor.diagnostics(editor.open(text))
    assert (found.code, found.severity) == ("FW503", types.DiagnosticSeverity.Error)
    line = text.split("\n")[found.range.start.line]
    assert line[found.range.start.character : found.range.end.character].startswith("Compute GEMM")
    assert found.code_description is not None
    assert found.code_description.href.endswith("explain/FW503.md")
    assert found.related_information


def test_columns_are_utf16(editor: Editor) -> None:
    text = "Compute Exp S and get S\nCopy \U0001d54f \U0001d54f from global to shared\n"
    (found,) = editor.diagnostics(editor.open(text))
    assert found.code == "FW101"
    at = (found.range.start.character, found.range.end.character)
    assert at == (5, 7)


def test_only_the_last_of_many_keystrokes_matters(editor: Editor) -> None:
    uri = editor.open(DECODE)
    assert {d.severity for d in editor.diagnostics(uri)} <= {types.DiagnosticSeverity.Information}
    for version, end in enumerate(range(len(DECODE) - 40, len(DECODE)), 2):
        editor.type(uri, version, DECODE[:end])
    editor.type(uri, 100, DECODE.replace("kv_idx < length", "kv_idx < lenght"))
    (found,) = (d for d in editor.diagnostics(uri, 100) if d.code == "FW201")
    assert "lenght" in found.message


def test_what_an_editor_shows(editor: Editor) -> None:
    uri = editor.open(DECODE)
    document = types.TextDocumentIdentifier(uri)
    row = next(n for n, line in enumerate(DECODE.split("\n")) if "GEMM S, V_shared" in line)
    place = types.Position(row, DECODE.split("\n")[row].index("V_shared") + 2)
    client = editor.client
    hover = editor.wait(client.text_document_hover_async(types.HoverParams(document, place)))
    assert "`(BN, HeadDim) = (64, 64)` as `bf16`, 2 stages" in hover.contents.value
    assert hover.range.start == types.Position(row, place.character - 2)
    params = types.CompletionParams(document, types.Position(row, place.character))
    offered = editor.wait(client.text_document_completion_async(params))
    assert {"K", "V", "S"} <= {item.label for item in offered}
    params = types.DefinitionParams(document, place)
    (found,) = editor.wait(client.text_document_definition_async(params))
    assert DECODE.split("\n")[found.range.start.line].startswith("Allocate V in shared")
    whole = types.Range(types.Position(0, 0), types.Position(200, 0))
    hints = editor.wait(
        client.text_document_inlay_hint_async(types.InlayHintParams(document, whole))
    )
    at = {(hint.position.line, hint.label) for hint in hints}
    scale = next(n for n, line in enumerate(DECODE.split("\n")) if line.startswith("param Scale"))
    assert (scale, "= 0.125") in at
    assert any(str(label).startswith("shared memory 40 of 227 KB, registers") for _, label in at)


def test_formatting_is_that_of_the_command(editor: Editor, tmp_path: Path) -> None:
    messy = DECODE.replace("  Copy K (", "Copy   K ( ").replace("and get S", "and  get S // scores")
    assert messy != DECODE
    file = tmp_path / "program.tl"
    file.write_text(messy)
    Outcome("fmt", str(file))
    uri = editor.open(messy)
    options = types.FormattingOptions(tab_size=2, insert_spaces=True)
    params = types.DocumentFormattingParams(types.TextDocumentIdentifier(uri), options)
    (edit,) = editor.wait(editor.client.text_document_formatting_async(params))
    assert edit.new_text == file.read_text()
    assert "// scores" in edit.new_text
    broken = editor.open("Copy K from\n")
    params = types.DocumentFormattingParams(types.TextDocumentIdentifier(broken), options)
    assert not editor.wait(editor.client.text_document_formatting_async(params))


def test_line_ends_of_windows_are_kept(editor: Editor) -> None:
    text = BROKEN["FW501"].replace("\n", "\r\n")
    uri = editor.open(text)
    (action,) = editor.actions(uri, "quickfix")
    assert action.edit is not None
    assert action.edit.changes is not None
    (edit,) = action.edit.changes[uri]
    assert "\r\n" in edit.new_text


def test_a_bug_of_ours_is_logged_and_the_editor_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server, told = make(), []
    monkeypatch.setattr(server, "text", lambda uri: {}[uri])
    monkeypatch.setattr(server, "window_log_message", lambda params: told.append(params.message))
    hover = server.protocol.fm.features[types.TEXT_DOCUMENT_HOVER]
    document = types.TextDocumentIdentifier("file:///a.tl")
    assert asyncio.run(hover(types.HoverParams(document, types.Position(0, 0)))) is None
    assert "This is a bug in Flashwright" in told[0]
    assert "KeyError" in told[0]


def test_without_pygls_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = Outcome("lsp")
    assert done.code == 2
    assert "FW931" in done.err
    assert "pip install 'flashwright[lsp]'" in done.err


def test_an_unknown_gpu_is_told() -> None:
    done = Outcome("lsp", "--gpu", "h999")
    assert done.code == 2
    assert "FW705" in done.err
    assert json.dumps(done.out) == '""'
