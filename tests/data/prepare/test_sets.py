"""Each set: from raw files as they are published to tasks that the matching reward can judge."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.prepare.maths import extract_last_boxed
from etude.errors import ConfigError, DataError
from etude.rewards import Countdown, Gsm8k, Math
from etude.rewards.countdown import evaluate_expression
from etude.rewards.maths import extract_boxed
from tests.data.prepare.made import GSM8K, MATH, earned, judge, lines, rows, run, table, tasks
from tests.view.pictures import png

# -- mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_gsm8k_is_judged_by_its_own_solutions(form: str, tmp_path: Path) -> None:
    if form == "jsonl":
        lines(tmp_path / "raw" / "train.jsonl", GSM8K)
    else:
        table(tmp_path / "raw" / "main" / "train-00000-of-00001.parquet", GSM8K)
        table(tmp_path / "raw" / "socratic" / "train-00000-of-00001.parquet", GSM8K)  # the same problems again
    done = run("gsm8k", tmp_path / "out", f"raw='{tmp_path / 'raw'}'")
    assert done.counts == {"train": 3}
    assert [task.fields["ground_truth"] for task in tasks(done)] == ["5", "1500", "-7"]
    reward = judge(done)
    assert isinstance(reward, Gsm8k)
    for task, other in zip(tasks(done), GSM8K[1:] + GSM8K[:1], strict=True):
        solution = task.fields["extra_info"]["answer"]  # type: ignore[call-overload,index]
        assert isinstance(solution, str)
        assert earned(reward, task, solution) == 1 and earned(reward, task, other["answer"]) == 0


@pytest.mark.parametrize("form", ["json", "parquet", "jsonl"])
def test_math_is_judged_by_its_own_solutions(form: str, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    if form == "json":
        for number, problem in enumerate(MATH):
            place = raw / "train" / problem["type"].lower() / f"{number}.json"
            place.parent.mkdir(parents=True)
            place.write_text(json.dumps(problem, indent=4))
    elif form == "parquet":
        for problem in MATH:
            table(raw / problem["type"].lower() / "train-00000-of-00001.parquet", [problem])
    else:
        lines(raw / "train.jsonl", MATH)
    done = run("math", tmp_path / "out", f"raw='{raw}'")
    result = {task.fields["extra_info"]["type"]: task for task in tasks(done)}  # type: ignore[call-overload,index]
    assert {kind: task.fields["ground_truth"] for kind, task in result.items()} == {
        "Algebra": "\\frac{5}{6}",
        "Geometry": "12\\pi",
        "Counting": "2",
    }
    levels = {row["extra_info"]["type"]: row["extra_info"]["level"] for row in rows(done)}
    assert levels == {"Algebra": 1, "Geometry": 5, "Counting": None}
    reward = judge(done)
    assert isinstance(reward, Math)
    for kind, answer in {"Algebra": "5/6", "Geometry": "12 \\pi", "Counting": "2"}.items():
        assert earned(reward, result[kind], f"So it is $\\boxed{{{answer}}}$.") == 1
        assert earned(reward, result[kind], "So it is $\\boxed{77}$.") == 0


CLEVR = {"problem": "How many cubes are there?", "solution": "<answer> 3 </answer>"}
GEOMETRY = {"problem": "<image>Find $x$ in <image>.", "answer": "2 \\sqrt { 3 }"}


def test_pictures_are_stored_with_their_rows_and_placed_in_the_prompt(tmp_path: Path) -> None:
    """The same question about another picture is another row; a row without its picture is left out."""
    red, blue = ({"bytes": png(8, 8, colour), "path": "a.png"} for colour in ((200, 0, 0), (0, 0, 200)))
    raw = tmp_path / "raw"
    table(raw / "train-0.parquet", [{**CLEVR, "image": red}, {**CLEVR, "image": blue}, {**CLEVR, "image": red}])
    table(raw / "train-1.parquet", [{**GEOMETRY, "images": [red, blue]}, {**GEOMETRY, "images": [red]}])
    table(raw / "train-2.parquet", [{**CLEVR, "image": {"bytes": None, "path": "a.png"}}])
    done = run("pictures", tmp_path / "out", f"raw='{raw}'")
    assert done.counts == {"train": 3} and sorted(done.skipped.reasons) == [
        "a picture is missing: the file has no bytes of it",
        "the number of `<image>` in the question is not that of its pictures",
        "the same row came before",
    ]
    first, second, third = tasks(done)
    assert [task.fields["ground_truth"] for task in (first, second, third)] == ["3", "3", "2 \\sqrt { 3 }"]
    assert [list(task.images.values()) for task in (first, second, third)] == [
        [red["bytes"]],
        [blue["bytes"]],
        [red["bytes"], blue["bytes"]],
    ]
    prompt: Any = third.fields["prompt"]
    assert [part["type"] for part in prompt[0]["content"]] == ["image_url", "text", "image_url", "text"]
    reward = judge(done)
    assert earned(reward, third, "\\boxed{2\\sqrt{3}}") == 1 and earned(reward, first, "\\boxed{4}") == 0


def test_math_500_has_its_answers_in_a_column(tmp_path: Path) -> None:
    row = {"problem": "1+1?", "solution": "\\boxed{3}", "answer": "2", "subject": "Algebra", "level": 2}
    done = run("math", tmp_path / "out", f"raw='{lines(tmp_path / 'test.jsonl', [row])}'")
    assert done.counts == {"test": 1} and done.command.startswith("etude eval model.path=MODEL data.val=[")
    (result,) = rows(done, "test")
    assert result["reward_model"]["ground_truth"] == "2"
    assert (result["extra_info"]["level"], result["extra_info"]["type"]) == (2, "Algebra")


def test_levels_may_be_chosen(tmp_path: Path) -> None:
    raw = f"raw='{lines(tmp_path / 'train.jsonl', MATH)}'"
    done = run("math", tmp_path / "out", raw, "levels=[4,5]")
    assert [row["extra_info"]["level"] for row in rows(done)] == [5]
    assert done.skipped.reasons == {"its level is none of 4, 5": (2, f"{tmp_path}/train.jsonl, row 0")}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("\\boxed{1} and \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}.", "\\{1, 2\\}"),
        ("\\fbox{3}", "3"),
        ("$\\boxed 4$.", "4"),
        ("\\boxed{ 5 }", "5"),
        ("\\boxed{6", ""),
        ("\\boxed{7} then \\boxed{8", "7"),
        ("none", ""),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box_is_found(text: str, result: str) -> None:
    assert extract_last_boxed(text) == result


@given(st.text("a{}\\ ", max_size=12), st.text("a{}\\ ", max_size=12))
def test_a_box_holds_what_the_reward_reads_in_it(before: str, inside: str) -> None:
    read = extract_boxed(f"{before}\\boxed{{{inside}}}")
    if read:
        assert extract_last_boxed(f"{before}\\boxed{{{inside}}}") == read.strip()


# -- generated problems -----------------------------------------------------------------------------------------------


def key(row: dict[str, Any]) -> tuple[int, ...]:
    """Return a key of a countdown problem, which differs for different problems."""
    truth = row["reward_model"]["ground_truth"]
    return (truth["target"], *sorted(truth["numbers"]))


@given(
    st.lists(st.integers(2, 6), min_size=1, max_size=2, unique=True),
    st.integers(5, 200),
    st.integers(20, 200),
    st.lists(st.sampled_from(["add", "subtract", "multiply", "divide"]), min_size=1, unique=True),
    st.integers(0, 3),
)
@settings(max_examples=10)
def test_countdown_can_be_solved(
    numbers: list[int], largest: int, highest: int, operations: list[str], seed: int
) -> None:
    options = [
        f"numbers={numbers}",
        f"max_number={largest}",
        f"max_target={highest}",
        f"operations=[{','.join(operations)}]",
    ]
    with TemporaryDirectory() as directory:
        try:
            done = run("countdown", Path(directory), *options, f"seed={seed}", "train=6", "test=2")
        except ConfigError as error:
            assert "that differ. Ask for fewer" in str(error)
            return
        reward = judge(done)
        assert isinstance(reward, Countdown)
        for split in done.files:
            for task, row in zip(tasks(done, split), rows(done, split), strict=True):
                target, *given_numbers = key(row)
                assert 1 <= target <= highest and max(given_numbers) <= largest and len(given_numbers) in numbers
                solution = row["extra_info"]["solution"]
                assert earned(reward, task, f"<answer>{solution}</answer>") == 1
                assert earned(reward, task, f"<answer>{solution} + 1</answer>") == 0
                assert {sign for sign in solution if sign in "+-*/"} <= {
                    {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}[name] for name in operations
                }
        both = [key(row) for split in done.files for row in rows(done, split)]
        assert len(set(both)) == len(both) == 8


@pytest.mark.parametrize("name", ["countdown", "arithmetic"])
def test_the_test_split_does_not_depend_on_the_size_of_the_training_split(name: str, tmp_path: Path) -> None:
    few, many = (run(name, tmp_path / str(n), f"train={n}", "test=20") for n in (10, 300))
    assert rows(few, "test") == rows(many, "test") and rows(few) == rows(many)[:10]
    prompts = [json.dumps(row["prompt"]) for split in many.files for row in rows(many, split)]
    assert len(set(prompts)) == len(prompts) == 320
    assert run(name, tmp_path / "alone", "train=5", "test=0").counts == {"train": 5}


@given(
    st.lists(st.sampled_from(["add", "subtract", "multiply"]), min_size=1, unique=True),
    st.integers(2, 5),
    st.integers(2, 6),
)
@settings(max_examples=15)
def test_generated_arithmetic_has_right_answers(operations: list[str], digits: int, terms: int) -> None:
    options = [f"operations=[{','.join(operations)}]", f"digits={digits}", f"terms={terms}", "train=20", "test=0"]
    with TemporaryDirectory() as directory:
        done = run("arithmetic", Path(directory), *options)
        reward = judge(done)
        for task, row in zip(tasks(done), rows(done), strict=True):
            expression = row["prompt"][0]["content"].split("? ")[0].removeprefix("What is ")
            value = evaluate_expression(expression)
            assert value is not None and str(value[0]) == task.fields["ground_truth"]
            assert Counter(value[1].values()).total() and max(map(len, map(str, value[1]))) <= digits
            assert earned(reward, task, f"…\n#### {value[0]}") == 1
            assert earned(reward, task, f"…\n#### {value[0] + 1}") == 0


def test_arithmetic_as_text_is_judged_exactly(tmp_path: Path) -> None:
    done = run("arithmetic", tmp_path, "form=text", "prompt='{question} ='", "train=20", "test=0")
    for task in tasks(done):
        prompt, truth = task.fields["prompt"], task.fields["ground_truth"]
        assert isinstance(prompt, str) and prompt.endswith(" =")
        assert earned(judge(done), task, f" {truth}") == 1 and earned(judge(done), task, f"{truth}0") == 0


def test_more_rows_than_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"asked for 150 and 100 problems.*found 200 that differ\. Ask for fewer"):
        run("arithmetic", tmp_path / "out", "digits=1", "train=150", "test=100")
    assert not (tmp_path / "out").exists()
    assert run("arithmetic", tmp_path / "out", "digits=1", "train=100", "test=100").counts["train"] == 100


# -- instructions -----------------------------------------------------------------------------------------------------

IFEVAL = [
    {
        "key": 1000,
        "prompt": "Write at least 20 words, without commas.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"relation": "at least", "num_words": 20}],
    },
    {
        "key": 1001,
        "prompt": "Answer in lower case.",
        "instruction_id_list": ["change_case:english_lowercase"],
        "kwargs": [{}],
    },
]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_constraints_keep_their_arguments(form: str, tmp_path: Path) -> None:
    """Parquet gives every constraint the keys of all; null keys do not belong to it."""
    write = {"jsonl": lines, "parquet": table}[form]
    done = run("instructions", tmp_path / "out", f"raw='{write(tmp_path / f'ifeval_input_data.{form}', IFEVAL)}'")
    for task, raw in zip(tasks(done), IFEVAL, strict=True):
        truth = task.fields["ground_truth"]
        assert isinstance(truth, str)
        assert json.loads(truth) == {name: raw[name] for name in ("instruction_id_list", "kwargs")}
        assert task.fields["prompt"] == [{"role": "user", "content": raw["prompt"]}]
        assert task.fields["extra_info"]["key"] == str(raw["key"])  # type: ignore[call-overload,index]


def test_constraints_are_judged(tmp_path: Path) -> None:
    done = run("instructions", tmp_path / "out", f"raw='{lines(tmp_path / 'ifeval.jsonl', IFEVAL)}'")
    first, second = tasks(done)
    assert earned(judge(done), first, "word " * 20) == 1 and earned(judge(done), first, "word, " * 20) == 0
    assert earned(judge(done), second, "yes") == 1 and earned(judge(done), second, "Yes") == 0


@pytest.mark.parametrize(
    "change",
    [{"kwargs": [{}]}, {"kwargs": None}, {"instruction_id_list": "a:b"}, {"kwargs": [1, 2]}],
)
def test_constraints_that_do_not_fit_are_reported_with_their_row(change: dict[str, Any], tmp_path: Path) -> None:
    raw = lines(tmp_path / "a.jsonl", [IFEVAL[1], IFEVAL[0] | change])
    with pytest.raises(DataError, match=r"a\.jsonl, row 1 should name its constraints in `instruction_id_list`"):
        run("instructions", tmp_path / "out", f"raw='{raw}'")


# -- preference pairs -------------------------------------------------------------------------------------------------

ASKED = "\n\nHuman: Hi there\n\nAssistant: Hello.\n\nHuman: A joke?\n\nAssistant:"
USER, OTHER = ({"role": "user", "content": text} for text in ("Hi there", "A joke?"))
HELLO, YES, NO = ({"role": "assistant", "content": text} for text in ("Hello.", "Knock, knock.", "No."))
TALK = [USER, HELLO, OTHER]
SHAPES: dict[str, tuple[dict[str, Any], list[dict[str, str]], float | None]] = {
    "hh": ({"chosen": f"{ASKED} Knock, knock.", "rejected": f"{ASKED} No."}, TALK, None),
    "hh-with-prompt": ({"prompt": ASKED, "chosen": " Knock, knock.", "rejected": " No."}, TALK, None),
    "texts": ({"prompt": "A joke?", "chosen": "Knock, knock.", "rejected": "No.", "score_chosen": 9}, [OTHER], 9.0),
    "messages": ({"prompt": TALK, "chosen": [YES], "rejected": [NO]}, TALK, None),
    "messages-without-prompt": ({"chosen": [*TALK, YES], "rejected": [*TALK, NO], "score_chosen": 9.5}, TALK, 9.5),
    "messages-beside-text": ({"prompt": "A joke?", "chosen": [OTHER, YES], "rejected": [OTHER, NO]}, [OTHER], None),
    "answers-beside-text": ({"prompt": "A joke?", "chosen": [YES], "rejected": [NO]}, [OTHER], None),
    "judged": (
        {
            "instruction": "A joke?",
            "completions": [
                {"response": "No.", "overall_score": 2.0},
                {"response": "Knock, knock.", "overall_score": 8.5},
                {"response": "Never.", "overall_score": None},
            ],
        },
        [OTHER],
        8.5,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["jsonl", "parquet", "jsonl.gz"])
def test_every_shape_becomes_a_prompt_and_two_answers(shape: str, form: str, tmp_path: Path) -> None:
    raw, prompt, score = SHAPES[shape]
    if form == "jsonl.gz":
        (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(json.dumps(raw).encode()))
    else:
        {"jsonl": lines, "parquet": table}[form](tmp_path / f"train.{form}", [raw])
    done = run("preferences", tmp_path / "out", f"raw='{tmp_path / f'train.{form}'}'", "source=hh")
    (row,) = rows(done)
    assert (row["prompt"], row["chosen"], row["rejected"]) == (prompt, [YES], [NO])
    assert row["data_source"] == "hh" and row["extra_info"]["score_chosen"] == score
    (task,) = tasks(done)
    assert (task.fields["prompt"], task.fields["chosen"], task.fields["rejected"]) == (prompt, [YES], [NO])
    assert done.command == f"etude dpo model.path=MODEL data.train=[{done.files['train']}]"


def test_a_score_too_large_for_a_float_is_left_out(tmp_path: Path) -> None:
    raw = lines(tmp_path / "a.jsonl", [{**SHAPES["hh"][0], "score_chosen": 10**400, "score_rejected": 1}])
    (row,) = rows(run("preferences", tmp_path / "out", f"raw='{raw}'"))
    assert row["extra_info"]["score_chosen"] is None


def test_text_stays_as_it_is(tmp_path: Path) -> None:
    raw = lines(tmp_path / "a.jsonl", [SHAPES["hh"][0], {"prompt": "Joke:\n", "chosen": " Ha. ", "rejected": " No"}])
    result = rows(run("preferences", tmp_path / "out", f"raw='{raw}'", "form=text"))
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in result] == [
        (ASKED, " Knock, knock.", " No."),
        ("Joke:\n", " Ha. ", " No"),
    ]
    raw = lines(tmp_path / "b.jsonl", [SHAPES["messages"][0]])
    with pytest.raises(DataError, match=r"b\.jsonl, row 0 has messages, which `form=text` cannot keep"):
        run("preferences", tmp_path / "none", f"raw='{raw}'", "form=text")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b "}, "both answers are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "the prompt or an answer is empty"),
        (
            {"chosen": [*TALK, YES], "rejected": [*TALK, YES]},
            "an answer does not begin with a message of the assistant",
        ),
        (
            {"chosen": [USER, OTHER], "rejected": [USER, HELLO]},
            "an answer does not begin with a message of the assistant",
        ),
        ({"chosen": f"{ASKED} a", "rejected": "\n\nHuman: b\n\nAssistant: c"}, "its answers have different prompts"),
        (
            {"prompt": "\n\nHuman: \n\nAssistant:", "chosen": "a", "rejected": "b"},
            "its dialogue does not end at the assistant's turn",
        ),
        (
            {"instruction": "a", "completions": [{"response": "b", "overall_score": 1}] * 2},
            "no two of its answers have different scores",
        ),
    ],
)
def test_a_pair_of_equal_answers_is_left_out(raw: dict[str, Any], why: str, tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"prompt": "x", "chosen": "y", "rejected": "z"}])
    lines(tmp_path / "b.jsonl", [raw])
    done = run("preferences", tmp_path / "out", f"raw='{tmp_path}'")
    assert done.counts == {"train": 1} and done.skipped.reasons == {why: (1, f"{tmp_path}/b.jsonl, row 0")}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, r"row 0 has no `prompt`, and no dialogue in `chosen` and `rejected`"),
        ({"prompt": "a", "chosen": "b"}, r"row 0 should have text in the column `rejected`, and it has no such column"),
        ({"chosen": [{"role": "user"}], "rejected": [YES]}, r"row 0 has \{'role': 'user'\} for a message"),
        ({"instruction": "a", "completions": "b"}, r"row 0 should have a list of mappings in `completions`"),
    ],
)
def test_a_row_without_a_pair_is_reported(raw: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        run("preferences", tmp_path / "out", f"raw='{lines(tmp_path / 'a.jsonl', [raw])}'")


def test_a_prompt_with_several_pairs_stays_on_one_side(tmp_path: Path) -> None:
    pairs = [{"prompt": f"q{n % 10}", "chosen": f"good {n}", "rejected": "bad"} for n in range(30)]
    done = run("preferences", tmp_path / "out", f"raw='{lines(tmp_path / 'a.jsonl', pairs)}'", "held_out=0.3")
    sides = [{json.dumps(row["prompt"]) for row in rows(done, split)} for split in ("train", "val")]
    assert list(map(len, sides)) == [7, 3] and not sides[0] & sides[1]
    assert done.counts == {"train": 21, "val": 9}


def test_the_worse_answer_is_drawn_by_the_seed(tmp_path: Path) -> None:
    answers = [{"response": f"answer {n}", "overall_score": n} for n in range(4)]
    raw = lines(tmp_path / "a.jsonl", [{"instruction": f"q{n}", "completions": answers} for n in range(20)])
    drawn = {}
    for seed in (0, 1):
        result = rows(run("preferences", tmp_path / str(seed), f"raw='{raw}'", f"seed={seed}"))
        assert {row["chosen"][0]["content"] for row in result} == {"answer 3"}
        drawn[seed] = [row["rejected"][0]["content"] for row in result]
        assert set(drawn[seed]) == {"answer 0", "answer 1", "answer 2"}
    assert drawn[0] != drawn[1]
