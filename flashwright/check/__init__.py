"""From a syntax tree to a checked program, or to diagnostics."""
