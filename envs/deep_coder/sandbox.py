"""How is a program run that is not trusted?  In bubblewrap, with namespaces of its own, or not at all.

A program sees a read-only Python and its libraries, an empty /tmp of bounded size, its own /proc and a minimal /dev: no
network, no home, no project, no environment variables, no other process. harness.py, which runs inside, sets the limits
of each test; here the clock of the whole submission is kept, and its end is the end of every process inside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

TMP_BYTES = 16 << 20  # of the private /tmp
HARNESS = Path(__file__).parent / "harness.py"
INSTALL = (
    "deep_coder runs programs that a model wrote, and does so in a sandbox or not at all: it needs Linux on x86_64 or"
    " aarch64 with bubblewrap 0.8 or later (`apt install bubblewrap` or `dnf install bubblewrap`; the package"
    " bubblewrap on PyPI is something else) and user namespaces."
)
FORBIDDEN = (
    " Where user namespaces are forbidden there is no weaker mode. On a machine, `sysctl"
    " kernel.unprivileged_userns_clone=1` (Debian) or `sysctl kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu,"
    " or an AppArmor profile for bwrap) allows them; in Docker, `--security-opt seccomp=unconfined --security-opt"
    " apparmor=unconfined --security-opt systempaths=unconfined` does."
)


class SandboxError(RuntimeError):
    """The sandbox did not start: the machine's fault, not the program's."""


@dataclass(frozen=True)
class Limits:
    """What a program may use: Limits(seconds=2.0, total_seconds=5.0) are those of a test and of all together."""

    seconds: float = 2.0
    total_seconds: float = 5.0
    memory_mb: int = 1024  # of address space
    output_bytes: int = 1 << 20  # of output, and of any other file


@dataclass(frozen=True)
class TestOutcome:
    """What came of one test: Outcome("ok", "3\\n", "").

    `status` is ok, error, syntax (it does not compile), time, threads, memory, files or crash. `output` is what it
    printed, or the value that the function returned as JSON; `error` its last words.
    """

    status: str
    output: str
    error: str


@lru_cache(maxsize=1)
def require() -> None:
    """Raise ValueError, one paragraph, where there is no sandbox; a process tries once."""
    if not sys.platform.startswith("linux") or os.uname().machine not in ("x86_64", "aarch64"):
        raise ValueError(INSTALL)
    if shutil.which("bwrap") is None:
        raise ValueError(f"{INSTALL} There is no `bwrap` on the path.")
    try:
        (outcome,) = execute("print(input())", "", ["works"], Limits())
    except (SandboxError, OSError) as error:
        raise ValueError(f"{INSTALL} Here it does not start ({error}).{FORBIDDEN}") from None
    if outcome != TestOutcome("ok", "works\n", ""):
        raise ValueError(f"{INSTALL} Here a program does not run in it ({outcome.status}: {outcome.error}).{FORBIDDEN}")


@lru_cache(maxsize=1)
def slots() -> threading.BoundedSemaphore:
    """Return a semaphore for one submission per core: more would only take each other's seconds."""
    return threading.BoundedSemaphore(len(os.sched_getaffinity(0)))


@lru_cache(maxsize=1)
def command() -> tuple[str, ...]:
    """Return what follows the harness. Python is bound from where it is, even from a home, to /python."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    system = sys.base_prefix == "/usr"
    home = "/usr" if system else "/python"
    words = ["--unshare-all", "--unshare-user", "--disable-userns"]
    words += ["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--setenv", "LD_LIBRARY_PATH"]
    words += [f"{home}/lib", "--setenv", "HOME", "/tmp", "--ro-bind", "/usr/lib", "/usr/lib"]
    words += ["--ro-bind-try", "/usr/lib64", "/usr/lib64", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in ("/lib", "/lib64"):
        link = os.path.islink(folder)
        words += ["--symlink", os.readlink(folder), folder] if link else ["--ro-bind-try", folder, folder]
    if not system:
        words += ["--ro-bind", f"{sys.base_prefix}/lib", "/python/lib"]
    if Path(sys.base_prefix, "lib", version, "site-packages").is_dir():
        packages = f"{home}/lib/{version}/site-packages"
        words += ["--tmpfs", packages, "--remount-ro", packages]
    words += ["--ro-bind", f"{sys.base_prefix}/bin/{version}", f"{home}/bin/{version}"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for each in os.scandir("/proc"):  # whose owner is root, who may have started us
        if each.is_file(follow_symlinks=False) and not each.stat().st_mode & 0o004:
            words += ["--ro-bind", "/dev/null", each.path]
    words += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--remount-ro", "/dev"]
    words += ["--remount-ro", "/proc", "--remount-ro", "/"]  # else root's own settings in /proc/sys could be written
    words += ["--chdir", "/tmp", f"{home}/bin/{version}", "-I", "-S", "-B", "-X", "utf8", "/harness.py"]
    return tuple(words)


def execute(source: str, function: str, inputs: Sequence[str], limits: Limits) -> list[TestOutcome]:
    """Return all outcomes of `run`."""
    return list(run_in_sandbox(source, function, inputs, limits))


def run_in_sandbox(
    source: str, function: str, inputs: Sequence[str], limits: Limits
) -> Generator[TestOutcome, None, None]:
    """Run a program on inputs, in order, in one sandbox; fewer outcomes than inputs where it was stopped before.

    `function` names the function to call, each input then being its arguments as JSON; without one an input is stdin.
    It is stopped when it does not compile, takes too long or crashes: further tests would go no better. An input is
    given when its outcome is asked for, and the clock runs on in between.
    """
    arguments = (str(limits.seconds), str(limits.memory_mb << 20), str(limits.output_bytes))
    with (
        slots(),
        HARNESS.open("rb") as harness,  # copied from here: of a file that is bound, /proc would tell the path
        subprocess.Popen(
            [shutil.which("bwrap") or "bwrap", "--file", str(harness.fileno()), "/harness.py", *command(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(harness.fileno(),),
            env={},  # process 1 inside could be asked for it
            bufsize=0,
        ) as process,
    ):
        clock = threading.Timer(limits.total_seconds, process.kill)
        clock.start()
        try:
            yield from _converse(process, source, function, inputs)
        finally:
            clock.cancel()
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the harness go, so that bubblewrap takes its exit code and leaves no zombie; kills what does not go."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()


def _converse(
    process: subprocess.Popen[bytes], source: str, function: str, inputs: Sequence[str]
) -> Iterator[TestOutcome]:
    try:
        if _read(process, 5) != b"ready":
            raise EOFError
    except EOFError:
        process.kill()
        assert process.stderr is not None
        stderr = process.stderr.read().decode("utf-8", "replace").strip()
        raise SandboxError(stderr[-500:] or "it did not answer in time") from None
    try:
        _write(process, source)
        _write(process, function)
        for each in inputs:
            _write(process, each)
            yield (outcome := _outcome([_read(process, 1 << 24) for _ in range(5)], bool(function)))
            if outcome.status not in ("ok", "error"):
                return
    except (EOFError, BrokenPipeError):  # the clock struck
        yield TestOutcome("time", "", "time is up")


def _outcome(parts: list[bytes], called: bool) -> TestOutcome:
    """Return the harness' answer in our words."""
    ended, number = parts[0].decode(), int(parts[1])
    output, stderr, report = (part.decode("utf-8", "replace") for part in parts[2:])
    last = (stderr.strip().splitlines() or [""])[-1]
    if ended == "syntax":
        return TestOutcome("syntax", output, report)
    if ended == "exit" and number == 0:
        return TestOutcome("ok", report if called else output, last)
    if ended == "time":
        return TestOutcome("time", output, "time is up")
    if ended in ("threads", "files", "memory"):
        return TestOutcome(ended, output, f"too {'much' if ended == 'memory' else 'many'} {ended}")
    if ended == "signal":
        return TestOutcome("crash", output, f"killed by signal {number}")
    return TestOutcome("error", output, report or last or f"exit code {number}")


def _write(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stdin is not None
    content = text.encode("utf-8", "surrogatepass")
    message = memoryview(len(content).to_bytes(4, "big") + content)
    while message:
        message = message[process.stdin.write(message) or 0 :]


def _read(process: subprocess.Popen[bytes], most: int) -> bytes:
    """Return one part of an answer; EOFError where the sandbox ended, or says what the harness never would."""
    size = int.from_bytes(_exactly(process, 4), "big")
    if size > most:
        raise EOFError
    return _exactly(process, size)


def _exactly(process: subprocess.Popen[bytes], size: int) -> bytes:
    assert process.stdout is not None
    data = bytearray()
    while len(data) < size:
        more = process.stdout.read(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
