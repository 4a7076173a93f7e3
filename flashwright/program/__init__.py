"""A checked program as data, with the vocabulary and the exact arithmetic of TL."""
