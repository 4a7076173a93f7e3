"""The language server: requests of an editor, answered by the functions of this folder.

A keystroke starts a check in a thread. Keystrokes that come while it runs wait for its end, and
then only the last text is checked. Hover and completion do not wait: they use what is known.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lsprotocol import types
from pygls import uris
from pygls.lsp.server import LanguageServer

from flashwright.editor import complete as completion
from flashwright.editor import hints, hover, names, places
from flashwright.editor.analysis import Analysis, analyse
from flashwright.gpu import Gpu, UnknownGpu, find
from flashwright.lang.codes import page_of
from flashwright.lang.diagnostic import Diagnostic, Edit, Failed
from flashwright.lang.fix import apply_all
from flashwright.lang.format import format_tree
from flashwright.lang.nodes import Span, Tree
from flashwright.lang.parse import parse
from flashwright.version import __version__

Handler = Callable[[Any], Awaitable[Any]]
Sizes = Callable[[Tree, str], Mapping[str, int]]
"""The sizes that the spec beside a file gives to its program's own dims."""

FIX_ALL = f"{types.CodeActionKind.SourceFixAll.value}.flashwright"
SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Information,
}
TAGS = {"FW203": types.DiagnosticTag.Unnecessary, "FW210": types.DiagnosticTag.Deprecated}
KINDS = {
    "keyword": types.CompletionItemKind.Keyword,
    "verb": types.CompletionItemKind.Method,
    "function": types.CompletionItemKind.Function,
    "tile": types.CompletionItemKind.Variable,
    "tensor": types.CompletionItemKind.Field,
    "number": types.CompletionItemKind.Constant,
    "type": types.CompletionItemKind.TypeParameter,
    "axis": types.CompletionItemKind.Property,
}


@dataclass
class Document:
    """A file that is open in the editor."""

    analysis: Analysis | None = None
    checking: asyncio.Task[None] | None = None
    changed: bool = field(default=False)
    """Whether its text changed after the running check began."""


class Server(LanguageServer):
    """The language server of TL."""

    def __init__(self, gpu: Gpu | None, sizes: Sizes) -> None:
        sync = types.TextDocumentSyncKind.Full
        super().__init__("flashwright", __version__, text_document_sync_kind=sync)
        self.gpu = gpu
        self.sizes = sizes
        self.documents: dict[str, Document] = {}
        self.checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="check")

    # --- checking -----------------------------------------------------------------------------

    def text(self, uri: str) -> str:
        """The text of an open file, with `\\n` as line ends."""
        source: str = self.workspace.get_text_document(uri).source
        return source.replace("\r\n", "\n").replace("\r", "\n")

    def changed(self, uri: str) -> None:
        """Check the text of a file, or check it again once the running check is done."""
        document = self.documents.setdefault(uri, Document())
        document.changed = True
        if document.checking is None or document.checking.done():
            document.checking = asyncio.ensure_future(self._check(uri, document))

    async def settled(self, uri: str) -> Analysis | None:
        """The findings on the present text of a file."""
        document = self.documents.get(uri)
        if document is None:
            return None
        if document.checking is not None:
            await document.checking
        return document.analysis

    async def _check(self, uri: str, document: Document) -> None:
        while document.changed and self.documents.get(uri) is document:
            document.changed = False
            try:
                await self._check_once(uri, document)
            except Exception as error:
                self.confess(error)

    async def _check_once(self, uri: str, document: Document) -> None:
        text, version = self.text(uri), self.workspace.get_text_document(uri).version
        before = document.analysis.known if document.analysis is not None else None
        path = uris.to_fs_path(uri) or ""
        analysis = await self.in_thread(
            lambda: analyse(text, self.gpu, lambda tree: self.sizes(tree, path), before)
        )
        if document.changed or self.documents.get(uri) is not document:
            return  # the text is another one by now, or the file is closed
        document.analysis = analysis
        self._publish(uri, version, analysis)
        gpu = self.gpu
        if gpu is not None and analysis.programs:
            noted = await self.in_thread(lambda: analysis.with_notes(gpu))
            present = not document.changed and self.documents.get(uri) is document
            if present and len(noted.diagnostics) > len(analysis.diagnostics):
                document.analysis = noted
                self._publish(uri, version, noted)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """The result of work that takes a while, during which other requests are answered."""
        return await asyncio.get_running_loop().run_in_executor(self.checker, work)

    def _publish(self, uri: str, version: int | None, analysis: Analysis) -> None:
        found = [self.diagnostic(uri, analysis.text, d) for d in analysis.diagnostics]
        params = types.PublishDiagnosticsParams(uri=uri, version=version, diagnostics=found)
        self.text_document_publish_diagnostics(params)

    def confess(self, error: Exception) -> None:
        """Report an unexpected exception as a bug of Flashwright; the editor goes on."""
        text = f"This is a bug in Flashwright {__version__}, not in your program: please report it."
        message = f"{text} {type(error).__name__}: {str(error)[:500]}"
        params = types.LogMessageParams(type=types.MessageType.Error, message=message)
        self.window_log_message(params)

    def answers(self, request: str, options: Any = None) -> Callable[[Handler], Handler]:
        """Register the handler of a request. If it raises, which is a bug, the answer is empty."""

        def register(handler: Handler) -> Handler:
            @functools.wraps(handler)
            async def safe(params: Any) -> Any:
                try:
                    return await handler(params)
                except Exception as error:
                    self.confess(error)
                    return None

            self.feature(request, options)(safe)
            return safe

        return register

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Called by pygls for what a handler raises outside of a request."""
        self.confess(error)

    # --- places -------------------------------------------------------------------------------

    def range(self, text: str, span: Span) -> types.Range:
        """A span in the units that the editor counts in (UTF-16 unless it asks for others)."""
        first = types.Position(span.line - 1, span.column - 1)
        last = types.Position(span.end_line - 1, span.end_column - 1)
        lines = text.split("\n")
        return self.workspace.position_codec.range_to_client_units(lines, types.Range(first, last))

    def offset(self, text: str, position: types.Position) -> int:
        """The offset of a position of the editor."""
        lines = text.split("\n")
        if position.line >= len(lines):
            return len(text)
        place = self.workspace.position_codec.position_from_client_units(lines, position)
        return places.offset_of(text, place.line, place.character)

    def edits(self, uri: str, text: str, edits: Sequence[Edit]) -> types.WorkspaceEdit:
        """Edits of a text, with the line ends that the file has."""
        crlf = "\r\n" in self.workspace.get_text_document(uri).source
        made = [
            types.TextEdit(
                self.range(text, places.span_of(text, edit.start, edit.end)),
                edit.text.replace("\n", "\r\n") if crlf else edit.text,
            )
            for edit in edits
        ]
        return types.WorkspaceEdit(changes={uri: made})

    def diagnostic(self, uri: str, text: str, found: Diagnostic) -> types.Diagnostic:
        """A finding as the editor shows it. The link of the code leads to its long form."""
        span = found.span or Span(0, 0, 1, 1, 1, 1)
        lines = [found.message, found.label, f"help: {found.help}" if found.help else ""]
        return types.Diagnostic(
            range=self.range(text, span),
            message="\n".join(line for line in lines if line),
            severity=SEVERITIES[found.severity],
            code=found.code,
            code_description=types.CodeDescription(href=page_of(found.code).as_uri()),
            source="flashwright",
            tags=[TAGS[found.code]] if found.code in TAGS else None,
            related_information=[
                types.DiagnosticRelatedInformation(
                    types.Location(uri, self.range(text, label.span)), label.text
                )
                for label in found.secondary
            ],
        )


def make(gpu: Gpu | None = None, sizes: Sizes = lambda tree, path: {}) -> Server:
    """A server with all features."""
    server = Server(gpu, sizes)
    _follow(server)
    _show(server)
    _edit(server)
    return server


def serve(gpu: Gpu | None, sizes: Sizes) -> None:
    """Serve an editor over stdin and stdout until it ends the session."""
    stdout = sys.stdout.buffer
    sys.stdout = sys.stderr  # what prints must not get between the messages
    make(gpu, sizes).start_io(stdout=stdout)


def _follow(server: Server) -> None:
    """The life of documents."""

    @server.feature(types.INITIALIZE)
    def begin(params: types.InitializeParams) -> None:
        options = params.initialization_options
        name = options.get("gpu") if isinstance(options, Mapping) else None
        if name:
            try:
                server.gpu = find(str(name))
            except UnknownGpu as error:
                message = types.ShowMessageParams(types.MessageType.Warning, str(error))
                server.window_show_message(message)
        server.checker.submit(analyse, "Copy Q from global to shared\n")  # loads what a check needs

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: types.DidOpenTextDocumentParams) -> None:
        server.changed(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: types.DidChangeTextDocumentParams) -> None:
        server.changed(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    async def closed(params: types.DidCloseTextDocumentParams) -> None:
        uri = params.text_document.uri
        server.documents.pop(uri, None)
        empty = types.PublishDiagnosticsParams(uri=uri, diagnostics=[])
        server.text_document_publish_diagnostics(empty)


def _show(server: Server) -> None:
    """What is shown and changes nothing."""

    @server.answers(types.TEXT_DOCUMENT_HOVER)
    async def hovered(params: types.HoverParams) -> types.Hover | None:
        uri, text = params.text_document.uri, server.text(params.text_document.uri)
        analysis = server.documents.get(uri, Document()).analysis or await server.settled(uri)
        if analysis is None:
            return None
        found = hover.hover(analysis, text, server.offset(text, params.position))
        if found is None:
            return None
        content = types.MarkupContent(types.MarkupKind.Markdown, found.markdown)
        return types.Hover(content, server.range(text, found.span))

    @server.answers(types.TEXT_DOCUMENT_DEFINITION)
    async def defined(params: types.DefinitionParams) -> list[types.Location]:
        uri, text = params.text_document.uri, server.text(params.text_document.uri)
        analysis = await server.settled(uri)
        word = places.word_at(text, server.offset(text, params.position))
        known = analysis.known if analysis is not None else None
        if known is None or word is None or known.text != text:
            return []
        found = names.meant(known, text, word)
        return [types.Location(uri, server.range(text, one.declared)) for one in found]

    @server.answers(types.TEXT_DOCUMENT_INLAY_HINT)
    async def hinted(params: types.InlayHintParams) -> list[types.InlayHint]:
        uri = params.text_document.uri
        analysis = await server.settled(uri)
        if analysis is None:
            return []
        text, lines = analysis.text, analysis.text.split("\n")
        first, last = params.range.start.line, params.range.end.line
        shown = [h for h in hints.hints(analysis, text, server.gpu) if first < h.line <= last + 1]
        made = []
        for hint in shown:
            code = lines[hint.line - 1].split("//")[0].rstrip()
            place = Span(0, 0, hint.line, len(code) + 1, hint.line, len(code) + 1)
            at = server.range(text, place).start
            made.append(types.InlayHint(at, hint.text, padding_left=True))
        return made

    @server.answers(
        types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=["["])
    )
    async def completed(params: types.CompletionParams) -> list[types.CompletionItem]:
        uri, text = params.text_document.uri, server.text(params.text_document.uri)
        analysis = server.documents.get(uri, Document()).analysis
        known = analysis.known if analysis is not None else None
        offset = server.offset(text, params.position)
        return [
            types.CompletionItem(item.label, kind=KINDS[item.kind], detail=item.detail or None)
            for item in completion.complete(known, text, offset)
        ]


def _edit(server: Server) -> None:
    """What changes the text: formatting and fixes."""

    @server.answers(types.TEXT_DOCUMENT_FORMATTING)
    async def formatted(params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        uri, text = params.text_document.uri, server.text(params.text_document.uri)
        try:
            canonical = format_tree(parse(text))
        except Failed:
            return None  # the findings say what is wrong
        if canonical == text:
            return []
        edits = server.edits(uri, text, [Edit(0, len(text), canonical)])
        return [*(edits.changes or {}).get(uri, ())]

    kinds = [types.CodeActionKind.QuickFix, FIX_ALL]

    @server.answers(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(kinds))
    async def offered(params: types.CodeActionParams) -> list[types.CodeAction]:
        uri = params.text_document.uri
        analysis = await server.settled(uri)
        if analysis is None or analysis.text != server.text(uri):
            return []
        only = params.context.only or [types.CodeActionKind.QuickFix]
        actions = []
        if _asked(types.CodeActionKind.QuickFix.value, only):
            actions += [*_quick_fixes(server, uri, analysis, params.range)]
        if _asked(FIX_ALL, only):
            actions += await _fix_all(server, uri, analysis)
        return actions


def _asked(kind: str, only: Sequence[str]) -> bool:
    """Whether an editor that asks for some kinds of actions, or their sub-kinds, asks for this."""
    wanted = [k.value if isinstance(k, types.CodeActionKind) else k for k in only]
    return any(f"{kind}.".startswith(f"{k}.") for k in wanted)


def _quick_fixes(
    server: Server, uri: str, analysis: Analysis, where: types.Range
) -> list[types.CodeAction]:
    text, actions = analysis.text, []
    for found in analysis.diagnostics:
        shown = server.diagnostic(uri, text, found)
        at = shown.range
        touches = not (_before(at.end, where.start) or _before(where.end, at.start))
        if found.fix is None or not touches:
            continue
        actions.append(
            types.CodeAction(
                found.fix.title,
                kind=types.CodeActionKind.QuickFix,
                diagnostics=[shown],
                is_preferred=found.severity != "note",
                edit=server.edits(uri, text, found.fix.edits),
            )
        )
    return actions


def _before(one: types.Position, other: types.Position) -> bool:
    return (one.line, one.character) < (other.line, other.character)


async def _fix_all(server: Server, uri: str, analysis: Analysis) -> list[types.CodeAction]:
    """The action that applies all fixes, as `flashwright check --fix` does."""
    path = uris.to_fs_path(uri) or ""

    def check(text: str) -> Sequence[Diagnostic]:
        return analyse(text, server.gpu, lambda tree: server.sizes(tree, path)).diagnostics

    found = [d for d in analysis.diagnostics if d.severity != "note"]
    mended, count = await server.in_thread(lambda: apply_all(analysis.text, found, check))
    if not count:
        return []
    edit = server.edits(uri, analysis.text, [Edit(0, len(analysis.text), mended)])
    return [types.CodeAction("Apply all fixes", kind=FIX_ALL, edit=edit)]
