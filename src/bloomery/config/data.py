"""The settings of `[data]`: text or datasets, tokenizer, order of samples, and what is held out."""

from __future__ import annotations

from bloomery.config.model import Auto
from bloomery.config.setting import LARGEST_SEED, setting
from bloomery.frozen import dataclass

HUB_PREFIX = "hf:"
"""Prefix of a tokenizer's name that is looked up on Hugging Face."""
LONGEST_LINE_MIB = 256


@dataclass(frozen=True, kw_only=True)
class DatasetSection:
    """One tokenised dataset of a mixture."""

    name: str = setting(kind="fixed", help="Name of the dataset in reports.")
    path: str = setting(
        kind="free",
        at_start=True,
        help="Path of the .bin/.idx pair, without its extension. At an address (s3://, gs://, az://, "
        "http(s)://, file://) the dataset is read block by block while training.",
    )
    weight: float | Auto = setting(
        "auto",
        kind="journalled",
        minimum=0.0,
        help="Weight of the dataset among those without a budget, before normalising. 0 takes no more of "
        "it. 'auto' is 1. With the megatron order, a single dataset with a weight provides 0.5% more "
        "samples, as in Megatron.",
    )
    tokens: int = setting(
        0,
        kind="journalled",
        minimum=0,
        help="Budget in place of a weight: tokens of the dataset over the whole run, none of them twice; 0 "
        "is no budget.",
    )
    epochs: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        help="Budget in place of a weight: how many times the run goes through the dataset; 0 is no budget.",
    )
    group: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Group of the dataset, such as its language, by which `bloomery data report` adds up.",
    )

    @property
    def resolved_weight(self) -> float:
        """The weight as a number: 1 for 'auto'."""
        return 1.0 if self.weight == "auto" else float(self.weight)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The data. Give either `sources` (raw text, which is tokenised at the first start) or `datasets`."""

    sources: tuple[str, ...] = setting(
        (),
        kind="fixed",
        help="Raw text: .jsonl (.gz, .zst), .parquet, .arrow and .txt files, directories and globs of them, "
        "or 'python:stdlib' for the source code of Python's standard library.",
    )
    datasets: tuple[DatasetSection, ...] = setting(
        (), kind="journalled", help="Tokenised datasets, each a table [[data.datasets]]."
    )
    weights_file: str = setting(
        "",
        kind="journalled",
        help="File with the weights of data.datasets by name: a TOML table, a JSON object, or a JSON list "
        "of {dataset_path, ratio}. Where it has several splits, 'train' is used.",
    )
    split: tuple[int, ...] = setting(
        (),
        kind="fixed",
        minimum=0,
        help="Parts [train, validation, test] into which each dataset's documents are split, in their "
        "order, as by Megatron's --split (with the megatron order, rounded exactly as there). Validation "
        "gives the held-out loss; test is never read. [] trains on all documents.",
    )
    held_out_datasets: tuple[DatasetSection, ...] = setting(
        (),
        kind="free",
        at_start=True,
        help="Tokenised datasets for the held-out loss; they are never trained on.",
    )
    text_field: str = setting(
        "text", kind="fixed", help="Field of a JSON line, or column of a table, which holds the text."
    )
    prompt_field: str = setting(
        "",
        kind="fixed",
        help="Field of a JSON line that holds a prompt; data.text_field then holds its answer, and only the "
        "tokens of answers count in the losses. '' for plain text.",
    )
    separator: str = setting(
        "",
        kind="fixed",
        help="Text between two documents of a .txt file; with an empty one, each file is one document. On "
        "the command line `\\n` in it is a line end.",
    )
    bad_documents: str = setting(
        "skip",
        kind="free",
        at_start=True,
        choices=("skip", "fail"),
        help="What happens to a document that is empty, malformed or not UTF-8: 'skip' counts and lists it, "
        "'fail' stops.",
    )
    longest_line_mib: int = setting(
        LONGEST_LINE_MIB,
        kind="free",
        at_start=True,
        minimum=1,
        help="A longer line of a .jsonl file, or text of a .txt file, in MiB, counts as a bad document; it "
        "is not held in memory.",
    )
    held_out_every: int = setting(
        10,
        kind="fixed",
        minimum=0,
        help="Holds out one document in N of data.sources, by the hash of its key; 0 holds out none.",
    )
    tokenizer: str = setting(
        "train",
        kind="fixed",
        help="Path of a tokenizer.json or of a SentencePiece model, 'hf:NAME' for one of Hugging Face, or "
        "'train' to train one on the sources.",
    )
    tokenizer_vocabulary: int = setting(
        8192, kind="fixed", minimum=257, help="Entries of the vocabulary of a tokenizer that is trained."
    )
    tokenizer_split: str = setting(
        "text",
        kind="fixed",
        choices=("text", "code"),
        help="Rules that split text before a tokenizer is trained: 'text' as GPT-2 does, 'code' for source "
        "code.",
    )
    sequence_length: int = setting(kind="fixed", minimum=2, help="Tokens of one sample.")
    order: str = setting(
        "bloomery",
        kind="fixed",
        choices=("bloomery", "megatron"),
        help="Order of the samples: 'bloomery' is computed, needs no stored index and has no end; "
        "'megatron' is Megatron's, and continues one of its runs with the same samples.",
    )
    packing: str = setting(
        "windows",
        kind="fixed",
        choices=("windows", "shifted", "documents"),
        help="How tokens become samples: 'windows' cuts a dataset every sequence_length tokens; 'shifted' "
        "does so at other places in each epoch; 'documents' packs whole documents by best fit, and cuts only "
        "those that are longer than a sample (needs mask_documents).",
    )
    order_seed: int | Auto = setting(
        "auto",
        kind="fixed",
        minimum=0,
        maximum=LARGEST_SEED,
        help="Seed of the order of the samples; 'auto' is run.seed.",
    )
    order_samples: int | Auto = setting(
        "auto",
        kind="fixed",
        minimum=1,
        help="Number of samples that the megatron order is made for (Megatron's iterations × global batch); "
        "'auto' is the run's length.",
    )
    mask_documents: bool = setting(
        False, kind="fixed", help="Whether a token attends only to tokens of its own document."
    )
    reset_positions: bool = setting(
        False,
        kind="fixed",
        help="Whether learned positions count from the beginning of a token's document; needs "
        "mask_documents. Rotary positions and ALiBi depend on distances, which this does not change.",
    )
    end_of_document_token: str = setting("<|endoftext|>", kind="fixed", help="Token that ends each document.")
    cache: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Directory on a disk of the node that caches blocks of datasets whose path is an address; '' "
        "is data/cache in the run directory.",
    )
    cache_gb: float = setting(
        20.0,
        kind="free",
        at_start=True,
        above=0.0,
        help="Largest size of data.cache, in 10⁹ bytes.",
    )
    prefetch: int = setting(
        2,
        kind="free",
        at_start=True,
        minimum=0,
        help="Number of global batches that threads read ahead; 0 reads each batch in its step.",
    )
    read_threads: int = setting(
        2,
        kind="free",
        at_start=True,
        minimum=1,
        help="Number of threads that read ahead; more than data.prefetch are not used.",
    )
