"""A task from its file, whatever its format."""

from __future__ import annotations

from pathlib import Path

from flashwright.formats import definition, module
from flashwright.formats.task import Task
from flashwright.lang.diagnostic import Diagnostic, Failed


def read(path: Path) -> Task:
    """The task in FILE.py (KernelBench), a folder with func_forward.py (robust-kbench), or
    FILE.json (FlashInfer-Bench). Raises Failed if there is none, or none that becomes a kernel."""
    if not path.exists():
        raise Failed(Diagnostic("FW001", f"{path}: there is no such file or folder"))
    if path.is_dir() or path.suffix == ".py":
        try:
            import torch  # noqa: F401
        except ImportError as error:
            text = f"a task in Python is traced by PyTorch, which cannot be imported ({error})"
            hint = "pip install 'flashwright[torch]'"
            raise Failed(Diagnostic("FW926", text, help=hint)) from None
        return module.read(path)
    if path.suffix == ".json":
        return definition.read(path)
    hint = "give a .py or .json file, or the folder of a robust-kbench task"
    raise Failed(Diagnostic("FW926", f"{path} is no task of a known format", help=hint))
