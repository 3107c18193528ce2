"""Training between peers: what a round over the internet takes, and what it leaves of the computation.

Legend: n peers, H inner steps.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from bloomery.config.convert import Unusable, convert_table
from bloomery.config.elastic import ElasticSection
from bloomery.config.find import shipped_files
from bloomery.config.setting import setting
from bloomery.errors import ConfigError, Mistake

CODEC_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
PREFIX = "internet-"


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one peer has to the others."""

    gbit_per_s: float = setting(1.0, kind="free", above=0.0, help="One direction.")
    efficiency: float = setting(0.4, kind="free", above=0.0, maximum=1.0, help="What a ring reaches.")
    latency_ms: float = setting(50.0, kind="free", minimum=0.0, help="One way.")
    outer_step_s: float = setting(7.5, kind="free", minimum=0.0, help="The outer optimizer's own time.")


@dataclass(frozen=True, kw_only=True)
class Round:
    """One outer step between peers."""

    peers: int
    inner_steps: int
    inner_s: float
    payload_bytes: float
    sent_bytes: float
    exchange_s: float
    utilisation: float
    """Inner steps' share of the time, with all of the exchange exposed."""


def plan_round(elastic: ElasticSection, link: Link, *, parameters: int, step_s: float) -> Round:
    """A ring all-reduce of every parameter in the codec, 2(n − 1)/n of it sent by each peer; and the step."""
    peers = elastic.peers
    payload = parameters * CODEC_BYTES[elastic.codec]
    sent = 2 * (peers - 1) / peers * payload
    speed = link.gbit_per_s * 1e9 / 8 * link.efficiency
    exchange = sent / speed + 2 * (peers - 1) * link.latency_ms / 1000 + link.outer_step_s
    inner = elastic.inner_steps * step_s
    return Round(
        peers=peers,
        inner_steps=elastic.inner_steps,
        inner_s=inner,
        payload_bytes=payload,
        sent_bytes=sent,
        exchange_s=exchange if peers > 1 else link.outer_step_s,
        utilisation=inner / (inner + (exchange if peers > 1 else link.outer_step_s)),
    )


def load_link(path_or_name: str) -> Link:
    """A shipped link by name (`internet-1g`), or a file by path. Raises ConfigError."""
    path, shipped = Path(path_or_name).expanduser(), shipped_links()
    if not path.is_file():
        found = shipped.get(path_or_name.removesuffix(".toml"))
        if found is None:
            raise _refused(
                path_or_name, "there is no such file or shipped link", f"Shipped: {', '.join(shipped)}."
            )
        path = found
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        values = convert_table(Link, raw.get("link", {}), "link")
    except Unusable as unusable:
        wrongs = [
            Mistake(key=one.key, value=one.value, source=path.name, problem=one.problem, remedy=one.remedy)
            for one in unusable.wrongs
        ]
        raise ConfigError(wrongs, of=f"the link file {path.name}") from None
    except (OSError, ValueError) as broken:
        raise _refused(
            path_or_name, f"cannot be read: {broken}", "See hardware/internet-1g.toml."
        ) from broken
    return Link(**values)


def shipped_links() -> dict[str, Path]:
    """The links that came with bloomery, by name."""
    return {name: path for name, path in shipped_files("hardware").items() if name.startswith(PREFIX)}


def _refused(value: str, problem: str, remedy: str) -> ConfigError:
    mistake = Mistake(key="--link", value=value, source="command line", problem=problem, remedy=remedy)
    return ConfigError([mistake], of="the plan")
