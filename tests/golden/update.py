"""Writes the golden kernels anew: `python -m tests.golden.update`. Read the difference."""

from __future__ import annotations

from tests.golden.cases import CASES, HERE


def main() -> None:
    for case in CASES:
        if (code := case.write()) is not None:
            case.program.write_text(code, "utf-8")
        made = case.translate()
        (HERE / f"{case.name}.cu").write_text(made.source, "utf-8")
        (HERE / f"{case.name}.map.json").write_text(made.map.dump(), "utf-8")


if __name__ == "__main__":
    main()
