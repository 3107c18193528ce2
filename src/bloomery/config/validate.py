"""Checks the settings of a recipe against each other and reports all mistakes at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from bloomery.config.checkpoint import (
    SCHEMES,
    WHOLE_PATH,
    BackupSection,
    LogSection,
    names_a_directory,
)
from bloomery.config.data import HUB_PREFIX, DataSection
from bloomery.config.environment import PROFILES, EnvironmentSection
from bloomery.config.findings import Finding, divisors, nearest_numbers, refuse
from bloomery.config.model import ModelSection
from bloomery.config.optim import OptimSection, ScheduleSection
from bloomery.config.peer_settings import peer_mistakes
from bloomery.config.recipe import Recipe, TrainSection
from bloomery.config.submit import SyncSection
from bloomery.config.validate_async_tensor import async_tensor_mistakes
from bloomery.config.validate_data import mixing_mistakes, sample_mistakes
from bloomery.config.validate_layout import (
    batch_mistakes,
    layout_mistakes,
    pipeline_mistakes,
    ramp_up_mistakes,
    sharding_mistakes,
)
from bloomery.config.validate_precision import scaling_mistakes


def backup_mistakes(
    section: BackupSection, *, offline: bool = False, key: str = "backup.url", other: str = ""
) -> list[Finding]:
    """Return what is wrong with the URL of a place of backups.

    offline: whether the network is forbidden. key: of the setting. other: the URL of the other place.
    """
    if not section.url:
        return []
    try:
        parts = urlsplit(section.url)
    except ValueError:  # brackets are for addresses of IPv6
        remedy = "Write s3://bucket/path, without brackets."
        return [Finding(key=key, problem="is no URL", remedy=remedy)]
    if parts.scheme not in SCHEMES:
        problem, remedy = "cannot be written to", f"Use a URL of {', '.join(SCHEMES)}."
    elif parts.username or parts.password or parts.query:
        problem = "holds credentials, which do not belong in a recipe: it is journalled and shared"
        remedy = "Put them into the environment (AWS_ACCESS_KEY_ID, …) and write only the bucket and path."
    elif "#" in section.url:
        problem, remedy = "holds a '#', and what follows it names no place", "Write it as %23."
    elif not (parts.netloc or parts.scheme == "file"):
        problem, remedy = "names no bucket", "Write s3://bucket/path."
    elif parts.scheme == "file" and not names_a_directory(section.url):
        problem, remedy = "names no directory of this machine", WHOLE_PATH
    elif offline and parts.scheme != "file":
        problem, remedy = "needs the network, which run.offline forbids", "Use file://…, or leave it out."
    elif section.url.rstrip("/") == other.rstrip("/"):
        problem, remedy = "is the place of the other backup too", "Name a second place, or leave it out."
    else:
        return []
    return [Finding(key=key, problem=problem, remedy=remedy)]


def _sync_mistakes(section: SyncSection, *, offline: bool) -> Iterator[Finding]:
    is_hub = section.place.startswith(HUB_PREFIX)
    if is_hub and offline:
        problem, remedy = "needs the network, which run.offline forbids", "Use file://…, or leave it out."
        yield Finding(key="sync.place", problem=problem, remedy=remedy)
    elif section.place and not is_hub:
        place = BackupSection(url=section.place)
        yield from backup_mistakes(place, offline=offline, key="sync.place")
    if section.checkpoints and not is_hub:
        problem = "publishes branches, and sync.place is no repository of the Hub"
        remedy = "Set sync.place to hf:OWNER/NAME; to a store, checkpoints go with backup.url."
        yield Finding(key="sync.checkpoints", problem=problem, remedy=remedy)


def store_mistakes(recipe: Recipe) -> Iterator[Finding]:
    """Yield what does not fit `checkpoint.url`; nothing for a run that saves into its directory."""
    if not recipe.checkpoint.url:
        return
    place = BackupSection(url=recipe.checkpoint.url)
    yield from backup_mistakes(place, offline=recipe.run.offline, key="checkpoint.url")
    if recipe.elastic.inner_steps:
        yield Finding(
            key="checkpoint.url",
            problem="is for a run of one peer: peers keep their checkpoints in their own directories",
            remedy="Use [backup], which copies the checkpoints of peers.",
        )
    for key, url in (("backup.url", recipe.backup.url), ("second_backup.url", recipe.second_backup.url)):
        if not url:
            continue
        yield Finding(
            key=key,
            problem="copies checkpoints of a run directory, and checkpoint.url keeps none there",
            remedy="Leave it out, and let the store keep copies; or leave checkpoint.url out.",
        )


def check_recipe(
    recipe: Recipe, sources: Mapping[str, str], *, data_degree: int | None = None, consumed: int = 0
) -> None:
    """Raise ConfigError with every setting of the recipe that does not fit the others.

    sources: where the value of each setting came from, by key.
    data_degree: data-parallel ranks; None where unknown, when `parallel.data = "auto"` counts as 1.
    consumed: the samples that the run has used already; batches before them need not fit the ranks.
    """
    degree = data_degree or (recipe.parallel.data if recipe.parallel.data != "auto" else 1)
    refuse(
        recipe,
        sources,
        [
            *_run_mistakes(recipe.run.name),
            *_model_mistakes(recipe.model, recipe.data, recipe.optim),
            *_data_mistakes(recipe.data),
            *mixing_mistakes(recipe.data),
            *sample_mistakes(recipe.data),
            *backup_mistakes(recipe.backup, offline=recipe.run.offline),
            *backup_mistakes(
                recipe.second_backup,
                offline=recipe.run.offline,
                key="second_backup.url",
                other=recipe.backup.url,
            ),
            *_sync_mistakes(recipe.sync, offline=recipe.run.offline),
            *_profile_mistakes(recipe.log),
            *store_mistakes(recipe),
            *_length_mistakes(recipe.train),
            *ramp_up_mistakes(recipe.train),
            *_change_mistakes(recipe.train),
            *_attention_mistakes(recipe.train, recipe.model, recipe.data),
            *batch_mistakes(recipe.train, recipe.parallel, data_degree=degree, consumed=consumed),
            *_schedule_mistakes(recipe.schedule, recipe.optim, recipe.train, recipe.data.sequence_length),
            *_environment_mistakes(recipe.environment),
            *peer_mistakes(recipe),
            *layout_mistakes(recipe),
            *async_tensor_mistakes(recipe),
            *scaling_mistakes(recipe),
            *sharding_mistakes(recipe, data_degree=degree),
            *pipeline_mistakes(
                recipe.parallel, recipe.model, recipe.train, data_degree=degree, consumed=consumed
            ),
        ],
    )


def _run_mistakes(name: str) -> Iterator[Finding]:
    if not re.fullmatch(r"[\w][\w.+-]*", name):
        yield Finding(
            key="run.name",
            problem="cannot name a directory",
            remedy="Use letters, digits, '.', '_', '+' and '-', and begin with a letter or a digit.",
        )


def _model_mistakes(model: ModelSection, data: DataSection, optim: OptimSection) -> Iterator[Finding]:
    width = model.head_width
    if model.head_dim == "auto" and model.hidden % model.heads:
        yield Finding(
            key="model.heads",
            problem=f"does not divide model.hidden = {model.hidden}",
            remedy=f"Heads that do: {nearest_numbers(divisors(model.hidden), near=model.heads)}. "
            "Or set model.head_dim.",
        )
    elif model.position == "rotary" and width % 2:
        yield Finding(
            key="model.heads" if model.head_dim == "auto" else "model.head_dim",
            problem=f"rotary positions turn channels in pairs, and a head has {width}",
            remedy="Choose heads so that hidden / heads is even, or another model.position.",
        )
    if model.kv_heads != "auto" and model.heads % model.kv_heads:
        yield Finding(
            key="model.kv_heads",
            problem=f"does not divide model.heads = {model.heads}",
            remedy=f"Key/value heads that do: {nearest_numbers(divisors(model.heads), near=model.kv_heads)}.",
        )
    if model.rope_scaling == "dynamic" and width == 2:
        yield Finding(
            key="model.rope_scaling",
            problem="'dynamic' stretches by a power that a head of 2 channels does not have",
            remedy="Choose fewer heads, or another model.rope_scaling.",
        )
    if model.rope_scaling in ("llama3", "yarn") and model.rope_high_rotations <= model.rope_low_rotations:
        yield Finding(
            key="model.rope_high_rotations",
            problem=f"is not above model.rope_low_rotations = {model.rope_low_rotations}",
            remedy="Between the two lie the channels that are scaled in part.",
        )
    if model.rope_scaling == "yarn" and model.rope_theta <= 1.0:
        yield Finding(
            key="model.rope_theta",
            problem=f"is {model.rope_theta}, and 'yarn' divides by its logarithm",
            remedy="Set it above 1, or another model.rope_scaling.",
        )
    if model.embedding_init == "bigram" and model.tied:
        yield Finding(
            key="model.embedding_init",
            problem="'bigram' factors fill an embedding and a head of its own, and model.tied is true",
            remedy="Set model.tied = false, or another model.embedding_init.",
        )
    if model.qk_norm and optim.qk_clip:
        yield Finding(
            key="optim.qk_clip",
            problem="rescales weights whose products model.qk_norm normalises, so it has no effect",
            remedy="Keep one of the two.",
        )
    # Published models with rotary positions tell how many they were trained on, and exports tell it again.
    if model.max_positions == "auto" or model.position == "rotary":
        return
    if model.position != "learned":
        yield Finding(
            key="model.max_positions",
            problem=f"has no effect on {model.position} positions, which have no table",
            remedy="Leave it out, or set model.position = 'learned'.",
        )
    elif data.sequence_length > model.max_positions:
        yield Finding(
            key="data.sequence_length",
            problem=f"exceeds model.max_positions = {model.max_positions}, the table of learned positions",
            remedy=f"Set model.max_positions to {data.sequence_length} or 'auto', or shorten the samples.",
        )


def _data_mistakes(data: DataSection) -> Iterator[Finding]:
    if data.sources and data.datasets:
        yield Finding(
            key="data.sources",
            problem="is given beside data.datasets",
            remedy="Give raw text (sources) or tokenised data (datasets), not both.",
        )
    elif not data.sources and not data.datasets:
        yield Finding(
            key="data.sources",
            problem="there is nothing to train on",
            remedy='Name your text, sources = ["my-notes.txt"], or use sources = ["python:stdlib"].',
        )
    elif any(not source.strip() for source in data.sources):
        yield Finding(
            key="data.sources",
            problem="one of them is empty",
            remedy="Name a file, a directory ('.' for the current one) or a pattern.",
        )
    if data.datasets and not data.sources and data.tokenizer == "train":
        yield Finding(
            key="data.tokenizer",
            problem="cannot be trained on data that is tokenised already",
            remedy="Give the path of the tokenizer.json that data.datasets were tokenised with.",
        )
    for key, datasets in (("datasets", data.datasets), ("held_out_datasets", data.held_out_datasets)):
        names = [dataset.name for dataset in datasets]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Finding(
                key=f"data.{key}",
                problem=f"two of them are called '{name}'",
                remedy="Give each its own name.",
            )


def _profile_mistakes(log: LogSection) -> Iterator[Finding]:
    steps = log.profile_steps
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        yield Finding(
            key="log.profile_steps",
            problem="is no first and last step",
            remedy="Write [first, last], as [10, 12], or [] for no profile.",
        )


def _length_mistakes(train: TrainSection) -> Iterator[Finding]:
    set_keys = [name for name in ("samples", "tokens", "steps") if getattr(train, name)]
    if len(set_keys) == 1:
        return
    if not set_keys:
        yield Finding(
            key="train.samples",
            problem="the run has no length",
            remedy="Set one of train.samples, train.tokens and train.steps.",
        )
        return
    others = " ".join(f"train.{name}=0" for name in set_keys[:-1])
    yield Finding(
        key=f"train.{set_keys[-1]}",
        problem=f"the run has {len(set_keys)} lengths: {', '.join(f'train.{name}' for name in set_keys)}",
        remedy=f"Keep one and set the others to 0, for instance with {others} on the command line.",
    )


def _change_mistakes(train: TrainSection) -> Iterator[Finding]:
    for key in ("micro_batch_changes", "precision_changes"):
        places = [place for place, _ in getattr(train, key)]
        if any(place < 1 for place in places) or sorted(set(places)) != places:
            yield Finding(
                key=f"train.{key}",
                problem="its samples must rise, from 1 on",
                remedy="Order the changes by the sample they begin with, and give each sample once.",
            )
    if any(micro_batch < 1 for _, micro_batch in train.micro_batch_changes):
        yield Finding(
            key="train.micro_batch_changes",
            problem="a micro-batch is below 1",
            remedy="Use at least 1 sample.",
        )


def _attention_mistakes(train: TrainSection, model: ModelSection, data: DataSection) -> Iterator[Finding]:
    others = {
        "model.position = 'alibi'": model.position == "alibi",
        "model.attention_dropout": model.attention_dropout > 0.0,
        "data.mask_documents": data.mask_documents,
    }
    beside = [key for key, is_set in others.items() if is_set]
    if train.attention not in ("auto", "triton") and beside:
        yield Finding(
            key="train.attention",
            problem=f"knows no {' and no '.join(beside)}",
            remedy="Leave it out: 'auto' takes the kernel that does.",
        )
    if train.attention == "cudnn" and train.deterministic:
        yield Finding(
            key="train.attention",
            problem="cuDNN's backward gives other bits each time, which train.deterministic forbids",
            remedy="Use 'flash' or 'auto', or set train.deterministic = false.",
        )


def _schedule_mistakes(
    schedule: ScheduleSection, optim: OptimSection, train: TrainSection, sequence_length: int
) -> Iterator[Finding]:
    if schedule.floor > optim.learning_rate:
        yield Finding(
            key="schedule.floor",
            problem=f"is above the peak, optim.learning_rate = {optim.learning_rate:g}",
            remedy="Lower the floor or raise the peak.",
        )
    length = _length_in(schedule.unit, train, sequence_length)
    if schedule.decay != "auto" and schedule.warmup > schedule.decay:
        yield Finding(
            key="schedule.warmup",
            problem=f"ends after schedule.decay = {schedule.decay}",
            remedy=f"Both count {schedule.unit} from the start of the run: shorten the warm-up.",
        )
    elif length is not None and schedule.warmup > length:
        yield Finding(
            key="schedule.warmup",
            problem=f"is longer than the run, which has {length} {schedule.unit}",
            remedy=f"It counts {schedule.unit} (schedule.unit): shorten it, or train longer.",
        )


def _length_in(unit: str, train: TrainSection, sequence_length: int) -> int | None:
    """Return the run's length in a unit; None without a length, and for steps of a ramp-up."""
    samples = train.samples or -(-train.tokens // sequence_length) or train.steps * train.global_batch
    if not samples:
        return None
    if unit == "steps":
        return None if train.ramp_up else -(-samples // train.global_batch)
    return samples * (sequence_length if unit == "tokens" else 1)


def _environment_mistakes(section: EnvironmentSection) -> Iterator[Finding]:
    """Yield variables that are no NAME=VALUE, and profiles that contradict each other."""
    for text in section.variables:
        name, equals, _ = text.partition("=")
        if not equals or not name.isidentifier():
            yield Finding(
                key="environment.variables",
                problem=f"{text!r} is not NAME=VALUE",
                remedy="Write for instance ['NCCL_DEBUG=WARN'].",
            )
    chosen: dict[str, tuple[str, str]] = {}
    own = {text.partition("=")[0] for text in section.variables}
    for profile in section.profiles:
        for name, value in PROFILES[profile].items():
            earlier, other = chosen.setdefault(name, (profile, value))
            if other != value and name not in own:
                yield Finding(
                    key="environment.profiles",
                    problem=f"'{earlier}' sets {name}={other}, and '{profile}' sets {name}={value}",
                    remedy=f"Leave one of them out, or decide in environment.variables: '{name}=…'.",
                )
