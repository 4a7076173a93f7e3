"""Programs as inference engines call them: sequences of different lengths in one batch."""
