"""The judge: problems and inputs, the fp64 oracle, the trial of a candidate, the verdict."""
