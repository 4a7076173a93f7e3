"""Kernels that reach for what is outside of their process. All of them mean causal attention.

Each makes one attempt. Where the system refuses it, the kernel raises `Refused` with the reason.
Where it succeeds, the kernel returns the right answer: a judge that accepts it has a hole. No
attempt does harm when it succeeds: signals have the number 0, files are opened and not written,
limits are set to what they are.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from flashwright.selftest.kernels.honest import Array, causal
from flashwright.selftest.kernels.system_calls import call

Action = Callable[[], Any]


class Refused(Exception):
    """The system refused the attempt."""


def attempt(action: Action) -> None:
    """Return where the action succeeds; raise Refused where the system forbids it.

    Any other error is raised as it is: arguments that are looked at have passed the filter.
    """
    try:
        action()
    except PermissionError as error:
        raise Refused(errno.errorcode[error.errno or errno.EPERM]) from None


def _judge() -> int:
    return os.getppid()


def _opened(path: str, flags: int = os.O_RDONLY) -> None:
    os.close(os.open(path, flags))


def _read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def _kernel(doc: str, action: Action) -> Callable[[Array, Array, Array], Array]:
    """A kernel that first makes the attempt."""

    def attack(q: Array, k: Array, v: Array) -> Array:
        attempt(action)
        return causal(q, k, v)

    attack.__doc__ = doc
    return attack


def _clone(flags: int) -> None:
    if call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        os._exit(0)


# --- the judge's process ----------------------------------------------------------------------

judge_memory = _kernel(
    "Open the judge's memory for writing.", lambda: _opened(f"/proc/{_judge()}/mem", os.O_RDWR)
)
judge_memory_by_thread = _kernel(
    "Open it through the judge's main thread.",
    lambda: _opened(f"/proc/{_judge()}/task/{_judge()}/mem"),
)
judge_environment = _kernel(
    "Read the judge's environment, where keys are.", lambda: _read(f"/proc/{_judge()}/environ")
)
judge_addresses = _kernel("Read where its memory lies.", lambda: _read(f"/proc/{_judge()}/maps"))
judge_open_files = _kernel(
    "Open what the judge has open.", lambda: _opened(f"/proc/{_judge()}/fd/0")
)
judge_folder = _kernel("List the judge's folder.", lambda: os.listdir(f"/proc/{_judge()}/cwd/"))
judge_oom_score = _kernel(
    "Make the judge the first to go when memory is short.",
    lambda: _opened(f"/proc/{_judge()}/oom_score_adj", os.O_WRONLY),
)
judge_signal = _kernel("Send the judge a signal.", lambda: os.kill(_judge(), 0))
judge_group_signal = _kernel(
    "Send one to the judge's process group.", lambda: os.killpg(os.getpgid(_judge()), 0)
)
signal_to_all = _kernel("Send one to every process of the user.", lambda: os.kill(-1, 0))
judge_thread_signal = _kernel(
    "Send one to the judge's thread.", lambda: call("tgkill", _judge(), _judge(), 0)
)
judge_queued_signal = _kernel(
    "Queue one with data.",
    lambda: call("rt_sigqueueinfo", _judge(), 0, struct.pack("3i", 0, 0, -1) + bytes(116)),
)
judge_limits = _kernel(
    "Change the judge's limits.",
    lambda: resource.prlimit(
        _judge(), resource.RLIMIT_CORE, resource.prlimit(_judge(), resource.RLIMIT_CORE)
    ),
)
judge_affinity = _kernel(
    "Bind the judge to cores.", lambda: os.sched_setaffinity(_judge(), os.sched_getaffinity(0))
)
judge_scheduling = _kernel(
    "Change how the judge is scheduled.",
    lambda: os.sched_setscheduler(_judge(), os.SCHED_OTHER, os.sched_param(0)),
)
judge_priority = _kernel(
    "Change its priority.",
    lambda: os.setpriority(os.PRIO_PROCESS, _judge(), os.getpriority(os.PRIO_PROCESS, 0)),
)
judge_disk_priority = _kernel(
    "Change its disk priority.", lambda: call("ioprio_set", 1, _judge(), 0)
)
judge_ptrace = _kernel("Attach as a debugger.", lambda: call("ptrace", 0x4206, _judge(), 0, 0))
judge_vm_read = _kernel(
    "Read the judge's memory by process_vm_readv.",
    lambda: call("process_vm_readv", _judge(), 0, 0, 0, 0, 0),
)
judge_vm_write = _kernel(
    "Write to it by process_vm_writev.",
    lambda: call("process_vm_writev", _judge(), 0, 0, 0, 0, 0),
)
judge_pidfd = _kernel("Get a handle of the judge.", lambda: call("pidfd_open", _judge(), 0))
judge_kcmp = _kernel(
    "Compare kernel objects with the judge's.",
    lambda: call("kcmp", _judge(), os.getpid(), 0, 0, 0),
)
namespace = _kernel("Leave into a user namespace.", lambda: call("unshare", 0x10000000))
namespace_by_clone = _kernel("Start a child in one.", lambda: _clone(0x10000000))
sibling_of_the_judge = _kernel("Start a child of the judge's.", lambda: _clone(0x8000))


def judge_memory_by_grandchild(q: Array, k: Array, v: Array) -> Array:
    """Open the judge's memory from a process that has left this one's family."""
    judge, (reading, writing) = _judge(), os.pipe()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            _tell(writing, lambda: _opened(f"/proc/{judge}/mem", os.O_RDWR))
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    found = os.read(reading, 64).decode()
    if found != "done":
        raise Refused(found)
    return causal(q, k, v)


def _tell(to: int, action: Action) -> NoReturn:
    """Write down what became of an action, and end this process."""
    try:
        action()
        os.write(to, b"done")
    except OSError as error:
        os.write(to, errno.errorcode.get(error.errno or 0, "?").encode())
    os._exit(0)


def socket_by_an_older_thread(q: Array, k: Array, v: Array) -> Array:
    """Open a socket in a thread that was there before this code, by a signal handler."""
    found: list[str] = []

    def handler(number: int) -> None:
        if threading.get_native_id() != os.getpid() and not found:
            try:
                socket.socket(socket.AF_INET).close()
                found.append("done")
            except OSError as error:
                found.append(errno.errorcode.get(error.errno or 0, "?"))

    kept = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGUSR1, kept)
    threads = [int(name) for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]
    for thread in threads:
        libc.tgkill(os.getpid(), thread, signal.SIGUSR1)
    for _ in range(500 if threads else 0):
        if found:
            break
        threading.Event().wait(0.01)
    if found != ["done"]:
        raise Refused(found[0] if found else "there is no older thread")
    return causal(q, k, v)


# --- the system -------------------------------------------------------------------------------


def _socket(family: str, kind: str) -> None:
    socket.socket(getattr(socket, family), getattr(socket, kind)).close()


internet = _kernel("Open a TCP socket.", lambda: _socket("AF_INET", "SOCK_STREAM"))
internet_datagrams = _kernel("Open a UDP socket.", lambda: _socket("AF_INET6", "SOCK_DGRAM"))
unix_socket = _kernel("Open a local datagram socket.", lambda: _socket("AF_UNIX", "SOCK_DGRAM"))
netlink = _kernel("Talk to the system by netlink.", lambda: _socket("AF_NETLINK", "SOCK_RAW"))
virtual_machine_socket = _kernel(
    "Talk to the hypervisor.", lambda: _socket("AF_VSOCK", "SOCK_STREAM")
)
io_uring = _kernel(
    "Make system calls by io_uring, past the filter.",
    lambda: call("io_uring_setup", 8, bytes(120)),
)
user_faults = _kernel("Handle page faults itself.", lambda: call("userfaultfd", 1))
bpf = _kernel("Load a BPF program.", lambda: call("bpf", 0, bytes(128), 128))
performance_counters = _kernel(
    "Watch other processes by perf events.",
    lambda: call("perf_event_open", bytes(128), 0, -1, -1, 0),
)
keyring = _kernel("Leave a message in a keyring.", lambda: call("keyctl", 0, -3, 0))
mount = _kernel("Mount a file system.", lambda: call("mount", 0, 0, 0, 0, 0))
shared_memory = _kernel("Attach System V shared memory.", lambda: call("shmat", -1, 0, 0))
file_handles = _kernel(
    "Open files by handle, past their folders.",
    lambda: call("open_by_handle_at", -100, bytes(64), 0),
)
another_filter = _kernel("Load another filter.", lambda: call("seccomp", 1, 0, 0))


def _survives(child_code: Callable[[], object], q: Array, k: Array, v: Array) -> Array:
    """Run in a child; the right answer only where the child lives to its end."""
    child = os.fork()
    if child == 0:
        try:
            child_code()
            os._exit(7)
        except OSError as error:
            os._exit(error.errno or 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 7:
        raise Refused(f"signal {-code}" if code < 0 else errno.errorcode.get(code, str(code)))
    return causal(q, k, v)


def program_of_32_bits(q: Array, k: Array, v: Array) -> Array:
    """Run a program of 32-bit Arm, whose system calls have other numbers."""
    code = struct.pack("<3I", 0xE3A00007, 0xE3A07001, 0xEF000000)  # exit(7)
    head = b"\x7fELF\x01\x01\x01" + bytes(9)
    head += struct.pack("<HHIIIIIHHHHHH", 2, 40, 1, 0x10054, 52, 0, 0x5000000, 52, 32, 1, 0, 0, 0)
    head += struct.pack("<8I", 1, 0, 0x10000, 0x10000, 84 + len(code), 84 + len(code), 5, 0x10000)
    with open("program", "wb") as file:
        file.write(head + code)
    os.chmod("program", 0o755)
    return _survives(lambda: os.execv("./program", ["./program"]), q, k, v)


def _machine_code(code: str) -> Callable[[], int]:
    """Machine code as a function."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex(code))
    start = ctypes.c_char.from_buffer(page)
    function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(start))
    _pages.append((page, start))  # for as long as the function is
    return function


_pages: list[Any] = []


def calls_of_32_bits(q: Array, k: Array, v: Array) -> Array:
    """Enter the kernel by int 0x80, which has the numbers of 32-bit programs."""
    return _survives(_machine_code("b814000000cd80c3"), q, k, v)


def calls_of_x32(q: Array, k: Array, v: Array) -> Array:
    """Enter it with the numbers of x32."""
    return _survives(_machine_code("b8270000400f05c3"), q, k, v)
