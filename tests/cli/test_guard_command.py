import json

import pytest

from bloomery.cli import main

EXCERPT = [
    *[(29020, 2.775923), (29030, 2.772822), (29040, 2.768131), (29050, 7.343709), (29060, 8.715872)],
    *[(29070, 7.654131), (29080, 7.192470), (29090, 6.849044), (33240, 2.722675), (43680, 2.635663)],
]


@pytest.fixture
def log(tmp_path):
    """Lines of a 13B training, as its chronicles print them."""
    path = tmp_path / "training.log"
    line = "iteration {:8d}/  311541 | global batch size:  1024 | lm loss: {:.6E} | grad norm: 0.000 |\n"
    path.write_text("".join(line.format(step, loss) for step, loss in EXCERPT))
    return path


def test_a_replay_says_what_would_have_been_done_and_when(log, capsys):
    assert main(["guard", "replay", str(log)]) == 0
    out = capsys.readouterr().out
    assert "10 lines, steps 29,020 to 43,680: 1 rewinds" in out
    assert "step 29,050 | spike | would rewind to step 28,949" in out and "7.344" in out


def test_a_replay_in_json_holds_every_finding_with_its_numbers(log, capsys):
    assert main(["guard", "replay", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (finding,) = told["findings"]
    assert (finding["step"], finding["action"], finding["guard"]) == (29050, "rewind", "spike")
    assert finding["rung"] == "repeat" and finding["if_it_came_again"]["rung"] == "skip"
    assert finding["numbers"]["loss"] == pytest.approx(7.343709) and told["lines"] == 10


def test_a_replay_is_drawn(log, tmp_path):
    picture = tmp_path / "replay.png"
    assert main(["guard", "replay", str(log), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("how", [(), ("--follow",)])
def test_a_picture_that_the_disk_refuses_is_told_as_such(log, tmp_path, how, capsys):
    picture = tmp_path / "full.png"
    picture.symlink_to("/dev/full")
    assert main(["guard", "replay", str(log), "--png", str(picture), *how]) == 1
    assert f"Drawing failed at {picture}: No space left on device" in capsys.readouterr().err


def test_settings_of_the_guards_can_be_tried_and_no_others(log, capsys):
    assert main(["guard", "replay", str(log), "guard.spike=false"]) == 0
    assert "nothing would have been said" in capsys.readouterr().out
    assert main(["guard", "replay", str(log), "train.steps=3"]) != 0
    assert "is not a setting of [guard]" in capsys.readouterr().err


def test_a_file_that_is_no_log_is_refused_in_one_message(tmp_path, capsys):
    (tmp_path / "other").write_text("hello\n")
    assert main(["guard", "replay", str(tmp_path / "other")]) != 0
    assert "holds no line of a training" in capsys.readouterr().err
