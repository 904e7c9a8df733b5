#!/bin/bash
# A batch script of Slurm: sbatch examples/clusters/slurm.sh train.py
#SBATCH --job-name=gradsync
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
# With GPUs, one for each rank:
##SBATCH --gpus-per-task=1
set -euo pipefail

# module load mpich             # the MPI for which mpi4py was built
# source ~/venv/bin/activate
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not always inherit this value from sbatch

# One task for each rank. With GPUs the ranks use NCCL. With GPUs and without mpi4py, rank 0 hosts the rendezvous server
# on the first node, and the ranks need a secret: export GRADSYNC_SECRET_FILE=/a/file/that/all/nodes/can/read
# Without GPUs the ranks use MPI, which srun must connect. If an error says that a rank is alone, say how:
# srun --mpi=pmi2 for MPICH and Intel MPI, srun --mpi=pmix for Open MPI; srun --mpi=list shows what there is.
srun python "$@"
