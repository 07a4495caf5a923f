"""Names of leases and keys (docs/storage.md, Redis keys).

The name of a lease contains its pool: `<job>/<host>/<run>/<token>`. The host is empty for a lease
of a job, and the run is empty for a lease of a host pool. Keys that one script uses together share
a hash tag, because a cluster requires them to be in one slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.domain.ids import JobId, LeaseId, Random, RunId
from conveyor.ports.coordinator import HostPool


def token(random: Random) -> str:
    return f"{random.getrandbits(96):024x}"


def lease(job_id: JobId, run_id: RunId, token: str) -> LeaseId:
    return LeaseId(f"{job_id}//{run_id}/{token}")


def host_lease(pool: HostPool, token: str) -> LeaseId:
    return LeaseId(f"{pool.name}//{token}")


def is_lease(lease_id: LeaseId) -> bool:
    return lease_id.count("/") == 3


def pool_name(lease_id: LeaseId) -> str:
    """Returns the job, or the name of the host pool."""
    job_id, host, _ = lease_id.split("/", 2)
    return f"{job_id}/{host}" if host else job_id


def member_name(lease_id: LeaseId) -> str:
    """Returns the name of a lease within its pool."""
    return lease_id.split("/", 2)[2]


def run_of(lease_id: LeaseId) -> str:
    return lease_id.split("/", 3)[2]


@dataclass(frozen=True, slots=True)
class Keys:
    """`space` separates deployments that share a server."""

    space: str

    def pool(self, name: str) -> str:
        """Returns the key of a job's pool or of a host pool, whose name begins with the job."""
        return f"{self._tagged(name)}:leases"

    def next_at(self, pool: HostPool) -> str:
        return f"{self._tagged(pool.name)}:next"

    def job_of(self, run_id: RunId) -> str:
        return f"{self._tagged(run_id)}:job"

    def marks(self, subject: str) -> str:
        return f"{self._tagged(subject)}:marks"

    def cached(self, name: str) -> str:
        return f"{self._tagged(name)}:cached"

    def _tagged(self, name: str) -> str:
        tag, _, rest = name.partition("/")
        return f"{self.space}:{{{tag}}}/{rest}"
