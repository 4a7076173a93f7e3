"""The passes: tile IR to tile IR."""
