"""Autotuning: times many tilings of one program and keeps the fastest for each length."""
