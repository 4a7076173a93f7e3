"""A sandbox without a process, for quick tests: the real judge and worker in this process."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from typing import Any
from unittest import mock

from flashwright.judge.judge import judge
from flashwright.judge.verdict import Verdict
from flashwright.sandbox import process
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.sandbox.worker import Worker, _error
from flashwright.spec import AttentionSpec


def judged(candidate: Candidate, spec: AttentionSpec, **options: Any) -> Verdict:
    """The verdict on a candidate that runs in this process, always on the same problems."""
    return judge(candidate, spec, sandbox=Inside, **{"seed": 1, **options})


NO_SUCH_PID = 2**31 - 1
"""A pid that no process has. (A mock's would be 1, and group 1 means every process.)"""


class Inside(Sandbox):
    """Runs a candidate in this process: only for candidates that do not harm it."""

    def start(self) -> None:
        # A new copy of its module: the loaded one has caches of another trial.
        self._module = sys.modules.pop(self.candidate.where, None)
        with contextlib.ExitStack() as self._started:
            fake = self._started.enter_context(mock.patch.object(process.subprocess, "Popen"))
            fake.return_value.pid = NO_SUCH_PID
            super().start()
        gc.freeze()  # the worker collects before each call, and here that is pytest's memory too

    def close(self) -> None:
        if self._process is None:
            return
        self._process = None
        if self._module is not None:
            sys.modules[self.candidate.where] = self._module
        gc.unfreeze()
        for end in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(end)
        shutil.rmtree(self._folder, ignore_errors=True)
        self.memory.close()

    def _wait(self, seconds: float) -> None:
        """No wait: no candidate that runs inside starts a thread."""

    @property
    def alive(self) -> bool:
        return self._process is not None

    def _ask(self, operation: str, seconds: float | None = None, **request: Any) -> dict[str, Any]:
        try:
            if operation == "load":
                self._started.close()  # a candidate may start processes
                self._worker = Worker(self._folder)
                found = self._worker.load(**request)
            else:
                found = getattr(self._worker, operation)(**request)
            return dict(found)
        except Exception as error:
            told = _error(error, getattr(self._worker, "device", None))
        if told["error"] == "unable":
            raise Unable(told["message"])
        raise Ended(told["error"], told["message"])
