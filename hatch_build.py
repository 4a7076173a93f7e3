"""The wheel's build hook: compiles the launcher and the emulator's libraries, so that machines that
load or emulate kernels need not.

An editable install gets none and compiles each at its first use. So does a wheel that is built
without a C++ compiler; it is tagged py3-none-any.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibrariesHook(BuildHookInterface):
    """Puts compiled libraries into the wheel and gives it the platform's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them, unless the install is editable or the system is not Linux."""
        if version == "editable" or sys.platform != "linux":
            return
        sys.path.insert(0, self.root)
        from flashwright.build import native
        from flashwright.emulate import host_library, machine
        from flashwright.lang.diagnostic import Failed

        self.folder = tempfile.TemporaryDirectory()
        launcher = Path(self.folder.name, native.BUILT_IN.name)

        def make_launcher() -> tuple[Path, Path]:
            native.compile_to(launcher)
            return launcher, native.BUILT_IN

        def make_machine() -> tuple[Path, Path]:
            made = machine.compile_portable(Path(self.folder.name))
            return made, machine.BUILT_IN / made.name

        def make_host() -> tuple[Path, Path]:
            made = host_library.compile_portable(Path(self.folder.name))
            return made, machine.BUILT_IN / made.name

        for make in (make_launcher, make_machine, make_host):
            try:
                made, place = make()
            except Failed as failed:
                why = failed.diagnostics[0].message
                self.app.display_warning(f"{why}; this wheel compiles it at its first use")
                continue
            inside = place.relative_to(native.BUILT_IN.parents[3])
            build_data["force_include"][str(made)] = inside.as_posix()
            build_data["pure_python"] = False
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{system}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled; the wheel has its copy."""
        if hasattr(self, "folder"):
            self.folder.cleanup()
