#!/bin/bash
# A batch script of Slurm that starts one gradsync run on each node, for GPUs only: without them the ranks of several
# nodes need MPI (slurm.sh). gradsync run reports failures, and shows the rank before each line of output.
#SBATCH --job-name=gradsync
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16  # for all ranks of a node; without this line Slurm may give a task only one core
#SBATCH --time=01:00:00
set -euo pipefail

secret=$HOME/gradsync.$SLURM_JOB_ID  # on a file system that all nodes can read
(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > "$secret")
trap 'rm -f "$secret"' EXIT
export GRADSYNC_SECRET_FILE=$secret
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not always inherit this value from sbatch
srun bash -c 'exec gradsync run -n "${RANKS_PER_NODE:-4}" --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --rendezvous "$HEAD:${PORT:-29400}" "$@"' gradsync "$@"
