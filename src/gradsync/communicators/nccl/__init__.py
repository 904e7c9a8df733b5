"""The communicator between GPUs: CuPy arrays over NCCL. Nothing else may import from here but what connects it."""
