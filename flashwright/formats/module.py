"""KernelBench and robust-kbench: a task is a module of PyTorch, whose attention is found by tracing
it (module_process.py)."""

from __future__ import annotations

import ast
from pathlib import Path

from flashwright.formats.confined import ask
from flashwright.formats.task import KERNELBENCH, ROBUST_KBENCH, Task
from flashwright.lang.diagnostic import Diagnostic, Failed

MODULE, CONFIG = "func_forward.py", "config_forward.json"
_NEEDED = {
    KERNELBENCH: {"Model", "get_inputs", "get_init_inputs"},
    ROBUST_KBENCH: {"Model", "forward_fn", "get_inputs"},
}


def read(path: Path) -> Task:
    """The task of a KernelBench file, or of a robust-kbench folder or its func_forward.py. Raises
    Failed with FW926 if it has no attention that a spec describes."""
    if path.is_dir():
        path /= MODULE
    text = _text(path)
    form = ROBUST_KBENCH if path.name == MODULE else KERNELBENCH
    _need_names(path, text, form)
    config = []
    if form == ROBUST_KBENCH:
        _text(path.with_name(CONFIG))
        config = [str(path.with_name(CONFIG).resolve())]
    told = ask(path, "flashwright.formats.module_process", [form, *config])
    if "wrong" in told:
        at = f"{path.parent / told['at']}" if told.get("at") else str(path)
        hint = "docs/formats.md lists what is recognised"
        raise Failed(Diagnostic("FW926", f"{at}: {told['wrong']}"[:600], help=hint))
    options = dict(told["settings"])
    name = path.resolve().parent.name if form == ROBUST_KBENCH else path.stem
    return Task(
        form,
        name,
        str(options.pop("variant")),
        options,
        text,
        int(told["keys"]),
        tuple(map(str, told["arguments"])),
        tuple(told["steps"]),
        str(told["result"]),
        float(told["rms"]),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Failed(Diagnostic("FW001", f"{path} cannot be read: {why}")) from None


def _need_names(path: Path, text: str, form: str) -> None:
    """Raise Failed unless the file defines what tasks of its format define."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise Failed(Diagnostic("FW926", f"{path}{line}: not valid Python: {error}")) from None
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    lacking = sorted(_NEEDED[form] - defined)
    if lacking:
        text = f"{path}: a task of {form} defines {', '.join(lacking)}, which it does not"
        raise Failed(Diagnostic("FW926", text))
