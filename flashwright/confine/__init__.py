"""What keeps a process from what is not its own: limits, the network, other processes, files."""
