"""The front end: a checked program to tile IR."""
