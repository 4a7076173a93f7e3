"""One thread per worker: the suite itself runs in parallel, and small matrices gain nothing. The
translator's verifier is on. Ctrl-C ends the processes of tests also where a shell that started the
suite in the background has it ignored. Bytecode is kept, whatever the environment says: hundreds of
processes would each compile the package again."""

import os
import signal
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("FLASHWRIGHT_VERIFY", "1")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
