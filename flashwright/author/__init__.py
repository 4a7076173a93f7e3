"""Authors of TL: who writes the sketch, the parameters and the translation."""
