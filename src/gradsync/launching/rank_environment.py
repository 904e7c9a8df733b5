"""The environment variables of a rank: our own, and those that scripts written for torchrun read."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gradsync import environment
from gradsync.launchers import variables_of_mpi
from gradsync.launching.job import Job
from gradsync.machine import blas_thread_variables
from gradsync.rendezvous.secret_files import Endpoint


def rank_environment(
    job: Job,
    local_rank: int,
    endpoint: Endpoint,
    master_port: int,
    restart: int = 0,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Gives the variables of one rank: those of this process, and the rank's own.

    Args:
        job: the job.
        local_rank: number of the process on this machine.
        endpoint: where the ranks meet.
        master_port: MASTER_PORT.
        restart: how often the ranks have been started again.
        environ: the variables of this process.
    """
    rank = str(job.rank_start + local_rank)
    world_size = str(job.world_size)
    own: dict[str, str] = {
        environment.RANK: rank,
        environment.WORLD_SIZE: world_size,
        environment.LOCAL_RANK: str(local_rank),
        environment.LOCAL_WORLD_SIZE: str(job.n_ranks),
        environment.ADDRESS: endpoint.address,
        environment.HOSTED: "1",
        environment.BACKEND: job.backend,
        environment.RESTART_COUNT: str(restart),
        environment.MAX_RESTARTS: str(job.max_restarts),
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.n_ranks),
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": str(master_port),
    }
    if job.state_dir is not None:
        own[environment.STATE_DIR] = os.path.abspath(job.state_dir)
    if job.gpus is not None:
        own["CUDA_VISIBLE_DEVICES"] = job.gpus[local_rank]
    # A secret around this process belongs to another run, and what mpiexec says is about this process.
    removed = job.removed_variables | {environment.SECRET, environment.SECRET_FILE, environment.STATE_DIR}
    removed |= variables_of_mpi(environ)
    kept = {name: value for name, value in environ.items() if name not in removed}
    blas = blas_thread_variables(job.n_ranks, environ)
    return _nccl_variables(job) | kept | blas | dict(job.variables) | _torchrun_variables(job, rank, restart) | own


def _nccl_variables(job: Job) -> dict[str, str]:
    """Gives what lets NCCL meet by the network that the launchers use; what the user has set counts more."""
    if job.network is None:
        return {}
    family = {"NCCL_SOCKET_FAMILY": "AF_INET6"} if job.network.is_ipv6 else {}
    return {"NCCL_SOCKET_IFNAME": f"={job.network.interface}"} | family  # "=": this one, not all that begin like it


def _torchrun_variables(job: Job, rank: str, restart: int) -> dict[str, str]:
    """Gives what torchrun sets beside RANK and its like, for scripts that read it."""
    world_size = str(job.world_size)
    # torchrun's groups are machines; where nobody has told, each has as many ranks as this one.
    group, groups = job.rank_start // job.n_ranks, -(-job.world_size // job.n_ranks)
    if job.node is not None:
        group, groups = job.node.node_rank, job.node.nnodes
    return {
        "GROUP_RANK": str(group),
        "GROUP_WORLD_SIZE": str(groups),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": f"gradsync-{os.getpid() if job.node is None else job.node.run_name}",
        # PyTorch's rank 0 then hosts its own store at MASTER_PORT: there is no agent of torchrun that does.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
