"""Texts of tasks are questions with their right answers: of our own tasks and of those of lm-eval."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bloomery.errors import BloomeryError
from bloomery.evaluate.task_texts import task_texts

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(
    not HAS_LM_EVAL, reason="lm-eval is not installed: pip install 'bloomery[eval]' (40 packages)"
)
QUESTION = {"text": "The sky is", "choices": ["green", "blue"], "right": 1}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {output}
doc_to_text: {text}
doc_to_choice: {choice}
doc_to_target: {target}
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def include(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of tasks over one question: with an index of the right choice, with the choices before the
    answer, and with several right answers.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "tasks"
    directory.mkdir()
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps(QUESTION) + "\n")
    shapes = {
        "which": ("multiple_choice", "text", "choices", "right"),
        "before": ("multiple_choice", '"{{right}}"', "choices", '"is the colour"'),
        "several": ("multiple_choice", "text", "choices", '["green", "azure"]'),
    }
    for name, (output, text, choice, target) in shapes.items():
        (directory / f"{name}.yaml").write_text(
            TASK.format(name=name, file=file, output=output, text=text, choice=choice, target=target)
        )
    (directory / "all.yaml").write_text("group: all_three\ntask: [which, before, several]\n")
    return directory


def test_our_questions_are_followed_by_their_right_answers() -> None:
    directory = Path(task_texts.__code__.co_filename).parent / "tasks"
    for name in ("local_pairs", "local_last_word"):
        lines = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        answers = [f" {line['choices'][line['right']]}" if "choices" in line else "" for line in lines]
        wanted = [line["text"] + answer for line, answer in zip(lines, answers, strict=True)]
        assert task_texts([name]) == {name: wanted}


def test_texts_of_our_tasks_need_no_lm_eval() -> None:
    texts = task_texts(["local_pairs", "local_texts"])
    assert list(texts) == ["local_pairs", "local_texts"]
    assert all(len(of_one) > 2 and all(of_one) for of_one in texts.values())


@needs_lm_eval
def test_a_group_gives_each_question_with_its_right_answers(include: Path) -> None:
    assert task_texts(["all_three", "local_pairs"], include=include).keys() == {
        "which",
        "before",
        "several",
        "local_pairs",
    }
    assert task_texts(["all_three"], include=include) == {
        "which": ["The sky is blue"],
        "before": ["blue is the colour"],
        "several": ["The sky is green", "The sky is azure"],
    }


@needs_lm_eval
def test_unknown_tasks_and_documents_that_cannot_be_had_are_told(include: Path) -> None:
    with pytest.raises(BloomeryError, match="There is no task which_one"):
        task_texts(["which_one"], include=include)
    (include.parent / "questions.jsonl").unlink()
    with pytest.raises(BloomeryError, match="documents of the task which could not be had") as told:
        task_texts(["which"], include=include)
    assert "--against" in str(told.value.remedy)


@pytest.mark.skipif(HAS_LM_EVAL, reason="lm-eval is installed")
def test_without_lm_eval_it_says_what_to_install() -> None:
    with pytest.raises(BloomeryError, match="lm-eval, which is not installed"):
        task_texts(["hellaswag"])
