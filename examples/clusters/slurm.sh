#!/bin/bash
# A batch script of Slurm: sbatch examples/clusters/slurm.sh train.py
#SBATCH --job-name=gradsync
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=01:00:00
# With GPUs, one for each rank:
##SBATCH --gpus-per-task=1
set -euo pipefail

# One task for each rank. Without GPUs the ranks use MPI, and mpi4py must use an MPI that srun can start (srun --mpi=list
# shows the possible MPIs). With GPUs the ranks use NCCL. With GPUs and without mpi4py, rank 0 hosts the rendezvous server
# on the first node, and the ranks need a secret: export GRADSYNC_SECRET_FILE=/a/file/that/all/nodes/can/read
srun python "$@"
