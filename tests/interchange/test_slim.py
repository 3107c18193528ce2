from __future__ import annotations

import errno
import json
import os
import resource
import weakref
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.disk_calls import recorded
from tokenizers import Tokenizer, models

from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.manifest import Index, Manifest, read_manifest
from bloomery.checkpoint.format.source import Source, source_of
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.format.suspects import SUSPECT, why_suspect
from bloomery.checkpoint.load import loader
from bloomery.checkpoint.load.loader import read_tensors
from bloomery.checkpoint.save import direct
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import main
from bloomery.errors import CheckpointError, StorageError
from bloomery.interchange import huggingface
from bloomery.interchange.slim import slim_checkpoint, slim_file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    entries = [whole(f"model.layer{i}", torch.randn(50, 40)) for i in range(3)]
    entries += [whole(f"optim.layer{i}.first_moment", torch.randn(50, 40), scope="peer") for i in range(3)]
    values = {"train": {"step": 3}, "data": {"fingerprint": "x"}, "guards": {"history": [1.0] * 50}}
    return save_checkpoint(
        tmp_path / "checkpoints", entries, step=3, incarnation=2, values=values, about={"loss": 1.5}
    )


def test_a_slim_checkpoint_is_the_model_alone_and_verifies(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.interchange.slim.PIECE_BYTES", 1_000)  # a tensor has 8,000
    reads = watched_reads(monkeypatch)
    done = slim_checkpoint(checkpoint, tmp_path / "slim")
    assert reads.count(str(checkpoint)) == 1, "the index is read once"
    assert verify(done.path) == []
    kept = dict(read_tensors(done.path))
    assert sorted(kept) == ["model.layer0", "model.layer1", "model.layer2"]
    for name, tensor in read_tensors(checkpoint, prefix="model."):
        assert torch.equal(kept[name], tensor)
    manifest = read_manifest(done.path)
    assert manifest.values == {"train": {"step": 3}, "data": {"fingerprint": "x"}}
    assert manifest.about["loss"] == 1.5
    assert done.after < 0.7 * done.before


def test_a_slim_copy_of_a_suspect_is_a_suspect(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / SUSPECT).write_text('{"why": "rank 3 erred"}')
    assert why_suspect(slim_checkpoint(checkpoint, tmp_path / "slim").path) == "rank 3 erred"


def test_a_slim_copy_that_cannot_be_marked_as_a_suspect_is_not_left_unmarked(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / SUSPECT).write_text('{"why": "rank 3 erred"}')

    def refused(path: Path, content: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("bloomery.durable.write_whole", refused)
    with pytest.raises(StorageError, match=rf"Marking a slim copy failed at .*{checkpoint.name}"):
        slim_checkpoint(checkpoint, tmp_path / "slim")
    assert not (tmp_path / "slim").exists(), "an unmarked copy would pass for a good one"


def test_a_slim_copy_of_a_damaged_checkpoint_leaves_no_directory(checkpoint: Path, tmp_path: Path) -> None:
    (weights,) = checkpoint.glob("model-*")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="ends too early"):
        slim_checkpoint(checkpoint, tmp_path / "slim")
    assert not (tmp_path / "slim").exists()


def test_a_slim_copy_is_not_written_into_a_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "incarnations").mkdir(parents=True)
    (run / "recipe.toml").touch()
    for target in (run, run / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"(?s)belongs to a run.*a directory of its own"):
            slim_checkpoint(checkpoint, target)
    assert not (run / "checkpoints").exists()
    (run / "checkpoints").mkdir()
    monkeypatch.chdir(run / "checkpoints")
    with pytest.raises(CheckpointError, match="belongs to a run"):
        slim_checkpoint(checkpoint, Path())


def watched_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places of the indexes that are read by whatever loads tensors."""
    places: list[str] = []
    read = loader.read_index

    def watched(source: Source, manifest: Manifest) -> Index:
        places.append(source_of(source).place().rstrip("/"))
        return read(source, manifest)

    monkeypatch.setattr(loader, "read_index", watched)
    return places


class LiveBytes:
    """Counts the bytes of tensors that are alive, as a generator hands them out."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def counted(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.nbytes
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._gone, size)
        return tensor

    def _gone(self, size: int) -> None:
        self.now -= size


def test_a_streamed_checkpoint_holds_one_tensor_beside_the_few_that_it_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "STREAM_BYTES", 10_000)
    live, sizes = LiveBytes(), [900, 1, 5_000, 30, 2_400, 700] * 5
    entries = (
        whole(f"model.t{number:02d}", live.counted(torch.full((size,), float(number))))
        for number, size in enumerate(sizes)
    )
    saved = direct.save_streamed(tmp_path, entries, step=1, incarnation=1)
    assert live.most <= 10_000 + 2 * 4 * max(sizes) < 4 * sum(sizes)
    assert verify(saved) == []
    read = dict(read_tensors(saved))
    assert [len(read[f"model.t{number:02d}"]) for number in range(len(sizes))] == sizes
    assert all((tensor == int(name[-2:])).all() for name, tensor in read.items())


def test_a_slim_checkpoint_is_made_in_pieces_of_the_largest_tensor(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.interchange.slim.PIECE_BYTES", 1_000)
    monkeypatch.setattr(direct, "STREAM_BYTES", 2_000)
    live, empty = LiveBytes(), torch.empty
    monkeypatch.setattr(loader, "empty", lambda *args, **more: live.counted(empty(*args, **more)))
    done = slim_checkpoint(checkpoint, tmp_path / "slim")
    assert live.most <= 3_000 and verify(done.path) == []


def test_an_import_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "STREAM_BYTES", 1_000)
    live, tensors = LiveBytes(), huggingface.read_logical

    def counted(*args: Any, **more: Any) -> Any:
        return ((name, live.counted(tensor.clone())) for name, tensor in tensors(*args, **more))

    monkeypatch.setattr(huggingface, "read_logical", counted)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    words = Tokenizer(models.WordLevel({"<|end|>": 0, "<unk>": 1}, unk_token="<unk>"))
    words.add_special_tokens(["<|end|>"])
    words.save(str(tmp_path / "theirs" / "tokenizer.json"))
    status = main(
        ["ckpt", "import", str(tmp_path / "theirs"), str(tmp_path / "run"), "--end-of-document", "<|end|>"]
    )
    assert status == 0
    largest = 4 * 300 * 32
    assert live.most <= 2 * largest + 1_000 < sum(one.nbytes for one in model.parameters()) / 2


def test_the_command_says_what_was_saved_and_refuses_to_overwrite(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "slim", str(checkpoint), "--to", str(tmp_path / "slim"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes_after"] < told["bytes_before"]
    assert main(["ckpt", "slim", str(checkpoint), "--to", str(tmp_path / "slim")]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--to"]])
def test_the_place_to_write_to_is_named_after_the_path_or_with_to(
    checkpoint: Path, tmp_path: Path, flags: list[str]
) -> None:
    run = checkpoint.parent.parent
    assert main(["ckpt", "slim", str(run), *flags, str(tmp_path / "slim")]) == 0
    assert verify(tmp_path / "slim" / checkpoint.name) == []


@pytest.mark.parametrize(("places", "why"), [([], "TARGET is missing"), (["a", "--to", "b"], "two targets")])
def test_no_place_and_two_places_are_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], places: list[str], why: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["ckpt", "slim", str(checkpoint), *places])
    assert refused.value.code == 2 and why in capsys.readouterr().err


def test_views_are_saved_with_their_own_elements_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = torch.randn(100_000)
    tied = torch.randn(30)
    content = {"shard": buffer[500:600], "other": [buffer[:7]], "a": tied, "b": tied, "step": 4}
    torch.save(content, tmp_path / "fat.pt")
    assert main(["ckpt", "slim", str(tmp_path / "fat.pt"), "--to", str(tmp_path / "slim.pt")]) == 0
    assert "2 tensors had been saved with unused storage" in capsys.readouterr().out
    slim = torch.load(tmp_path / "slim.pt", weights_only=True)
    assert (tmp_path / "slim.pt").stat().st_size < 10_000 < (tmp_path / "fat.pt").stat().st_size
    assert torch.equal(slim["shard"], buffer[500:600]) and torch.equal(slim["other"][0], buffer[:7])
    assert slim["a"].data_ptr() == slim["b"].data_ptr() and slim["step"] == 4


def test_a_file_that_would_run_something_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": Path("y")}, tmp_path / "odd.pt")
    assert main(["ckpt", "slim", str(tmp_path / "odd.pt"), "--to", str(tmp_path / "slim.pt")]) == 1
    assert "cannot be read without running" in capsys.readouterr().err
    assert not (tmp_path / "slim.pt").exists()


def test_a_slim_file_is_synced_before_it_gets_its_name(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "fat.pt")
    with recorded() as calls:
        slim_file(tmp_path / "fat.pt", tmp_path / "slim.pt")
    assert calls.names == [("sync", "slim.pt.partial"), ("rename", "slim.pt"), ("sync", tmp_path.name)]


def test_all_that_a_file_of_torch_may_hold_stays_what_it_was(tmp_path: Path) -> None:
    saved = {
        "scheduler": {"milestones": Counter({30: 1, 60: 2})},
        "order": OrderedDict(b=1, a=torch.zeros(9)[:2]),
        "shape": torch.zeros(2, 3).shape,
        "sparse": torch.eye(3).to_sparse(),
        "list": [(torch.zeros(5)[1:3], "x")],
    }
    torch.save(saved, tmp_path / "fat.pt")
    assert slim_file(tmp_path / "fat.pt", tmp_path / "slim.pt").repaired == 2
    slim = torch.load(tmp_path / "slim.pt", weights_only=True)
    assert slim["scheduler"] == saved["scheduler"] and type(slim["scheduler"]["milestones"]) is Counter
    assert list(slim["order"]) == ["b", "a"] and type(slim["order"]) is OrderedDict
    assert slim["shape"] == (2, 3) and type(slim["shape"]) is torch.Size
    assert torch.equal(slim["sparse"].to_dense(), torch.eye(3)) and slim["list"][0][1] == "x"


def test_a_disk_that_is_full_while_a_slim_file_is_written_is_told_with_what_helps(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 16)}, tmp_path / "fat.pt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # stands for the end of the disk
    try:
        with pytest.raises(StorageError, match=r"Writing a slimmed file failed at .*slim.pt: File too large"):
            slim_file(tmp_path / "fat.pt", tmp_path / "slim.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["fat.pt"]


def test_a_slim_checkpoint_is_of_the_same_step_incarnation_and_time(tmp_path: Path) -> None:
    entries = [whole("model.layer", torch.randn(5, 4))]
    values = {"guards": {"history": [1.0]}}
    checkpoint = save_checkpoint(
        tmp_path / "checkpoints", entries, step=3, incarnation=2, values=values, about={}
    )
    told: list[tuple[str, int, int]] = []
    done = slim_checkpoint(checkpoint, tmp_path / "slim", progress=lambda *about: told.append(about[:3]))
    before, after = read_manifest(checkpoint), read_manifest(done.path)
    assert (after.step, after.incarnation, after.time) == (3, 2, before.time) and after.values == {}
    assert told[-1][:2] == ("slimming", 80) and done.path.name == checkpoint.name


def test_tuples_lists_and_numbers_of_a_file_stay_what_they_are(tmp_path: Path) -> None:
    buffer = torch.arange(100.0)
    content = {"a": (buffer[:3], [buffer[5:7], 4]), "b": buffer[:0], "c": None, "whole": buffer}
    torch.save(content, tmp_path / "large.pt")
    done = slim_file(tmp_path / "large.pt", tmp_path / "small.pt")
    found = torch.load(tmp_path / "small.pt", weights_only=True)
    assert done.repaired == 3 and isinstance(found["a"], tuple) and isinstance(found["a"][1], list)
    assert found["a"][0].tolist() == [0.0, 1.0, 2.0] and found["a"][1][0].tolist() == [5.0, 6.0]
    assert (found["a"][1][1], found["c"]) == (4, None) and torch.equal(found["whole"], buffer)
    assert not (tmp_path / "small.pt.partial").exists()
