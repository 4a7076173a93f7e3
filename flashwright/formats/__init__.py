"""Tasks of public benchmarks as requests for a kernel: a spec, and what their submissions need."""
