"""Reads notices of node maintenance: clouds' metadata services, SLURM's reservations, and files."""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bloomery.config.checkpoint import ControlSection
from bloomery.operate.schedulers.slurm import Slurm

log = logging.getLogger(__name__)

ADDRESSES = {
    "gce": "http://metadata.google.internal",
    "aws": "http://169.254.169.254",
    "azure": "http://169.254.169.254",
}
"""Where the metadata service of each cloud answers to its own machines."""
_ANSWER_S = 5.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Passes by http_proxy: a proxy does not reach this machine's service, or answers with that of its own."""
_DMI = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_SHORT_PAUSE_S = 30
"""A pause of so many seconds ends no collective; it is waited for."""
_told: dict[str, str] = {}
"""What was said last of each address that does not answer as it should."""
_HARMLESS = {"NONE", "MIGRATE_ON_HOST_MAINTENANCE"}


@dataclass(frozen=True, kw_only=True)
class MaintenanceNotice:
    """A notice that this machine, or a node of the run, goes away.

    at: when, in seconds since 1970; 0.0 for now.
    what: the notice in words, with its source.
    """

    at: float
    what: str


def cloud_here(dmi: Path = _DMI) -> str:
    """Return the cloud whose machine this is, by what the firmware says; "" elsewhere. Asks no network."""
    product, vendor, tag = (_read(dmi / name) for name in ("product_name", "sys_vendor", "chassis_asset_tag"))
    if "Google Compute Engine" in product:
        return "gce"
    if "Amazon EC2" in (vendor, product):
        return "aws"
    return "azure" if tag == _AZURE_TAG else ""


def notices_of_cloud(section: ControlSection) -> Callable[[], list[MaintenanceNotice]]:
    """Return a function that asks the metadata service of this machine's cloud; without one it returns []."""
    cloud = cloud_here() if section.metadata == "auto" else section.metadata
    asks = {"gce": _gce, "aws": _aws, "azure": _azure}
    if cloud not in asks:
        return list
    url = section.metadata_url.rstrip("/") or ADDRESSES[cloud]
    return lambda: asks[cloud](url)


def notices_of_files(paths: Sequence[Path], *, after: float = 0.0) -> list[MaintenanceNotice]:
    """Return a notice for each file that exists: at its first line's time, as 2026-01-31T12:00, or now.

    A line that is no time counts as now, for whoever wrote it wanted the machine. A file whose time lies
    before `after` (seconds since 1970) gives none: what it announced has begun, and this machine runs.
    """
    notices = []
    for path in paths:
        try:
            line = path.read_text(errors="replace").partition("\n")[0].strip()
        except OSError:
            continue
        at = 0.0
        with suppress(ValueError):
            at = datetime.fromisoformat(line).timestamp()
            if at < after:
                continue
        notices.append(MaintenanceNotice(at=at, what=f"{path}: {line or 'now'}"))
    return notices


def notices_of_slurm(slurm: Slurm, nodes: Sequence[str], *, own: str = "") -> list[MaintenanceNotice]:
    """Return the maintenance reservations that hold one of these nodes. Raises SchedulerError.

    own: the reservation that the job itself runs in, which takes no node from it.
    """
    notices = []
    for name, start, reserved in slurm.reservations():
        hit = sorted(set(nodes) & set(reserved)) if name != own else []
        if hit:
            notices.append(MaintenanceNotice(at=start, what=f"reservation {name} of {', '.join(hit)}"))
    return notices


def _gce(url: str) -> list[MaintenanceNotice]:
    base, headers = f"{url}/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
    notices = []
    event = _get(f"{base}/maintenance-event", headers)
    if event and event.strip() not in _HARMLESS:
        notices.append(MaintenanceNotice(at=0.0, what=f"Google Cloud: {event.strip()}"))
    if (_get(f"{base}/preempted", headers) or "").strip() == "TRUE":
        notices.append(MaintenanceNotice(at=0.0, what="Google Cloud: preempted"))
    upcoming = _parsed(_get(f"{base}/upcoming-maintenance?alt=json", headers))
    if isinstance(upcoming, dict):
        start = str(upcoming.get("window_start_time") or upcoming.get("windowStartTime") or "")
        if start:
            notices.append(MaintenanceNotice(at=_iso(start), what=f"Google Cloud: maintenance from {start}"))
    return notices


def _aws(url: str) -> list[MaintenanceNotice]:
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "300"}
    token = _get(f"{url}/latest/api/token", lifetime, method="PUT")
    headers = {"X-aws-ec2-metadata-token": token.strip()} if token else {}
    notices = []
    action = _parsed(_get(f"{url}/latest/meta-data/spot/instance-action", headers))
    if isinstance(action, dict):
        at = _iso(str(action.get("time", "")))
        notices.append(MaintenanceNotice(at=at, what=f"AWS: {action.get('action', 'interruption')}"))
    events = _parsed(_get(f"{url}/latest/meta-data/events/maintenance/scheduled", headers))
    for event in events if isinstance(events, list) else []:
        if event.get("State", "active") == "active":
            what = f"AWS: {event.get('Code', 'maintenance')}"
            notices.append(MaintenanceNotice(at=_mail_date(str(event.get("NotBefore", ""))), what=what))
    return notices


def _azure(url: str) -> list[MaintenanceNotice]:
    answer = _get(f"{url}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    events = _parsed(answer)
    listed = events.get("Events", []) if isinstance(events, dict) else []
    if not listed:
        return []
    own = _get(
        f"{url}/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"}
    )
    notices = []
    for event in listed:
        kind, begins = str(event.get("EventType", "event")), str(event.get("NotBefore", ""))
        hit = [str(name) for name in event.get("Resources", [])]
        # All machines of a scale set are told of each other's events.
        is_of_others = bool(own.strip() and hit) and own.strip() not in hit
        pause_s = event.get("DurationInSeconds", -1)  # -1: not known
        is_short = kind == "Freeze" and isinstance(pause_s, int) and 0 <= pause_s <= _SHORT_PAUSE_S
        if not is_of_others and not is_short:
            what = f"Azure: {kind} of {', '.join(hit) or 'this machine'}"
            notices.append(MaintenanceNotice(at=_mail_date(begins), what=what))
    return notices


def _get(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    """Return an answer's text; "" for one of 404, which these services give when there is no notice."""
    try:
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        with _DIRECT.open(request, timeout=_ANSWER_S) as answer:
            text: str = answer.read(1 << 20).decode(errors="replace")
            _told.pop(url, None)
            return text
    except urllib.error.HTTPError as refused:
        if refused.code not in (404, 405, 503):
            _tell(url, f"answers {refused.code}")
        else:
            _told.pop(url, None)
    except (OSError, HTTPException, ValueError) as silent:  # the last for a metadata_url that is none
        _tell(url, f"does not answer: {silent}")
    return ""


def _tell(url: str, what: str) -> None:
    """Warn of a service once until it says something else: it is asked every few seconds of a run."""
    if _told.get(url) != what:
        log.warning("%s %s", url, what)
    _told[url] = what


def _parsed(text: str) -> Any:  # Any: parsed JSON
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        return None


def _iso(text: str) -> float:
    """Return the seconds since 1970 of a time such as 2017-09-18T08:22:00Z; 0.0 where it is none."""
    with suppress(ValueError):
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return 0.0


def _mail_date(text: str) -> float:
    """Return the seconds since 1970 of a time such as Mon, 19 Sep 2016 18:29:47 GMT; 0.0 where it is none."""
    with suppress(ValueError, TypeError):
        return parsedate_to_datetime(text).timestamp()
    return 0.0


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def earliest(notices: Sequence[MaintenanceNotice]) -> MaintenanceNotice | None:
    """Return the notice of what comes first; None without notices."""
    return min(notices, key=lambda notice: notice.at or time.time(), default=None)
