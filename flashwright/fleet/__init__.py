"""Jobs on the machines of a fleet: this machine's processes and GPUs, or a Ray cluster."""
