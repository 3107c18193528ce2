"""How much main memory a process may use, on a machine, in a container and in a job of a batch system."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.plan.main_memory import available_memory_bytes, main_memory_gib

GIB = 2**30


def files(monkeypatch: pytest.MonkeyPatch, texts: dict[str, str]) -> None:
    def read(path: Path) -> str:
        if str(path) not in texts:
            raise FileNotFoundError(path)
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": GIB // 1024}.__getitem__)


@pytest.mark.parametrize(
    ("job", "step", "gib"),
    [(f"{GIB}", "max", 1.0), ("max", f"{GIB}", 1.0), (f"{3 * GIB}", f"{2 * GIB}", 2.0), ("max", "max", 4.0)],
)
def test_the_memory_of_a_job_is_the_least_that_a_group_of_it_allows(
    monkeypatch: pytest.MonkeyPatch, job: str, step: str, gib: float
) -> None:
    """SLURM limits the job, and a process of it is in the group of a step, with or without a name space."""
    groups = {
        "/proc/self/cgroup": "0::/slurm/job_7/step_0\n",
        "/sys/fs/cgroup/slurm/job_7/memory.max": f"{job}\n",
        "/sys/fs/cgroup/slurm/job_7/step_0/memory.max": f"{step}\n",
    }
    files(monkeypatch, groups)
    assert main_memory_gib() == gib
    groups["/proc/self/cgroup"] = "0::/slurm/job_7/step_0/user/task_0\n"
    files(monkeypatch, groups)
    assert main_memory_gib() == gib, "however far above the process the group is"
    files(monkeypatch, {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": f"{9 * GIB}\n"})
    assert main_memory_gib() == 4.0, "a limit beyond what there is"
    files(monkeypatch, {})
    assert main_memory_gib() == 4.0 and available_memory_bytes() is None


def test_control_groups_of_version_1_limit_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "/sys/fs/cgroup/memory/slurm/job_7"
    texts = {
        "/proc/self/cgroup": "5:cpu,memory:/slurm/job_7\n4:cpuset:/other\n0::/\n",
        f"{place}/memory.limit_in_bytes": f"{GIB}\n",
        f"{place}/memory.usage_in_bytes": "700000\n",
        f"{place}/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\ntotal_active_file 20000\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/other/memory.limit_in_bytes": "5\n",
    }
    files(monkeypatch, texts)
    assert main_memory_gib() == 1.0
    assert available_memory_bytes() == GIB - 700_000 + 70_000


@pytest.mark.parametrize(
    ("absent", "limit", "of_job", "expected"),
    [
        ("", "4000000", "max", 2_500_000 + 70_000),
        ("", "9000000", "max", 5_120_000),
        ("", "max", "max", 5_120_000),
        ("", "unheard of", "max", 5_120_000),
        ("", "max", "3000000", 1_000_000 + 5_000),
        ("", "2000000", "3000000", 500_000 + 70_000),
        ("one/memory.current", "4000000", "max", 5_120_000),
        ("one/memory.stat", "4000000", "3000000", 1_000_000 + 5_000),
        ("cgroup", "4000000", "max", 5_120_000),
        ("meminfo", "4000000", "max", 2_500_000 + 70_000),
    ],
)
def test_memory_is_free_where_the_machine_and_all_control_groups_have_it_beside_cached_files(
    monkeypatch: pytest.MonkeyPatch, absent: str, limit: str, of_job: str, expected: int | None
) -> None:
    texts = {
        "/proc/meminfo": "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:   5000 kB\nBuffers: 1 kB\n",
        "/proc/self/cgroup": "0::/job/one\n",
        "/sys/fs/cgroup/job/one/memory.max": f"{limit}\n",
        "/sys/fs/cgroup/job/one/memory.current": "1500000\n",
        "/sys/fs/cgroup/job/one/memory.stat": "anon 9\ninactive_file 50000\nactive_file 20000\nshmem 8\n",
        "/sys/fs/cgroup/job/memory.max": f"{of_job}\n",
        "/sys/fs/cgroup/job/memory.current": "2000000\n",
        "/sys/fs/cgroup/job/memory.stat": "active_file 5000\ninactive_file 0\n",
    }

    def read(path: Path) -> str:
        if (absent and str(path).endswith(absent)) or str(path) not in texts:
            raise FileNotFoundError(path)
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert available_memory_bytes() == expected
