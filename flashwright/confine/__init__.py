"""Confinement of a process: limits, files (Landlock), system calls (seccomp), environment."""
