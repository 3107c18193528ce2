from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

from bloomery.config import find
from bloomery.config.find import nearest, shipped_recipes
from bloomery.config.load import load_recipe
from bloomery.config.peer_settings import refuse_alone
from bloomery.config.validate import check_recipe
from bloomery.plan.parameters import count_parameters, token_cost
from bloomery.plan.schedule import phases, total_samples

NAMES = ["demo", "tr1-13b", "tr11-176b", "llmjp-172b", "intellect1-10b"]
TINY = [f"{name}-tiny" for name in NAMES[1:]]
LAPTOP_FLOPS = 40e9
"""What two cores without bf16 units reach on matrices as small as these."""


def parameters(recipe):
    vocabulary = recipe.model.vocabulary
    if vocabulary == "auto":
        vocabulary = recipe.data.tokenizer_vocabulary
    return count_parameters(
        recipe.model, vocabulary=vocabulary, sequence_length=recipe.data.sequence_length
    ).total


def test_all_recipes_are_shipped_from_the_top_of_the_clone():
    assert set(shipped_recipes()) >= {*NAMES, *TINY}
    assert all(path.parent == Path(__file__).parents[2] / "recipes" for path in shipped_recipes().values())


class InstalledFile(PurePosixPath):
    """A line of the list of an installed wheel's files."""

    def locate(self):
        return Path("/") / self


def test_an_installed_wheel_finds_its_recipes_in_the_list_of_its_files(tmp_path, monkeypatch):
    directory = tmp_path / "share" / "bloomery"
    listed = []
    for name in ("recipes/mine.toml", "hardware/h100.toml", "recipes/notes.txt", "recipes/more/other.toml"):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        listed.append(InstalledFile(path))
    listed.append(InstalledFile(directory / "recipes" / "gone.toml"))
    monkeypatch.setattr(find, "_in_clone", lambda kind: [])
    monkeypatch.setattr(metadata, "files", lambda package: listed)
    assert shipped_recipes() == {"mine": directory / "recipes" / "mine.toml"}


def test_recipes_beside_the_packages_are_found_where_no_list_of_files_names_them(tmp_path, monkeypatch):
    def unknown(package):
        raise metadata.PackageNotFoundError

    packages = tmp_path / "deep" / "packages"
    for directory, names in ((tmp_path, ["clone"]), (packages / "share" / "bloomery", ["b", "a", "c"])):
        (directory / "recipes").mkdir(parents=True)
        for name in names:
            (directory / "recipes" / f"{name}.toml").touch()
    monkeypatch.setattr(find, "__file__", str(packages / "bloomery" / "config" / "find.py"))
    for listed in (lambda package: None, unknown):
        monkeypatch.setattr(metadata, "files", listed)
        assert list(shipped_recipes()) == ["a", "b", "c"]
    (packages.parent / "recipes").mkdir()
    (packages.parent / "recipes" / "mine.toml").touch()
    assert list(shipped_recipes()) == ["a", "b", "c"], "without pyproject.toml it is no clone"
    (packages.parent / "pyproject.toml").touch()
    assert list(shipped_recipes()) == ["mine"]


@pytest.mark.parametrize("name", list(shipped_recipes()))
def test_every_shipped_recipe_is_sound_and_says_what_it_is(name):
    loaded = load_recipe(name)
    check_recipe(loaded.recipe, loaded.sources)
    assert loaded.recipe.run.name == name
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert text.startswith(f"# {name}: ")
    assert all(len(line) <= 110 for line in text.splitlines())


@pytest.mark.parametrize("name", ["demo", "demo-small", *TINY])
def test_the_small_recipes_train_in_this_version_on_any_machine(name):
    loaded = load_recipe(name)
    refuse_alone(loaded.recipe, loaded.sources)
    assert loaded.recipe.data.sources == ("python:stdlib",)
    parallel = loaded.recipe.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.zero) == (1, 1, 0)
    assert loaded.recipe.train.precision == "auto"


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_recipe_needs_about_two_minutes_of_a_laptop(name):
    recipe = load_recipe(name).recipe
    length = recipe.data.sequence_length
    cost = token_cost(recipe.model, vocabulary=recipe.data.tokenizer_vocabulary, sequence_length=length)
    seconds = cost.model * total_samples(recipe.train, sequence_length=length) * length / LAPTOP_FLOPS
    assert 60 <= seconds <= 180
    assert 300_000 <= parameters(recipe) <= 1_000_000


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_tiny_sibling_keeps_architecture_and_options(name):
    whole, tiny = load_recipe(name).recipe, load_recipe(f"{name}-tiny").recipe
    for key in (
        "norm",
        "position",
        "activation",
        "bias",
        "tied",
        "embedding_norm",
        "embedding_init",
        "rope_theta",
    ):
        assert getattr(tiny.model, key) == getattr(whole.model, key), key
    for key in ("hidden_dropout", "attention_dropout", "residual_init"):
        assert getattr(tiny.model, key) == getattr(whole.model, key), key
    for key in ("name", "beta1", "beta2", "epsilon", "weight_decay", "clip"):
        assert getattr(tiny.optim, key) == getattr(whole.optim, key), key
    for key in ("shape", "unit", "cooldown_share", "cooldown_shape"):
        assert getattr(tiny.schedule, key) == getattr(whole.schedule, key), key
    assert tiny.loss == whole.loss
    assert tiny.data.mask_documents == whole.data.mask_documents
    assert bool(tiny.train.ramp_up) == bool(whole.train.ramp_up)
    assert len(tiny.train.micro_batch_changes) == len(whole.train.micro_batch_changes)
    assert tiny.guard.spike and whole.guard.spike


def test_the_source_runs_have_the_published_numbers_of_parameters():
    assert parameters(load_recipe("tr11-176b").recipe) == 176_247_271_424
    assert parameters(load_recipe("intellect1-10b").recipe) == 10_211_381_248
    assert round(parameters(load_recipe("llmjp-172b").recipe) / 1e9, 2) == 172.39
    assert round(parameters(load_recipe("tr1-13b").recipe) / 1e9) == 13
    assert 9e6 <= parameters(load_recipe("demo").recipe) <= 12e6


def test_a_tiny_ramp_up_really_goes_through_its_batches():
    train = load_recipe("tr11-176b-tiny").recipe.train
    assert sorted({phase.global_batch for _, phase in phases(train)}) == [8, 12, 16, 20, 24, 28, 32]
    assert {phase.micro_batch for _, phase in phases(train)} == {2, 4}


def test_published_figures_of_the_source_runs_stand_in_their_recipes():
    bloom = load_recipe("tr11-176b").recipe
    assert bloom.train.samples == 220_000_000
    assert bloom.train.ramp_up == (192, 16, 9_765_625)
    assert (bloom.schedule.warmup, bloom.schedule.decay, bloom.schedule.floor) == (183_105, 200_000_000, 6e-6)
    assert (bloom.parallel.tensor, bloom.parallel.pipeline, bloom.parallel.data) == (4, 12, 8)
    assert bloom.model.init_std == pytest.approx((1 / (3 * 14336)) ** 0.5, rel=0.01)
    first = load_recipe("tr1-13b").recipe
    assert first.optim.beta2 == 0.999
    assert (first.schedule.warmup, first.schedule.decay) == (216_320, 126_953_125)
    assert first.train.precision == "fp16"
    japanese = load_recipe("llmjp-172b").recipe
    assert japanese.train.precision_changes == ((7_000 * 1728, "fp8"),)
    assert japanese.parallel.sequence and (japanese.parallel.tensor, japanese.parallel.pipeline) == (4, 16)
    internet = load_recipe("intellect1-10b").recipe
    assert [dataset.weight for dataset in internet.data.datasets] == [55, 10, 20, 10, 5]
    assert internet.elastic.inner_steps == 100
    assert internet.loss.z_loss == 2e-4


def test_one_name_alone_is_suggested_for_one_that_is_not_known():
    assert nearest("layer", ["layers", "layer_s", "hidden"], cutoff=0.6) == ["layers"]
    assert nearest("zzz", ["layers"], cutoff=0.6) == []
