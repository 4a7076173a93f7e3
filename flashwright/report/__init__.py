"""A run for people to read: one HTML page, the terminal, Markdown, all from the same model."""
