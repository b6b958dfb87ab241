"""Checks of computation: torch, the CPU's precisions and threads, and accelerators."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from etude.tools.doctor.finding import GIB, Finding, fail, ok, warn
from etude.tools.doctor.machine import AGAIN, cores, describe_busy

DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Files of an installed NVIDIA driver."""
MAX_SHARE_OF_OTHERS = 0.5
"""The largest share of a device's memory that other processes may use without a warning."""


class TorchProbe:
    """A process that loads torch and tests it, while the other checks run."""

    def __init__(self, process: subprocess.Popen[bytes], answer: Path, errors: Path) -> None:
        self._process = process
        self._answer = answer
        self._errors = errors

    def findings(self, timeout_s: float) -> Iterator[Finding]:
        """Yield its findings. A crash, or no reply within the timeout, is a finding too."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if busy := describe_busy():
                yield warn("torch", f"Torch did not list its devices within {timeout_s:g} s. {busy}", AGAIN)
                return
            yield fail(
                "torch",
                f"Torch did not list its devices within {timeout_s:g} s: it hangs, or the driver does.",
                "Check if `nvidia-smi` responds. If it hangs, restart the machine.",
            )
            return
        if status != 0 or not self._answer.exists():
            lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
            reason = f"ended by signal {-status}" if status < 0 else f"it said: {lines[-1]}"
            remedy = "Reinstall it in this environment: `pip install --force-reinstall torch`."
            yield fail("torch", f"Torch cannot be used ({reason}).", remedy)
            return
        report = json.loads(self._answer.read_text(encoding="utf-8"))
        yield from interpret_probe(report, any(path.exists() for path in DRIVER), cores())


@contextmanager
def start_probe() -> Iterator[TorchProbe]:
    """Start the process, and kill it at the end of the block."""
    with TemporaryDirectory() as scratch:
        answer, errors = Path(scratch, "answer.json"), Path(scratch, "errors")
        with errors.open("wb") as log:
            command = [sys.executable, "-P", "-m", "etude.tools.doctor.probe", str(answer)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                yield TorchProbe(process, answer, errors)
            finally:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # a process that waits inside a driver cannot be killed
                    process.wait(5)


def interpret_probe(report: Mapping[str, Any], driver: bool, cores_available: int) -> Iterator[Finding]:
    """Yield the findings of a probe's report. driver: an NVIDIA driver is installed."""
    built = f"CUDA {report['cuda']}" if report["cuda"] else f"ROCm {report['hip']}" if report["hip"] else "CPUs only"
    yield ok("torch", f"{report['torch']}, built for {built}")
    yield from _devices(report, driver)
    if report["kernels"]:
        yield _kernels(report["kernels"])
    yield _precision(report)
    yield _batch_invariance(report["company"])
    yield _threads(report["threads"], cores_available)


def _devices(report: Mapping[str, Any], driver: bool) -> Iterator[Finding]:
    for number, gpu in enumerate(report["gpus"]):
        name = f"{gpu['name']}, {gpu['free'] / GIB:.0f} GiB free of {gpu['total'] / GIB:.0f}"
        if not _has_kernels(gpu["capability"], report["kernels_for"]):
            what = f"{name}: this torch has no kernels for it, only for {', '.join(report['kernels_for'])}."
            yield fail("device", what, "Install a torch that is built for this device: see pytorch.org.")
        elif gpu["free"] < (1 - MAX_SHARE_OF_OTHERS) * gpu["total"]:
            yield warn("device", f"{name}.", f"Other processes use it: `nvidia-smi` lists them (device {number}).")
        else:
            yield ok("device", name)
    if report["gpus"]:
        return
    if report["mps"]:
        yield ok("device", "Apple GPU, memory shared with the CPU")
    elif driver and not report["cuda"]:
        what = "An NVIDIA driver is installed, and this torch is built for CPUs only."
        yield warn("device", what, "Install a torch that is built for CUDA: see pytorch.org.")
    elif driver:
        reason = report["said"] or "it gives no reason"
        what = f"An NVIDIA driver is installed; this torch, built for CUDA {report['cuda']}, finds no device: {reason}"
        remedy = (
            "Update an old driver, or install a torch that is built for its CUDA. In a container: `docker run --gpus "
            "all`. CUDA_VISIBLE_DEVICES must not be empty."
        )
        yield fail("device", what, remedy)
    else:
        yield ok("device", "no accelerator: runs compute on the CPU")


def _has_kernels(capability: list[int], kernels_for: list[str]) -> bool:
    """Return True if a torch build has kernels for a device: its own, of a lower minor version, or PTX for a JIT.

    Names of other vendors (`gfx90a`) do not tell; torch would not have found the device without kernels.
    """
    if not all(name.startswith(("sm_", "compute_")) for name in kernels_for):
        return True
    major, minor = capability
    for name in kernels_for:
        kind, _, number = name.rstrip("af").partition("_")
        high, low = int(number[:-1]), int(number[-1])
        if (high == major and low <= minor) or (kind == "compute" and (high, low) <= (major, minor)):
            return True
    return not kernels_for


def _kernels(report: Mapping[str, Any]) -> Finding:
    """Report the Triton kernels that decode steps use on a GPU; see `etude.models.kernels.probe`."""
    if report["complete"]:
        return ok("kernels", report["line"].removesuffix("."))
    remedy = (
        "Decode steps are slower without them. Triton comes with torch's CUDA builds, and compiles with gcc and "
        "Python's headers: `apt install gcc python3-dev`."
    )
    return warn("kernels", report["line"], remedy)


def _precision(report: Mapping[str, Any]) -> Finding:
    """Report the precision that runs compute in by default; see `choose_precision`."""
    if report["gpus"]:
        return ok("precision", "runs compute in bf16, as on every GPU")
    speedup = report["bf16_speedup"]
    chosen = "bf16" if speedup > 1 else "fp32"
    return ok("precision", f"runs compute in {chosen}: the CPU is {speedup:.2f} times as fast in bf16 as in fp32")


def _batch_invariance(variance: str) -> Finding:
    """Report if an answer in float32 is independent of its batch on this CPU; see `batch_invariance`."""
    if variance == "matters":
        what = "In fp32 the last bits of an answer depend on the rest of its batch: a resumed run is not bit-identical."
        remedy = (
            "If that matters, give `threads=1`, or set MKL_CBWR=AVX2 or the slower COMPATIBLE, and run `etude doctor` "
            "again (OMP_NUM_THREADS=1 makes it use one thread)."
        )
        return warn("exactness", what, remedy)
    slower = "; matrix products use slower shapes for it" if variance == "other form" else ""
    return ok("exactness", f"in fp32 an answer does not depend on the rest of its batch{slower}")


def _threads(threads: int, cores_available: int) -> Finding:
    if threads > cores_available:
        return warn(
            "threads",
            f"Torch computes with {threads} threads on {cores_available} cores, which is slow.",
            f"Give runs `threads={cores_available}`, or set OMP_NUM_THREADS={cores_available}.",
        )
    return ok("threads", f"torch computes with {threads} of {cores_available} cores; `threads` sets how many")
