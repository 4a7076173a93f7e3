"""The author that asks a language model: stage by stage, each reply checked before the next."""
