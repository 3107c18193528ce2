"""Checks `[elastic]` against the rest of a recipe, and lists the settings that must be equal on all peers.

Every setting is either in EQUAL or in FREE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bloomery.config.convert import settings_of
from bloomery.config.elastic import SPARSE
from bloomery.config.findings import Finding, refuse
from bloomery.config.recipe import Recipe
from bloomery.errors import Mistake


def no_rounds_mistake(sources: Mapping[str, str]) -> Mistake:
    """Return the mistake of a recipe that peers are to train together, and that has no rounds."""
    return Mistake(
        key="elastic.inner_steps",
        value=0,
        source=sources.get("elastic.inner_steps", "default"),
        problem="the recipe has no rounds between peers",
        remedy="Set elastic.inner_steps, for instance to 50; or train alone: `bloomery train`.",
    )


def peer_mistakes(recipe: Recipe) -> Iterator[Finding]:
    """Yield what does not fit `[elastic]`; nothing for a recipe without peers."""
    elastic = recipe.elastic
    if not elastic.inner_steps:
        return
    yield from _length_mistakes(recipe)
    if elastic.average == "gradients":
        yield from _gradient_mistakes(recipe)
    if elastic.codec == SPARSE and elastic.outer_momentum:
        yield Finding(
            key="elastic.outer_momentum",
            problem="is used beside codec = 'sparse', whose error feedback is the momentum of each peer",
            remedy="Set elastic.outer_momentum = 0; elastic.feedback_decay says how long the feedback lasts.",
        )
    if elastic.inner_steps % elastic.fragments:
        yield Finding(
            key="elastic.fragments",
            problem=f"does not divide elastic.inner_steps = {elastic.inner_steps}",
            remedy="One fragment is averaged each inner_steps / fragments steps: choose a divisor.",
        )
    elif elastic.fragments > recipe.model.layers:
        yield Finding(
            key="elastic.fragments",
            problem=f"exceeds model.layers = {recipe.model.layers}",
            remedy="A fragment is made of whole blocks: use at most as many.",
        )
    if elastic.overlap_steps >= elastic.round_steps and elastic.average == "weights":
        yield Finding(
            key="elastic.overlap_steps",
            problem=f"is not below the {elastic.round_steps} steps of a round",
            remedy="A round must end before the next one begins: set fewer steps.",
        )
    if elastic.mixing != 1.0 and not elastic.overlap_steps:
        yield Finding(
            key="elastic.mixing",
            problem="has no effect without elastic.overlap_steps: no step is made before the result arrives",
            remedy="Leave it out, or set elastic.overlap_steps.",
        )
    if elastic.quorum:
        yield from _quorum_mistakes(recipe)
    if elastic.minimum_peers > elastic.peers:
        yield Finding(
            key="elastic.minimum_peers",
            problem=f"exceeds elastic.peers = {elastic.peers}",
            remedy="Plan for at least as many peers as a round needs.",
        )


def refuse_alone(recipe: Recipe, sources: Mapping[str, str]) -> None:
    """Raise ConfigError for a recipe with peers that is not started by `bloomery peer`."""
    if recipe.elastic.inner_steps:
        finding = Finding(
            key="elastic.inner_steps",
            problem="this is a run between peers, and each peer needs an agent",
            remedy="Start each peer with `bloomery peer`, or train alone with elastic.inner_steps=0.",
        )
        refuse(recipe, sources, [finding])


def _quorum_mistakes(recipe: Recipe) -> Iterator[Finding]:
    elastic = recipe.elastic
    if not elastic.overlap_steps:
        yield Finding(
            key="elastic.quorum",
            problem="needs elastic.overlap_steps: without them a quorum waits while a round is decided",
            remedy="Set elastic.overlap_steps, to more than a step of the slowest peer takes, or quorum = 0.",
        )
    if not elastic.minimum_peers <= elastic.quorum <= elastic.peers:
        yield Finding(
            key="elastic.quorum",
            problem=f"is not between elastic.minimum_peers = {elastic.minimum_peers} and "
            f"elastic.peers = {elastic.peers}",
            remedy="Choose how many of the peers decide a round: 0 waits for all.",
        )


def _length_mistakes(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.steps:
        yield Finding(
            key="train.steps",
            problem="cannot count a run between peers, because each peer makes its own steps",
            remedy="Count the run in samples or tokens: train.samples=… train.steps=0.",
        )
    schedule = recipe.schedule
    if schedule.unit == "steps" and schedule.decay == "auto" and schedule.shape != "constant":
        yield Finding(
            key="schedule.unit",
            problem="'steps' are those of one peer, so the run's length in steps depends on who joins",
            remedy="Use 'samples' or 'tokens', which count those of all peers; or set schedule.decay.",
        )


def _gradient_mistakes(recipe: Recipe) -> Iterator[Finding]:
    elastic = recipe.elastic
    if elastic.codec == SPARSE:
        yield Finding(
            key="elastic.codec",
            problem="'sparse' keeps for later rounds what it does not send, and gradients are of one step",
            remedy="Use another codec, or set elastic.average = 'weights'.",
        )
    for key, value, wanted in (
        ("inner_steps", elastic.inner_steps, 1),
        ("fragments", elastic.fragments, 1),
        ("overlap_steps", elastic.overlap_steps, 0),
    ):
        if value != wanted:
            yield Finding(
                key=f"elastic.{key}",
                problem="gradients are averaged at each step, whole, before the update",
                remedy=f"Set elastic.{key} = {wanted}, or elastic.average = 'weights'.",
            )
    if recipe.optim.qk_clip:
        yield Finding(
            key="optim.qk_clip",
            problem="follows each peer's own samples, and all peers must make the same update",
            remedy="Leave it out (0), or set elastic.average = 'weights'.",
        )
    if "fp16" in {recipe.train.precision, *(precision for _, precision in recipe.train.precision_changes)}:
        yield Finding(
            key="train.precision",
            problem="fp16 scales each peer's gradients by a factor of its own",
            remedy="Use bf16 or fp32 where elastic.average = 'gradients'.",
        )


EQUAL: frozenset[str] = frozenset(
    f"{section}.{name}"
    for section, names in {
        "run": "seed",
        "model": "layers hidden heads head_dim kv_heads ffn vocabulary max_positions norm norm_epsilon "
        "position rope_theta rope_scaling rope_factor rope_original_positions rope_low_rotations "
        "rope_high_rotations rope_attention_factor activation bias bias_in tied embedding_norm qk_norm "
        "hidden_dropout attention_dropout init_std residual_init embedding_init",
        "data": "split text_field prompt_field separator held_out_every tokenizer_vocabulary tokenizer_split "
        "sequence_length order packing order_seed order_samples mask_documents reset_positions "
        "end_of_document_token",
        "train": "samples tokens steps global_batch ramp_up precision precision_changes fp8_scaling",
        "optim": "name learning_rate beta1 beta2 epsilon weight_decay decay_embeddings clip clip_method "
        "clip_z_score clip_ratio skip_outliers qk_clip qk_clip_stride "
        "embedding_learning_rate head_learning_rate muon_learning_rate muon_momentum muon_iterations",
        "schedule": "shape unit warmup decay floor cooldown_share cooldown_shape",
        "loss": "z_loss",
        "guard": "slow_rate clamp clamp_z_score clamp_qk restrain_steps",
        # Each rank averages its own part with the same rank elsewhere: these say what that part is.
        "parallel": "data tensor pipeline schedule chunks partition blocks_per_stage zero shard_degree",
        "elastic": "inner_steps average outer_learning_rate outer_momentum codec density feedback_decay "
        "fragments overlap_steps quorum mixing minimum_peers outlier_factor streams",
    }.items()
    for name in names.split()
)
"""The settings that all peers of a run must have equal; otherwise they would train different models."""

FREE: frozenset[str] = frozenset(
    f"{section}.{name}"
    for section, names in {
        "run": "name hardware offline notes",  # the coordinator already keeps runs apart by name
        # Paths differ between machines: what lies there is compared by its content.
        "init": "from",
        "data": "sources datasets weights_file tokenizer held_out_datasets bad_documents longest_line_mib "
        "cache cache_gb prefetch read_threads",
        "train": "micro_batch micro_batch_changes recompute compile attention deterministic loss_chunk",
        "parallel": "recompute_per_stage sequence async_tensor offload working fp8_copies overlap "
        "prefetch_blocks bucket_mb ranks_per_node",
        "checkpoint": "url every_steps every_samples every_minutes keep_last keep_every_steps keep_tenths "
        "keep_best at_end background partner_copies memory_directory throttle",
        "backup": "url what every_steps finish_minutes logs data prune_waits",
        "second_backup": "url what every_steps finish_minutes logs data prune_waits",
        "evaluate": "every_steps samples at_end",
        "log": "every_steps form tensorboard profile_steps trackers",
        "control": "directory preflight maintenance_minutes metadata metadata_url",
        "environment": "profiles variables",
        "sync": "place every_minutes checkpoints",
        "submit": "scheduler nodes spares minutes tasks queue keep_queued signal_before_s gpus_per_node "
        "cpus_per_node memory_per_node partition account qos reservation constraint nice exclude exclusions "
        "group setup image namespace volumes more",
        "guard": "refused_updates not_finite_losses stop_after_minutes stop_at_step spike spike_patience "
        "spike_rewind_steps spike_skip_steps repeat last_rung forget_rewind_steps gradient_norm loss_scale "
        "throughput plateau held_out memory growth_steps resume_parity corruption_steps "
        "corruption_faults trial_steps",
        "elastic": "peers grace_s patience_s join coordinator certificates peer listen advertise relay "
        "encrypt bandwidth_limit_mbit_s heartbeat_s lease_s stall_s still_s",
    }.items()
    for name in names.split()
)
"""The settings that each peer may choose for itself."""


def equal_settings(recipe: Recipe) -> dict[str, str]:
    """Return the settings that all peers must have in common, as TOML text by key."""
    return {key: value for key, value in settings_of(recipe).items() if key in EQUAL}
