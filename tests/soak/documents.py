"""Every command that a block of README or of the documentation shows runs as it is written.

The examples and the first page have a soak of their own (`examples.py`). What a page presupposes (a run, a
text, a store, a cluster) is prepared before its commands; `NOT_HERE` says which commands cannot run on one
machine, and why.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transformers
from tests.checkpoint.object_store import ObjectStore, serving
from tests.documented_commands import ROOT, DocumentedCommand, documented_commands
from tests.operate.slurm_cluster import SlurmCluster, can_run, started
from tests.soak.examples import PLACES, bloomery, own_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SHOWN = [shown for shown in documented_commands() if shown.whole]
COVERED = {shown.words for shown in SHOWN if shown.place in PLACES}
COMMANDS = [shown for shown in SHOWN if shown.words not in COVERED]
NOT_HERE = {
    "bloomery dashboard runs/mine --host 0.0.0.0": "listens to other machines; the tests do, with TLS",
    "bloomery coordinate --certificates certs --listen 0.0.0.0": "the same; the coordinator's tests do",
    "bloomery evaluate runs/demo --tasks": "the extra `eval` (lm-eval) is not in `dev`",
    "nice bloomery evaluate runs/demo --tasks": "the same",
    "bloomery train my.toml log.trackers": "the services' extras are not in `dev`",
    "bloomery watch runs/mine --to slack": "speaks to Slack and a mail server",
    "*/5 * * * *": "a line of cron's table",
    "bloomery launch my.toml --supervise --nnodes 5": "five machines; test_group.py starts two",
}
"""Beginnings of commands that do not run here, and why."""
INTERRUPTED = (
    "bloomery dashboard",
    "bloomery coordinate",
    "bloomery sync",
    "bloomery follow",
    "bloomery guard replay training.log --follow",
)
"""Commands that go on until Ctrl-C."""
UNTIL_CTRL_C_S = 6.0
LONG = "bloomery train demo"
"""It trains for ten minutes where there are units for bf16, and for an hour elsewhere: it is stopped in its
middle.
"""
LONG_S = 150.0
RECIPE = """
[run]
name = "mine"
[model]
layers = 2
hidden = 32
heads = 2
tied = true
[data]
sources = ["notes.txt"]
sequence_length = 32
tokenizer_vocabulary = 300
separator = "\\n\\n"
held_out_every = 10
[train]
steps = {steps}
global_batch = 8
micro_batch = 4
precision = "fp32"
compile = "off"
[optim]
learning_rate = 1e-2
[schedule]
warmup = 16
[checkpoint]
every_steps = 100
keep_last = 20
[evaluate]
every_steps = 100
samples = 64
"""
ELASTIC = "[elastic]\ninner_steps = 5\npeers = 2\nminimum_peers = 2\n"
RUNS = ("demo", "small", "mine", "a", "b", "large", "notes")
DISK = Path("/mnt/disk")
"""Where docs/checkpoints.md writes."""


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with serving() as running:
        for bucket in ("corpus", "bucket"):
            running.put(f"/{bucket}")
        library = sorted(Path(os.__file__).parent.glob("*.py"))[:64]
        for number, source in enumerate(library):
            folder = "en" if number % 2 else "code"
            running.put(f"/corpus/{folder}/{source.stem}.txt", source.read_bytes())
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if not can_run():
        pytest.skip("needs SLURM: apt-get install slurmctld slurmd slurm-client munge")
    with started(tmp_path_factory.mktemp("slurm"), nodes=4) as running:
        yield running


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, store: ObjectStore) -> Iterator[Path]:
    """A directory with what a clone has, some texts, and runs of 720 steps under the names that pages use."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("docs", "examples", "src"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, clone)
    own_text(clone / "notes.txt")
    _write_texts(clone)
    (clone / "my.toml").write_text(RECIPE.format(steps=720))
    first = bloomery("train", "my.toml", cwd=clone)
    assert first.returncode == 0, first.stderr
    for name in RUNS:
        if name != "mine":
            shutil.copytree(clone / "runs/mine", clone / "runs" / name)
    (clone / "my.toml").write_text(RECIPE.format(steps=40))
    if DISK.exists() or not os.access(DISK.parent, os.W_OK):
        pytest.skip(f"needs the right to make {DISK}, which must not be there")
    yield clone
    shutil.rmtree(DISK, ignore_errors=True)


def _write_texts(clone: Path) -> None:
    text = {"content": "A text.", "prompt": "Translate: a.\n", "answer": "a"}
    lines = "".join(json.dumps(text | {"content": f"Text number {number}."}) + "\n" for number in range(2000))
    (clone / "texts.jsonl").write_text(lines)
    (clone / "pairs.jsonl").write_text(lines)
    (clone / "prompts.txt").write_text("def main(\nimport \n")
    log = [
        f" iteration {step}/ 5000 | lm loss: {8.0 if 3000 <= step < 3010 else 3.0 + step % 7 / 100:.6E} | "
        f"grad norm: {0.5 + step % 5 / 50:.3f} |"
        for step in range(1, 4000)
    ]
    (clone / "training.log").write_text("\n".join(log) + "\n")


def _save_published(clone: Path, name: str, *, chat: bool = False) -> None:
    """Write a directory as transformers does, of a random Llama with the tokenizer of the runs."""
    tokenizer = clone / "runs/small/data/tokenizer.json"
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(vocabulary) + 8, max_position_embeddings=2048, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(clone / name)
    shutil.copy(tokenizer, clone / name / "tokenizer.json")
    settings = {"eos_token": "<|endoftext|>"}
    if chat:
        settings["chat_template"] = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (clone / name / "tokenizer_config.json").write_text(json.dumps(settings))


def _published(clone: Path) -> None:
    """Make what the guide presupposes: a model that transformers wrote, and the page's recipe."""
    _save_published(clone, "published")
    shutil.rmtree(clone / "exported", ignore_errors=True)
    shutil.rmtree(clone / "runs/mine")
    page = (ROOT / "docs/guides/continuing.md").read_text()
    (clone / "my.toml").write_text(page.split("```toml\n")[1].split("```")[0])


def _answers(clone: Path) -> None:
    """Another run with the same name begins anew."""
    shutil.rmtree(clone / "runs/mine")


def _peers(clone: Path) -> None:
    """A recipe that counts samples, since each peer makes its own steps."""
    (clone / "my.toml").write_text(RECIPE.format(steps=40).replace("steps = 40", "samples = 640") + ELASTIC)


def _own_recipe(clone: Path) -> None:
    (clone / "my.toml").write_text(RECIPE.format(steps=40))


def _large(clone: Path) -> None:
    """A recipe whose batch can be divided by the accelerators that the page plans for."""
    recipe = RECIPE.format(steps=40).replace("global_batch = 8", "global_batch = 4096")
    (clone / "my.toml").write_text(recipe)


def _endless(clone: Path) -> None:
    """A run that does not come to its end while faults are injected."""
    (clone / "my.toml").write_text(RECIPE.format(steps=1_000_000))


def _own_run(clone: Path) -> None:
    _own_recipe(clone)
    shutil.rmtree(clone / "runs/mine")


def _restored(clone: Path) -> None:
    shutil.rmtree(clone / "runs/demo")
    shutil.copytree(clone / "runs/small", clone / "runs/demo")


def _fresh(clone: Path) -> None:
    """A run of the shipped recipe cannot go on in a directory of another one."""
    shutil.rmtree(clone / "runs/demo")


def _tokens(clone: Path) -> None:
    for name in ("code", "held-out"):
        given = ("raw/code", "--tokenizer", "tokenizer.json", "--to", f"tokens/{name}")
        _must(clone, "data", "tokenize", *given)


def _parts(clone: Path) -> None:
    for file in (clone / "tokens").glob("en*"):
        file.unlink()
    for part in range(1, 17):
        tokenizer = ("--tokenizer", "tokenizer.json", "--to", "tokens/en", "--part", f"{part}/16")
        _must(clone, "data", "tokenize", "raw/en", *tokenizer)


def _report(clone: Path) -> None:
    recipe = RECIPE.format(steps=40).replace('sources = ["notes.txt"]', "split = [1, 1, 0]")
    own = 'tokenizer = "tokenizer.json"'
    tables = "".join(f'[[data.datasets]]\nname = "{it}"\npath = "tokens/{it}"\n' for it in ("en", "code"))
    (clone / "recipe.toml").write_text(recipe.replace("tokenizer_vocabulary = 300", own) + tables)


def _llama(clone: Path) -> None:
    _save_published(clone, "llama-7b")


def _imported(clone: Path) -> None:
    _save_published(clone, "with-template", chat=True)
    _must(clone, "ckpt", "import", "with-template", "runs/imported")


PREPARED: dict[str, Callable[[Path], None]] = {
    "bloomery config show my.toml --why": _published,
    "bloomery plan my.toml --hardware h200 --gpus 8": _large,
    "bloomery calibrate": _own_recipe,
    "bloomery drill my.toml": _endless,
    "bloomery chaos my.toml": _endless,
    "bloomery launch my.toml --supervise": _own_run,
    "bloomery train my.toml data.sources=pairs.jsonl": _answers,
    "bloomery submit my.toml": _own_run,
    "bloomery plan my.toml": _large,
    "bloomery train demo": _fresh,
    "bloomery rewind runs/demo --to-step 400 --dry-run": _restored,
    "bloomery data merge tokens/en": _tokens,
    "bloomery data merge --parts": _parts,
    "bloomery data report recipe.toml": _report,
    "bloomery ckpt import llama-7b": _llama,
    "bloomery generate runs/imported": _imported,
}
"""What is done before a command that begins so."""


def _must(clone: Path, *words: str) -> None:
    done = bloomery(*words, cwd=clone)
    assert done.returncode == 0, done.stderr


def _until_ctrl_c(
    words: tuple[str, ...], clone: Path, *, after_s: float = UNTIL_CTRL_C_S
) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bloomery", *words],
        cwd=clone,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=after_s)
        pytest.fail(f"ended before it was interrupted: {output}")
    except subprocess.TimeoutExpired:
        pass  # it runs, as it should
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    # An ended process has told that it was interrupted, or has done what was wanted of it.
    status = 0 if process.returncode in (0, 130) else process.returncode
    return subprocess.CompletedProcess(words, status, output, "")


@pytest.mark.parametrize("shown", COMMANDS, ids=lambda shown: f"{shown.place}: {shown.text[:60]}")
def test_a_command_runs_as_it_is_written(
    shown: DocumentedCommand, clone: Path, request: pytest.FixtureRequest
) -> None:
    text = shown.text.removeprefix("$ ").removeprefix(".venv/bin/")
    for beginning, reason in NOT_HERE.items():
        if text.startswith(beginning):
            pytest.skip(reason)
    for beginning, prepare in PREPARED.items():
        if f"{text} ".startswith(f"{beginning} "):
            prepare(clone)
    if shown.place == "docs/peers.md" and "my.toml" in text:
        ended = _together(shown, clone)
    elif "--revoke" in text:
        ended = _beside_coordinator(shown.words, clone)
    elif text == LONG:
        ended = _until_ctrl_c(shown.words, clone, after_s=LONG_S)
    elif text.startswith(INTERRUPTED) and "--init-certs" not in text:
        ended = _until_ctrl_c(shown.words, clone)
    elif text.startswith("srun ") or shown.place.endswith("submitting.md"):
        ended = _on_slurm(text, clone, request.getfixturevalue("cluster"))
    else:
        ended = bloomery(*shown.words, cwd=clone)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "Traceback" not in ended.stdout + ended.stderr


def _on_slurm(text: str, clone: Path, cluster: SlurmCluster) -> subprocess.CompletedProcess[str]:
    """Run a line in a shell that reaches the cluster; a line with srun has two nodes."""
    shell = f"PATH={Path(sys.executable).parent}:$PATH; {text.replace('srun ', 'srun --nodes 2 ', 1)}"
    return subprocess.run(
        ["bash", "-c", shell],
        cwd=clone,
        env=os.environ | cluster.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def _beside_coordinator(words: tuple[str, ...], clone: Path) -> subprocess.CompletedProcess[str]:
    """Run a command while a coordinator with the same certificates listens on loopback."""
    command = [sys.executable, "-m", "bloomery", "coordinate", "--certificates", "certs"]
    with subprocess.Popen(
        [*command, "--data", "certified"], cwd=clone, stdout=subprocess.PIPE
    ) as coordinator:
        assert coordinator.stdout is not None
        coordinator.stdout.readline()
        try:
            return bloomery(*words, cwd=clone)
        finally:
            coordinator.send_signal(signal.SIGINT)


def _together(shown: DocumentedCommand, clone: Path) -> subprocess.CompletedProcess[str]:
    """Run both peers of the page beside a coordinator; the second command finds the run at its end."""
    _peers(clone)
    coordinator = subprocess.Popen(
        [sys.executable, "-m", "bloomery", "coordinate", "--data", str(clone / "peers-coordinator")],
        cwd=clone,
        stdout=subprocess.DEVNULL,
    )
    peers = [command for command in COMMANDS if command.place == shown.place and "my.toml" in command.text]
    surroundings = os.environ | {"BLOOMERY_COORDINATOR": "http://127.0.0.1:2379"}
    try:
        running = {
            command.text: subprocess.Popen(
                [sys.executable, "-m", "bloomery", *command.words],
                cwd=clone,
                env=surroundings,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command in peers
        }
        ended = {text: process.communicate(timeout=600)[0] for text, process in running.items()}
    finally:
        coordinator.send_signal(signal.SIGINT)
        coordinator.wait(timeout=60)
    for command in peers:
        shutil.rmtree(clone / command.words[-1], ignore_errors=True)  # a peer that was refused made none
    shutil.rmtree(clone / "peers-coordinator")
    return subprocess.CompletedProcess(shown.words, running[shown.text].returncode, ended[shown.text], "")
