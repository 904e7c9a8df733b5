"""The backend between GPUs: CuPy arrays over NCCL. Other folders import only `connect` and `library`."""
