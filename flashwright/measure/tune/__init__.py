"""Which of many tilings is the fastest, measured; and where."""
