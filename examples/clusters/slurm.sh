#!/bin/bash
# A batch script of Slurm: sbatch examples/clusters/slurm.sh train.py
#SBATCH --job-name=gradsync
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=01:00:00
# With GPUs, one for each rank:
##SBATCH --gpus-per-task=1
set -euo pipefail

# One task for each rank. On CPUs the ranks communicate and meet over MPI; mpi4py must belong to an MPI that srun starts
# (srun --mpi=list shows them). With GPUs they communicate over NCCL; without mpi4py they meet at the first node, and need
# a secret: export GRADSYNC_SECRET_FILE=/a/file/that/all/nodes/see
srun python "$@"
