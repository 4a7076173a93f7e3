"""A candidate's process reaches neither the judge, nor other processes, nor a socket; honest work
goes on. Each attack is made from inside, by its system call, and so is the honest work."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashwright.confine import filter as filters
from flashwright.confine import landlock, seal
from flashwright.confine.calls import ALLOWED, REFUSED, RULED
from flashwright.confine.filter import Party
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec

ROOT = Path(__file__).parents[2]
SPEC = AttentionSpec.make(variant="mha", heads=2, head_dim=16, dtype="fp16", causal=True)
LIMITS = Limits(seconds=60, start_seconds=60)
MACHINE = platform.machine()

pytestmark = pytest.mark.skipif(
    not (landlock.available() and seal.available()), reason="this system confines no process"
)

# What a candidate does is the body of `work(judge)`; what it returns is told as an exception.
FRAME = """
import ctypes, errno, mmap, os, signal, socket, struct, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {numbers}
def call(name, *arguments):
    ctypes.set_errno(0)
    given = [a if isinstance(a, (bytes, ctypes.Array)) else ctypes.c_long(a) for a in arguments]
    done = libc.syscall(ctypes.c_long(NUMBERS[name]), *given)
    return "done" if done >= 0 else errno.errorcode[ctypes.get_errno()]
def tried(function):
    try:
        function()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
def work(judge):
{body}
def attention(q, k, v):
    raise RuntimeError(repr(work(os.getppid())))
"""


def attempt(folder: Path, body: str) -> Candidate:
    """A candidate that does this when it is called."""
    table = {**ALLOWED, **RULED, **REFUSED}
    numbers = {name: known[MACHINE] for name, known in table.items() if MACHINE in known}
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    (folder / "candidate.py").write_text(FRAME.format(numbers=numbers, body=indented))
    return Candidate("python", str(folder / "candidate.py"), "attention")


def told(folder: Path, body: str) -> str:
    """What the candidate found out."""
    return ended(folder, body).message.removeprefix("RuntimeError: ")


def ended(folder: Path, body: str) -> Ended:
    x = np.zeros((1, 2, 9, 16), np.float16)
    with Sandbox(attempt(folder, body), SPEC, "cpu", LIMITS) as sandbox:
        assert sandbox.sealed
        assert sandbox.gaps == ()
        with pytest.raises(Ended) as found:
            sandbox.call({"Q": x, "K": x, "V": x})
    return found.value


# --- the judge's process ----------------------------------------------------------------------

# What is tried, by name, and what is answered. Where it succeeds after all, no harm is done but to
# the process of this test: setpriority of all of a user's processes is tried on the filter alone.
JUDGE = {
    "memory": ('tried(lambda: os.open(f"/proc/{judge}/mem", os.O_RDWR))', "EACCES"),
    "memory of a thread": (
        'tried(lambda: os.open(f"/proc/{judge}/task/{judge}/mem", os.O_RDONLY))',
        "EACCES",
    ),
    "environment": ('tried(lambda: open(f"/proc/{judge}/environ").read())', "EACCES"),
    "addresses": ('tried(lambda: open(f"/proc/{judge}/maps").read())', "EACCES"),
    "open files": ('tried(lambda: os.open(f"/proc/{judge}/fd/0", os.O_RDONLY))', "EACCES"),
    "its folder": ('tried(lambda: os.listdir(f"/proc/{judge}/cwd/"))', "EACCES"),
    "out of memory": (
        'tried(lambda: open(f"/proc/{judge}/oom_score_adj", "w").write("1000"))',
        "EACCES",
    ),
    "signal": ("tried(lambda: os.kill(judge, 0))", "EPERM"),
    "signal to its group": ("tried(lambda: os.killpg(os.getpgid(judge), 0))", "EPERM"),
    "signal to all": ("tried(lambda: os.kill(-1, 0))", "EPERM"),
    "signal to a thread": ('call("tgkill", judge, judge, 0)', "EPERM"),
    "signal to a thread alone": ('call("tkill", judge, 0)', "EPERM"),
    "queued signal": ('call("rt_sigqueueinfo", judge, 0, bytes(128))', "EPERM"),
    "signal to init": ("tried(lambda: os.kill(1, 0))", "EPERM"),
    "limits": ('call("prlimit64", judge, 4, struct.pack("QQ", 0, 0), 0)', "EPERM"),
    "limits read": ('call("prlimit64", judge, 7, 0, bytes(16))', "EPERM"),
    "affinity": ("tried(lambda: os.sched_setaffinity(judge, {0}))", "EPERM"),
    "scheduling": (
        "tried(lambda: os.sched_setscheduler(judge, os.SCHED_IDLE, os.sched_param(0)))",
        "EPERM",
    ),
    "priority": ("tried(lambda: os.setpriority(os.PRIO_PROCESS, judge, 19))", "EPERM"),
    "disk priority": ('call("ioprio_set", 1, judge, 3 << 13)', "EPERM"),
    "ptrace": ('call("ptrace", 0x4206, judge, 0, 0)', "EPERM"),
    "process_vm_readv": ('call("process_vm_readv", judge, 0, 0, 0, 0, 0)', "EPERM"),
    "process_vm_writev": ('call("process_vm_writev", judge, 0, 0, 0, 0, 0)', "EPERM"),
    "pidfd_open": ('call("pidfd_open", judge, 0)', "EPERM"),
    "pidfd_getfd": ('call("pidfd_getfd", 3, 0, 0)', "EPERM"),
    "owner of a pipe": ("tried(lambda: __import__('fcntl').fcntl(0, 8, judge))", "EPERM"),
    "kcmp": ('call("kcmp", judge, os.getpid(), 0, 0, 0)', "EPERM"),
}
OUTSIDE = {
    **{
        family: (f"tried(lambda: socket.socket(socket.{family}, socket.SOCK_{kind}))", "EPERM")
        for family, kind in (
            *(("AF_INET", "STREAM"), ("AF_INET6", "DGRAM"), ("AF_UNIX", "DGRAM")),
            *(("AF_NETLINK", "RAW"), ("AF_VSOCK", "STREAM"), ("AF_PACKET", "RAW")),
        )
    },
    "datagrams by a pair": (
        "tried(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))",
        "EPERM",
    ),
    "io_uring": ('call("io_uring_setup", 8, bytes(120))', "EPERM"),
    "userfaultfd": ('call("userfaultfd", 1)', "EPERM"),
    "bpf": ('call("bpf", 0, bytes(128), 128)', "EPERM"),
    "perf_event_open": ('call("perf_event_open", bytes(128), 0, -1, -1, 0)', "EPERM"),
    "keyctl": ('call("keyctl", 0, -3, 0)', "EPERM"),
    "unshare": ('call("unshare", 0x10000000)', "EPERM"),
    "setns": ('call("setns", 0, 0)', "EPERM"),
    "namespace by clone": ('call("clone", 0x10000000 | 17, 0, 0, 0, 0)', "EPERM"),
    "child of the judge": ('call("clone", 0x8000 | 17, 0, 0, 0, 0)', "EPERM"),
    "mount": ('call("mount", 0, 0, 0, 0, 0)', "EPERM"),
    "shared memory": ('call("shmat", -1, 0, 0)', "EPERM"),
    "handles": ('call("open_by_handle_at", -100, bytes(64), 0)', "EPERM"),
    "another filter": ('call("seccomp", 1, 0, 0)', "EPERM"),
    "another filter by prctl": ('call("prctl", 22, 2, 0)', "EPERM"),
    "clone3": ("libc.syscall(435, 0, 0), errno.errorcode[ctypes.get_errno()]", (-1, "ENOSYS")),
    "a call of the future": ("libc.syscall(9999), ctypes.get_errno()", (-1, 38)),
}
ATTACKS = {**JUDGE, **OUTSIDE}
ALL = "return {" + ", ".join(f"{name!r}: ({code})" for name, (code, _) in ATTACKS.items()) + "}"
FROM_OLDER_THREAD = f"""
def inside(judge):
    {ALL}
found = []
@ctypes.CFUNCTYPE(None, ctypes.c_int)
def elsewhere(number):
    if threading.get_native_id() != os.getpid():
        found.append(inside(judge))
libc.signal(signal.SIGUSR1, elsewhere)
for thread in os.listdir("/proc/self/task"):
    if int(thread) != os.getpid():
        libc.tgkill(os.getpid(), int(thread), signal.SIGUSR1)
for _ in range(2000):
    if found:
        break
    threading.Event().wait(0.01)
return found[0]
"""
FROM_CHILD = f"""
def inside(judge):
    {ALL}
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, repr(inside(judge)).encode())
    os._exit(0)
os.waitpid(child, 0)
return eval(os.read(reading, 1 << 16))
"""
WAYS = {"itself": ALL, "a thread of NumPy": FROM_OLDER_THREAD, "a child": FROM_CHILD}


@pytest.mark.parametrize("way", WAYS)
def test_the_judge_and_the_outside_are_out_of_reach(way: str, tmp_path: Path) -> None:
    """Also from a thread that was there before the candidate, and from a child."""
    # The worker has none of the variables that hold NumPy to one thread: it has one a core.
    if way == "a thread of NumPy" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("NumPy has no threads on one core")
    core, cores = resource.getrlimit(resource.RLIMIT_CORE), os.sched_getaffinity(0)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # A message is cut at 500 characters: what was refused as it should is left out.
    expected = {name: answer for name, (_, answer) in ATTACKS.items()}
    body = "\n".join(
        (
            "def all_of(judge):",
            *(f"    {line}" for line in WAYS[way].strip().splitlines()),
            f"expected = {expected!r}",
            "found = all_of(judge)",
            "return len(found), {n: f for n, f in found.items() if f != expected[n]}",
        )
    )
    assert told(tmp_path, body) == repr((len(ATTACKS), {}))
    assert resource.getrlimit(resource.RLIMIT_CORE) == core
    assert os.sched_getaffinity(0) == cores
    assert os.getpriority(os.PRIO_PROCESS, 0) == nice


def test_a_server_outside_is_not_spoken_to(tmp_path: Path) -> None:
    """Neither one with a path, even where it may write, nor one with an abstract name."""
    name = f"flashwright-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as path, socket.socket(socket.AF_UNIX) as abstract:
        path.bind(str(tmp_path / "server"))
        abstract.bind(f"\0{name}")
        for server in (path, abstract):
            server.listen()
        code = f"""
def connect(where):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(where)
return [tried(lambda: connect(p)) for p in ({str(tmp_path / "server")!r}, "\\0{name}")]
"""
        assert told(tmp_path, code) == repr(["EPERM", "EPERM"])


def test_the_judge_is_no_open_book_while_it_judges(tmp_path: Path) -> None:
    """Not even for what is not confined; afterwards it is as before."""
    (tmp_path / "candidate.py").write_text("def attention(q, k, v):\n    return q.copy()\n")
    candidate = Candidate("python", str(tmp_path / "candidate.py"), "attention")
    before = _dumpable()
    with Sandbox(candidate, SPEC, "cpu", LIMITS) as one:
        assert _dumpable() == 0
        with Sandbox(candidate, SPEC, "cpu", LIMITS):
            assert _dumpable() == 0
        assert _dumpable() == 0
        one.start()
        assert _dumpable() == 0
    assert _dumpable() == before


def _dumpable() -> int:
    import ctypes

    return int(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))


def test_it_has_no_capability(tmp_path: Path) -> None:
    """And gains none. (Only root can put them out of bounds, and only root has to.)"""
    code = """
lines = open("/proc/self/status").read().splitlines()
found = {line[:6]: int(line.split()[1], 16) for line in lines if line.startswith("Cap")}
bounds = found.pop("CapBnd")
return set(found.values()), bounds if os.getuid() == 0 else 0, "NoNewPrivs:\\t1" in lines
"""
    assert told(tmp_path, code) == "({0}, 0, True)"


def test_it_ends_with_the_judge_whatever_it_asks_for(tmp_path: Path) -> None:
    code = """
asked, now = libc.prctl(1, 0, 0, 0, 0), ctypes.c_int()
libc.prctl(2, ctypes.byref(now), 0, 0, 0)
return asked, now.value
"""
    assert told(tmp_path, code) == "(0, 9)"


# --- another architecture ---------------------------------------------------------------------

# A program of 32-bit Arm that ends with status 7: mov r0, #7; mov r7, #1; svc 0.
ARM = """
code = struct.pack("<3I", 0xE3A00007, 0xE3A07001, 0xEF000000)
head = b"\\x7fELF\\x01\\x01\\x01" + bytes(9)
head += struct.pack("<HHIIIIIHHHHHH", 2, 40, 1, 0x10054, 52, 0, 0x5000000, 52, 32, 1, 0, 0, 0)
head += struct.pack("<8I", 1, 0, 0x10000, 0x10000, 84 + len(code), 84 + len(code), 5, 0x10000)
with open("arm", "wb") as file:
    file.write(head + code)
os.chmod("arm", 0o755)
"""
# mov eax, 20 (getpid of 32 bits); int 0x80; ret. And getpid of x32: mov eax, 0x40000027; syscall.
X86 = """
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex({code!r}))
where = ctypes.addressof(ctypes.c_char.from_buffer(page))
return ctypes.CFUNCTYPE(ctypes.c_long)(where)()
"""


@pytest.mark.skipif(MACHINE != "aarch64", reason="it is a program for Arm")
def test_a_program_of_32_bit_arm_is_killed(tmp_path: Path) -> None:
    free = tmp_path / "free"
    free.mkdir()
    code = f"import os, struct\n{ARM}"
    subprocess.run([sys.executable, "-c", code], cwd=free, check=True)
    try:
        assert subprocess.run([str(free / "arm")]).returncode == 7
    except OSError:
        pytest.skip("this system runs no programs of 32 bits")
    assert told(tmp_path, f"{ARM}return subprocess.run(['./arm']).returncode") == "-31"
    found = ended(tmp_path, f"{ARM}os.execv('./arm', ['./arm'])")
    assert (found.offence, "another architecture" in found.message) == ("tampering", True)


@pytest.mark.skipif(MACHINE != "x86_64", reason="it is code for x86")
@pytest.mark.parametrize("code", ["b814000000cd80c3", "b8270000400f05c3"], ids=["int80", "x32"])
def test_another_way_into_the_kernel_is_killed(code: str, tmp_path: Path) -> None:
    found = ended(tmp_path, X86.format(code=code))
    assert (found.offence, "another architecture" in found.message) == ("tampering", True)


# --- honest work ------------------------------------------------------------------------------

HONEST = """
import multiprocessing, tempfile
import numpy as np
found = []
def thread():
    open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("kernel")
    found.append(float((np.ones((300, 300)) @ np.ones((300, 300)))[0, 0]))
threads = [threading.Thread(target=thread) for _ in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
memory = os.memfd_create("mine")
os.ftruncate(memory, 4096)
mmap.mmap(memory, 4096)[:4] = b"fast"
found.append(os.pread(memory, 4, 0).decode())
one, other = socket.socketpair()
one.sendall(b"to and fro")
found.append(other.recv(64).decode())
here, there = multiprocessing.Pipe()
child = os.fork()
if child == 0:
    there.send(os.getppid())
    os._exit(0)
found.append(here.recv() == os.getpid())
found.append(os.waitpid(child, 0)[1])
sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
sleeper.kill()
found.append(sleeper.wait())
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
os.kill(os.getpid(), 0)
with tempfile.TemporaryDirectory() as folder, open(f"{folder}/x", "w") as file:
    file.write("x")
os.mkdir(os.path.expanduser("~/.triton"))
return found
"""


def test_honest_work_goes_on(tmp_path: Path) -> None:
    killed = -9 if landlock.keeps_signals() else None
    if killed is None:
        pytest.skip("without Landlock's scopes it cannot end its children")
    expected = [300.0, 300.0, 300.0, "fast", "to and fro", True, 0, killed]
    assert told(tmp_path, HONEST) == repr(expected)


def test_it_compiles_and_loads_what_it_compiled(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    code = f"""
open("mine.c", "w").write("#include <math.h>\\nint twice(int n) {{ return 2 * n; }}")
subprocess.run([{compiler!r}, "-O2", "-shared", "-fPIC", "mine.c", "-o", "mine.so"], check=True)
return ctypes.CDLL("./mine.so").twice(21)
"""
    assert told(tmp_path, code) == "42"


# --- the filter -------------------------------------------------------------------------------


def test_no_call_is_in_two_tables() -> None:
    tables = (ALLOWED, RULED, REFUSED)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    for machine in ("x86_64", "aarch64"):
        numbers = [n[machine] for table in tables for n in table.values() if machine in n]
        assert len(numbers) == len(set(numbers))
    assert all(known for table in tables for known in table.values())


# From the two lists of the kernel that calls.py names: x86_64, aarch64.
SAMPLE = """
read 0 63 | openat 257 56 | mmap 9 222 | ioctl 16 29 | clone 56 220 | execve 59 221
futex 202 98 | kill 62 129 | tgkill 234 131 | ptrace 101 117 | socket 41 198 | prctl 157 167
socketpair 53 199 | prlimit64 302 261 | memfd_create 319 279 | process_vm_writev 311 271
sched_setaffinity 203 122 | unshare 272 97 | setpriority 141 140 | ioprio_set 251 30
setsid 112 157 | setpgid 109 154 | perf_event_open 298 241 | bpf 321 280 | userfaultfd 323 282
keyctl 250 219 | eventfd2 290 19 | epoll_pwait 281 22 | statx 332 291 | getrandom 318 278
rseq 334 293 | io_uring_setup 425 425 | pidfd_getfd 438 438 | seccomp 317 277 | mount 165 40
setns 308 268 | personality 135 92 | exit_group 231 94
"""


def test_numbers_of_system_calls() -> None:
    table = {**ALLOWED, **RULED, **REFUSED}
    for name, x86, arm in re.findall(r"(\w+) (\d+) (\d+)", SAMPLE):
        assert table[name] == {"x86_64": int(x86), "aarch64": int(arm)}, name


def _header() -> Iterator[tuple[str, int]]:
    """The numbers that the headers of this machine have."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return
    lines = "#include <asm/unistd.h>\n"
    command = [compiler, "-E", "-dM", "-"]
    found = subprocess.run(command, input=lines, capture_output=True, text=True).stdout
    said = dict(re.findall(r"#define (__NR\w*) (\w+)", found))
    for name, value in said.items():
        number = said.get(value, value)
        if name.startswith("__NR_") and number.isdigit():
            yield name.removeprefix("__NR_"), int(number)


@pytest.mark.skipif(MACHINE not in filters.AUDIT, reason="there is no filter for this machine")
def test_numbers_are_those_of_the_headers() -> None:
    known = dict(_header())
    if not known:
        pytest.skip("there is no C compiler, or no headers")
    table = {**ALLOWED, **RULED, **REFUSED}
    both = [name for name in table if name in known and MACHINE in table[name]]
    assert len(both) > 200
    assert {name: table[name][MACHINE] for name in both} == {name: known[name] for name in both}


OWN, OTHER = 4711, 815
LOW = 0xFFFFFFFF


def answer(machine: str, name: str | int, *arguments: int, scoped: bool = True) -> int:
    """What the filter says to a call, by carrying it out."""
    table = {**ALLOWED, **RULED, **REFUSED}
    number = name if isinstance(name, int) else table[name][machine]
    words = {0: number, 4: filters.AUDIT[machine]}
    words |= {16 + 8 * n: value & LOW for n, value in enumerate((*arguments, *[0] * 6)) if n < 6}
    program, at, held = filters.program(machine, Party(OWN, OTHER, OTHER - 1, scoped)), 0, 0
    while True:
        code, yes, no, value = program[at]
        assert max(yes, no) < 256
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            held = words[value]
        elif code == 0x54:
            held &= value
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += yes if holds else no


ALLOW, KILL, EPERM, ENOSYS, SUCCESS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026, 0x50000


@pytest.mark.parametrize("machine", filters.AUDIT)
def test_what_the_filter_answers(machine: str) -> None:
    """On both machines, whichever this one is."""
    assert len(filters.program(machine, Party(OWN, OTHER, OTHER, True))) < 4096
    assert all(answer(machine, name) == ALLOW for name in ALLOWED if machine in ALLOWED[name])
    assert all(answer(machine, name) == EPERM for name in REFUSED if machine in REFUSED[name])
    assert answer(machine, 435) == answer(machine, 9999) == ENOSYS
    assert answer(machine, 0x40000000 | 39) == (KILL if machine == "x86_64" else ENOSYS)
    assert answer(machine, "clone", 0x3D0F00) == ALLOW  # a thread
    assert answer(machine, "clone", 0x1200011) == ALLOW  # fork
    for flag in (17, *range(25, 31), 15):  # namespaces, and the parent's own child
        assert answer(machine, "clone", 1 << flag) == EPERM
    for name in ("prlimit64", "sched_setaffinity", "sched_setattr"):
        assert [answer(machine, name, pid) for pid in (0, OWN, OTHER)] == [ALLOW, ALLOW, EPERM]
    assert answer(machine, "setpriority", 0, 0) == answer(machine, "ioprio_set", 1, OWN) == ALLOW
    assert answer(machine, "setpriority", 2, 0) == answer(machine, "ioprio_set", 3, 0) == EPERM
    assert answer(machine, "socketpair", 1, 0x80801) == answer(machine, "socketpair", 1, 5) == ALLOW
    for family, kind in ((1, 2), (1, 3), (2, 1), (16, 3), (40, 1)):
        assert answer(machine, "socketpair", family, kind) == EPERM
        assert answer(machine, "socket", family, kind) == EPERM
    assert answer(machine, "socket", 1, 1) == answer(machine, "bind") == ALLOW
    assert answer(machine, "connect") == EPERM
    assert answer(machine, "setsid") == answer(machine, "setpgid") == SUCCESS
    assert [answer(machine, "prctl", 1, n) for n in (9, 0, 18)] == [ALLOW, SUCCESS, SUCCESS]
    assert [answer(machine, "prctl", n) for n in (4, 15, 22, 35, 62)] == [ALLOW] * 2 + [EPERM] * 3
    assert [answer(machine, "fcntl", 0, n) for n in (1, 3, 8, 10, 15)] == [ALLOW] * 2 + [EPERM] * 3
    assert answer(machine, "ioctl", 3, 0xC020462A) == ALLOW  # of NVIDIA's driver
    assert answer(machine, "ioctl", 0, 0x5412) == EPERM


@pytest.mark.parametrize("machine", filters.AUDIT)
@pytest.mark.parametrize("name", ["kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"])
def test_signals(machine: str, name: str) -> None:
    """To its children where Landlock knows them, else to itself; to the judge never."""
    for scoped in (True, False):
        for pid in (OTHER, -OTHER, -1, 1 - OTHER):
            assert answer(machine, name, pid, scoped=scoped) == EPERM
        assert answer(machine, name, 0, scoped=scoped) == ALLOW
        assert answer(machine, name, OWN, scoped=scoped) == ALLOW
        assert answer(machine, name, 99, scoped=scoped) == (ALLOW if scoped else EPERM)
