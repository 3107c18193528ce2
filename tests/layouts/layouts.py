"""The layouts that must train what one process trains: the one list of what is supported.

Add a row for what you build; `covers` puts it into the suite's covering subset, for the styles named, and
`make soak PART=layouts` trains every row with every style. What cannot agree is not in the list.
"""

from __future__ import annotations

from dataclasses import dataclass

LLAMA, BLOOM, GPT = STYLES = ("llama", "bloom", "gpt")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row. settings: overrides of the recipe. covers: styles with which the suite trains it."""

    name: str
    ranks: int
    settings: tuple[str, ...]
    covers: tuple[str, ...] = ()
    styles: tuple[str, ...] = STYLES


LAYOUTS: tuple[Layout, ...] = (
    Layout(name="one process, micro-batch 4", ranks=1, settings=("train.micro_batch=4",), covers=(GPT,)),
    Layout(name="DP 2", ranks=2, settings=("parallel.data=2",), covers=(BLOOM,)),
    Layout(name="DP 4", ranks=4, settings=("parallel.data=4",), covers=(GPT,)),
    Layout(
        name="DP 8, micro-batch 1",
        ranks=8,
        settings=("parallel.data=8", "train.micro_batch=1"),
    ),
    Layout(name="TP 2", ranks=2, settings=("parallel.tensor=2",), covers=(BLOOM,)),
    Layout(
        name="TP 2 + SP",
        ranks=2,
        settings=("parallel.tensor=2", "parallel.sequence=true"),
        covers=(LLAMA, GPT),
    ),
    Layout(name="TP 4", ranks=4, settings=("parallel.tensor=4",)),
    Layout(name="TP 4 + SP", ranks=4, settings=("parallel.tensor=4", "parallel.sequence=true")),
    Layout(
        name="TP 2 + SP × DP 2",
        ranks=4,
        settings=("parallel.tensor=2", "parallel.sequence=true", "parallel.data=2"),
        covers=(BLOOM,),
    ),
    Layout(name="TP 4 × DP 2", ranks=8, settings=("parallel.tensor=4", "parallel.data=2")),
    *(
        Layout(
            name=f"DP {degree}, ZeRO {stage}",
            ranks=degree,
            settings=(f"parallel.data={degree}", f"parallel.zero={stage}"),
            covers=covers,
        )
        for degree, stage, covers in (
            (2, 1, (LLAMA,)),
            (2, 2, (BLOOM,)),
            (2, 3, (GPT,)),
            (4, 1, ()),
            (4, 2, ()),
            (4, 3, ()),
        )
    ),
    Layout(
        name="DP 4, ZeRO 3 within 2",
        ranks=4,
        settings=("parallel.data=4", "parallel.zero=3", "parallel.shard_degree=2"),
        covers=(LLAMA,),
    ),
    Layout(
        name="TP 2 + SP × DP 2, ZeRO 1",
        ranks=4,
        settings=("parallel.tensor=2", "parallel.sequence=true", "parallel.data=2", "parallel.zero=1"),
        covers=(GPT,),
    ),
    *(
        Layout(
            name=f"TP 2 + SP × DP 4, ZeRO {stage}",
            ranks=8,
            settings=(
                "parallel.tensor=2",
                "parallel.sequence=true",
                "parallel.data=4",
                f"parallel.zero={stage}",
            ),
        )
        for stage in (2, 3)
    ),
    *(
        Layout(
            name=name,
            ranks=ranks,
            settings=tuple(f"parallel.{one}" for one in settings.split()),
            covers=covers,
        )
        for name, ranks, settings, covers in (
            ("PP 2", 2, "pipeline=2", (LLAMA,)),
            ("PP 2, GPipe", 2, "pipeline=2 schedule=gpipe", (GPT,)),
            ("PP 2, interleaved", 2, "pipeline=2 schedule=interleaved chunks=2", (BLOOM,)),
            ("PP 2, zero-bubble", 2, "pipeline=2 schedule=zero-bubble", (LLAMA,)),
            ("PP 2, zero-bubble interleaved", 2, "pipeline=2 schedule=zero-bubble chunks=2", (GPT,)),
            ("PP 2, ZBV", 2, "pipeline=2 schedule=zbv chunks=2", (BLOOM,)),
            ("PP 4", 4, "pipeline=4", (BLOOM,)),
            ("PP 4, zero-bubble", 4, "pipeline=4 schedule=zero-bubble", (GPT,)),
            ("PP 2 × DP 2", 4, "pipeline=2 data=2", (GPT,)),
            ("PP 2 × DP 2, interleaved", 4, "pipeline=2 data=2 schedule=interleaved chunks=2", ()),
            ("PP 2 × DP 2, ZBV", 4, "pipeline=2 data=2 schedule=zbv chunks=2", (LLAMA,)),
            ("PP 2 × DP 2, ZeRO 1", 4, "pipeline=2 data=2 zero=1", (BLOOM,)),
            ("PP 2 × DP 2, ZBV, ZeRO 1", 4, "pipeline=2 data=2 schedule=zbv chunks=2 zero=1", ()),
            ("PP 2 × DP 2, zero-bubble, ZeRO 2", 4, "pipeline=2 data=2 schedule=zero-bubble zero=2", ()),
            ("PP 2 × DP 2, ZeRO 3", 4, "pipeline=2 data=2 zero=3", ()),
            ("TP 2 + SP × PP 2", 4, "tensor=2 sequence=true pipeline=2", (BLOOM,)),
            (
                "TP 2 + SP × PP 2, zero-bubble",
                4,
                "tensor=2 sequence=true pipeline=2 schedule=zero-bubble",
                (LLAMA,),
            ),
            ("TP 2 × PP 2 × DP 2", 8, "tensor=2 pipeline=2 data=2", (GPT,)),
            (
                "TP 2 + SP × PP 2 × DP 2, ZBV, ZeRO 1",
                8,
                "tensor=2 sequence=true pipeline=2 data=2 schedule=zbv chunks=2 zero=1",
                (),
            ),
        )
    ),
    Layout(
        name="one process, recompute selective",
        ranks=1,
        settings=("train.recompute=selective",),
        covers=(GPT,),
    ),
    Layout(
        name="one process, recompute elementwise",
        ranks=1,
        settings=("train.recompute=elementwise",),
        covers=(LLAMA,),
    ),
    Layout(name="one process, recompute full", ranks=1, settings=("train.recompute=full",)),
    Layout(
        name="DP 2, ZeRO 3, recompute full",
        ranks=2,
        settings=("parallel.data=2", "parallel.zero=3", "train.recompute=full"),
        covers=(BLOOM,),
    ),
    Layout(
        name="PP 2, zero-bubble, recompute full",
        ranks=2,
        settings=("parallel.pipeline=2", "parallel.schedule=zero-bubble", "train.recompute=full"),
    ),
    Layout(
        name="TP 2 + SP, recompute elementwise",
        ranks=2,
        settings=("parallel.tensor=2", "parallel.sequence=true", "train.recompute=elementwise"),
        covers=(GPT,),
    ),
    Layout(
        name="TP 2 + SP, recompute full",
        ranks=2,
        settings=("parallel.tensor=2", "parallel.sequence=true", "train.recompute=full"),
    ),
    Layout(
        name="DP 2, ZeRO 1, offload",
        ranks=2,
        settings=("parallel.data=2", "parallel.zero=1", "parallel.offload=cpu"),
        covers=(GPT,),
    ),
)
