"""What a TL program means: the machine that runs it, with numbers or without."""
