"""The wheel's build hook: compiles the launcher, so that a machine that loads kernels need not.

An editable install gets no launcher and compiles it at the first load. So does a wheel that is
built without a C++ compiler; it is tagged py3-none-any.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LauncherHook(BuildHookInterface):
    """Puts launcher.so into flashwright/build/launcher and gives the wheel the platform's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it, unless the install is editable or the system is not Linux."""
        if version == "editable" or sys.platform != "linux":
            return
        sys.path.insert(0, self.root)
        from flashwright.build import native
        from flashwright.lang.diagnostic import Failed

        self.folder = tempfile.TemporaryDirectory()
        target = Path(self.folder.name, native.BUILT_IN.name)
        try:
            native.compile_to(target)
        except Failed as failed:
            why = failed.diagnostics[0].message
            self.app.display_warning(f"{why}; this wheel compiles it at the first load")
            return
        place = native.BUILT_IN.relative_to(native.BUILT_IN.parents[3])
        build_data["force_include"][str(target)] = place.as_posix()
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled; the wheel has its copy."""
        if hasattr(self, "folder"):
            self.folder.cleanup()
