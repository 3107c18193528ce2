"""What is wrong with the places a recipe names."""

from __future__ import annotations

from urllib.parse import urlsplit

from bloomery.config.backup import SCHEMES, BackupSection
from bloomery.config.finding import Finding


def backup_mistakes(section: BackupSection, *, offline: bool = False) -> list[Finding]:
    """What is wrong with the place; where the network is forbidden, one beyond it is."""
    if not section.url:
        return []
    parts = urlsplit(section.url)
    if parts.scheme not in SCHEMES:
        problem, remedy = "is no place that can be written to", f"Use {', '.join(SCHEMES)}://…"
    elif parts.username or parts.password or parts.query:
        problem = "holds credentials, and a recipe is no place for them: it is journalled and shared"
        remedy = "Put them into the environment (AWS_ACCESS_KEY_ID, …) and write the bucket and path alone."
    elif not (parts.netloc or parts.scheme == "file"):
        problem, remedy = "names no bucket", "Write s3://bucket/path."
    elif offline and parts.scheme != "file":
        problem, remedy = "needs the network, which run.offline forbids", "Use file://…, or leave it out."
    else:
        return []
    return [Finding(key="backup.url", problem=problem, remedy=remedy)]
