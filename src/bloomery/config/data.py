"""`[data]`: which text, which tokenizer, in which order, and what is held out."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.model import Auto
from bloomery.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class DatasetSection:
    """`[[data.datasets]]`: one tokenised dataset of a mixture."""

    name: str = setting(kind="fixed", help="Name in reports.")
    path: str = setting(
        kind="free",
        at_start=True,
        help="Path of the .bin/.idx pair, without the ending; an address (s3://, gs://, http(s)://, file://) "
        "is read as it is needed.",
    )
    weight: float = setting(
        1.0,
        kind="journalled",
        minimum=0.0,
        help="Share of what budgets leave, before normalising; 0 retires the dataset of a running mixture.",
    )
    tokens: int = setting(
        0,
        kind="journalled",
        minimum=0,
        help="Budget instead of a weight: so many tokens over the run, none of them twice; 0 is no budget.",
    )
    epochs: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        help="Budget instead of a weight: the dataset so many times over the run; 0 is no budget.",
    )
    group: str = setting(
        "", kind="free", at_start=True, help="Language or kind, for the sums of `bloomery data report`."
    )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The text. Give `sources` (raw text, tokenised at the first start) or `datasets`, not both."""

    sources: tuple[str, ...] = setting(
        (),
        kind="fixed",
        help="Raw text: .jsonl (.gz, .zst), .parquet, .arrow and .txt files, directories and globs of them, "
        "or 'python:stdlib'.",
    )
    datasets: tuple[DatasetSection, ...] = setting((), kind="journalled", help="Tokenised datasets.")
    weights_file: str = setting(
        "",
        kind="journalled",
        help="Weights of data.datasets by name: a TOML table, or JSON, also a catalogue of {dataset_path, "
        "ratio}; of several splits 'train' counts.",
    )
    split: tuple[int, ...] = setting(
        (),
        kind="fixed",
        minimum=0,
        help="[train, validation, test] parts of each dataset's documents, in their order, as Megatron's "
        "--split; validation gives the held-out loss, test is never read. [] trains on all.",
    )
    held_out_datasets: tuple[DatasetSection, ...] = setting(
        (), kind="free", at_start=True, help="Tokenised datasets never trained on, for the held-out loss."
    )
    text_field: str = setting(
        "text", kind="fixed", help="Field of a JSON line, or column of a table, that holds the text."
    )
    separator: str = setting(
        "", kind="fixed", help="What parts the documents of a .txt file; empty makes each file one document."
    )
    bad_documents: str = setting(
        "skip",
        kind="free",
        at_start=True,
        choices=("skip", "fail"),
        help="A document that is empty, malformed or not UTF-8: count, name and skip it, or stop.",
    )
    held_out_every: int = setting(
        10,
        kind="fixed",
        minimum=0,
        help="Documents with sha256(key) mod this = 0 are held out; 0 holds out nothing.",
    )
    tokenizer: str = setting(
        "train",
        kind="fixed",
        help="Path of a tokenizer.json or a SentencePiece model, a Hugging Face name, or 'train' to train "
        "one on the sources.",
    )
    tokenizer_vocabulary: int = setting(
        8192, kind="fixed", minimum=257, help="Vocabulary of a tokenizer that is trained here."
    )
    tokenizer_split: str = setting(
        "text",
        kind="fixed",
        choices=("text", "code"),
        help="Where a trained tokenizer's merges stop: at GPT-2's words, or at those of source code.",
    )
    sequence_length: int = setting(kind="fixed", minimum=2, help="Tokens of one sample.")
    order: str = setting(
        "bloomery",
        kind="fixed",
        choices=("bloomery", "megatron"),
        help="How positions map to samples: 'bloomery' stores nothing and has no end; 'megatron' goes on "
        "where a run of Megatron stopped, with the same samples.",
    )
    order_seed: int | Auto = setting(
        "auto", kind="fixed", minimum=0, help="Seed of the order; 'auto' is run.seed."
    )
    order_samples: int | Auto = setting(
        "auto",
        kind="fixed",
        minimum=1,
        help="Samples that the megatron order is made for (Megatron's iterations × global batch); 'auto' is "
        "the run's length.",
    )
    mask_documents: bool = setting(False, kind="fixed", help="A token attends only within its document.")
    reset_positions: bool = setting(
        False,
        kind="fixed",
        help="Learned positions count within a token's document, with mask_documents. Rotary ones and "
        "ALiBi's are distances, which a reset does not change.",
    )
    end_of_document_token: str = setting(
        "<|endoftext|>", kind="fixed", help="Token that ends each document, and opens the next."
    )
    cache: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Directory, on a disk of the node, for blocks of datasets whose path is an address; '' is "
        "data/cache in the run directory.",
    )
    cache_gb: float = setting(
        20.0,
        kind="free",
        at_start=True,
        above=0.0,
        help="Most that they may take, in 10⁹ bytes.",
    )
    prefetch: int = setting(
        2,
        kind="free",
        at_start=True,
        minimum=0,
        help="Global batches read ahead by threads; 0 reads in the step.",
    )
    read_threads: int = setting(
        2, kind="free", at_start=True, minimum=1, help="Threads that read ahead, at most one a batch."
    )
