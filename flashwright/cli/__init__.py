"""The command line: one file for each of the larger commands; main.py has the small ones."""
