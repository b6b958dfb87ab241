"""The doctor finds problems, names their remedies, and survives the checks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.tools.doctor import Finding, is_healthy, machine, packages, run_checks
from etude.tools.doctor.accelerator import TorchProbe, interpret_probe, start_probe
from etude.tools.doctor.finding import GIB, ok

Captured = pytest.CaptureFixture[str]
PROBED: dict[str, Any] = {
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "hip": None,
    "kernels_for": ["sm_80", "sm_90a", "compute_120"],
    "said": "",
    "gpus": [{"name": "H100", "capability": [9, 0], "free": 70 * GIB, "total": 80 * GIB}],
    "kernels": {"line": "Triton kernels in decode steps: attention.", "complete": True},
    "mps": False,
    "threads": 4,
    "company": "usual form",
    "bf16_speedup": 4.0,
}


def time_out(*_: Any) -> None:
    raise TimeoutError("timed out")


class HangingProcess:
    """A process that does not end."""

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("probe", timeout)


def named(findings: list[Finding], name: str) -> Finding:
    """Return the finding of this name."""
    (finding,) = [finding_of_check for finding_of_check in findings if finding_of_check.name == name]
    return finding


def fake(directory: Path, **versions: str) -> None:
    """Install fake packages with these versions."""
    for name, version in versions.items():
        about = directory / f"{name}-{version}.dist-info" / "METADATA"
        about.parent.mkdir(parents=True)
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_every_check_of_a_machine_runs(tmp_path: Path, capsys: Captured) -> None:
    code = main(["doctor", str(tmp_path)])
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.startswith(("ok ", "warn", "fail"))]
    names = {line[6:].partition("  ")[0] for line in lines}
    assert names >= {
        *(
            "python",
            "command",
            "packages",
            "trackers",
            "environments",
            "torch",
            "device",
            "exactness",
            "threads",
            "place",
        ),
        *("disk", "disk speed", "load", "memory", "cache", "limits", "clock", "loopback", "compiler"),
    }
    assert code == (1 if any(line.startswith("fail") for line in lines) else 0)
    assert f"runs can be written to {tmp_path}" in output and not list(tmp_path.iterdir())
    counted = f"{sum(line.startswith('ok') for line in lines)} ok, "
    assert counted in output.splitlines()[-1]


def test_damaged_parts_are_found(tmp_path: Path) -> None:
    """Everything is damaged at once, in a real process: no problem hides another."""
    fake(tmp_path, pydantic="1.0", wandb="0.1", jinja2="99.0")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "etude").write_text("#!/bin/sh\n")
    (tmp_path / "etude").chmod(0o755)
    (tmp_path / "cache").touch()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "etude", "doctor", "/proc", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    report = json.loads(done.stdout)
    findings = [Finding(**finding) for finding in report["findings"]]
    assert report["healthy"] is False and all(bool(finding.remedy) == (finding.grade != "ok") for finding in findings)
    bad = {finding.name: finding for finding in findings if finding.grade != "ok" and finding.name != "packages"}
    assert {name: bad[name].grade for name in ("torch", "place", "disk", "command", "cache", "trackers", "tested")} == {
        **dict.fromkeys(("torch", "place", "disk"), "fail"),
        **dict.fromkeys(("command", "cache", "trackers", "tested"), "warn"),
    }
    assert "it said: ImportError: libcudart.so.13: cannot open" in bad["torch"].what
    assert bad["place"].what == "No run can be written to /proc: No such file or directory."
    assert f"another `etude`: {tmp_path / 'etude'}, not the one" in bad["command"].what
    assert "wandb 0.1 installed, and Etude needs wandb>=0.31" in bad["trackers"].what
    assert "pydantic 1.0 (tested: " in bad["tested"].what
    wants = [finding for finding in findings if finding.name == "packages" and finding.grade == "fail"]
    assert [finding.what for finding in wants] == ["etude needs pydantic>=2.9, and 1.0 is installed."]
    assert wants[0].remedy == "`pip install 'pydantic>=2.9'` fixes it."
    assert named(findings, "loopback").grade == "ok"


def test_a_torch_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    began = time.monotonic()
    findings = run_checks(tmp_path, timeout_s=0.5)
    assert "Torch did not list its devices within 0.5 s" in named(findings, "torch").what
    assert time.monotonic() - began < 20
    with start_probe() as probe:
        process = probe._process
    assert process.poll() is not None


def test_a_busy_machine_is_not_called_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (100.0 * machine.cores(), 0.0, 0.0))
    monkeypatch.setattr("socket.create_connection", time_out)
    (torch,) = TorchProbe(HangingProcess(), tmp_path, tmp_path).findings(0.5)  # type: ignore[arg-type]
    (load,), (loopback,) = machine.load(), machine.loopback()
    for finding in (torch, load, loopback):
        assert finding.grade == "warn" and "The machine is busy: its load was" in finding.what, finding
    assert "run `etude doctor` again" in torch.remedy.lower() and "run `etude doctor` again" in loopback.remedy.lower()


def test_an_idle_machine_is_not_called_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.0, 0.0))
    (torch,) = TorchProbe(HangingProcess(), tmp_path, tmp_path).findings(0.5)  # type: ignore[arg-type]
    (load,) = machine.load()
    assert torch.grade == "fail" and load.grade == "ok" and load.what.startswith("0.5 on ")


def test_a_killed_torch_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 11)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with start_probe() as probe:
        assert "ended by signal 11" in named(list(probe.findings(30)), "torch").what


@pytest.mark.parametrize(
    ("change", "driver", "grade", "says"),
    [
        ({}, True, "ok", "H100, 70 GiB free of 80"),
        ({"gpus": [PROBED["gpus"][0] | {"free": GIB}]}, True, "warn", "H100, 1 GiB free of 80."),
        ({"gpus": [PROBED["gpus"][0] | {"capability": [8, 6]}]}, True, "ok", "H100"),
        ({"gpus": [PROBED["gpus"][0] | {"capability": [13, 0]}]}, True, "ok", "H100"),
        ({"gpus": [PROBED["gpus"][0] | {"capability": [7, 5]}]}, True, "fail", "no kernels for it, only for sm_80"),
        ({"kernels_for": ["gfx90a", "gfx942"]}, False, "ok", "H100"),
        ({"gpus": [], "said": "The driver is too old."}, True, "fail", "finds no device: The driver is too old."),
        ({"gpus": [], "cuda": None}, True, "warn", "and this torch is built for CPUs only"),
        ({"gpus": []}, False, "ok", "no accelerator: runs compute on the CPU"),
        ({"gpus": [], "cuda": None, "mps": True}, False, "ok", "Apple GPU"),
    ],
)
def test_a_device_is_graded(change: dict[str, Any], driver: bool, grade: str, says: str) -> None:
    finding = named(list(interpret_probe(PROBED | change, driver, cores_available=4)), "device")
    assert finding.grade == grade and says in finding.what


@pytest.mark.parametrize(
    ("change", "name", "grade", "remedy"),
    [
        ({"threads": 5}, "threads", "warn", "`threads=4`, or set OMP_NUM_THREADS=4"),
        ({"threads": 1}, "threads", "ok", ""),
        ({"company": "matters"}, "exactness", "warn", "give `threads=1`, or set MKL_CBWR=AVX2"),
        ({"hip": "7.1", "cuda": None}, "torch", "ok", ""),
        ({}, "kernels", "ok", ""),
        ({"kernels": PROBED["kernels"] | {"complete": False}}, "kernels", "warn", "`apt install gcc python3-dev`"),
    ],
)
def test_computations_are_graded(change: dict[str, Any], name: str, grade: str, remedy: str) -> None:
    finding = named(list(interpret_probe(PROBED | change, True, cores_available=4)), name)
    assert finding.grade == grade and remedy in finding.remedy


@pytest.mark.parametrize(("company", "slower"), [("usual form", False), ("other form", True)])
def test_batch_invariance_is_reported_with_its_cost(company: str, slower: bool) -> None:
    finding = named(list(interpret_probe(PROBED | {"company": company}, True, cores_available=4)), "exactness")
    assert finding.grade == "ok" and "does not depend on the rest of its batch" in finding.what
    assert ("slower" in finding.what) == slower


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bf16_speedup": 0.08}, "runs compute in bf16, as on every GPU"),
        ({"gpus": [], "bf16_speedup": 0.08}, "runs compute in fp32: the CPU is 0.08 times as fast in bf16 as in fp32"),
        ({"gpus": []}, "runs compute in bf16: the CPU is 4.00 times as fast"),
    ],
)
def test_the_default_precision_of_the_device_of_runs_is_reported(change: dict[str, Any], says: str) -> None:
    finding = named(list(interpret_probe(PROBED | change, True, cores_available=4)), "precision")
    assert finding.grade == "ok" and says in finding.what


@pytest.mark.parametrize(
    ("finding", "grade", "says"),
    [
        (machine.grade_memory(64 * GIB, 40 * GIB), "ok", "40.0 GiB free of 64.0: room to train up to 2.4 billion"),
        (machine.grade_memory(4 * GIB, 2 * GIB), "warn", "room to train up to 119 million parameters"),
        (machine.grade_memory(4 * GIB, GIB // 2), "fail", "0.5 GiB free of 4.0"),
        (machine.grade_space(Path("runs"), 100 * GIB), "ok", "100.0 GiB free in runs"),
        (machine.grade_space(Path("runs"), 5 * GIB), "warn", "5.0 GiB free in runs"),
        (machine.grade_space(Path("runs"), GIB // 2), "fail", "0.5 GiB free in runs"),
        (machine.grade_speed(1.2e9), "ok", "1,200 MB/s to disk: 10 s for each billion parameters saved"),
        (machine.grade_speed(1e7), "warn", "10 MB/s to disk: 1,200 s for each billion"),
    ],
)
def test_memory_and_disk_are_graded(finding: Finding, grade: str, says: str) -> None:
    assert finding.grade == grade and says in finding.what and bool(finding.remedy) == (grade != "ok")


def in_process(check: str, *before: str) -> list[Finding]:
    """Run a check in another process, started with this code; return its findings."""
    code = (
        "import json, dataclasses; from etude.tools.doctor import machine;"
        f"print(json.dumps([dataclasses.asdict(each) for each in machine.{check}]))"
    )
    done = subprocess.run([*before, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Finding(**fields) for fields in json.loads(done.stdout)]


def test_limits_of_a_process_are_reported() -> None:
    findings = in_process("limits()", "sh", "-c", 'ulimit -n 200; ulimit -f 2048; exec "$0" "$@"')
    assert [finding.grade for finding in findings] == ["warn", "warn"]
    assert findings[0].what == "A process may open 200 files." and "ulimit -n 1024" in findings[0].remedy
    assert "more than 1,048,576 bytes in a file" in findings[1].what and "ulimit -f unlimited" in findings[1].remedy


def test_an_unreachable_machine_is_reported() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("the kernel grants no network namespace here")
    (finding,) = in_process("loopback()", "unshare", "-rn")
    assert finding.grade == "fail" and finding.what.startswith("No process can be reached at 127.0.0.1: ")


def test_an_unresolvable_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    (finding,) = machine.loopback()
    assert finding.grade == "warn" and "add the line `127.0.0.1 no-such-host.invalid`" in finding.remedy


def test_cores_are_those_of_the_processs_affinity() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});" if sys.platform == "linux" else ""
    code += "from etude.tools.doctor.machine import cores; print(cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == ("1" if sys.platform == "linux" else str(os.cpu_count()))


def test_small_or_absent_shared_memory_is_reported(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("shared memory is a folder on Linux alone")
    (absent,) = machine.shared_memory(tmp_path / "absent")
    (small,) = machine.shared_memory(Path("/sys"))
    assert absent.grade == small.grade == "warn"
    assert "mount a tmpfs" in absent.remedy and "--shm-size" in small.remedy


def test_a_wrong_clock_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("time.time", lambda: 0.0)
    (finding,) = machine.clock()
    assert finding.grade == "warn" and "before Etude was installed" in finding.what
    monkeypatch.setattr("time.time", lambda: now - 60)
    (finding,) = machine.place(tmp_path)
    assert finding.grade == "warn" and "s ahead of the clock" in finding.what


def test_a_missing_tool_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (compiler,), (command,) = machine.compiler(), packages.command()
    assert compiler.grade == command.grade == "warn"
    assert "no C++ compiler" in compiler.what and "The shell finds no `etude`" in command.what


def test_environments_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environments = tmp_path / "etude" / "environments"
    (environments / "torn-abc").mkdir(parents=True)
    (environments / "vllm-cpu-def").mkdir()
    (environments / "vllm-cpu-def" / "whole.json").touch()
    (environments / "vllm-cpu-def.lock").touch()
    torn, complete = packages.environments()
    assert torn.grade == "warn" and f"Incomplete: {environments / 'torn-abc'}." == torn.what
    assert complete.grade == "ok" and "for inference servers: vllm-cpu (" in complete.what


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path, capsys: Captured) -> None:
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "There is no directory" in capsys.readouterr().err


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> Iterator[Finding]:
        yield ok("first", "seen")
        raise KeyError("MemAvailable")

    monkeypatch.setattr("etude.tools.doctor.PACKAGE_CHECKS", (broken,))
    monkeypatch.setattr("etude.tools.doctor.MACHINE_CHECKS", ())
    findings = run_checks(tmp_path, timeout_s=0)
    assert findings[0] == ok("first", "seen") and findings[1].what == ("This check failed: KeyError: 'MemAvailable'.")
    assert findings[1].name == "broken" and not is_healthy(findings)
