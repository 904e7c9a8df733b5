"""The backend between GPUs: CuPy arrays over NCCL. Other rooms import `connect` and `library` only."""
