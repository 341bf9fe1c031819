"""What runs inside of the sandbox?  The tests of one program, one child process a test, under limits set by the kernel.

Started by sandbox.py as process 1 of its own namespaces, with the limits as arguments. It reads the program, the name
of the function to call (empty: the program reads stdin) and then one input after the other, and answers each with what
came of it. Expected outputs never come here, nor an input before its turn: a program that forges its results forges
nothing but its own output, and there is nothing to find. A child can neither start a process nor open a socket but a
pair that is connected to itself, which asyncio needs (seccomp), and its output goes to memory of bounded size. What it
makes the kernel keep counts for no limit on its address space, so calls that make it keep much are forbidden. Imports
are few: they take time at every start.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import resource
import select
import sys
import time

THREADS = 64  # of one program
FILES = 64  # open at once
SIGNALS = 64  # queued at once: the kernel keeps each, and counts them for the user, not for the program
TABLES = 16 << 20  # bytes of page tables beyond those of dense memory: a page alone in its GiB takes two more of them
INODES = 2000  # in /tmp, about: mount options bound its bytes alone, and a name in it takes a KB that they do not see
ANNOTATIONS = ("Any", "Dict", "List", "Optional", "Set", "Tuple")  # that functions in data sets use without import
TAIL = 600  # characters of an error
PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 22, 2
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column of FORBIDDEN
NEWEST = 424  # Linux 5.1: from here on numbers are the same everywhere, and libc does without these calls
LANDLOCK = 444  # Linux 5.13: this call makes a ruleset, the next adds a rule to it, and the one behind that restricts
READ_FILE, READ_DIR = 1 << 2, 1 << 3
CLONE, PRLIMIT = (56, 220), (302, 261)
CLONE_SHARED = 0x10000 | 0x400  # a thread, with the files of the others: else each had `FILES` of its own
FCNTL = (72, 25)
LOCKS = (6, 7, 37, 38, 1024, 1026)  # commands of fcntl: locks, leases and watches on files, which may be the host's
FORBIDDEN = {  # numbers on x86_64 and aarch64; None where the call is not there
    "socket": (41, 198),
    "bind": (49, 200),  # a socket of a pair that has a name can be filled by many, which then end; as the next
    "connect": (42, 203),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "personality": (135, 92),
    "acct": (163, 89),
    "swapon": (167, 224),
    "quotactl": (179, 60),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "modify_ldt": (154, None),
    "memfd_create": (319, 279),  # memory that RLIMIT_AS does not see, as all up to `prctl`
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "setxattr": (188, 5),  # of the files for output no file system counts attributes, as the next two
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "vmsplice": (278, 75),  # a byte in a pipe keeps a whole huge page, as the next three do with a file's
    "splice": (275, 76),
    "tee": (276, 77),
    "sendfile": (40, 71),
    "sendmsg": (46, 211),  # files on their way are not open ones, as the next
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),  # larger buffers
    "timer_create": (222, 107),
    "seccomp": (317, 277),  # filters, of each thread its own; as the next
    "prctl": (157, 167),
    "inotify_init": (253, None),  # what all processes of a user share the count of, as the next two
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "sync": (162, 81),  # what other processes wait for, as the next two
    "syncfs": (306, 267),
    "flock": (73, 32),
    "setpriority": (141, 140),  # with which it could slow down the harness, as the next five
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}


def system_call_filter(machine: str) -> bytes:
    """Return the seccomp program: forbidden calls fail with EPERM, new ones with ENOSYS, foreign call tables kill."""
    architecture, column = MACHINES[machine]
    numbers = [each[column] for each in FORBIDDEN.values() if each[column] is not None]
    load, equal, at_least, only, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026

    def line(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        order = "little"
        return code.to_bytes(2, order) + bytes([yes, no]) + k.to_bytes(4, order)

    lines = [line(load, 4), line(equal, architecture, 1, 0), line(give, kill), line(load, 0)]
    lines += [line(at_least, 0x40000000, 0, 1), line(give, kill)]  # the x32 table
    lines += [line(at_least, NEWEST, 0, 1), line(give, enosys)]
    for number in numbers:
        lines += [line(equal, number, 0, 1), line(give, eperm)]
    for number, bits, value in (  # allowed for a thread, and for the process itself
        (CLONE[column], CLONE_SHARED, CLONE_SHARED),
        (PRLIMIT[column], 0xFFFFFFFF, 0),
    ):
        lines += [line(equal, number, 0, 5), line(load, 16), line(only, bits), line(equal, value, 0, 1)]
        lines += [line(give, allow), line(give, eperm)]
    lines += [line(equal, FCNTL[column], 0, 1 + 2 * len(LOCKS)), line(load, 24)]
    for command in LOCKS:
        lines += [line(equal, command, 0, 1), line(give, eperm)]
    return b"".join([*lines, line(give, allow)])


class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def all_but_proc(libc: ctypes.CDLL) -> int | None:
    """Return a Landlock ruleset that lets a process read everything but /proc; None where Linux has no Landlock.

    /proc says where on the host the folders lie that are bound here, and what the whole machine is doing.
    """
    handled = (READ_FILE | READ_DIR).to_bytes(8, sys.byteorder)
    rules = libc.syscall(LANDLOCK, handled, len(handled), 0)
    if rules < 0:
        return None
    for name in os.listdir("/"):
        if name != "proc":
            place = os.open(f"/{name}", os.O_PATH)
            allowed = READ_FILE | READ_DIR if os.path.isdir(f"/{name}") else READ_FILE
            rule = allowed.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
            if libc.syscall(LANDLOCK + 1, rules, 1, rule, 0):
                os._exit(125)
            os.close(place)
    return rules


def read_exactly(size: int) -> bytes:
    """Return so many bytes of the next request; exit at the end of the requests."""
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def next_request() -> bytes:
    return read_exactly(int.from_bytes(read_exactly(4), "big"))


def reply(*parts: bytes) -> None:
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    while message:
        message = message[os.write(1, message) :]


def memory_file(content: bytes = b"") -> int:
    """Return a file in memory that holds `content`, read from its beginning."""
    file = os.memfd_create("test")
    while content:
        content = content[os.write(file, content) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def told_of(pid: int) -> tuple[int, int]:
    """Return how many threads a process has, and bytes of page tables."""
    with open(f"/proc/{pid}/status", "rb") as file:
        status = file.read()
    threads = int(status.partition(b"\nThreads:")[2].split(None, 1)[0])
    others = [] if b"\nVmPTE:" in status else os.listdir(f"/proc/{pid}/task")  # the first ended, and tells of no memory
    while others and b"\nVmPTE:" not in status:
        try:
            with open(f"/proc/{pid}/task/{others.pop()}/status", "rb") as file:
                status = file.read()
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
    return threads, int((status.partition(b"\nVmPTE:")[2].split(None, 1) or [b"0"])[0]) << 10


def wait_for_child(pid: int, seconds: float, memory_bytes: int) -> tuple[str, int]:
    """Return how a child ended: ("exit", code), ("signal", number), or what stopped it: "time", "threads", ..."""
    deadline, handle = time.monotonic() + seconds, os.pidfd_open(pid)
    poll, stopped = select.poll(), ""
    poll.register(handle, select.POLLIN)
    while not poll.poll(20):
        threads, tables = told_of(pid)
        disk = os.statvfs("/tmp")
        stopped = "time" if time.monotonic() > deadline else "threads" if threads > THREADS else ""
        if tables > TABLES + memory_bytes // 256:
            stopped = "memory"
        if disk.f_files - disk.f_ffree > INODES:
            stopped = "files"
        if stopped:
            os.kill(pid, 9)
            break
    os.close(handle)
    status = os.waitpid(pid, 0)[1]
    if stopped:
        return stopped, 0
    return ("signal", os.WTERMSIG(status)) if os.WIFSIGNALED(status) else ("exit", os.WEXITSTATUS(status))


def limit(seconds: float, memory_bytes: int, output_bytes: int) -> None:
    """Return what the kernel counts for this process; soft and hard alike, so that they cannot be raised again."""
    for what, most in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_NPROC, THREADS),
        (resource.RLIMIT_SIGPENDING, SIGNALS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def error_line(error: BaseException) -> bytes:
    """Return `line 3: ValueError: ...` with the line of the program."""
    line, trace = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "program":
            line = trace.tb_lineno
        trace = trace.tb_next
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return (f"line {line}: {text}" if line else text)[:TAIL].encode("utf-8", "backslashreplace")


def run_program(source: bytes, function: str, data: bytes) -> None:
    """Run the program in this process; the function's value, or the error, goes to file 3.

    Text in file 4 means that it does not compile; it is closed before the program runs.
    """
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    sys.argv = ["program"]
    builtins.exit = builtins.quit = sys.exit
    main = sys.modules["__main__"] = type(sys)("__main__")
    if function:
        import json
        import typing

        main.__dict__.update({name: getattr(typing, name) for name in ANNOTATIONS})
    try:
        code = compile(source.decode("utf-8", "surrogatepass"), "program", "exec", dont_inherit=True)
    except BaseException as error:
        os.write(3, error_line(error))
        os.write(4, b"!")
        os._exit(1)
    os.close(4)
    try:
        exec(code, main.__dict__)
        if not function:
            return
        holder = main if hasattr(main, function) or not hasattr(main, "Solution") else main.Solution()
        value = getattr(holder, function)(*json.loads(data))
        os.write(3, json.dumps(value, default=list).encode())
    except SystemExit as end:
        if end.code not in (None, 0):
            os.write(3, error_line(end))
        raise
    except BaseException as error:
        os.write(3, error_line(error))
        try:
            sys.stdout.flush()
        finally:
            os._exit(1)


def main() -> None:
    seconds, memory_bytes, output_bytes = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    lines = system_call_filter(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    program, prctl = Filter(len(lines) // 8, lines), libc.prctl
    libc.signal(2, None)  # SIGINT: the default of process 1 is to hear none from inside; Python would end
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # or a child could write to our memory by /proc/1/mem
    rules = all_but_proc(libc)
    reply(b"ready")
    source, function = next_request(), next_request().decode()
    if function:  # imported here, it is there in every child
        import json  # noqa: F401
        import typing  # noqa: F401
    while True:
        data = next_request()
        files = [memory_file(b"" if function else data), memory_file(), memory_file(), memory_file()]
        compiled, not_compiled = os.pipe()
        pid = os.fork()
        if pid == 0:
            break
        os.close(not_compiled)
        ended, number = wait_for_child(pid, seconds, memory_bytes)
        if os.read(compiled, 1):
            ended = "syntax"
        texts = [os.pread(file, output_bytes, 0) for file in files[1:]]
        reply(ended.encode(), str(number).encode(), texts[0], texts[1][-TAIL:], texts[2])
        for file in (*files, compiled):
            os.close(file)
    if rules is not None and libc.syscall(LANDLOCK + 2, rules, 0):
        os._exit(125)
    # Ascending and each above its place, so that none is overwritten before it is moved.
    for place, file in enumerate((*files, not_compiled)):
        os.dup2(file, place)
    os.closerange(5, 256)
    limit(seconds, memory_bytes, output_bytes)
    if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        os._exit(125)
    run_program(source, function, data)


if __name__ == "__main__":
    main()
