"""Edits that make a program slightly invalid: it must be refused, or give right results."""

from __future__ import annotations

import re

from flashwright.fuzz.choices import Choices

_NUMBERS = ("0", "1", "7", "24", "40", "65", "100", "-1", "3 / 2", "1000000", "i", "BM", "kv_len")
_WORDS = (
    "Q_shared",
    "K_shared",
    "V_shared",
    "S",
    "O_register",
    "Smax",
    "Ssum",
    "P",
    "Q",
    "K_register",
    "block_idx",
    "head_idx",
    "i",
    "kv_len",
    "q_len",
    "BN",
    "HeadDim",
    "fp32",
    "e4m3",
    "int32",
    "shared",
    "register",
    "global",
    "get",
    "accumulate",
    "q_idx",
    "kv_idx",
)
_HOWS = (
    "drop",
    "twice",
    "swap",
    "number",
    "word",
    "transpose",
    "operator",
    "move",
    "type",
    "name",
    "rename",
)


def spoil(c: Choices, text: str) -> tuple[str, str]:
    """The program with one edit, and the edit's name."""
    lines = text.splitlines()
    how = c.pick(_HOWS)
    at = c.below(len(lines))
    while not lines[at].strip():
        at = (at + 1) % len(lines)
    line = lines[at]
    if how == "drop":
        del lines[at]
    elif how == "twice":
        lines.insert(at, line)
    elif how == "swap":
        other = (at + 1) % len(lines)
        lines[at], lines[other] = lines[other], lines[at]
    elif how == "move":
        del lines[at]
        lines.insert(c.below(len(lines)), line)
    elif how == "number":
        lines[at] = _replaced(c, line, r"\b\d+(\.\d+)?\b", _NUMBERS)
    elif how == "word":
        lines[at] = _replaced(c, line, r"\b[A-Za-z_]\w*\b", _WORDS)
    elif how == "transpose":
        lines[at] = line.replace(".T", "") if ".T" in line else line.replace("_shared", "_shared.T")
    elif how == "operator":
        lines[at] = _replaced(
            c, line, r"[-+*/%]|<=|>=|<|>|==", ("+", "-", "*", "/", "%", "<", ">=")
        )
    elif how == "name":  # another name of the same program
        names = tuple(sorted(set(re.findall(r"\b[A-Z]\w*\b|\b[a-z]+_idx\b", text))))
        lines[at] = _replaced(c, line, r"\b[A-Za-z_]\w*\b", names)
    elif how == "rename":  # what is copied here goes by a name that nothing else uses
        lines[at] = f"{line} and get {c.pick(['K1', 'Z', 'S', 'O'])}" if "Copy" in line else line
    elif how == "type":
        kinds = ("fp16", "bf16", "fp32", "e4m3", "e5m2", "int32", "int8")
        lines[at] = _replaced(c, line, r"\b(fp16|bf16|fp32|e4m3|int32)\b", kinds)
    return "\n".join(lines) + "\n", how


def _replaced(c: Choices, line: str, pattern: str, options: tuple[str, ...]) -> str:
    """One match of the pattern replaced by one of the options."""
    found = list(re.finditer(pattern, line))
    if not found:
        return line
    match = c.pick(found)
    return line[: match.start()] + c.pick(options) + line[match.end() :]
