"""The sandbox: an untrusted candidate in a separate process, with limits."""
