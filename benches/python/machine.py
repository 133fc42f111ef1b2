"""What was measured, and where."""

import os
import pathlib
import platform
import re
import subprocess

import nanoarrow
import pyarrow as pa

# When the report begins: measuring is a load itself.
LOAD = os.getloadavg()


def _run(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _field(path, name):
    """The first value of a field in a file of `name: value` lines."""
    try:
        found = re.search(rf"^{name}\s*:\s*(.+)$", pathlib.Path(path).read_text(), re.M)
    except OSError:
        return ""
    return found[1] if found else ""


def cpu():
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def cores():
    return len(os.sched_getaffinity(0))


def kind():
    """A short name for file names: the CPU's model and the number of cores."""
    name = re.sub(r"\((R|TM)\)|@.*|\bCPU\b|\b(Processor|\d+-Core)\b", " ", cpu(), flags=re.I)
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join([*words, str(cores()), "cores"])


def commit():
    changed = " with changes" if _run("git", "status", "--porcelain") else ""
    return (_run("git", "rev-parse", "--short=12", "HEAD") or "unknown") + changed


def _locked(package):
    lock = pathlib.Path("Cargo.lock").read_text()
    return ", ".join(re.findall(rf'^name = "{package}"\nversion = "(.+)"$', lock, re.M))


def _huge_pages():
    try:
        text = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return re.search(r"\[(\w+)\]", text)[1]


def _kernel():
    """The version, without what its builder added."""
    return re.match(r"[\d.]*\d", platform.release())[0]


def facts(memcpy):
    """Lines of `name | value`. `memcpy`: GB/s by bytes copied."""
    rates = ", ".join(f"{rate:.1f} GB/s at {bytes / 1e6:.3g} MB" for bytes, rate in memcpy.items())
    return [
        ("CPU", f"{cpu()}, {cores()} cores"),
        ("memory", _field("/proc/meminfo", "MemTotal")),
        ("huge pages", _huge_pages()),
        ("load before", "{:.2f}, {:.2f}, {:.2f}".format(*LOAD)),
        ("memcpy, 1 thread, warm", rates),
        ("system", f"{platform.system()} {_kernel()}, {' '.join(platform.libc_ver())}"),
        ("commit", commit()),
        ("rustc", _run("rustc", "--version")),
        ("C++ compiler", _run(os.environ.get("CXX", "c++"), "--version").splitlines()[0]),
        ("arrow-rs", _locked("arrow-array")),
        ("Arrow C++ and pyarrow", pa.__version__),
        ("nanoarrow", nanoarrow.__version__),
        ("Python", platform.python_version()),
        ("valgrind", _run("valgrind", "--version") or "none"),
    ]
