"""A setting of cuBLAS that is read when CUDA is first used."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
