"""Settings of the allocator and of cuBLAS that are read when CUDA is first used."""

import os

from mimose.memory import use_expandable_segments

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
use_expandable_segments()
