"""Every command tells its version and hands its options to the shell's completion."""

import re
import subprocess
from pathlib import Path

import pytest

from bloomery.cli import COMMANDS, main
from bloomery.cli.completion import whole_parser

SHELL = Path("/bin/bash")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_the_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([name, "--version"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 0 and re.match(r"bloomery \d+\.\d+", capsys.readouterr().out)


def test_the_whole_parser_knows_commands_parts_and_options() -> None:
    commands = next(action.choices for action in whole_parser()._actions if action.choices)
    assert set(commands) == set(COMMANDS)
    parts = next(action.choices for action in commands["ckpt"]._actions if action.choices)
    assert "--dry-run" in parts["prune"]._option_string_actions
    merging = next(action.choices for action in commands["data"]._actions if action.choices)["merge"]
    assert "--to" in merging._option_string_actions


@pytest.mark.skipif(not SHELL.exists(), reason="no bash here")
def test_bash_completes_commands_options_choices_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "runs-of-mine").mkdir()

    def completed(*words: str) -> list[str]:
        line = (
            f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            '_shtab_bloomery; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        asked = [str(SHELL), "--norc", "-c", line]
        return subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()

    assert completed("bloomery", "sim") == ["simulate", "simulate-internet"]
    assert completed("bloomery", "ckpt", "ver") == ["verify"]
    assert completed("bloomery", "ckpt", "prune", "--dr") == ["--dry-run"]
    assert completed("bloomery", "config", "show", "--") and "--why" in completed(
        "bloomery", "config", "show", "--"
    )
    assert completed("bloomery", "ckpt", "list", "runs-") == ["runs-of-mine"]
    (tmp_path / "bf-of-mine").mkdir()
    assert completed("bloomery", "generate", "--dtype", "bf") == ["bf16"]
    assert completed("bloomery", "completion", "z") == ["zsh"]


@pytest.mark.parametrize(
    ("shell", "begins"),
    [("zsh", "#compdef bloomery"), ("tcsh", "complete bloomery"), ("bash", "complete -o")],
)
def test_the_script_is_for_the_shell_that_was_named(
    shell: str, begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(begins) for line in lines)
