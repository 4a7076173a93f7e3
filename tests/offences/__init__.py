"""Candidates for the judge: honest ones, and one for each offence, as they are really met."""
