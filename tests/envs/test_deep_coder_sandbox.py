"""Does no program get out of the sandbox, and does each end in time?  Attacks, and what they must come to."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from open_envs import needs_sandbox
from waiting import wait_until

from envs import make
from envs.deep_coder import harness, sandbox
from envs.deep_coder.sandbox import Limits, TestOutcome, execute

PATIENCE = 6  # seconds in which every attack ends
SECRET = "a secret of the host"
SHORT = Limits(seconds=0.265625, total_seconds=3.0)  # for those who end by the clock; also how leftovers are found


# name -> (program, what its end must look like: status, error and output). A program prints ESCAPED where it succeeds,
# and does no harm then: it opens, and does not write. {secret}, {marker}, {port}, {home} and {project} are the host's.
ATTACKS = {
    "fork bomb": ("import os\nwhile True: os.fork()", "error .*PermissionError"),
    "stubborn fork bomb": (
        "import os\nwhile True:\n    try:\n        if os.fork(): print('ESCAPED')\n    except OSError: pass",
        "time",
    ),
    "fork by number": (
        "import ctypes\nif ctypes.CDLL(None, use_errno=True).syscall({fork}, 17, 0, 0, 0, 0) >= 0: print('ESCAPED')\n"
        "raise OSError(ctypes.get_errno())",
        "error .*OSError: 1",
    ),
    "shell": ("import os\nif os.system('true') == 0: print('ESCAPED')\nraise OSError('no shell')", "error .*no shell"),
    "subprocess": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])\nprint('ESCAPED')",
        "error .*PermissionError",
    ),
    "exec": ("import os, sys\nos.execv(sys.executable, ['python', '-c', 'print(9)'])", "error .*PermissionError"),
    "thread bomb": (
        "import threading, time\nthreading.stack_size(32768)\nfor n in range(1000):\n"
        "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nprint('ESCAPED')",
        "(threads|error .*can't start new thread)",
    ),
    "memory bomb": ("x = bytearray(10**10)\nprint('ESCAPED')", "error .*MemoryError"),
    "growing memory bomb": (  # a busy machine may need all of its seconds to fill that much
        "x = []\nwhile True: x.append(bytearray(10**8))",
        "(error .*MemoryError|time)",
    ),
    "memory file": ("import os\nos.memfd_create('x')\nprint('ESCAPED')", "error .*PermissionError"),
    "shared memory": (
        "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) >= 0: print('ESCAPED')",
        "ok",
    ),
    "endless output": ("while True: print('x' * 1000)", "error .*File too large"),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "(error|crash)"),
    "big file": ("open('/tmp/x', 'wb').write(bytes(10**8))\nprint('ESCAPED')", "error .*File too large"),
    "full disk": (
        "for n in range(99): open(f'/tmp/{{n}}', 'wb').write(bytes(10**6))\nprint('ESCAPED')",
        "error .*No space left",
    ),
    "network": (
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('ESCAPED')",
        "error .*PermissionError",
    ),
    "pairs of sockets": (  # asyncio needs one; it must not lead out
        "import socket\nfor family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):\n"
        "    try: socket.socketpair(family, socket.SOCK_DGRAM)\n    except OSError: pass\n"
        "    else: print('ESCAPED', family)\none, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "one.connect({listener!r})\nprint('ESCAPED')",
        "error .*PermissionError",
    ),
    "pairs of sockets that part": (  # a named one could be filled by many who are gone
        "import ctypes, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nname = bytes(16)\n"
        "for found in (lambda: libc.connect(one.fileno(), name, 16),\n"
        "              lambda: libc.bind(one.fileno(), b'\\1\\0\\0x', 4)):\n"
        "    print('ESCAPED' if found() >= 0 else ctypes.get_errno())",
        r"ok\s+(1\s+){{2}}$",
    ),
    "priorities": (  # of the harness, which is process 1
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nroom = ctypes.create_string_buffer(64)\n"
        "for found in (lambda: libc.setpriority(0, 1, 19), lambda: libc.sched_setscheduler(1, 5, room),\n"
        "              lambda: libc.sched_setparam(1, room), lambda: libc.sched_setaffinity(1, 8, b'\\1' + bytes(7)),\n"
        "              lambda: libc.syscall({sched_setattr}, 1, room, 0),\n"
        "              lambda: libc.syscall({ioprio_set}, 1, 1, 0)):\n"
        "    print('ESCAPED' if found() >= 0 else ctypes.get_errno())",
        r"ok\s+(1\s+){{6}}$",
    ),
    "name server": ("import urllib.request\nurllib.request.urlopen('http://example.com', timeout=1)", "error .*rror"),
    "reading home": (
        "import os\nfor path in ('{home}', '/home', '/root', '{project}', '/etc/passwd', '/work'):\n"
        "    if os.path.exists(path): print('ESCAPED', path)\nopen({secret!r})",
        "error .*FileNotFoundError",
    ),
    "environment variables": (
        "import os\nfor path in ('self', '1'):\n    try: found = open(f'/proc/{{path}}/environ').read()\n"
        "    except OSError: found = ''\n    if 'DEEP_CODER_SECRET' in found: print('ESCAPED', path)\n"
        "print('ESCAPED' if 'DEEP_CODER_SECRET' in os.environ else sorted(os.environ))",
        r"ok .*\['HOME', 'LC_CTYPE', 'LD_LIBRARY_PATH', 'PWD'\]",
    ),
    "writing outside": (
        "import os, sys\nfor path in ({marker!r}, '/x', '/usr/lib/x', '/harness.py', '/dev/shm/x', os.__file__,\n"
        "             '/etc/x', sys.executable):\n"
        "    try: open(path, 'r+' if os.path.exists(path) else 'w')\n    except OSError as error: print(error.errno)\n"
        "    else: print('ESCAPED', path)",
        r"ok\s+(\d+\s+){{8}}$",
    ),
    "symbolic link": (
        "import os\nos.symlink({secret!r}, '/tmp/link')\nopen('/tmp/link')",
        "error .*FileNotFoundError",
    ),
    "way up": (
        "import os\nos.chdir('/../../..')\nprint(sorted(os.listdir('.')))\nopen('/proc/1/root' + {secret!r})",
        "error",
    ),
    "signals": (  # 9 to process 1, which must survive it; to others the signal that only asks whether it could be sent
        "import os\nos.kill(1, 9)\nfor pid in (-1, {pid}):\n    try: os.kill(pid, 0)\n"
        "    except OSError as error: print(error.errno)\n    else: print('ESCAPED', pid)",
        r"ok\s+3\s+3\s+$",
    ),
    "interrupting the harness": (
        "import os, time\nos.kill(1, 2)\ntime.sleep(0.1)\nprint('alive')",
        "ok .*alive",
    ),
    "interrupting itself": ("import os\nos.kill(os.getpid(), 2)\nprint('ESCAPED')", "crash .*signal 2"),
    "limits of the harness": (
        "import os, resource\nprint(resource.prlimit(0, resource.RLIMIT_NOFILE))\n"
        "resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1))\nprint('ESCAPED')",
        "error .*PermissionError",
    ),
    "what all of a user share": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nfile = os.open('/harness.py', os.O_RDONLY)\n"
        "place = ctypes.byref(ctypes.c_long(0))\n"
        "for found in (lambda: libc.inotify_init(), lambda: libc.inotify_init1(0),\n"
        "              lambda: libc.syscall({io_setup}, 9, place), lambda: libc.syncfs(file),\n"
        "              lambda: libc.flock(file, 6)):\n"
        "    print('ESCAPED' if found() >= 0 else ctypes.get_errno())",
        r"ok\s+(1\s+){{5}}$",
    ),
    "locks": (  # of a file of the host: shared, private to the descriptor, a lease, and a watch on a folder
        "import fcntl, os, struct\nfile, folder = os.open(os.__file__, os.O_RDONLY), os.open('/usr/lib', os.O_RDONLY)\n"
        "lock = struct.pack('hhqqi', 0, 0, 0, 1, 0)\n"
        "for what, command, value in ((file, 6, lock), (file, 7, lock), (file, 37, lock), (file, 38, lock),\n"
        "                             (file, fcntl.F_SETLEASE, 0), (folder, fcntl.F_NOTIFY, 1)):\n"
        "    try: fcntl.fcntl(what, command, value)\n    except OSError as error: print(error.errno)\n"
        "    else: print('ESCAPED', command)",
        r"ok\s+(1\s+){{6}}$",
    ),
    "what the kernel tells root": (
        "for name in 'kcore kmsg kpagecount kpageflags pagetypeinfo slabinfo timer_list vmallocinfo'.split():\n"
        "    try: open('/proc/' + name, 'rb')\n    except OSError: pass\n    else: print('ESCAPED', name)",
        "ok",
    ),
    "where the project is": (
        "for line in open('/proc/self/mountinfo'):\n    if 'deep_coder' in line: print('ESCAPED', line)",
        "(ok|error .*PermissionError)",
    ),
    "bomb of links": (
        "import os\nfor n in range(10**6):\n    os.symlink('a' * 120, f'/tmp/{{n}}')\nprint('ESCAPED')",
        "(files|error .*No space left)",
    ),
    "extended attributes": (  # of its output, which is in memory; no file system counts them there
        "import os\nfor file in (0, 1, 2, 3, '/tmp', '/proc/self/fd/1'):\n"
        "    try: os.setxattr(file, 'user.a', b'x' * 65000)\n    except OSError as error: print(error.errno)\n"
        "    else: print('ESCAPED', file)",
        r"ok\s+(1\s+){6}$",
    ),
    "pinned huge page": (  # a byte of it in a pipe keeps it, when it is in no address space any more
        "import ctypes, mmap, os\nlibc = ctypes.CDLL(None, use_errno=True)\nreader, writer = os.pipe()\n"
        "room = mmap.mmap(-1, 4 << 20)\nroom.madvise(mmap.MADV_HUGEPAGE)\nroom[2 << 20] = 1\n"
        "vector = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.c_char.from_buffer(room, 2 << 20)), 1)\n"
        "if libc.vmsplice(writer, vector, 1, 0) >= 0: print('ESCAPED')\nraise OSError(ctypes.get_errno())",
        "error .*OSError: 1",
    ),
    "thread with files of its own": (  # 64 threads would have 64 times as many, each full of data
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.clone.argtypes = [ctypes.c_void_p] * 4\n"
        "stack = ctypes.create_string_buffer(65536)\n"
        "sleep, top = ctypes.cast(libc.sleep, ctypes.c_void_p), ctypes.addressof(stack) + 65000 & ~63\n"
        "if libc.clone(sleep, top, 0x10900, 1) > 0: print('ESCAPED', flush=True)\nraise OSError(ctypes.get_errno())",
        "error .*OSError: 1",
    ),
    "page tables": (  # a page alone in its GiB costs two more
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.mmap.restype = ctypes.c_void_p\n"
        "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\n"
        "for n in range(20_000): ctypes.memset(libc.mmap((1 << 40) + (n << 30), 4096, 3, 0x100022, -1, 0), 1, 1)\n"
        "import time\ntime.sleep(0.1)\nprint('ESCAPED')",
        "memory",
    ),
    "page tables of a thread alone": (
        "import ctypes, threading, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.mmap.restype = ctypes.c_void_p\n"
        "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\n"
        "def fill():\n    time.sleep(0.05)\n"
        "    for n in range(20_000): ctypes.memset(libc.mmap((1 << 40) + (n << 30), 4096, 3, 0x100022, -1, 0), 1, 1)\n"
        "    time.sleep(0.1)\n    print('ESCAPED', flush=True)\n"
        "threading.Thread(target=fill).start()\nlibc.syscall({exit}, 0)",
        "memory",
    ),
    "queue of signals": (
        "import ctypes, os, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
        "if not any([libc.sigqueue(os.getpid(), 40, None) for _ in range(100)]): print('ESCAPED')\n"
        "raise OSError(ctypes.get_errno())",
        "error .*OSError: 11",
    ),
    "memory of the harness": ("open('/proc/1/mem', 'rb')\nprint('ESCAPED')", "error .*PermissionError"),
    "files of the harness": (
        "import os\nfor n in range(64):\n    for mode in ('rb', 'wb'):\n"
        "        try: open(f'/proc/1/fd/{{n}}', mode, 0)\n        except OSError: pass\n"
        "        else: print('ESCAPED', n)\nos.readlink('/proc/1/fd/0')",
        "error .*PermissionError",
    ),
    "kernel settings": (
        "for path in ('sys/kernel/core_pattern', 'sys/kernel/hostname', 'sys/vm/drop_caches', 'self/oom_score_adj'):\n"
        "    try: open('/proc/' + path, 'r+b', 0)\n    except OSError as error: print(error.errno)\n"
        "    else: print('ESCAPED', path)",
        r"ok\s+(\d+\s+){{4}}$",
    ),
    "magic keys": ("open('/proc/sysrq-trigger', 'wb', 0)\nprint('ESCAPED')", "error .*rror"),
    "ptrace": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nif libc.ptrace(16, 1, 0, 0) >= 0: print('ESCAPED')\n"
        "raise OSError(ctypes.get_errno())",
        "error .*OSError: 1",
    ),
    "name spaces": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for name, arguments in (('unshare', (0x10000000,)), ('mount', (b'x', b'/tmp', b'tmpfs', 0, 0)),\n"
        "                        ('chroot', (b'/tmp',)), ('umount2', (b'/tmp', 2)), ('setns', (0, 0))):\n"
        "    print('ESCAPED' if getattr(libc, name)(*arguments) >= 0 else ctypes.get_errno())",
        r"ok\s+(1\s+){{5}}$",
    ),
    "new system calls": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0: print('ESCAPED')\n"
        "raise OSError(ctypes.get_errno())",
        "error .*OSError: 38",
    ),
    "another user": ("import os\nos.setuid(0)\nprint('ESCAPED')", "error .*(PermissionError|Errno 22)"),
    "higher limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\nprint('ESCAPED')",
        "error .*(ValueError|PermissionError)",
    ),
    "devices": (
        "import os\nknown = 'console core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero'\n"
        "if set(os.listdir('/dev')) - set(known.split()): print('ESCAPED')\n"
        "os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0))",
        "error .*PermissionError",
    ),
    "child that outlives": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)",
        "error .*PermissionError",
    ),
    "deaf to signals": (
        "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "time",
    ),
    "sleep": ("import time\ntime.sleep(60)", "time"),
    "waiting thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "time",
    ),
    "endless exit": ("import atexit, time\natexit.register(time.sleep, 60)", "time"),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f([x])\nf(0)",
        "(time|crash|error)",
    ),
    "deep brackets": ("(" * 50_000, "(syntax|crash)"),
    "deep expression": ("x = " + "-" * 50_000 + "1", "(syntax|crash|error)"),
    "huge constant": ("x = 9**9**9", "time"),
    "surrogates": ("print('\ud800')", "syntax .*UnicodeEncodeError"),
    "null bytes": ("print(1)\x00", "syntax"),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "crash"),
}
BY_THE_CLOCK = {name for name, (_, end) in ATTACKS.items() if end == "time"} | {"deep recursion"}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """What an attack may go for."""
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv("DEEP_CODER_SECRET", SECRET)
    listener = f"\0deep_coder_{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local:
        local.bind(listener)
        server.settimeout(0)
        yield {
            "secret": str(tmp_path / "secret"), "marker": str(tmp_path / "marker"), "port": server.getsockname()[1],
            "home": str(Path.home()), "project": str(Path(__file__).parents[2]), "pid": os.getpid(),
            "fork": {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, -1),
            "exit": {"x86_64": 60, "aarch64": 93}.get(os.uname().machine, -1),
            "io_setup": {"x86_64": 206, "aarch64": 0}.get(os.uname().machine, -1),
            "ioprio_set": {"x86_64": 251, "aarch64": 30}.get(os.uname().machine, -1),
            "sched_setattr": {"x86_64": 314, "aarch64": 274}.get(os.uname().machine, -1), "listener": listener,
        }  # fmt: skip
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not (tmp_path / "marker").exists()


def attack(name: str, host: dict[str, object], limits: Limits) -> str:
    """What is wrong with how an attack ended; empty if nothing is."""
    program, end = ATTACKS[name]
    values = {key: value for key, value in host.items()}
    if "{" in program:
        program = program.format(**values)
    begun = time.monotonic()
    outcomes = execute(program, "", ["1\n"], limits)
    seconds = time.monotonic() - begun
    told = f"{outcomes[0].status} {outcomes[0].error} {outcomes[0].output}"
    if "ESCAPED" in told:
        return f"{name} escaped: {told[:300]}"
    if not re.match(end.replace("{{", "{").replace("}}", "}"), told, re.DOTALL):
        return f"{name} ended otherwise: {told[:300]}"
    return f"{name} took {seconds:.1f} seconds" if seconds > PATIENCE else ""


@needs_sandbox
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_succeeds_and_each_ends(name, host):
    assert attack(name, host, SHORT if name in BY_THE_CLOCK else Limits()) == ""


@needs_sandbox
@pytest.mark.slow
def test_every_attack_ends_within_six_seconds_at_the_usual_limits(host):
    assert [told for name in ATTACKS if (told := attack(name, host, Limits()))] == []


@needs_sandbox
def test_nothing_is_left_running():
    limits = Limits(seconds=0.28125, total_seconds=0.75)
    assert execute("while True: pass", "", ["1", "2"], limits) == [TestOutcome("time", "", "time is up")]
    slow = execute("import time\ntime.sleep(0.25)", "", ["1"] * 9, limits)
    assert len(slow) < 9 and slow[-1] == TestOutcome("time", "", "time is up"), "the clock of the whole submission"
    wait_until(lambda: not running(limits.seconds), 3)


@needs_sandbox
def test_no_zombie_is_left_to_whoever_is_process_one():
    prctl, subreaper = ctypes.CDLL(None).prctl, 36
    prctl(subreaper, 1, 0, 0, 0)  # orphans come to us
    try:
        before = set(psutil.Process().children())
        execute("print(1)", "", ["1"], Limits())
        execute("while True: pass", "", ["1"], Limits(seconds=0.1))
        assert set(psutil.Process().children()) <= before
    finally:
        prctl(subreaper, 0, 0, 0, 0)


@needs_sandbox
def test_it_ends_with_the_process_that_started_it():
    folder, seconds = Path(sandbox.__file__).parent, 4.0625
    program = f"from sandbox import *\nexecute('while True: pass', '', [''], Limits({seconds}))"
    with subprocess.Popen([sys.executable, "-c", program], cwd=folder) as parent:
        wait_until(lambda: running(seconds), 3)
        parent.kill()
    wait_until(lambda: not running(seconds), 3)


def running(seconds: float) -> list[object]:
    """The sandboxes with this time limit."""
    told = psutil.process_iter(["cmdline"])
    return [each.info for each in told if str(seconds) in (each.info["cmdline"] or ())]


def decide(lines: bytes, number: int, architecture: int, *arguments: int) -> str:
    """What a seccomp filter says, by reading it line by line as the kernel does."""
    first, second = (*arguments, 0, 0)[:2]
    data, value, at = {0: number, 4: architecture, 16: first, 24: second}, 0, 0
    while True:
        line = lines[8 * at : 8 * at + 8]
        code, yes, no, k = int.from_bytes(line[:2], "little"), line[2], line[3], int.from_bytes(line[4:], "little")
        at += 1
        if code == 0x06:
            return {0x7FFF0000: "allow", 0x80000000: "kill", 0x00050001: "EPERM", 0x00050026: "ENOSYS"}[k]
        if code == 0x20:
            value = data[k]
        elif code == 0x54:
            value &= k
        else:
            at += yes if {0x15: value == k, 0x35: value >= k}[code] else no


@pytest.mark.parametrize("machine", harness.MACHINES)
def test_the_filter_decides_as_it_should(machine):
    lines, (here, column) = harness.system_call_filter(machine), harness.MACHINES[machine]
    for numbers in harness.FORBIDDEN.values():
        if (number := numbers[column]) is not None:
            assert decide(lines, number, here) == "EPERM"
    clone, read = harness.CLONE[column], (0, 63)[column]
    assert decide(lines, clone, here, 17) == decide(lines, clone, here, 0x10000000) == "EPERM"
    assert decide(lines, clone, here, 0x10900) == "EPERM", "a thread with files of its own"
    assert decide(lines, clone, here, 0x3D0F00) == decide(lines, read, here) == "allow", "threads, and the rest"
    limits = harness.PRLIMIT[column]
    assert decide(lines, limits, here, 0) == "allow" and decide(lines, limits, here, 1) == "EPERM"
    commands = harness.FCNTL[column]
    assert {decide(lines, commands, here, 5, command) for command in harness.LOCKS} == {"EPERM"}
    assert {decide(lines, commands, here, 6, command) for command in (0, 1, 2, 3, 4, 1030, 1031)} == {"allow"}
    assert decide(lines, 435, here) == decide(lines, 425, here) == "ENOSYS", "clone3 and io_uring_setup"
    assert decide(lines, 0x40000000, here) == decide(lines, read, 0x40000003) == "kill", "x32 and i386"


KEPT_BY_THE_KERNEL = (  # and counted for nobody whom a limit here is about
    "setxattr lsetxattr fsetxattr vmsplice splice tee sendfile sendmsg sendmmsg setsockopt timer_create seccomp prctl"
    " memfd_create shmget semget msgget mq_open inotify_init inotify_init1 add_key keyctl io_setup userfaultfd bpf"
    " perf_event_open bind connect"
)


@needs_sandbox
def test_every_call_of_the_list_is_refused_and_so_is_every_new_one():
    assert set(KEPT_BY_THE_KERNEL.split()) <= harness.FORBIDDEN.keys()
    _, column = harness.MACHINES[os.uname().machine]
    listed = {name: numbers[column] for name, numbers in harness.FORBIDDEN.items() if numbers[column] is not None}
    new = {str(number): number for number in range(harness.NEWEST, 512)}  # memfd_secret is 447, setxattrat 463
    program = (
        "import ctypes, json\nlibc = ctypes.CDLL(None, use_errno=True)\ndone = {}\n"
        f"for name, number in {listed | new}.items():\n"
        "    done[name] = ctypes.get_errno() if libc.syscall(number, -1, -1, -1, -1, -1, -1) == -1 else 0\n"
        "print(json.dumps(done))"
    )
    (outcome,) = execute(program, "", [""], Limits())
    assert json.loads(outcome.output) == dict.fromkeys(listed, errno.EPERM) | dict.fromkeys(new, errno.ENOSYS)


@needs_sandbox
def test_files_are_copied_all_the_same():
    program = (
        "import shutil, tempfile\nwith tempfile.NamedTemporaryFile() as file:\n    file.write(b'7')\n"
        "    file.flush()\n    print(open(shutil.copy(file.name, '/tmp/copy')).read())"
    )
    assert execute(program, "", [""], Limits())[0].output == "7\n", "without sendfile, which shutil tries first"


@needs_sandbox
@pytest.mark.parametrize("name", ["reading home", "environment variables", "writing outside", "memory file", "exec"])
def test_the_attacks_would_succeed_without_a_sandbox(name, host):
    program = ATTACKS[name][0].format(**host)
    if name == "writing outside":
        program = re.sub(r"'/x'.*?executable", "", program, flags=re.DOTALL)  # the marker alone
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert "ESCAPED" in done.stdout or done.stdout.strip() == "9"
    Path(str(host["marker"])).unlink(missing_ok=True)


# -- forgery -----------------------------------------------------------------------------------------------------------

FORGERIES = {
    "frames on every file": (
        "import os\nframe = b''.join(len(p).to_bytes(4, 'big') + p for p in (b'exit', b'0', b'8642', b'', b'8642'))\n"
        "for file in range(64):\n    try: os.write(file, frame)\n    except OSError: pass"
    ),
    "patched exits": "import os, sys\nsys.exit = os._exit = exit = lambda *code: None\nraise SystemExit(0)",
    "early exit": "import os\nos._exit(0)",
    "wrong exit": "print(8642, flush=True)\nimport os\nos._exit(1)",
    "frames of the harness": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    for value in (*frame.f_locals.values(),"
        " *frame.f_globals.values()):\n        if str(4321 * 2) in str(value): print(8642)\n    frame = frame.f_back"
    ),
    "all objects": (
        "import gc\nfor each in gc.get_objects():\n    if isinstance(each, (dict, list, tuple)):\n"
        "        for value in (each.values() if isinstance(each, dict) else each):\n"
        '            if isinstance(value, (str, bytes)) and str(value).strip("b\'") == str(4321 * 2):\n'
        "                print(8642)"
    ),
    "killed": "import os\nos.kill(os.getpid(), 9)",
}


@needs_sandbox
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_result_is_no_result(name):
    (outcome,) = execute(FORGERIES[name], "", ["7"], Limits())
    assert outcome.status != "ok" or outcome.output.strip() != "8642"


@needs_sandbox
@pytest.mark.skipif(ctypes.CDLL(None).syscall(444, None, 0, 1) < 1, reason="this Linux has no Landlock")
def test_proc_cannot_be_read():
    """It names the folders of the host that are bound, which may lie in a home."""
    program = (
        "import os\nfor path in ('self/mountinfo', 'self/mounts', '1/mountinfo', 'thread-self/mountinfo',\n"
        "             'self/maps', 'self/mountstats', 'cpuinfo', 'self'):\n"
        "    where = f'/proc/{path}'\n"
        "    for way in (lambda: os.open(where, os.O_RDONLY),\n"
        "                lambda: os.open(os.path.basename(where), os.O_RDONLY,\n"
        "                                dir_fd=os.open(os.path.dirname(where), os.O_PATH))):\n"
        "        try: way()\n        except PermissionError: pass\n        else: print('ESCAPED', path)\n"
        "print(open('/dev/stdin').read(), os.path.isdir('/usr/lib'), len(os.listdir('/tmp')))"
    )
    assert execute(program, "", ["5"], Limits()) == [TestOutcome("ok", "5 True 0\n", "")]


@needs_sandbox
def test_inputs_of_later_tests_are_not_there_yet():
    """What a program finds in its memory, page by page: a write of a page that is not there fails, and does no harm."""
    program = (
        "import ctypes, os, re\nlibc, found = ctypes.CDLL(None), False\nreader, writer = os.pipe()\n"
        "libc.sbrk.restype = ctypes.c_void_p\n"
        "for near in (id(object()), id(bytearray(9000)), libc.sbrk(0)):\n"
        "    for page in range(near // 4096 * 4096 - 2**24, near + 2**24, 4096):\n"
        "        if libc.write(writer, ctypes.c_void_p(page), 4096) == 4096:\n"
        "            found |= bool(re.search(b'LATE[R]-INPUT', os.read(reader, 4096)))\nprint(found)"
    )
    outcomes = execute(program, "", ["FIRST", "LATER-INPUT", "x"], Limits(seconds=20, total_seconds=40))
    assert [outcome.output.strip() for outcome in outcomes][:2] == ["False", "True"], "and one's own input is found"


@needs_sandbox
def test_a_program_that_spoils_its_files_spoils_no_later_test():
    program = (
        "import os\nprint(int(open('/dev/stdin').read()) * 2, flush=True)\nos.ftruncate(0, 0)\nos.closerange(0, 64)"
    )
    outcomes = execute(program, "", ["1", "2", "3"], Limits())
    assert [outcome.output for outcome in outcomes] == ["2\n", "4\n", "6\n"]


# -- what must work ----------------------------------------------------------------------------------------------------


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("print(sum(map(int, input().split())))", "3"),
        ("import sys\nprint(sum(int(x) for x in sys.stdin.read().split()))", "3"),
        ("import sys\ninput = sys.stdin.buffer.readline\nprint(input().decode().strip())", "1 2"),
        ("if __name__ == '__main__':\n    print(open(0).read().strip())", "1 2"),
        (
            "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
            "def f(n): return n and 1 + f(n - 1)\n"
            "thread = threading.Thread(target=lambda: print(f(50_000)))\nthread.start()\nthread.join()",
            "50000",
        ),
        ("import asyncio\nasync def f(): print(5)\nasyncio.run(f())", "5"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(3).x)", "3"),
        ("import collections, heapq, itertools, math, re, decimal, random, bisect, functools\nexit(print(1))", "1"),
        ("import atexit\natexit.register(print, 8)", "8"),
        ("print('é → 字')", "é → 字"),
    ],
)
def test_usual_programs_run(program, output):
    (outcome,) = execute(program, "", ["1 2\n"], Limits())
    assert (outcome.status, outcome.output.strip()) == ("ok", output), outcome


@needs_sandbox
def test_functions_are_called_with_their_arguments():
    assert execute("def f(a, b): return a + b, {1: None}", "f", ["[1, 2]"], Limits())[0].output == '[3, {"1": null}]'
    method = "class Solution:\n    def f(self, a: List[int]) -> int:\n        print('noise')\n        return max(a)"
    assert execute(method, "f", ["[[1, 5]]"], Limits())[0] == TestOutcome("ok", "5", "")
    assert "AttributeError" in execute("def g(): pass", "f", ["[]"], Limits())[0].error
    assert "TypeError" in execute("def f(): return f", "f", ["[]"], Limits())[0].error


@needs_sandbox
def test_errors_name_the_programs_line():
    (outcome,) = execute("x = 1\ndef f():\n    return 1 / 0\nf()", "", [""], Limits())
    assert outcome == TestOutcome("error", "", "line 3: ZeroDivisionError: division by zero")
    assert execute("x = 1\nif", "", ["", ""], Limits()) == [
        TestOutcome("syntax", "", "line 2: SyntaxError: invalid syntax")
    ]


@needs_sandbox
def test_no_program_that_runs_passes_for_one_that_does_not_compile():
    assert execute("import os\nos._exit(3)", "", ["", ""], Limits()) == [TestOutcome("error", "", "exit code 3")] * 2
    forged = (
        "import os\nfor file in range(3, 64):\n    try: os.write(file, b'!')\n    except OSError: pass\nos._exit(1)"
    )
    assert execute(forged, "", [""], Limits())[0].status == "error"


# -- who may not, and who may ------------------------------------------------------------------------------------------


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The sandbox is looked for again, before and after."""
    for each in (sandbox.require, sandbox.command):
        each.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for each in (sandbox.require, sandbox.command):
        each.cache_clear()


def test_without_bubblewrap_the_environment_is_refused(anew):
    anew.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"apt install bubblewrap.*no `bwrap` on the path"):
        make("deep_coder")


def test_on_other_systems_too(anew):
    anew.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"needs Linux .*apt install bubblewrap"):
        make("deep_coder")


def test_without_user_namespaces_it_is_refused_in_one_paragraph(anew, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    anew.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"No permissions to create .*unprivileged_userns_clone.*seccomp=unconfined"
    ) as told:
        make("deep_coder")
    assert "\n" not in str(told.value)


@needs_sandbox
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a Python that every user can read")
def test_ordinary_users_have_the_same_sandbox():
    folder = Path("/var/tmp") / f"deep_coder_{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        for name in ("sandbox.py", "harness.py"):
            shutil.copy(Path(sandbox.__file__).parent / name, folder)
        program = (
            "from sandbox import *\nrequire()\nprint(execute('import os; print(os.getuid())', '', [''], Limits()))\n"
            "print(execute('import os; os.fork()', '', [''], Limits()))"
        )
        done = subprocess.run(
            ["/usr/bin/python3", "-c", program],
            cwd=folder, user=65534, group=65534, extra_groups=[], env={"PATH": os.environ["PATH"]},
            capture_output=True, text=True,
        )  # fmt: skip
        assert "65534" in done.stdout and "PermissionError" in done.stdout, done.stderr
    finally:
        shutil.rmtree(folder)


@needs_sandbox
def test_submissions_run_side_by_side():
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: execute(f"print({n})", "", [""], Limits())[0].output, range(16)))
    assert found == [f"{n}\n" for n in range(16)]
