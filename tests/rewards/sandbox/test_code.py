"""Programs as rewards: right programs pass, and programs that try to pass without being right do not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from etude.errors import ConfigError, DataError
from etude.observe import configure_logging
from etude.records import Outcome, Task
from etude.rewards import Code, Judge, JudgingConfig, Verdict
from etude.rewards.sandbox import code as code_reward
from etude.rewards.sandbox import sandbox as sandbox_module
from etude.rewards.sandbox.code import extract_code
from etude.rewards.sandbox.probe import probe_protections
from tests.rewards.tasks import task
from tests.sweeps import later

SUM = {"inputs": ["1 2\n", "3 4\n", "10 20\n"], "outputs": ["3\n", "7\n", "30\n"]}
ADD = ["assert add(1, 2) == 3", "assert add(3, 4) == 7", "assert add('secret', 'ly') == 'secretly'"]
RIGHT = "def add(a, b):\n    return a + b\n"


def scored(code: str, truth: Any, **options: Any) -> float:
    """Return the reward of a program, judged as in a run."""
    return judged(code, truth, **options).reward


def judged(code: str, truth: Any, **options: Any) -> Verdict:
    with Judge(Code(**options)) as judge:
        return asyncio.run(judge.judge(task(truth), f"So:\n```python\n{code}\n```\n"))


# -- finding the program ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("First\n```python\nprint(1)\n```\nbetter\n```py\nprint(2)\n```\nDone.", "print(2)\n"),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```Python3 title='a'\nprint(1)\n```", "print(1)\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')\n"),
        ("cut off\n```python\nprint(1)\nprint(", "print(1)\nprint("),
        ("```cpp\nint x;\n```\n```python\nprint(1)\n```", "print(1)\n"),
        ("```python\n```", ""),
        ("", ""),
    ],
)
def test_the_last_block_of_python_is_the_program(answer: str, code: str) -> None:
    assert extract_code(answer) == code


@pytest.mark.parametrize("unit", ["`", "```", "```a", "``` ", "```a\n", " ", "~~~\n", "\n```", "a`"])
def test_long_answers_are_read_at_once(unit: str) -> None:
    began = time.process_time()
    for head, tail in (("", ""), ("```", "x"), ("\n", "\n")):
        extract_code(head + unit * (100_000 // len(unit)) + tail)
    assert time.process_time() - began < 3


# -- programs that pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "share", "all_of_them"),
    later(
        [
            ("print(sum(map(int, input().split())))", 1, 1),
            ("a, b = map(int, input().split())\nprint(3 if a == 1 else 0)", 1 / 3, 0),
            ("print(3)", 1 / 3, 0),
            ("print(", 0, 0),
            ("raise SystemExit", 0, 0),
            ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0, 0),
        ],
        every=2,
    ),
)
def test_scripts_are_tested_by_their_output(code: str, share: float, all_of_them: float) -> None:
    assert scored(code, SUM, score="share") == pytest.approx(share)
    assert scored(code, json.dumps(SUM)) == all_of_them


def test_functions_are_tested_by_their_results() -> None:
    truth = {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [3, "7"]}
    assert scored(RIGHT, truth) == 1
    assert scored("class Solution:\n    def add(self, a, b):\n        return [a + b][0]", truth) == 1
    assert scored("def add(a, b): return 3", truth, score="share") == 0.5
    assert scored("def add(a, b): raise ValueError", truth) == scored("", truth) == 0


def test_statements_are_tests() -> None:
    assert scored(RIGHT, ADD) == scored(RIGHT, "\n".join(ADD)) == scored(RIGHT, {"test_list": ADD}) == 1
    assert scored("def add(a, b): return 7", ADD, score="share") == pytest.approx(1 / 3)
    assert scored("def ad(a, b): return a + b", ADD, score="share") == 0


HUMAN_EVAL = """
METADATA = {"author": "x"}

def check(candidate):
    assert candidate(1, 2) == 3
    for n in range(20):
        assert candidate(n, -n) == 0
"""


def test_a_check_of_the_entry_point_is_one_test() -> None:
    truth = {"test": HUMAN_EVAL, "entry_point": "add"}
    assert scored(RIGHT, truth) == 1 and scored("def add(a, b): return 3", truth) == 0
    row = Task(0, {"prompt": "…", "ground_truth": None, "test": HUMAN_EVAL, "entry_point": "add"})
    with Judge(Code()) as judge:
        assert asyncio.run(judge.judge(row, RIGHT)).reward == 1


# -- programs that do not pass ----------------------------------------------------------------------------------------

LIAR = """
class Liar(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    __hash__ = int.__hash__
class Other:
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __abs__ = __sub__
"""

CHEATS = {
    "ends before the tests": "import os\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "ends in the function": "import os\ndef add(a, b): os._exit(0)",
    "exits in the function": "def add(a, b): raise SystemExit(0)",
    "equals everything": LIAR + "def add(a, b): return Liar(0)",
    "another that equals everything": LIAR + "def add(a, b): return Other()",
    "a class that equals everything": "class M(type):\n    def __eq__(s, o): return True\n"
    "class add(metaclass=M):\n    def __new__(c, *a): return c",
    "replaces what asserts raise": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
    "def add(a, b): raise AssertionError",
    "replaces builtins": "import builtins\nbuiltins.isinstance = builtins.all = lambda *a: True\n"
    "builtins.compile = lambda *a, **k: None\nbuiltins.exec = lambda *a, **k: None\ndef add(a, b): return 0",
    "replaces names of the tests": "__builtins__['AssertionError'] = Exception\ndef add(a, b): return 0",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef add(a, b): return 0",
    "prints that it passed": "print('{\"passed\": true}')\nprint('OK 3 passed')\ndef add(a, b): print('passed')",
    "writes to every descriptor": "import os\nfor n in range(64):\n    try: os.write(n, b'{\"passed\": true}\\n' * 3)\n"
    "    except OSError: pass\ndef add(a, b): return 0",
    "answers nonsense": "import os\nos.write(4, b'\\xff' * 100)\ndef add(a, b): return 0",
    "answers too deeply": "import os\nt = b'[' * 100000 + b']' * 100000\n"
    "os.write(4, len(t).to_bytes(4, 'big') + t)\ndef add(a, b): return 0",
    "kills its neighbors": "import os, signal\nfor p in [os.getppid(), *range(2, 20)]:\n"
    "    try: p == os.getpid() or os.kill(p, signal.SIGKILL)\n    except OSError: pass\ndef add(a, b): return 0",
    "interrupts its neighbors": "import os, signal\ndef add(a, b):\n    for p in [1, os.getppid(), *range(2, 20)]:\n"
    "        try: p == os.getpid() or os.kill(p, signal.SIGINT)\n        except OSError: pass\n    return 0",
    "raises what is expected nowhere": "def add(a, b): raise AssertionError",
    "returns itself": "def add(a, b): return add",
    "returns what has no end": "def add(a, b):\n    l = []\n    l.append(l)\n    return l",
}


@pytest.mark.parametrize("code", later(CHEATS.values()), ids=CHEATS)
def test_a_program_does_not_pass_by_a_trick(code: str) -> None:
    assert scored(code, ADD, score="share") == 0


SEARCH = """
import gc, os, re, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield repr((frame.f_locals, frame.f_code.co_consts))
        frame = frame.f_back
    for held in gc.get_objects():
        try: yield repr(held)[:100000]
        except Exception: pass
    for top in (".", "/tmp", "/proc/self", "/proc/%d" % os.getppid()):
        for place, _, names in os.walk(top):
            for name in names:
                try: yield open(os.path.join(place, name), errors="replace").read(100000)
                except OSError: pass
    for n in range(5, 64):
        try: os.set_blocking(n, False); yield repr(os.read(n, 100000))
        except OSError: pass
def found(pattern):
    return next((match[0] for text in texts() if (match := re.search(pattern, text))), "nothing")
"""
"""A program that searches all that it can read for a word that begins in a known way."""


@pytest.mark.slow
def test_a_program_does_not_find_its_tests() -> None:
    truth = ["assert word(1) == 'sesame-4711'", "assert word(2) == 'sesame-4711'"]
    assert scored(SEARCH + "def word(n): return found('sesame-[0-9]+')", truth, score="share") == 0
    assert scored(SEARCH + "held = 'sesame-' + str(4711)\ndef word(n): return found('sesame-[0-9]+')", truth) == 1


@pytest.mark.slow
def test_a_program_does_not_find_its_expected_outputs() -> None:
    truth = {"inputs": ["say", "say"], "outputs": ["sesame-4711", "sesame-4711"]}
    assert scored(SEARCH + "print(found('sesame-[0-9]+'))", truth, score="share") == 0
    assert scored(SEARCH + "held = 'sesame-' + str(4711)\nprint(found('sesame-[0-9]+'))", truth) == 1


def test_a_test_that_catches_everything_does_not_pass_a_program_that_ended() -> None:
    truth = "try:\n    quick()\nexcept:\n    pass\nassert True"
    assert scored("def quick(): raise ValueError", truth) == 1
    assert scored("import os\ndef quick(): os._exit(0)", truth) == 0


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_time_limits_hold_for_each_test_and_in_total() -> None:
    began = time.monotonic()
    loops = "def add(a, b):\n    while a == 3: pass\n    return a + b"
    assert scored(loops, ADD, score="share", timeout=1.0, total_timeout=3.0) == pytest.approx(1 / 3)
    sleeps = "import time\na, b = map(int, input().split())\ntime.sleep(60 * (a == 3))\nprint(a + b)"
    assert scored(sleeps, SUM, score="share", timeout=1.0, total_timeout=5.0) == pytest.approx(2 / 3)
    assert scored(sleeps, SUM, score="share", timeout=2.0, total_timeout=1.0) == pytest.approx(1 / 3)
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_waiting_for_a_slot_does_not_count_as_running_time() -> None:
    """Four programs of a second each, one at a time, within a limit that none alone exceeds."""

    async def four(judge: Judge) -> Sequence[Verdict]:
        code = "import time; time.sleep(1); print(input())"
        truth = {"inputs": ["x"], "outputs": ["x"]}
        return await asyncio.gather(*(judge.judge(task(truth, ordinal=n), code) for n in range(4)))

    with Judge(Code(max_concurrency=1, timeout=2.5, total_timeout=2.9), JudgingConfig(timeout=3.0)) as judge:
        verdicts = asyncio.run(four(judge))
    assert [verdict.reward for verdict in verdicts] == [1.0] * 4
    assert all(1 <= verdict.seconds < 2.9 for verdict in verdicts)


@pytest.mark.slow
def test_limits_follow_the_options() -> None:
    code = """
import resource, threading, time
def count():
    n = 0
    try:
        while n < 64:
            threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
            n += 1
    except RuntimeError: pass
    return n
names = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE")
print(*[resource.getrlimit(getattr(resource, name))[0] for name in names])
"""
    options = {"cpu": 3, "memory_mb": 512, "disk_mb": 2}
    assert scored(code, {"inputs": [""], "outputs": [f"3 {512 << 20} {2 << 20}"]}, **options) == 1
    if "processes" in probe_protections():
        few = {"inputs": [""], "outputs": ["True"]}
        assert (
            scored(
                f"{code}\nprint(count() < 10)",
                {**few, "outputs": [f"3 {512 << 20} {2 << 20}\nTrue"]},
                **options,
                max_processes=4,
            )
            == 1
        )
    assert scored("print('x' * 2048)", {"inputs": [""], "outputs": ["x" * 2048]}, output_kb=1) == 0
    assert scored("import numpy; print(1)", {"inputs": [""], "outputs": ["1"]}, packages=True) == 1


def test_a_sandbox_that_is_lost_is_a_failure_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with Judge(Code()) as judge:
        monkeypatch.setattr(sandbox_module, "_BOOT", "raise SystemExit('no room')")
        verdict = asyncio.run(judge.judge(task(SUM), "print(3)"))
    assert (
        verdict.outcome is Outcome.FAILED and "the sandbox of its program was lost: it ended: no room" in verdict.error
    )


@pytest.mark.parametrize(
    ("tests", "message"),
    later(
        [
            ("class Node:\n    pass\nassert add(Node(), 1) is None", "a `Node` cannot be sent to the program"),
            ("assert add((n for n in range(2)), 1) is None", "a `generator` cannot be sent to the program"),
            ("try:\n    add(object(), 1)\nexcept BaseException:\n    pass\nassert True", "`object` cannot be sent to"),
            (
                "assert np.allclose(add(1, 2), 3)",
                "they import a module that is not in the sandbox (No module named 'numpy'",
            ),
            (
                "import pytest\nassert add(1, 2) == 3",
                "they import a module that is not in the sandbox (No module named 'pytest'; see `reward.packages`)",
            ),
        ],
        every=3,
    ),
)
def test_tests_that_cannot_run_against_a_program_are_a_failure_and_no_zero(tests: str, message: str) -> None:
    verdict = judged(RIGHT, tests)
    assert verdict.outcome is Outcome.FAILED and "its tests cannot run against a program: " in verdict.error
    assert message in verdict.error
    if "np." not in tests:
        assert scored("def add(a, b): return 0", f"assert add(1, 2) == 3\n{tests}") == 0, "it is wrong before that"


@pytest.mark.parametrize(
    ("code", "tests"),
    later(
        [
            ("def f(n): return (i for i in range(n))", "assert f(3)[:2] == [0, 1]"),
            ("def f(n): return iter([])", "assert not f(1)[1:]"),
            ("def f(n): return {1: 2}\ndef g(n): return 3", "assert g(f(1).keys()) == 3"),
            ("def f(n): return {1: 2}\ndef g(n): return 3", "held = f(1)\nassert g(held.keys()) == 3"),
            ("f = {1: 2}\ndef g(n): return 3", "assert g(f.keys()) == 3"),
            (
                "def f(n): return {1: 2}\ndef g(n): return 3",
                "try:\n    assert g(f(1).keys())\nexcept BaseException: pass",
            ),
            ("def f(n): return n({1: 2})\ndef g(n): return 3", "assert f(lambda n: g(n.items())) == 3"),
        ],
        every=4,
    ),
)
def test_no_reply_of_a_program_makes_its_tests_invalid(code: str, tests: str) -> None:
    """Python itself fails the first of these; the others return objects of the program."""
    assert scored(code, tests) == 0


FABS = "def check(candidate):\n    for x in (1.0, 2.0):\n        assert math.fabs(candidate(x) - x * 7) < 1e-4"
SPOOFS = {
    "math": ({"test": FABS, "entry_point": "f"}, "class math:\n    fabs = staticmethod(lambda d: 0.0)\n"),
    "isclose": ("assert math.isclose(f(2), 14.0)", "class math:\n    isclose = staticmethod(lambda *each: True)\n"),
    "a module in a module": ("assert os.path.basename(f(2) and 'a/b') == 'b' and f(2) == 14", "class os: pass\n"),
}


@pytest.mark.parametrize(("tests", "spoof"), later(SPOOFS.values()), ids=SPOOFS)
def test_a_module_that_tests_do_not_import_is_not_the_programs(tests: Any, spoof: str) -> None:
    assert scored(spoof + "def f(x): return 0", tests) == 0
    assert scored(spoof + "def f(x): return x * 7", tests) == scored("def f(x): return x * 7", tests) == 1


@pytest.mark.slow
def test_a_package_that_tests_do_not_import_is_not_the_programs() -> None:
    spoof = "class np:\n    allclose = staticmethod(lambda *each: True)\n"
    options = {"packages": True, "memory_mb": 2048}
    assert scored(spoof + "def f(x): return 0", "assert np.allclose(f(2), [1.5, 2.5])", **options) == 0
    assert scored("def f(x): return [1.5, x + 0.5]", "assert np.allclose(f(2), [1.5, 2.5])", **options) == 1


def test_a_class_that_has_the_name_of_a_module_is_the_programs() -> None:
    code = "class calendar:\n    def add(n): return n + 1\nclass queue: pass"
    assert scored(code, "assert calendar.add(1) == 2") == 1 and scored(code, "assert queue() and not queue.x") == 0
    verdict = judged(code, "assert math.floor(1.5) == 1")
    assert "they use no name that a program could define" in verdict.error


@pytest.mark.slow
def test_numpy_reads_no_memory_that_a_program_names() -> None:
    code = (
        "class A:\n    __array_interface__ = {'shape': (1,), 'typestr': '<f8', 'version': 3, 'data': (id(1), True)}\n"
    )
    tests = "import numpy\nassert numpy.asarray(f(1)).dtype == object"
    assert scored(code + "def f(x): return A()", tests, packages=True, memory_mb=2048) == 1


@pytest.mark.slow
def test_the_processor_time_of_a_function_is_that_of_all_its_tests() -> None:
    code = (
        "import time\ndef f(n):\n    until = time.process_time() + 0.4\n    while time.process_time() < until: pass\n"
    )
    tests = {"fn_name": "f", "inputs": [[0], [1], [2]], "outputs": [0, 1, 2]}
    assert scored(code + "    return n", tests, cpu=1) == 1


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (None, "there are none"),
        ([], "there are none"),
        (7, "is of type int"),
        ({"answer": 1}, "there are none in the fields answer"),
        ({"inputs": ["1"], "outputs": []}, "there are 1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "must be lists, and not empty"),
        ({"fn_name": "f", "inputs": [3], "outputs": [3]}, "the arguments of a call are a list"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "give the name as `fn_name`"),
        ("assert f(", "they are not Python"),
        ("assert 1 == 1", "they use no name that a program could define"),
    ],
)
def test_a_task_without_tests_is_refused(truth: Any, message: str) -> None:
    with pytest.raises(
        DataError, match=r"The tests of task 7 of sums cannot be used: .*`data\.columns\.answer=…`"
    ) as e:
        Code().check(task(truth))
    assert message in str(e.value)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"may take 40 seconds .*`reward\.total_timeout`.* is 30\. Set `judging\.timeout` above 40"
    ):
        Judge(Code(total_timeout=40.0))
    with pytest.raises(
        ConfigError, match=r"`judging\.workers=2` judges in several processes.*`reward\.max_concurrency`"
    ):
        Judge(Code(), JudgingConfig(workers=2))
    for wrong in (
        {"timeout": 0},
        {"cpu": 0},
        {"memory_mb": 1},
        {"max_concurrency": 0},
        {"require": ["peace"]},
        {"score": "some"},
    ):
        with pytest.raises(ConfigError):
            Code(**wrong)  # type: ignore[arg-type]


def test_the_protections_of_a_machine_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    with Judge(Code(require=tuple(probe_protections()))):
        message = capsys.readouterr().err
    assert message.count("The programs of answers") == 1
    if len(probe_protections()) == 3:
        assert "reach no network" in message and "WARNING" not in message


def test_a_required_protection_that_is_missing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("info")
    monkeypatch.setattr(
        code_reward, "probe_protections", lambda: probe_protections(("namespaces", "landlock", "filter", "stranger"))
    )
    with pytest.raises(ConfigError, match=r"`require` asks for network, and .* sockets of others: it grants"):
        Judge(Code(require=("network",)))
    with Judge(Code()):
        message = capsys.readouterr().err
    assert "WARNING" in message and "they can reach the network or sockets of others; read and write files" in message
