"""A study: how far a language model comes, by several ways, with several operators and samples."""
