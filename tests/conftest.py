"""One thread per worker: the suite itself runs in parallel, and small matrices gain nothing. The
translator's verifier is on."""

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("FLASHWRIGHT_VERIFY", "1")
