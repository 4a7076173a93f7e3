"""A task's code in a confined process: what is asked of it, and what it answers, as JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashwright.confine.seal import hidden
from flashwright.confine.start import confined
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.place import environment, make_folder, policy

SECONDS = 600.0
MOST = 1 << 24  # bytes of an answer


def ask(file: Path, module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What a module of ours says of a file that is anybody's code: an object, with `wrong` if it
    failed. It may read the file's folder, and has no network."""
    folder, where = make_folder(), file.resolve()
    beside = Candidate("python", str(where.parent), title=str(file), untrusted=True)
    allowed = policy(beside, folder, environment(folder), Limits())
    command, env = confined(allowed, [sys.executable, "-P", "-m", module, str(where), *arguments])
    hidden.begin()
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        found = json.loads(done.stdout[:MOST])
        return found if isinstance(found, dict) else {"wrong": "its process gave no object"}
    except subprocess.TimeoutExpired:
        return {"wrong": f"{SECONDS:g} s were not enough"}
    except ValueError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return {"wrong": f"its process gave no answer: {lines[-1][:300] if lines else 'killed'}"}
    finally:
        hidden.end()
        shutil.rmtree(folder, ignore_errors=True)


def answering(work: Callable[[], dict[str, Any]]) -> None:
    """Print what `work` gives, in the process. What the user's code prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        told = work()
    except Exception as error:  # of the user's code: a message, no traceback
        first = (str(error).strip() or "no message").splitlines()[0]
        told = {"wrong": f"{type(error).__name__}: {first}"}
    answer.write(json.dumps(told))
    answer.flush()
