"""TL, the language: reading, writing, and the diagnostics about it."""
