import argparse
import importlib.util
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_benchmark_of_saves_measures_a_small_state(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("checkpoint_benchmark", BENCHMARKS / "checkpoint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "checkpoint_benchmark", module)
    spec.loader.exec_module(module)
    # The file system here may not write past its cache: what is compared with does not matter.
    monkeypatch.setattr(module, "_write_directly", lambda buffer, path, **way: path.touch())
    options = argparse.Namespace(gigabytes=0.07, rounds=1, peer_rounds=0, steps=1, copies=12)
    found = module.measure_save(options, tmp_path / "save") + module.measure_steps(
        options, tmp_path / "steps"
    )
    # A save that is over within its first step leaves none beside which it is only written.
    assert [one.unit for one in found] in (["x", "%", "%"], ["x", "%", "%", "%"])
    assert "a durable save" in found[0].name and found[0].value > 0
