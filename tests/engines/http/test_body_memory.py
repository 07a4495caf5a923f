"""The memory limit of the process, read from the files of cgroup v1 and v2."""

from __future__ import annotations

from pathlib import Path

import pytest

from conveyor.bootstrap.body_memory import container_bytes

GB = 1024**3
NO_LIMIT_V1 = 9223372036854771712


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/\n", {"memory.max": f"{GB}\n"}, GB),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("4:memory:/x\n", {"memory/memory.limit_in_bytes": f"{GB}\n"}, GB),
        ("4:memory:/x\n", {"memory/memory.limit_in_bytes": f"{NO_LIMIT_V1}\n"}, None),
        ("0::/a.slice/b.service\n", {"a.slice/b.service/memory.max": f"{GB}\n"}, GB),
        (
            "0::/a.slice/b.service\n",
            {"a.slice/memory.max": f"{GB}\n", "a.slice/b.service/memory.max": "max\n"},
            GB,
        ),
        ("", {}, None),
    ],
)
def test_the_memory_limit_of_a_container_or_a_systemd_unit_is_found(
    tmp_path: Path, own: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert container_bytes(tmp_path, tmp_path / "own") == limit
