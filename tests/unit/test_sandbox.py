"""A candidate in a process of its own: limits, ends of all kinds, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwright
from flashwright.confine import landlock
from flashwright.judge.judge import judge
from flashwright.lang.diagnostic import Failed
from flashwright.sandbox import place, process
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.process import Called, Ended, Sandbox
from flashwright.spec import AttentionSpec
from tests.share import some

ROOT = Path(__file__).parents[2]
SPEC = AttentionSpec.make(variant="mha", heads=2, head_dim=16, dtype="fp16", causal=True)
SMALL = Limits(seconds=5, start_seconds=20)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sandboxes of a test have their folders; nothing else is there."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(place, "_SHARED_MEMORY", Path("/no/such/folder"))
    monkeypatch.setattr(place.tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids of the workers that a test starts."""
    found: list[int] = []
    real = subprocess.Popen

    class Noted(real):  # type: ignore[type-arg,misc,valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            found.append(self.pid)

    monkeypatch.setattr(process.subprocess, "Popen", Noted)
    return found


def inputs(length: int = 9, dtype: Any = np.float16) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((1, 2, length, 16)).astype(dtype) for name in "QKV"}


def cpu(function: str) -> Candidate:
    return Candidate("python", "flashwright.selftest.kernels.cpu_conduct", function)


def written(folder: Path, text: str, function: str = "attention", **more: Any) -> Candidate:
    (folder / "candidate.py").write_text(text)
    return Candidate("python", str(folder / "candidate.py"), function, **more)


@contextlib.contextmanager
def running(candidate: Candidate, limits: Limits = SMALL) -> Iterator[Sandbox]:
    with Sandbox(candidate, SPEC, "cpu", limits) as sandbox:
        yield sandbox


def called(candidate: Candidate, limits: Limits = SMALL, **options: Any) -> Called:
    with running(candidate, limits) as sandbox:
        return sandbox.call(inputs(), **options)


def dead(pid: int, seconds: float = 2.0) -> bool:
    """Gone, or on its way: a killed process that nobody has waited for yet is no danger."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


# --- a call -----------------------------------------------------------------------------------


def test_a_call_gives_the_bits_and_touches_nothing() -> None:
    found = called(Candidate("python", "flashwright.selftest.kernels.honest", "causal"))
    assert (found.changed, found.spilled, found.late, found.alias) == ((), (), (), ())
    assert found.outputs["O"].dtype == "fp16"
    from flashwright.selftest.kernels.honest import causal

    exact = causal(*inputs().values())
    assert np.array_equal(found.outputs["O"].array, exact)


def test_types_that_numpy_lacks_travel_by_their_bits(tmp_path: Path) -> None:
    from ml_dtypes import bfloat16, float8_e4m3fn

    same = written(tmp_path, "def attention(q, k, v):\n    return q.copy()\n")
    with running(same) as sandbox:
        for dtype, name in ((bfloat16, "bf16"), (float8_e4m3fn, "e4m3"), (np.float32, "fp32")):
            given = inputs(dtype=dtype)
            out = sandbox.call(given).outputs["O"]
            assert out.dtype == name
            assert out.array.tobytes() == given["Q"].tobytes()


def test_another_place_is_another_address(tmp_path: Path) -> None:
    text = """
def attention(q, k, v):
    raise RuntimeError(f"{q.ctypes.data} {v.ctypes.data}")
"""
    where = []
    with running(written(tmp_path, text)) as sandbox:
        for place in (0, 1, 2):
            with pytest.raises(Ended) as ended:
                sandbox.call(inputs(), place=place)
            where.append(ended.value.message)
    assert len(set(where)) == 3


@pytest.mark.parametrize(
    ("function", "spilled"), [("writes_behind_v", ("V",)), ("writes_before_q", ("Q",))]
)
def test_guard_zones(function: str, spilled: tuple[str, ...]) -> None:
    with running(cpu(function)) as sandbox:
        for place in (0, 3):
            assert sandbox.call(inputs(), place=place).spilled == spilled


def test_what_happens_to_the_inputs_is_seen() -> None:
    assert called(cpu("scales_q_in_place")).changed == ("Q",)
    found = called(cpu("output_over_q"))
    assert found.changed == found.alias == ("Q",)


def test_an_input_given_back_shares_its_memory(tmp_path: Path) -> None:
    found = called(written(tmp_path, "def attention(q, k, v):\n    return v[:, ::-1]\n"))
    assert (found.alias, found.changed) == (("V",), ())


def test_a_thread_that_goes_on_is_seen() -> None:
    assert called(cpu("in_a_thread"), patience=0.2).late == ("O",)


# --- how it ends ------------------------------------------------------------------------------

ENDS = [
    ("hangs", "hang", "no answer after 0.5 s"),
    ("hangs_deaf", "hang", "no answer after 0.5 s"),
    ("crashes", "crash", "SIGSEGV"),
    ("writes_to_null", "crash", "SIGSEGV"),
    ("exits", "crash", "exit code 0"),
    ("takes_memory", "out_of_memory", "0.5 GB"),
    ("raises", "raises", "ValueError: the head dim must be 128"),
    ("exits_politely", "raises", "SystemExit"),
]


ALIKE = ("hangs", "writes_to_null", "raises")  # as one of the others


@pytest.mark.parametrize(
    ("function", "offence", "words"),
    [
        pytest.param(*end, id=end[0], marks=pytest.mark.slow if end[0] in ALIKE else [])
        for end in ENDS
    ],
)
def test_every_end_has_its_name_and_leaves_nothing(
    function: str, offence: str, words: str, scratch: Path, started: list[int]
) -> None:
    limits = Limits(seconds=3 if function == "takes_memory" else 0.5, memory=1 << 29)
    with pytest.raises(Ended) as ended:
        called(cpu(function), limits)
    assert ended.value.offence == offence
    assert words in ended.value.message
    assert started
    assert all(dead(pid) for pid in started)
    assert not list(scratch.iterdir())


def test_only_what_the_candidate_takes_of_the_gpu_is_held_against_it() -> None:
    used = iter([60, *[90] * 1000])  # by others before it starts, by all while it waits
    limits = Limits(seconds=0.5, gpu_memory=40)
    with (
        pytest.raises(Ended) as ended,
        Sandbox(cpu("hangs"), SPEC, "cpu", limits, gpu_used=lambda: (100 - next(used), 100)) as one,
    ):
        one.call(inputs())
    assert ended.value.offence == "hang"
    used = iter([60, *[101] * 1000])
    with (
        pytest.raises(Ended) as ended,
        Sandbox(cpu("hangs"), SPEC, "cpu", limits, gpu_used=lambda: (200 - next(used), 200)) as one,
    ):
        one.call(inputs())
    assert ended.value.offence == "out_of_memory"


def test_after_an_exception_the_next_call_is_possible(tmp_path: Path) -> None:
    text = """
def attention(q, k, v):
    if q.shape[2] == 9:
        raise ValueError("no nine")
    return q.copy()
"""
    with running(written(tmp_path, text)) as sandbox:
        with pytest.raises(Ended, match="no nine") as ended:
            sandbox.call(inputs())
        assert "candidate.py" in ended.value.log
        assert sandbox.call(inputs(8)).outputs["O"].array.shape == (1, 2, 8, 16)


def test_after_a_crash_it_can_be_started_again() -> None:
    with running(cpu("exits")) as sandbox:
        for _ in range(2):
            with pytest.raises(Ended):
                sandbox.call(inputs())
            assert not sandbox.alive
            with pytest.raises(Ended, match="its process is gone"):
                sandbox.call(inputs())
            sandbox.start()
        assert sandbox.alive


def test_an_odd_signal_is_a_crash_too(tmp_path: Path) -> None:
    """Not every number of a signal has a name."""
    text = "import os\ndef attention(q, k, v):\n    os.kill(os.getpid(), 41)\n"
    with pytest.raises(Ended, match="signal 41") as ended:
        called(written(tmp_path, text))
    assert ended.value.offence == "crash"


LOADS = {
    "raises": ("import no_such_module", "raises", "no_such_module"),
    "no function": ("other = 1", "raises", "attention"),
    "no callable": ("attention = 1", "raises", "is no function"),
    "syntax": ("def attention(:", "raises", "SyntaxError"),
    "exits": ("import os\nos._exit(3)", "crash", "exit code 3"),
    "hangs": ("while True: pass", "hang", "no answer after 1 s"),
}


@pytest.mark.parametrize("case", LOADS)
def test_a_candidate_that_cannot_be_loaded(
    case: str, tmp_path: Path, scratch: Path, started: list[int]
) -> None:
    text, offence, words = LOADS[case]
    with pytest.raises(Ended, match=words) as ended:
        called(written(tmp_path, text), Limits(start_seconds=1 if case == "hangs" else 20))
    assert ended.value.offence == offence
    assert all(dead(pid) for pid in started)
    assert not list(scratch.iterdir())


def test_unable_is_no_offence(tmp_path: Path) -> None:
    text = """
from flashwright.sandbox.candidate import Unable
def make(spec):
    if spec.dtype == "fp16":
        raise Unable(f"no {spec.dtype} here")
"""
    with pytest.raises(Unable, match="no fp16 here"):
        called(written(tmp_path, text, "make", factory=True))


def test_a_factory_gets_the_spec(tmp_path: Path) -> None:
    text = """
import numpy as np
def make(spec):
    return lambda q, k, v: np.full(q.shape, spec.heads + spec.causal, q.dtype)
"""
    found = called(written(tmp_path, text, "make", factory=True))
    assert found.outputs["O"].array.flat[0] == 3


def test_a_method_of_a_class_and_a_module_by_name(tmp_path: Path) -> None:
    text = "class Mine:\n    @staticmethod\n    def attention(q, k, v):\n        return q.copy()\n"
    assert called(written(tmp_path, text, "Mine.attention")).outputs["O"].dtype == "fp16"


# --- what it knows ----------------------------------------------------------------------------


def test_it_does_not_see_the_users_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "secret")
    text = """
import os, sys
def attention(q, k, v):
    raise RuntimeError(" ".join(sorted(os.environ)) + " HOME=" + os.environ["HOME"])
"""
    with pytest.raises(Ended) as ended:
        called(written(tmp_path, text))
    told = ended.value.message
    assert "PATH" in told
    assert not [name for name in ("API_KEY", "SECRET", "TOKEN", "SSH") if name in told]
    assert os.environ.get("HOME", "/root") not in told.split("HOME=")[1].split(os.sep * 2)
    assert "flashwright-" in told.split("HOME=")[1]


REACHES = """
import os, socket
def attention(q, k, v):
    judge, refused = os.getppid(), []
    for number, work in enumerate((
        lambda: os.kill(judge, 0),
        lambda: os.kill(-judge, 0),
        lambda: os.killpg(os.getpgid(judge), 0),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
        lambda: os.close(os.open(f"/proc/{judge}/mem", os.O_RDWR)),
    )):
        try:
            work()
        except OSError:
            refused.append(number)
    os.kill(os.getpid(), 0)  # itself it may
    socket.socketpair()
    raise RuntimeError(f"refused {refused}")
"""


def test_it_reaches_neither_the_judge_nor_the_network(tmp_path: Path) -> None:
    with running(written(tmp_path, REACHES)) as sandbox:
        if not sandbox.sealed:
            pytest.skip("this system has no seccomp")
        with pytest.raises(Ended) as ended:
            sandbox.call(inputs())
    assert "refused [0, 1, 2, 3, 4, 5]" in ended.value.message


OPENS = """
import os, signal, ctypes, tempfile, threading
import numpy as np
def attention(q, k, v):
    told = []
    def tell(name, where, how):
        try:
            with open(where, how) as file:
                file.read() if how == "rb" else file.write(b"x")
            told.append(name)
        except OSError:
            pass
    tell("own source", __file__, "rb")
    tell("own folder", "mine", "wb")
    tell("temporary", os.path.join(tempfile.gettempdir(), "mine"), "wb")
    tell("null", "/dev/null", "wb")
    tell("cpu", "/proc/cpuinfo", "rb")
    waits = threading.Event()
    other = threading.Thread(target=waits.wait)
    other.start()
    tell("thread's name", f"/proc/self/task/{other.native_id}/comm", "wb")
    waits.set()
    tell("package", np.__file__, "rb")
    tell("judge", f"/proc/{os.getppid()}/environ", "rb")
    tell("shared memory", "/dev/shm/flashwright-test", "wb")
    for number, place in enumerate(PLACES):
        tell(f"read {number}", place, "rb")
        tell(f"write {number}", place, "r+b")
        tell(f"make {number}", place + ".new", "wb")
    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def elsewhere(number):
        tell("other thread", PLACES[0], "rb")
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGUSR1, elsewhere)
    for thread in os.listdir("/proc/self/task"):
        libc.tgkill(os.getpid(), int(thread), signal.SIGUSR1)
    threading.Event().wait(0.2)
    raise RuntimeError(", ".join(told))
"""


@pytest.mark.parametrize("untrusted", [False, True])
def test_it_opens_no_file_that_is_not_its_own(
    untrusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor from a thread that was there before it. Only what the user chose reads what Python looks
    through for modules, and of a folder with the user's home in it nothing but modules."""
    secret, beside, here = tmp_path / "a/secret", tmp_path / "secret.py", tmp_path / "here/.env"
    for path in (secret, beside, here):
        path.parent.mkdir(exist_ok=True)
        path.write_text("hush")
    monkeypatch.chdir(here.parent)
    monkeypatch.setenv("HOME", str(secret.parent))
    monkeypatch.setattr(sys, "path", ["", str(here.parent), str(tmp_path), *sys.path])
    text = f"PLACES = {[str(p) for p in (secret, beside, here)]}\n{OPENS}"
    if not landlock.available():
        pytest.skip("this system has no Landlock")
    with pytest.raises(Ended) as ended:
        called(written(tmp_path, text, untrusted=untrusted))
    own = ["own source", "own folder", "temporary", "null", "cpu", "thread's name", "package"]
    assert _told(ended.value) == [*own, *([] if untrusted else ["read 1", "read 2"])]
    assert not list(tmp_path.rglob("*.new"))


def test_where_files_cannot_be_refused_the_verdict_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a model wrote is not run, unless the user says so."""
    candidate = written(tmp_path, "def attention(q, k, v):\n    return q.copy()\n")
    model = replace(candidate, untrusted=True)
    monkeypatch.setattr(landlock, "available", lambda: False)

    def noted(one: Candidate) -> bool:
        notes = judge(one, SPEC, device="cpu", lengths=[(9, 9)]).notes
        return any("no Landlock" in note for note in notes)

    assert noted(candidate)
    with pytest.raises(Failed, match="FW851") as failed:
        noted(model)
    assert "FLASHWRIGHT_UNCONFINED=1" in str(failed.value.diagnostics[0].help)
    monkeypatch.setenv("FLASHWRIGHT_UNCONFINED", "maybe")  # as for the compiler: 1, or not at all
    with pytest.raises(Failed, match="FW851"):
        noted(model)
    monkeypatch.setenv("FLASHWRIGHT_UNCONFINED", "1")
    assert noted(model)


def test_a_user_can_let_a_candidate_read_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    weights = tmp_path / "weights"
    weights.write_text("1")
    text = f"open({str(weights)!r}).read()\ndef attention(q, k, v):\n    return q.copy()\n"
    chosen = written(tmp_path / "a", text)
    if landlock.available():
        with pytest.raises(Ended, match="PermissionError"):
            called(chosen)
    monkeypatch.setenv("FLASHWRIGHT_CANDIDATE_READS", str(weights))
    assert called(chosen).outputs["O"].dtype == "fp16"


def _told(ended: Ended) -> list[str]:
    assert ended.offence == "raises"
    return ended.message.removeprefix("RuntimeError: ").split(", ")


UNDER_A_TOOL = """
import os, threading
def attention(q, k, v):
    told = [os.environ.get("TOOL", "")]
    for name, place in (
        ("its own thread", f"/proc/self/task/{threading.get_native_id()}/comm"),
        ("the tool", f"/proc/{os.getppid()}/comm"),
        ("its memory", f"/proc/{os.getppid()}/mem"),
    ):
        try:
            with open(place, "r+b") as file:
                file.write(b"x")
            told.append(name)
        except OSError:
            pass
    raise RuntimeError(", ".join(told))
"""


def test_under_a_tool_it_is_confined_as_alone(tmp_path: Path) -> None:
    """The tool is another process, and sets variables that its application needs."""
    tool = ("/bin/sh", "-c", 'TOOL=here "$@"; exit $?', "tool")
    candidate = written(tmp_path, UNDER_A_TOOL)
    with Sandbox(candidate, SPEC, "cpu", SMALL, before=tool) as sandbox:
        if not landlock.available():
            pytest.skip("this system has no Landlock")
        with pytest.raises(Ended) as ended:
            sandbox.call(inputs())
    assert _told(ended.value) == ["here", "its own thread"]


def test_a_device_that_is_allowed_takes_commands_too() -> None:
    """The GPU's driver is nothing but that: ioctl on files in /dev."""
    code = """
import fcntl, os, termios
from flashwright.confine.landlock import restrict
restrict([], ["/dev/ptmx"])
fcntl.ioctl(os.open("/dev/ptmx", os.O_RDWR), termios.TIOCGWINSZ, bytes(8))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""


def test_it_is_told_of_no_cache_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be written to: those in its own home can."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    text = "import os\ndef attention(q, k, v):\n    raise RuntimeError(' '.join(os.environ))\n"
    for untrusted in (False, True):
        with pytest.raises(Ended) as ended:
            called(written(tmp_path, text, untrusted=untrusted))
        assert "TRITON_CACHE_DIR" not in ended.value.message


def test_who_is_confined_shares_its_process_with_nobody(tmp_path: Path, started: list[int]) -> None:
    """A process that was started for another candidate may open more."""
    trusted = written(tmp_path, "def attention(q, k, v):\n    return q.copy()\n")
    with running(trusted) as sandbox:
        for number, untrusted in ((1, False), (2, True), (3, True), (4, False)):
            sandbox.switch(replace(trusted, untrusted=untrusted), SPEC)
            assert sandbox.call(inputs()).outputs["O"].dtype == "fp16"
            assert len(started) == number


def test_who_needs_other_files_gets_another_process(tmp_path: Path, started: list[int]) -> None:
    if not landlock.available():
        pytest.skip("this system has no Landlock")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, other = (
        written(tmp_path / name, "def attention(q, k, v):\n    return q.copy()\n")
        for name in ("a", "b")
    )
    with running(first) as sandbox:
        for number, candidate in ((1, first), (2, other), (2, other)):
            sandbox.switch(candidate, SPEC)
            assert sandbox.call(inputs()).outputs["O"].dtype == "fp16"
            assert len(started) == number


def test_kernels_side_by_side_share_a_process(tmp_path: Path) -> None:
    """What is built together is measured together; other folders are not open to it."""
    for name in ("a", "b", "private"):
        (tmp_path / name).mkdir()
        if name != "private":
            (tmp_path / name / "launch.json").write_text("{}")
    one = Candidate.package(tmp_path / "a")
    readable = place.policy(one, tmp_path / "scratch", {}, SMALL).readable
    assert {str(tmp_path / "a"), str(tmp_path / "b")} <= set(readable)
    assert str(tmp_path / "private") not in readable


def test_a_folder_of_temporary_files_is_not_opened_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other candidates have their folders there."""
    monkeypatch.setattr(place.tempfile, "tempdir", str(tmp_path))
    helper, other = tmp_path / "helper.py", tmp_path / "flashwright-other"
    helper.touch()
    other.mkdir()
    one = written(tmp_path, "")
    readable = place.policy(one, tmp_path / "scratch", {}, SMALL).readable
    assert {one.where, str(helper)} <= set(readable)
    assert not {str(tmp_path), str(other)} & set(readable)


def test_it_has_no_terminal_and_its_output_is_kept_apart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
import os, sys
print("loaded")
def attention(q, k, v):
    print("to stdout", sys.stdin.read() == "")
    print("to stderr", file=sys.stderr)
    os.system("echo from a shell")
    return q.copy()
"""
    with running(written(tmp_path, text)) as sandbox:
        sandbox.call(inputs())
        assert sandbox.log().split("\n")[:2] == ["loaded", "to stdout True"]
        assert "from a shell" in sandbox.log()
        assert "to stderr" in sandbox.log()
    assert capfd.readouterr() == ("", "")


def test_large_files_are_refused(tmp_path: Path) -> None:
    text = """
def attention(q, k, v):
    with open("big", "wb") as file:
        file.truncate(1 << 30)
"""
    with pytest.raises(Ended, match="OSError") as ended:
        called(written(tmp_path, text), Limits(file_bytes=1 << 20))
    assert ended.value.offence == "raises"


# --- who dies with whom -----------------------------------------------------------------------

PARENT = """
import sys, threading
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.process import Sandbox
from flashwright.spec import AttentionSpec
import numpy as np
spec = AttentionSpec.make(variant="mha", heads=2, head_dim=16)
def work():
    with Sandbox(Candidate.parse(sys.argv[1]), spec, "cpu", Limits(seconds=60)) as sandbox:
        x = np.zeros((1, 2, 9, 16), np.float16)
        sandbox.call({"Q": x, "K": x, "V": x})
if sys.argv[2] == "thread":
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
else:
    work()
"""
NOTED = """
import os, time
def attention(q, k, v):
    with open("note", "w") as file:
        file.write(str(os.getpid()) + " ")
    time.sleep(60)
"""


def noted(place: Path) -> int:
    """The process id that a candidate has put down in its scratch folder."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for note in place.glob("*/note"):
            if note.read_text().endswith(" "):
                return int(note.read_text())
        time.sleep(0.02)
    raise AssertionError("the candidate was never called")


@pytest.mark.parametrize("where", some(["thread", "main"]))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_worker_dies_with_its_parent(
    number: signal.Signals, where: str, tmp_path: Path
) -> None:
    """Ctrl-C, also while a daemon's thread waits, a polite end and one that no handler sees."""
    place = tmp_path / "tmp"
    place.mkdir()
    candidate = written(tmp_path, NOTED)
    # Without shared memory the scratch folder goes to TMPDIR, where it can be looked for.
    code = f"import flashwright.sandbox.place as p; p._ROOM = 1 << 60; exec({PARENT!r})"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, f"{candidate.where}:attention", where],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)},
    )
    try:
        worker = noted(place)
        assert list(place.iterdir())
        parent.send_signal(number)
        parent.wait(10)
        assert dead(worker)
        if number == signal.SIGINT:
            assert not list(place.iterdir())
    finally:
        parent.kill()
        parent.wait()


def test_no_child_outlives_the_candidate() -> None:
    """Not even one that has left its session."""
    with running(cpu("leaves_children")) as sandbox:
        sandbox.call(inputs())
        note = sandbox._folder / "children"
        children = [int(pid) for pid in note.read_text().split()]
    assert len(children) == 2
    try:
        assert [pid for pid in children if not dead(pid)] == []
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# --- a script, and a shared library -----------------------------------------------------------

SCRIPT = """
import flashwright
from flashwright.selftest.kernels.honest import causal

def attention(q, k, v):
    return causal(q, k, v)

try:
    found = flashwright.verify(
        attention, "causal, heads=2, head_dim=16", lengths=[(9, 9)], device="cpu"
    )
except Exception as error:
    print("caught", error)
print("once:", found.ok)
"""


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout, done.stderr) == ("once: True\n", "")


def test_a_function_that_no_other_process_finds_is_refused() -> None:
    def inner(q: Any, k: Any, v: Any) -> Any:
        return q

    for function in (inner, lambda q, k, v: q, Limits()):
        with pytest.raises(Failed, match="FW857"):
            flashwright.verify(function, "causal, head_dim=16", device="cpu")


@pytest.mark.parametrize("text", ["nothing", "no/such.py:f", "no_such.so:f", ":f", "f:", ""])
def test_text_that_names_nothing(text: str) -> None:
    with pytest.raises(Failed, match="FW857"):
        Candidate.parse(text)


def test_a_package_is_found_from_another_folder_and_named_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel").mkdir()
    found = Candidate.package(Path("kernel"))
    assert (found.where, found.name) == (str(tmp_path / "kernel"), "kernel")
    assert found == Candidate.parse("kernel")
    assert Candidate.package(Path("kernel"), "mine").name == "mine"


LIBRARY = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <cstring>
namespace ffi = tvm::ffi;
using T = ffi::TensorView;
void first(T q, T k, T v, T o, T lse) {
  std::memcpy(o.data_ptr(), q.data_ptr(), q.numel() * 2);
  std::memset(lse.data_ptr(), 0, lse.numel() * 4);
}
void null(T q, T k, T v, T o, T lse) {
  *reinterpret_cast<volatile int*>(8) = 1;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(first, first);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(null, null);
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared library that copies Q to O, compiled here."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    from tvm_ffi import libinfo

    folder = tmp_path_factory.mktemp("library")
    (folder / "mine.cpp").write_text(LIBRARY)
    includes = {libinfo.find_include_path(), libinfo.find_dlpack_include_path()}
    command = [compiler, "-std=c++17", "-O0", "-fPIC", "-shared", *(f"-I{i}" for i in includes)]
    command += [str(folder / "mine.cpp"), "-o", str(folder / "mine.so")]
    done = subprocess.run([*command, libinfo.find_libtvm_ffi()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "mine.so"


def test_a_shared_library_writes_to_tensors_it_is_given(library: Path) -> None:
    shapes = {"O": ((1, 2, 9, 16), "fp16"), "LSE": ((1, 2, 9), "fp32")}
    found = called(Candidate.parse(f"{library}:first"), outputs=shapes)
    assert np.array_equal(found.outputs["O"].array, inputs()["Q"])
    assert not found.outputs["LSE"].array.any()
    with pytest.raises(Ended, match="SIGSEGV"):
        called(Candidate.parse(f"{library}:null"), outputs=shapes)
